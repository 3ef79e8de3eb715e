# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Readers that are known to fail are named, and only where they would."""

import pytest

from fp4kit.checkpoint.reader_faults import KNOWN, model_types, reader_faults

EXPERT = "model.layers.0.mlp.experts.3.up_proj"
DENSE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("model_type", sorted(KNOWN))
@pytest.mark.parametrize("nested", [False, True])
def test_a_model_type_is_named_wherever_it_stands(model_type, nested):
    config = {"model_type": model_type}
    if nested:
        config = {"model_type": "llava", "text_config": config}
    (said,) = reader_faults(config, ["mxfp4"], [DENSE])
    assert model_type in said
    assert "no fault of the file" in said


@pytest.mark.parametrize(
    ("formats", "modules", "count"),
    [
        (["nvfp4"], [EXPERT], 1),
        (["mxfp4"], [EXPERT], 0),
        (["nvfp4"], [DENSE], 0),
        (["nvfp4", "mxfp4"], [DENSE, EXPERT], 1),
        (["nvfp4"], [], 0),
    ],
)
def test_experts_in_nvfp4(formats, modules, count):
    said = reader_faults({"model_type": "qwen3_moe"}, formats, modules)
    assert len(said) == count
    assert all("48371" in line for line in said)


@pytest.mark.parametrize("value", [None, 3, [], {"x": 1}])
def test_a_model_type_that_is_no_text_is_none(value):
    assert list(model_types({"model_type": value, "text_config": {"model_type": "t5"}})) == ["t5"]
    assert reader_faults({}, ["nvfp4"], [DENSE]) == []
