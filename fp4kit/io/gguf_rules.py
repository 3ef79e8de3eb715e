# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp expects of a model in FP4: which tensors stay, and where `.scale` takes effect.

Which tensors stay follows `tensor_allows_quantization` of its llama-quant.cpp, and besides token
embedding and output. The scales are data, `gguf_scales.json`, which `tests/gguf_scale_facts.py`
reads from llama.cpp's sources: every architecture loads them, but most hand on only some, and
silently compute without the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

WEIGHT = ".weight"
TABLE = Path(__file__).with_name("gguf_scales.json")
#: Parts of names, and why llama.cpp does not quantize what has them.
_KEPT = (
    ("ffn_gate_inp.weight ffn_gate_tid2eid.weight", "a router of experts"),
    ("altup laurel per_layer_model_proj", "small"),
    ("ssm_conv1d shortconv.conv.weight", "a small convolution"),
    ("indexer.k_proj.weight indexer.q_proj.weight", "small"),
    (
        "time_mix_first.weight time_mix_w0.weight time_mix_w1.weight time_mix_w2.weight "
        "time_mix_v0.weight time_mix_v1.weight time_mix_v2.weight time_mix_a0.weight "
        "time_mix_a1.weight time_mix_a2.weight time_mix_g1.weight time_mix_g2.weight "
        "time_mix_decay_w1.weight time_mix_decay_w2.weight time_mix_lerp_fused.weight",
        "small",
    ),
    ("attn_rel_b.weight .position_embd sam.pos_embd .rel_pos", "of positions"),
    ("sam.neck. sam.net_ .patch_embd .patch_merger a.rvq.codebook mm.a.code_embd", "of an encoder"),
)
_KEPT_BY_PART = tuple((part, reason) for parts, reason in _KEPT for part in parts.split())
#: Whole names of others that stay.
_KEPT_BY_NAME = {
    "output.weight": "the output",
    "token_embd.weight": "the token embedding",
    "per_layer_token_embd.weight": "a token embedding",
    "position_embd.weight": "of positions",
    "token_types.weight": "of token types",
}
#: A weight of a layer, or the output: what it is called within its layer.
_IN_LAYER = re.compile(r"(?:blk\.\d+\.)?([^.]+)\.weight")
_FFN = ("ffn_up", "ffn_gate", "ffn_down")


def never(name: str) -> str:
    """Why a tensor is never quantized, whatever is asked for; "" if it may be."""
    if not name.endswith("weight"):
        return "no weight"
    return "a norm" if "_norm.weight" in name else ""


def kept(name: str) -> str:
    """Why llama.cpp leaves a weight as it is unless it is told otherwise; "" if it does not."""
    reason = _KEPT_BY_NAME.get(name) or next(
        (reason for part, reason in _KEPT_BY_PART if part in name), ""
    )
    return f"{reason}; --include quantizes it" if reason else ""


@cache
def _scales() -> dict[str, frozenset[str]]:
    """The weights of each architecture whose scales are applied."""
    found = json.loads(TABLE.read_text())["weights"]
    return {name: frozenset(weights.split()) for name, weights in found.items()}


def why_one_level(architecture: str, name: str, names: Collection[str]) -> str:
    """Why a weight cannot have a `.scale`, "" if it can.

    Args:
        architecture: `general.architecture` of the model.
        name: name of the weight.
        names: all tensors of the model.
    """
    match = _IN_LAYER.fullmatch(name)
    if architecture not in _scales():
        return f"llama.cpp applies no .scale in architecture {architecture!r}, as far as known"
    if match is None or match[1] not in _scales()[architecture]:
        of = match[1] if match else name
        return f"llama.cpp applies no .scale of {of} in architecture {architecture!r}"
    if match[1] in _FFN and f"{name.removesuffix(WEIGHT)}.bias" in names:
        return f"llama.cpp refuses a .scale of {match[1]} with a bias"
    return ""
