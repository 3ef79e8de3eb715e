# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Readers that are known to fail are named, and only where they would."""

import json

import numpy as np
import pytest

from command_line import invoke
from fp4kit.checkpoint.models.expert_types import model_types
from fp4kit.checkpoint.models.reader_faults import KNOWN, reader_faults
from fp4kit.checkpoint.operations import quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.verify.paths import reader_notes

EXPERT = "model.layers.0.mlp.experts.3.up_proj"
DENSE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("model_type", sorted(KNOWN))
@pytest.mark.parametrize("nested", [False, True])
def test_a_model_type_is_named_wherever_it_stands(model_type, nested):
    config = {"model_type": model_type}
    if nested:
        config = {"model_type": "llava", "text_config": config}
    found = reader_faults(config, ["mxfp4"], [DENSE])
    if nested and not KNOWN[model_type].inside:
        assert found == []
        return
    (said,) = found
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


@pytest.mark.parametrize(
    ("model_type", "modules", "count"),
    [
        ("mistral4", [EXPERT], 1),
        ("gpt_oss", [EXPERT, DENSE], 1),
        ("mistral4", [DENSE], 0),
        # Each expert becomes a layer of its own.
        ("llama4", [EXPERT], 0),
        # The text model inside another one may be read otherwise.
        ("glm4v_moe_text", [EXPERT], 1),
        ("glm4v_moe", [EXPERT], 0),
    ],
)
def test_experts_that_are_read_fused_only(model_type, modules, count):
    config = {"model_type": model_type, "text_config": {"model_type": "glm4v_moe_text"}}
    said = reader_faults(config, ["mxfp4"], modules)
    assert len(said) == count
    assert all("stay random" in line for line in said)


@pytest.mark.parametrize("value", [None, 3, [], {"x": 1}])
def test_a_model_type_that_is_no_text_is_none(value):
    assert model_types({"model_type": value, "text_config": {"model_type": "t5"}}) == ["t5"]
    assert reader_faults({}, ["nvfp4"], [DENSE]) == []


@pytest.mark.parametrize(
    ("config", "layout", "said"),
    [
        ({"model_type": "t5"}, "compressed-tensors", ["model type t5", "48371"]),
        ({"model_type": "t5"}, "modelopt", []),
        ({"model_type": "qwen3_moe"}, "compressed-tensors", ["48371"]),
        ({"model_type": "qwen3_moe"}, "modelopt", []),
        ({"model_type": "never_seen"}, "modelopt", ["'never_seen'"]),
        ({"model_type": "never_seen"}, "compressed-tensors", ["'never_seen'", "48371"]),
        ({"model_type": "never_seen"}, "comfy", []),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_verify_tells_and_finds_no_fault(checkpoints, tmp_path, config, layout, said, as_json):
    tensors = {f"{EXPERT}.weight": ("BF16", np.full((16, 64), 0x3F80, np.uint16))}
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(layout=layout))
    notes = reader_notes(tmp_path / "out")
    assert len(notes) == len(said)
    assert all(any(text in note for note in notes) for text in said)
    result = invoke("verify", tmp_path / "out", *(["--json"] if as_json else []))
    assert result.exit_code == 0
    if as_json:
        assert json.loads(result.stdout) == {
            "source": str(tmp_path / "out"),
            "faults": [],
            "notes": notes,
        }
    else:
        assert [line for line in result.stderr.splitlines() if line.startswith("note: ")] == [
            f"note: {note}" for note in notes
        ]


def test_what_cannot_be_read_has_no_note(tmp_path):
    assert reader_notes(tmp_path) == []
