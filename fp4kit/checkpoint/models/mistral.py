# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Mistral's own checkpoint format: `consolidated*.safetensors` with params.json, no config.json.

vLLM and SGLang read it. They take params.json's `quantization` over as the model's
quantization_config if its quant_method is compressed-tensors, and refuse other methods of ours;
and they build modules under the names of the Hugging Face format, which its ignore list has to
name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

#: Key of params.json for what config.json calls `quantization_config`.
QUANTIZATION = "quantization"
#: Keys of params.json to those of config.json that mean the same.
KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
}
#: Those of its `moe`.
MOE_KEYS = {"num_experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"}
#: What readers call the parts of a name.
PARTS = {
    "attention": "self_attn",
    "feed_forward": "mlp",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa",
    "wkv_b": "kv_b_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "gate": "mlp.gate",
    "experts": "mlp.experts",
    "shared_experts": "mlp.shared_experts",
}
#: Modules outside of the layers.
OUTER = {"tok_embeddings": "model.embed_tokens", "output": "lm_head"}
#: Where readers build modules of other names than ours, and fuse them, beside the language model.
TOWERS = ("vision_encoder", "vision_language_adapter", "patch_merger")
LAYER = re.compile(r"layers\.(\d+)\.(.+)")
#: Projections whose rows readers reorder while loading, where they are stored plainly only.
REORDERED = re.compile(r"layers\.\d+\.attention\.w[qk]\.weight")


def as_config(params: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of params.json, as config.json names them."""
    found = {**config, **params}
    for ours, theirs in KEYS.items():
        if ours in params:
            found[theirs] = params[ours]
    moe = params.get("moe")
    for ours, theirs in MOE_KEYS.items():
        if isinstance(moe, dict) and ours in moe:
            found[theirs] = moe[ours]
    quantization = found.pop(QUANTIZATION, None)
    if isinstance(quantization, dict) and "qformat_weight" in quantization:
        # Mistral's own FP8: a name for the message.
        quantization = {"quant_method": f"Mistral's {quantization['qformat_weight']}"}
    if quantization:
        found["quantization_config"] = quantization
    else:
        found.pop("quantization_config", None)
    return found


def new_params(
    params: Mapping[str, Any], changes: Mapping[str, Any], quantization: dict[str, Any] | None
) -> dict[str, Any]:
    """params.json of the output: the source's with another quantization.

    Of the changes to config.json those are made whose keys are there.
    """
    result = {key: value for key, value in params.items() if key != QUANTIZATION}
    result |= {key: value for key, value in changes.items() if key in result}
    return result | ({} if quantization is None else {QUANTIZATION: quantization})


def built_name(module: str) -> str:
    """What readers call a module, its own name if they do not rename it."""
    match = LAYER.fullmatch(module)
    if match is None:
        return OUTER.get(module, module)
    parts = [PARTS.get(part, part) for part in match[2].split(".")]
    return f"model.layers.{match[1]}.{'.'.join(parts)}"


def ignore_list(ignore: Iterable[str], quantized: Iterable[str]) -> tuple[str, ...]:
    """Modules that are not quantized, under stored names and those that readers build."""
    stored, others = set(ignore), set(quantized)
    towers = {
        f"re:{tower}.*"
        for tower in TOWERS
        if any(name.startswith(f"{tower}.") for name in stored)
        and not any(name.startswith(f"{tower}.") for name in others)
    }
    return tuple(sorted(stored | {built_name(name) for name in stored} | towers))


def reason_to_keep(name: str) -> str:
    """Why a weight is left alone in this format, "" if it need not be."""
    if REORDERED.fullmatch(name):
        return "its rows are reordered by readers only if it is not quantized"
    return ""
