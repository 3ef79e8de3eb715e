# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A small config of any model type: sizes of a few dozen, two layers of each kind."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import transformers

#: What a model type needs beside the sizes below: `init` (arguments of its config), `set` (dotted
#: names of settings and their values), `class` (of the model).
OVERRIDES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "overrides.json").read_text()
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 4, 2, 16, 256
_SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim projection_dim "
    "moe_intermediate_size expert_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
    "out_hidden_size lru_width word_embed_proj_dim lm_head_hidden max_source_positions "
    "max_target_positions text_hidden_size",
    128: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size d_inner encoder_ffn_dim "
    "decoder_ffn_dim mlp_dim ff_dim feed_forward_hidden_size intermediate_size_mlp mamba_d_ssm "
    "max_position_embeddings n_positions n_ctx",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
    "num_decoder_layers num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k "
    "top_k_experts mamba_expand num_memory_tokens type_vocab_size index_n_heads "
    "num_key_value_heads num_kv_heads n_head_kv linear_num_key_heads",
    HEADS: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts linear_num_value_heads",
    HEAD_DIM: "head_dim d_kv attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "mamba_d_head mamba_d_state mamba_head_dim ssm_state_size state_size mamba_dt_rank "
    "time_step_rank linear_key_head_dim linear_value_head_dim num_mel_bins rotary_dim",
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
    32: "q_lora_rank kv_lora_rank qk_head_dim image_size sliding_window mamba_chunk_size "
    "chunk_size attention_chunk_size hidden_size_per_layer_input index_head_dim",
    8: "mamba_n_heads mamba_num_heads patch_size index_topk",
    1: "n_group topk_group num_expert_groups n_shared_experts mamba_n_groups n_groups",
    0: "num_nextn_predict_layers",
}
#: Every setting that is made small, by name.
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
#: Settings that are a list with one value per layer in some model types.
PER_LAYER = ("intermediate_size", "num_key_value_heads")
#: Lists of the kinds of layers: two or more, each kind once.
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
DEEPEST = 4


def shrunken_config(model_type: str) -> transformers.PretrainedConfig:
    """The default config of a model type, made small, with what the type needs beside that."""
    override = OVERRIDES.get(model_type, {})
    config = transformers.CONFIG_MAPPING[model_type](**override.get("init", {}))
    _shrink(config, set(override.get("keep", ())), 0)
    for name, value in override.get("set", {}).items():
        *path, last = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


def _shrink(config: transformers.PretrainedConfig, keep: set[str], depth: int) -> None:
    """Makes a config small in place, and those that it holds."""
    for name, size in SMALL.items():
        if name not in keep:
            _set_size(config, name, size)
    for name in KINDS:
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)) and len(kinds) > LAYERS and name not in keep:
            distinct = list(dict.fromkeys(kinds))
            setattr(config, name, (distinct * LAYERS)[: max(len(distinct), LAYERS)])
            config.num_hidden_layers = len(getattr(config, name))
    for name in TOKENS:
        token = getattr(config, name, None)
        if isinstance(token, int) and token >= VOCABULARY:
            setattr(config, name, 1)
    if depth < DEEPEST:
        for part in list(vars(config).values()):
            if isinstance(part, transformers.PretrainedConfig):
                _shrink(part, keep, depth + 1)


def _set_size(config: transformers.PretrainedConfig, name: str, size: int) -> None:
    """Sets a size where the config has one; some have it as a property, or refuse the value."""
    # What a config raises is its own choice; one that stays too large is told when it is built.
    with contextlib.suppress(Exception):
        old = getattr(config, name)
        if isinstance(old, int) and not isinstance(old, bool):
            setattr(config, name, size)
        elif isinstance(old, (list, tuple)) and old and name in PER_LAYER:
            setattr(config, name, type(old)([size] * LAYERS))
