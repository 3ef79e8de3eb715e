# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The model types of the installed transformers, and which of them CI runs."""

from __future__ import annotations

import zlib

import transformers
from transformers.models.auto import modeling_auto

from tiny_configs import OVERRIDES

#: Tasks in the order in which a model type's class is looked for.
TASKS = ("CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM")
#: One type of this many is part of CI, beside those of the groups.
SHARE = 3
#: One of this many is tested in NVFP4 as well.
SAMPLE = 24

#: Types that came out broken once, by what was wrong with them; CI runs them all.
GROUPS = {
    # Modules that transformers builds under other names than it stores.
    "A": """aria audioflamingo3 axk2 aya_vision cohere_asr cosmos3_omni deepseek_v4 fuyu gemma3
        glmasr got_ocr2 gpt_neox hyperclovax_vision_v2 internvl kimi_k25 lfm3_vl llava llava_next
        llava_next_video llava_onevision mistral3 musicflamingo paddleocr_vl paligemma phimoe
        pp_chart2table qianfan_ocr qwen2_5_omni qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl
        qwen3_omni_moe qwen3_omni_moe_thinker ultravbert video_llava vipllava voxtral
        voxtral_realtime""",
    # Output heads of other names than lm_head that share the weight of the embedding.
    "B": """bert-generation biogpt canary convbert electra encoder-decoder flaubert
        gpt_neox_japanese kosmos-2.5 speech-encoder-decoder t5gemma2 trocr ultrabert
        vision-encoder-decoder xlm""",
    # Fused experts that are quantized one by one.
    "C": """aria aria_text gpt_oss granitemoe_swa hy_v4 lara_mini llama4 llama4_text
        minimax_m3_vl_text mistral4 qwen3_vl_moe""",
    # Fused tensors beside them whose orientation is not clear.
    "D": "inkling_text muse_spark",
}


def class_names() -> dict[str, str]:
    """{model type: name of its model class} of every type that has one."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS]
    tables.append(modeling_auto.MODEL_MAPPING_NAMES)
    first, second, *rest = tables
    found: dict[str, str] = {}
    for model_type in dict.fromkeys(name for table in tables for name in table):
        config = transformers.CONFIG_MAPPING[model_type]
        multimodal = "text_config" in getattr(config, "sub_configs", {})
        order = (second, first, *rest) if multimodal else (first, second, *rest)
        given = next(table[model_type] for table in order if model_type in table)
        name = given if isinstance(given, str) else given[0]
        found[model_type] = OVERRIDES.get(model_type, {}).get("class", name)
    return found


def in_share(model_type: str) -> bool:
    """Whether CI runs a type: all of the groups and a fixed part of the others."""
    if any(model_type in names.split() for names in GROUPS.values()):
        return True
    return zlib.crc32(model_type.encode()) % SHARE == 0


def in_sample(model_type: str) -> bool:
    """Whether a type is tested in NVFP4 as well."""
    # The parts of HRM's joined layers get no second-level scale when transformers cuts them.
    return model_type != "hrm_text" and zlib.crc32(model_type.encode()) % SAMPLE == 0
