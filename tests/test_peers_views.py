# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused experts as transformers writes them, and MXFP4 as it decodes them."""

from __future__ import annotations

import numpy as np
import pytest

from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.views import search as view_search
from fp4kit.checkpoint.views.base import ViewOptions

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

HIDDEN, INTERMEDIATE, EXPERTS = 64, 96, 4
COMMON = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "head_dim": 32,
    "pad_token_id": 0,
}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
#: Name of the class, configuration, whether gate and up alternate.
MODELS = {
    "gpt_oss": (
        "GptOss",
        {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS},
        True,
    ),
    "llama4": (
        "Llama4",
        {
            "intermediate_size": INTERMEDIATE,
            "intermediate_size_mlp": 128,
            "num_local_experts": EXPERTS,
        },
        False,
    ),
    "aria": (
        "AriaText",
        {"intermediate_size": INTERMEDIATE, "moe_num_experts": EXPERTS, "moe_topk": 2},
        False,
    ),
    "gemma4": (
        "Gemma4",
        {
            "intermediate_size": 128,
            "enable_moe_block": True,
            "num_experts": EXPERTS,
            "top_k_experts": 2,
            "moe_intermediate_size": INTERMEDIATE,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 64,
        },
        False,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": INTERMEDIATE,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "rope_scaling": {"mrope_section": [8, 4, 4], "rope_type": "default"},
        },
        False,
    ),
}


def build(name, options):
    text = COMMON | options
    if name == "Qwen3VLMoe":
        vision = VISION | {"out_hidden_size": HIDDEN, "deepstack_visual_indexes": []}
        config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
        return transformers.Qwen3VLMoeForConditionalGeneration(config)
    classes = {"Llama4": "Llama4TextConfig", "Gemma4": "Gemma4TextConfig"}
    config = getattr(transformers, classes.get(name, f"{name}Config"))(**text)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("model", MODELS)
def test_experts_of_saved_models(model, tmp_path, stored):
    """Every projection of every expert equals the rows that the model computes with."""
    name, options, interleaved = MODELS[model]
    module = build(name, options).to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    (experts,) = [
        part
        for part in module.modules()
        if isinstance(getattr(part, "gate_up_proj", None), torch.nn.Parameter)
    ]
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if gate_up.shape[1] == HIDDEN:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    half = slice(0, None, 2) if interleaved else slice(0, INTERMEDIATE)
    other = slice(1, None, 2) if interleaved else slice(INTERMEDIATE, None)
    expected = {"gate_proj": gate_up[:, half], "up_proj": gate_up[:, other], "down_proj": down}
    with Checkpoint(tmp_path) as checkpoint:
        found = view_search.search(checkpoint, ViewOptions(checkpoint.config))
        weights = [view for view in found.views if view.tensor.name.endswith(".weight")]
        assert len(weights) == 3 * EXPERTS
        for view in weights:
            *_, expert, projection, _ = view.tensor.name.split(".")
            array = bits(expected[projection][int(expert)])
            assert (stored.read_all(view, np.uint16) == array).all()
        biases = [view for view in found.views if view.tensor.name.endswith(".bias")]
        assert len(biases) == (3 * EXPERTS if model == "gpt_oss" else 0)


def test_decoded_mxfp4_experts(stored):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 64, 3, 16), np.uint8)
    scales = rng.integers(0, 250, (2, 64, 3), np.uint8)
    expected = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    ).numpy()
    source = stored.ArraySource(
        {"experts.down_proj_blocks": ("U8", blocks), "experts.down_proj_scales": ("U8", scales)}
    )
    (view,) = view_search.search(source, ViewOptions({"model_type": "gpt_oss"}, fused=False)).views
    assert (stored.read_all(view) == expected).all()
