# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MLX runs the experts of several model types in layout mlx: `make engines`.

mlx-lm's own class of each type makes the model, whose experts are taken apart as in a checkpoint.
"""

from __future__ import annotations

import dataclasses
import importlib
import re

import numpy as np
import pytest

import fp4kit

mx = pytest.importorskip("mlx.core", reason="the engines are not installed")
mlx_lm = pytest.importorskip("mlx_lm.utils", reason="the engines are not installed")
from mlx.utils import tree_flatten  # noqa: E402 - MLX may be missing

# Deprecations of their dependencies are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS = 4
SETTINGS = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "vocab_size": 80, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 1e4,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "shared_expert_intermediate_size": 64,
    "first_k_dense_replace": 0, "moe_layer_freq": 1, "norm_topk_prob": True, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "use_qk_norm": False, "attention_bias": False,
    "partial_rotary_factor": 1.0, "rope_scaling": None, "tie_word_embeddings": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
#: What else a type needs.
MORE = {
    "deepseek_v2": {
        "topk_method": "greedy", "scoring_func": "softmax",
        "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
    },
    "phimoe": {
        "rope_scaling": {
            "type": "longrope", "original_max_position_embeddings": 64, "short_mscale": 1.0,
            "long_mscale": 1.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
        },
    },
}  # fmt: skip
TYPES = (
    "deepseek", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe",
)  # fmt: skip
#: Of types whose checkpoints call the projections of an expert otherwise.
PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
STACK = re.compile(r"(.*)\.(mlp|block_sparse_moe)\.(?:switch_mlp|experts)\.(\w+_proj)\.weight")
TOKENS = mx.arange(32).reshape(2, 16)


def source_of(model_type, folder):
    """A checkpoint of a small model with random weights."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    known = {field.name for field in dataclasses.fields(module.ModelArgs)}
    config = {"model_type": model_type, "dtype": "float32"}
    config |= {name: value for name, value in SETTINGS.items() if name in known}
    config |= MORE.get(model_type, {})
    mx.random.seed(0)
    model, arrays = module.Model(module.ModelArgs.from_dict(config)), {}
    for name, value in tree_flatten(model.parameters()):
        array = np.array(value.astype(mx.float32))
        if match := STACK.fullmatch(name):
            layer, block, projection = match.groups()
            called = PROJECTIONS[projection] if block == "block_sparse_moe" else projection
            for expert, one in enumerate(array):
                arrays[f"{layer}.{block}.experts.{expert}.{called}.weight"] = one
        else:
            arrays[name] = array
    fp4kit.save(folder, arrays, config=config)
    return folder


def logits(model):
    return np.array(model(TOKENS).astype(mx.float32))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("model_type", TYPES)
def test_experts_are_multiplied(model_type, format, tmp_path):
    source = source_of(model_type, tmp_path / "in")
    target, back = tmp_path / "out", tmp_path / "back"
    fp4kit.quantize_checkpoint(source, target, format, layout="mlx")
    model, _ = mlx_lm.load_model(target)
    stacks = [one for _, one in model.named_modules() if "Switch" in str(type(one))
              and hasattr(one, "scales")]  # fmt: skip
    assert len(stacks) == 3 * 2
    assert all((one.mode, one.weight.shape[0]) == (format, EXPERTS) for one in stacks)
    fp4kit.dequantize_checkpoint(target, back, "float32", experts_layout="single")
    plain, original = (mlx_lm.load_model(path)[0] for path in (back, source))
    expected = logits(plain)
    np.testing.assert_allclose(logits(model), expected, rtol=1e-3, atol=1e-4)
    # Quantizing changed far more than that.
    assert np.abs(logits(original) - expected).max() > 1e-2
