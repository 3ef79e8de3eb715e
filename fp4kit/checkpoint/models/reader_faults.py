# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Model types whose reader is known to fail on a checkpoint that has no fault.

Found by loading small models of every model type of transformers 5.24 from files of
compressed-tensors, also from those that compressed-tensors itself writes. The peer tests fail when
an entry is not true any more. `KNOWN` has one row for a model type, of these columns:

- reader: which library fails, with the version that was tried;
- happens: what a user sees;
- reason: why, in a few words;
- issue: where it is reported, "" if that is not known;
- formats: block formats that it happens with;
- modules: a regular expression; it happens only where a quantized module's name has a match;
- inside: whether it happens as well where the model is a part of another one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from fp4kit.checkpoint.models.expert_types import model_types, reading

READER = "transformers 5.24"
ANY_FORMAT = ("nvfp4", "mxfp4", "mxfp8")


@dataclasses.dataclass(frozen=True)
class ReaderFault:
    """A fault of a reader; see the module for what each column means."""

    happens: str
    reason: str
    issue: str = ""
    formats: tuple[str, ...] = ANY_FORMAT
    modules: str = ""
    inside: bool = True
    reader: str = READER


_INIT = ReaderFault(
    "loading stops with AttributeError: no attribute 'weight'",
    "its initialization reads `.weight` of layers that are quantized, whatever tool wrote them",
)
_TIED = ReaderFault(
    "loading stops with AttributeError: no attribute 'weight'",
    "it reads `.weight` of layers that share their weight with others, also where these are "
    "quantized, whatever tool wrote them",
    inside=False,
)
_FORWARD = ReaderFault(
    "loading or running stops with AttributeError: no attribute 'weight'",
    "its own linear class reads `.weight` of layers that are quantized",
)
_CONVERSION = ReaderFault(
    "loading stops with an error of the automatic conversion of weights",
    "what it does to weights of this model while loading does not know the parts of a quantized "
    "layer",
    inside=False,
)
_OFFLOADED = ReaderFault(
    "running stops with an error of mixed types",
    "its forward replaces a buffer, which compressed-tensors' wrappers of modules prevent",
)
_CUT = ReaderFault(
    "loading leaves weights missing",
    "it cuts the joined projections of this model's files while loading, and their second-level "
    "scale cannot be cut; leave them whole with --exclude '*gqkv*' --exclude '*gate_up*'",
    formats=("nvfp4",),
)
#: Experts that are stored one by one, for every model type.
EXPERTS = ReaderFault(
    "experts are decoded wrongly, without an error",
    "the second-level scale of experts stored one by one is dropped",
    "https://github.com/huggingface/transformers/issues/48371",
    ("nvfp4",),
    r"\bexperts\.\d+\.",
)
#: Experts of model types whose reader takes them fused only (`expert_layout.READ_FUSED`).
SEPARATED = ReaderFault(
    "experts stay random, without an error",
    "it knows experts of this model in one tensor only, for which compressed-tensors has no form",
    modules=r"\bexperts\.\d+\.",
)
#: Of these types the reader makes a layer of each expert where a checkpoint is quantized.
SEPARATES = frozenset(("llama4", "llama4_text"))
#: Model types whose initialization reads `.weight`, as parts of others too.
_INITIALIZED = """
    falcon_mamba gpt_bigcode longt5 mamba mamba2 modernvbert mt5 nanochat pix2struct pop2piano
    recurrent_gemma rwkv siglip switch_transformers t5 udop umt5 xlstm
"""
#: The same where they are the whole: as a part, they are not quantized.
_INITIALIZED_ALONE = """
    blt bridgetower chinese_clip_vision_model clap clipseg clvp cvt d_fine data2vec-audio deimv2
    dinov3_vit emu3 fastspeech2_conformer fastspeech2_conformer_with_hifigan grounding-dino
    groupvit hiera ijepa kosmos-2 lw_detr mask2former mgp-str mlcd mlcd_vision_model
    mm-grounding-dino modernbert modernbert-decoder musicgen musicgen_melody neucodec
    oneformer owlv2 owlvit pe_audio pp_doclayout_v4 pvt pvt_v2 radio rf_detr
    rt_detr rt_detr_v2 sam3_lite_text sam3_lite_text_text_model sapiens2 seggpt siglip2
    siglip2_vision_model siglip_vision_model speech-encoder-decoder speecht5 swin2sr timesformer
    unispeech unispeech-sat videoprism videoprism_vision_model vitdet vjepa2 wav2vec2
    wav2vec2-bert wav2vec2-conformer wavlm xclip xcodec xcodec2
"""
#: Model types in which quantized layers share a weight.
_SHARED = "diffusion_gemma neomme pp_doclayout_v3 zamba"
#: Model types whose weights are split, joined or cut while loading.
_CONVERTED = """
    bailing_hybrid depth_pro dinov2 dinov2_with_registers dots3_note ernie4_5_vl_moe glm5_next
    glm5_next_text inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model
    kimi_linear olmo_hybrid qianfan_ocr step3p7 tipsv2 tipsv2_vision_model
"""
#: Model type to the fault of its reader.
KNOWN: dict[str, ReaderFault] = {
    **dict.fromkeys(_INITIALIZED.split(), _INIT),
    **dict.fromkeys(_INITIALIZED_ALONE.split(), dataclasses.replace(_INIT, inside=False)),
    **dict.fromkeys(_CONVERTED.split(), _CONVERSION),
    **dict.fromkeys(_SHARED.split(), _TIED),
    "falcon": _FORWARD,
    "ctrl": _OFFLOADED,
}
#: The same for faults that only some block formats meet.
KNOWN_BY_FORMAT: dict[str, ReaderFault] = {"hrm_text": _CUT}


def reader_faults(
    config: dict[str, Any], formats: Iterable[str], quantized: Iterable[str]
) -> list[str]:
    """What a user should know about the reader of a compressed-tensors checkpoint.

    Returns:
        One line for each fault that is known; empty if there is none.
    """
    modules, used = list(quantized), set(formats)
    types = model_types(config)
    rows = [
        (f"model type {name}", KNOWN[name])
        for depth, name in enumerate(types)
        if name in KNOWN and (depth == 0 or KNOWN[name].inside)
    ]
    rows += [
        (f"model type {name}", KNOWN_BY_FORMAT[name]) for name in types if name in KNOWN_BY_FORMAT
    ]
    if reading(config) == "fused" and config["model_type"] not in SEPARATES:
        rows.append((f"model type {config['model_type']}", SEPARATED))
    rows.append(("experts", EXPERTS))
    said = []
    for what, fault in rows:
        hit = any(re.search(fault.modules, module) for module in modules)
        if hit and used.intersection(fault.formats):
            issue = f" ({fault.issue})" if fault.issue else ""
            said.append(
                f"{fault.reader} is known to fail for {what}: {fault.happens}, as {fault.reason}"
                f"{issue}; this is no fault of the file"
            )
    return said
