# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models of transformers, quantized, and the same with their weights decoded."""

from __future__ import annotations

import functools

import torch
import transformers

import fp4kit

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: Model type to the class that is built and the arguments of its configuration.
MODELS = {
    "llama": ("CausalLM", {**COMMON, **GROUPED, "attention_bias": True}),
    "tied": ("CausalLM", {**COMMON, **GROUPED, "tie_word_embeddings": True}),
    "bert": ("MaskedLM", COMMON),
    "qwen3_moe": ("CausalLM", {**COMMON, **GROUPED, **EXPERTS, "num_experts": 4}),
    "gpt_oss": (
        "CausalLM",
        {**COMMON, **GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4},
    ),
}
TYPES = {"tied": "llama"}
TOKENS = torch.arange(24).reshape(2, 12)


@functools.cache
def backend():
    """What multiplies on the CPU; the reference until there is more."""
    identity = fp4kit.quantize(torch.eye(16))
    try:
        fp4kit.matmul(torch.eye(16), identity, backend="cpu")
    except fp4kit.BackendUnavailableError:
        return "reference"
    return "cpu"


def config_of(name, **changes):
    kind = TYPES.get(name, name)
    return transformers.AutoConfig.for_model(kind, **{**MODELS[name][1], **changes})


def class_of(name):
    return getattr(transformers, f"AutoModelFor{MODELS[name][0]}")


def built(name, *, device="meta", **changes):
    """A model without numbers, or with random ones."""
    torch.manual_seed(0)
    with torch.device(device):
        model = class_of(name).from_config(config_of(name, **changes))
    return model.eval()


def outputs(model):
    with torch.no_grad():
        return model(TOKENS.to(next(model.parameters()).device)).logits
