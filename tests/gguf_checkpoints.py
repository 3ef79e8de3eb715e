# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the models of :mod:`gguf_models`, and what becomes of their weights in GGUF."""

from __future__ import annotations

import numpy as np

import fp4kit
from gguf_models import EXPERTS, HEADS, NAMES, OUTSIDE

MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
#: Of an architecture's layers; Gemma has norms of its own.
INSIDE = {called: module for module, called in NAMES.items()} | {"ffn_gate_inp": "mlp.gate"}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP = {called: name for name, called in OUTSIDE.items()}


def permuted(array):
    """Rows of q or k as llama.cpp's converter orders them: its own lines."""
    shape = (HEADS, 2, array.shape[0] // HEADS // 2, *array.shape[1:])
    return array.reshape(shape).swapaxes(1, 2).reshape(array.shape)


def checkpoint_of(found, architecture):
    """The weights of a model under the names, and in the order of rows, of its checkpoint."""
    inside_of, made = INSIDE | (GEMMA if "gemma" in architecture else {}), {}
    for name, array in found.items():
        if name in TOP:
            made[TOP[name]] = array
            continue
        _, layer, kind, part = name.split(".")
        if kind.endswith("_exps"):
            for expert, one in enumerate(array):
                inside = f"mlp.experts.{expert}.{INSIDE[kind.removesuffix('_exps')].split('.')[1]}"
                made[f"model.layers.{layer}.{inside}.weight"] = one
            continue
        made[f"model.layers.{layer}.{inside_of[kind]}.{part}"] = array
    if architecture == "llama":
        return made, {
            name: permuted(array) if name.split(".")[-2] in ("attn_q", "attn_k") else array
            for name, array in found.items()
        }
    return made, found


def expected(checkpoint, name, architecture):
    """A weight of a GGUF model from its checkpoint, and its parts; None if it is not quantized."""
    _, layer, kind, _ = name.split(".")
    with fp4kit.open(checkpoint) as tensors:
        at = f"model.layers.{layer}."
        if kind.endswith("_exps"):
            inside = INSIDE[kind.removesuffix("_exps")].split(".")[1]
            names = [f"{at}mlp.experts.{number}.{inside}.weight" for number in range(EXPERTS)]
        else:
            names = [f"{at}{INSIDE[kind]}.weight"]
        if names[0] not in tensors or not isinstance(tensors[names[0]], fp4kit.QuantizedTensor):
            return None, None
        coded = [tensors[one] for one in names]
    arrays = np.stack([np.asarray(fp4kit.dequantize(one, "float32")) for one in coded])
    if architecture == "llama" and kind in ("attn_q", "attn_k"):
        arrays = np.stack([permuted(array) for array in arrays])
    return arrays if kind.endswith("_exps") else arrays[0], coded
