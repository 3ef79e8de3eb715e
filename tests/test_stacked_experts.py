# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Names that an ignore list needs for experts which stay stacked."""

from __future__ import annotations

import pytest

from fp4kit.checkpoint.stacked_experts import stacked_modules


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
