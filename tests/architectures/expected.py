# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Model types of transformers 5.24 that are not quantized and compared like the others, and why.

Types that transformers does not read, whatever wrote them, stand in
`fp4kit/checkpoint/reader_faults.py` instead.
"""

from __future__ import annotations

#: What cannot be built small here, or is not loaded by transformers itself: why, and which.
_UNBUILDABLE = {
    "transformers does not load what it saves: a row of its embedding differs": "chinese_clip",
    "a backbone of timm, which is not installed": """
        conditional_detr dab-detr deformable_detr detr edgetam edgetam_vision_model fast_vlm gemma3n
        gemma3n_vision omdet-turbo pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder
        perception_lm table-transformer timm_backbone timm_wrapper
    """,
    "detectron2 is not installed": """
        layoutlmv2
    """,
    "its config lacks dropout_rate, which its model reads": """
        t5gemma2_encoder
    """,
    "its config lacks what its model reads (block configs of the neck)": """
        pp_ocrv6_medium_det
    """,
    "its from_pretrained takes no output_loading_info": """
        qwen2_5_omni
    """,
    "natten is not installed": """
        dinat
    """,
    "small sizes do not fit: it derives some from others": """
        nemo_speechlm
    """,
    "torchaudio is not installed": """
        higgs_audio_v2_tokenizer
    """,
    "transformers does not load what it saves: its conversion of weights fails": """
        gradium_phonon_tts
    """,
    "transformers does not load what it saves: names of the inner model differ": """
        shieldgemma2
    """,
    "transformers has no class of the name that it gives": """
        voxtral_realtime_text
    """,
}
UNBUILDABLE = {name: why for why, names in _UNBUILDABLE.items() for name in names.split()}
#: Nothing is quantized: convolutions, Conv1D layers, towers alone, rows of no whole blocks.
_NOTHING = """
    bit dac efficientnet encodec glm_image_vqmodel gpt-sw3 gpt2 hgnet_v2 ibert imagegpt
    mobilenet_v1 mobilenet_v2 mobilevitv2 omniasr_ctc openai-gpt poolformer pp_ocrv5_mobile_rec
    pp_ocrv5_server_rec pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec regnet resnet
    sam_hq_vision_model sam_vision_model swiftformer textnet univnet uvdoc wavtokenizer_encoder
"""
NOTHING_QUANTIZED = frozenset(_NOTHING.split())
#: Loaded and compared tensor by tensor, but what it computes is not: it takes inputs of its own, or
#: does not compute in bfloat16 on a CPU.
_NOT_COMPUTED = """
    align audio-spectrogram-transformer autoformer bark bark blip-2 blip_2_qformer bros
    cohere_compass_vision convnext convnextv2 cosmos3_edge_vision deberta decision_transformer
    deepseek_ocr2 donut-swin edgetam_video efficientloftr exaone4_5_vision fnet
    fun_asr_nano_encoder gemma3n_audio gemma4_assistant gemma4_unified_assistant gemma4_vision
    glm4v_moe glm4v_moe_vision glm4v_text glm4v_vision glm5_next_vision glm_image_text
    glm_image_vision glm_ocr_vision granite_speech5_ctc granite_speech5_encoder hunyuan_vl
    hunyuan_vl_text hunyuan_vl_vision hy_v4_vl_vision idefics informer inkling2_vision
    instructblip instructblipvideo kimi_k25_vision kyutai_speech_to_text layoutlmv3 levit
    lfm3_vl_vision lightglue lilt llama4 lxmert mimi_decoder minicpm_ocr_vision
    minicpmv4_7_vision mra muse_glimmer_assistant muse_glimmer_vision muse_spark_vision
    nemotron3_5_transcribe_word_timestamp patchtsmixer patchtst pi0
    pocket_tts_audio_tokenizer_decoder pp_formulanet qwen2_5_omni_thinker qwen2_5_vl_vision
    qwen3_5_moe_vision qwen3_5_vision qwen3_asr_encoder qwen3_omni_moe qwen3_vl_moe_vision
    qwen3_vl_vision qwen4_exp_vision reformer sam sam2 sam2_hiera_det_model sam2_video
    sam2_vision_model sam3 sam3_tracker sam3_tracker_video sam3_video sam_hq swin
    time_series_transformer timesfm timesfm2_5 tvp vibevoice_acoustic_tokenizer_decoder
    vibevoice_acoustic_tokenizer_encoder video_llama_3_vision videomae vision-text-dual-encoder
    vivit voxtral_realtime xlnet zamba2
"""
NOT_COMPUTED = frozenset(_NOT_COMPUTED.split())
#: Computed in another order where a layer is quantized, and the largest error of that, relative.
ROUNDED = {"jamba": "adds the bias of dt_proj and subtracts it again, in bfloat16"}
ROUNDED_ERROR = 2.0**-5
