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
    "mixtral": "llama",
}
#: Of an architecture's layers; Gemma has norms of its own.
INSIDE = {called: module for module, called in NAMES.items()} | {"ffn_gate_inp": "mlp.gate"}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Of one expert, by model type.
EXPERT = {
    "qwen3_moe": {
        "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
    "mixtral": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_gate_inp": "block_sparse_moe.gate",
    },
}  # fmt: skip
TOP = {called: name for name, called in OUTSIDE.items()}


def permuted(array):
    """Rows of q or k as llama.cpp's converter orders them: its own lines."""
    shape = (HEADS, 2, array.shape[0] // HEADS // 2, *array.shape[1:])
    return array.reshape(shape).swapaxes(1, 2).reshape(array.shape)


def modules_of(model_type):
    """Modules of a layer by what files call them; those of experts with a place for the number."""
    gemma = GEMMA if model_type.startswith("gemma") else {}
    return INSIDE | gemma | EXPERT.get(model_type, {})


def checkpoint_of(found, model_type):
    """The weights of a model under the names, and in the order of rows, of its checkpoint.

    Also the weights of its GGUF model, which has the rows of q and k in an order of its own.
    """
    modules, made = modules_of(model_type), {}
    for name, array in found.items():
        if name in TOP:
            made[TOP[name]] = array
            continue
        _, layer, kind, part = name.split(".")
        at = f"model.layers.{layer}.{modules[kind]}.{part}"
        if kind.endswith("_exps"):
            made |= {at.format(expert): one for expert, one in enumerate(array)}
        else:
            made[at] = array
    if MODEL_TYPES.get(model_type) == "llama":
        return made, {
            name: permuted(array) if name.split(".")[-2] in ("attn_q", "attn_k") else array
            for name, array in found.items()
        }
    return made, found


def expected(checkpoint, name, model_type):
    """A weight of a GGUF model from its checkpoint, and its parts; None if it is not quantized."""
    _, layer, kind, _ = name.split(".")
    stacked = kind.endswith("_exps")
    at = f"model.layers.{layer}.{modules_of(model_type)[kind]}.weight"
    names = [at.format(number) for number in range(EXPERTS)] if stacked else [at]
    with fp4kit.open(checkpoint) as tensors:
        if names[0] not in tensors or not isinstance(tensors[names[0]], fp4kit.QuantizedTensor):
            return None, None
        coded = [tensors[one] for one in names]
    arrays = np.stack([np.asarray(fp4kit.dequantize(one, "float32")) for one in coded])
    if MODEL_TYPES.get(model_type) == "llama" and kind in ("attn_q", "attn_k"):
        arrays = np.stack([permuted(array) for array in arrays])
    return arrays if stacked else arrays[0], coded
