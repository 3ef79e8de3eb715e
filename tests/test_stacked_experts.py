# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Names that an ignore list needs for experts which stay stacked."""

from __future__ import annotations

import pytest

from checkpoints import config_of, normal, save
from fp4kit.checkpoint.layouts.ignore_list import IgnoreList
from fp4kit.checkpoint.operations import quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.plan.ignored import stacked_modules
from fp4kit.checkpoint.verify.structure import structure_faults


@pytest.mark.parametrize("prefix", ["", "model.layers.0.", "language_model.model.layers.3."])
@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        # DBRX: two axes, all experts in the first.
        ("ffn.experts.mlp.w1", (256, 64), {"ffn.experts"}),
        ("mlp.experts.gate_up_proj", (4, 128, 64), {"mlp.experts", "mlp.experts.gate_up_proj"}),
        ("mlp.experts.w13_weight", (4, 128, 64), {"mlp.experts"}),
        (
            "moe.input_linear.weight",
            (4, 128, 64),
            {"moe.input_linear", "moe.experts"},
        ),
        (
            "mlp.shared_experts.down_proj",
            (1, 64, 64),
            {
                "mlp.shared_experts",
                "mlp.shared_experts.down_proj",
                "mlp.shared_experts.gate_up_proj",
            },
        ),
        ("moe.gate_proj.weight", (4, 64, 64), {"moe.gate_proj", "moe.experts"}),
        # None of these is stacked.
        ("mlp.experts.gate.weight", (4, 64), set()),
        ("mlp.experts.0.gate_proj.weight", (4, 64), set()),
        ("mlp.experts.gate_up_proj_bias", (4, 128), set()),
        ("mixer.conv1d.weight", (4, 1, 4), set()),
        ("mlp.down_proj.weight", (64, 64), set()),
    ],
)
def test_names(prefix, name, shape, expected):
    found = stacked_modules({prefix + name: shape}, ())
    assert set(found) == {prefix + module for module in expected}


def test_no_name_that_holds_a_quantized_weight():
    kept = {"a.moe.gate_proj.weight": (4, 64, 64), "a.mlp.experts.x": (4, 64, 64)}
    quantized = ["a.moe.experts.0.up_proj.weight", "a.mlp.experts.1.down_proj.weight"]
    assert stacked_modules(kept, quantized) == ("a.moe.gate_proj",)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_the_ignore_list_names_them(tmp_path, layout, prefix):
    base = f"{prefix}model.layers.0"
    tensors = {
        f"{base}.self_attn.o_proj.weight": normal((64, 64)),
        f"{base}.block_sparse_moe.input_linear.weight": normal((4, 128, 64)),
        f"{base}.block_sparse_moe.output_linear.weight": normal((4, 64, 64)),
        f"{base}.ffn.experts.mlp.w1": normal((256, 64)),
        f"{base}.mlp.shared_experts.down_proj": normal((1, 64, 64)),
    }
    source = save(tmp_path / "source", tensors, {"model_type": "brand_new"})
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(layout=layout))
    assert structure_faults(tmp_path / "out") == []
    listed = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert {
        f"{base}.{module}"
        for module in (
            "block_sparse_moe.experts",
            "block_sparse_moe.input_linear",
            "block_sparse_moe.output_linear",
            "ffn.experts",
            "mlp.shared_experts",
            "mlp.shared_experts.down_proj",
        )
    } <= set(listed)
    assert not IgnoreList(listed, layout).matches(f"{base}.self_attn.o_proj")
