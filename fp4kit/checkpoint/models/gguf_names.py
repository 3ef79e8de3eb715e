# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the weights of a GGUF model are called in its checkpoint, and how their rows are ordered.

As llama.cpp's own converter has it. Its attention in architecture `llama` turns neighbours of a
head, where the checkpoint's turns its halves: rows of q and k are in another order there.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: What comes before `layers.0` in a checkpoint.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Of one expert; Mixtral has names of its own.
_EXPERT = {
    "ffn_gate_exps": ("mlp.experts.{}.gate_proj", "block_sparse_moe.experts.{}.w1"),
    "ffn_up_exps": ("mlp.experts.{}.up_proj", "block_sparse_moe.experts.{}.w3"),
    "ffn_down_exps": ("mlp.experts.{}.down_proj", "block_sparse_moe.experts.{}.w2"),
}
_OUTSIDE = {
    "output.weight": ("lm_head.weight", "language_model.lm_head.weight"),
    "token_embd.weight": tuple(f"{prefix}embed_tokens.weight" for prefix in _PREFIXES),
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.([^.]+)\.weight")


@dataclass(frozen=True)
class Family:
    """What is known of an architecture of llama.cpp.

    Attributes:
        types: model types whose checkpoints become it.
        permuted: heads of q and k have their rows interleaved.
    """

    types: tuple[str, ...]
    permuted: bool = False


FAMILIES = {
    "llama": Family(("llama", "mistral", "mixtral"), permuted=True),
    "qwen2": Family(("qwen2",)),
    "qwen3": Family(("qwen3",)),
    "qwen3moe": Family(("qwen3_moe",)),
    "gemma2": Family(("gemma2",)),
    "gemma3": Family(("gemma3", "gemma3_text")),
}


def stored_names(name: str, experts: int, known: Collection[str]) -> list[str]:
    """The weights of a checkpoint that a tensor of a GGUF model is made of.

    Args:
        name: name of the tensor.
        experts: how many experts it stacks, 0 if it is one weight.
        known: the weights that there are.

    Returns:
        One name, or one for each expert; none if the checkpoint lacks all of them.
    """
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return next(([one] for one in _OUTSIDE.get(name, ()) if one in known), [])
    layer, kind = match.groups()
    forms = _EXPERT.get(kind, ()) if experts else (_LAYER.get(kind, ""),)
    for prefix in _PREFIXES:
        for form in filter(None, forms):
            base = f"{prefix}layers.{layer}.{form}.weight"
            names = [base.format(number) for number in range(experts or 1)]
            if any(one in known for one in names):
                return names
    return []


def known_kind(name: str) -> bool:
    """Whether weights of the kind that a tensor of a GGUF model is have a name here."""
    match = _IN_LAYER.fullmatch(name)
    return name in _OUTSIDE if match is None else match[2] in {**_LAYER, **_EXPERT}


def stacks_experts(name: str) -> bool:
    """Whether a tensor of a GGUF model stacks experts."""
    match = _IN_LAYER.fullmatch(name)
    return match is not None and match[2] in _EXPERT


def heads_key(name: str, architecture: str) -> str:
    """The metadata that says how many heads interleave the rows of a weight; "" if none do."""
    match = _IN_LAYER.fullmatch(name)
    if match is None or not FAMILIES[architecture].permuted:
        return ""
    keys = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    return f"{architecture}.attention.{keys[match[2]]}" if match[2] in keys else ""


def interleaved(rows: int) -> NDArray[np.intp]:
    """The rows of a head in the order of GGUF: one of the first half, one of the second."""
    return np.arange(rows).reshape(2, rows // 2).T.reshape(-1)
