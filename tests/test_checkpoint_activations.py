# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activation scales are values like others: checked, converted, and missed by name."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest

from fp4kit.checkpoint.operations import convert_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import FileFormatError

LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
PAIRS = list(itertools.permutations(LAYOUTS, 2))
INPUT = {
    "compressed-tensors": ".input_global_scale",
    "modelopt": ".input_scale",
    "comfy": ".input_scale",
}
EXPERT = "model.layers.0.mlp.experts.1"


@pytest.fixture(scope="module")
def w4a4(checkpoints, tmp_path_factory):
    """A folder with a quantized directory of each layout."""
    folder = tmp_path_factory.mktemp("w4a4")
    tensors, config = checkpoints.moe(2)
    source = checkpoints.save(folder / "in", tensors, config)
    for layout in LAYOUTS:
        options = CheckpointOptions(layout=layout, activations="uncalibrated")
        quantize_checkpoint(source, folder / layout, options)
    return folder


@pytest.fixture
def edited(checkpoints, w4a4, tmp_path):
    """Copies a directory with the activation scale of a module set, or removed if None."""

    def copy(layout, module, value):
        target = tmp_path / "edited"
        shutil.copytree(w4a4 / layout, target)
        (path,) = target.glob("*.safetensors")
        stored, metadata = checkpoints.read_file(path)
        arrays = {name: (t[0], checkpoints.array(t).copy()) for name, t in stored.items()}
        name = f"{module}{INPUT[layout]}"
        if value is None:
            del arrays[name]
        else:
            arrays[name][1][...] = value
        checkpoints.write_file(path, arrays, metadata)
        return target

    return copy


@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize("member", ["up_proj", "down_proj"])
def test_a_missing_one_is_blamed_on_the_input_before_any_work(edited, tmp_path, old, new, member):
    source = edited(old, f"{EXPERT}.{member}", None)
    with pytest.raises(FileFormatError) as caught:
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(new))
    message = str(caught.value)
    assert message.startswith(str(source))
    assert f"1 of 13 activation scales are missing: '{EXPERT}.{member}{INPUT[old]}'" in message
    assert "report" not in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_what_is_no_scale_is_not_converted(edited, tmp_path, old, new, value):
    source = edited(old, f"{EXPERT}.up_proj", value)
    with pytest.raises(FileFormatError, match=f"not finite and above 0: '{EXPERT}.up_proj"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(new))
    assert not (tmp_path / "out").exists()
    assert any(f"{EXPERT}.up_proj{INPUT[old]}: is " in fault for fault in structure_faults(source))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("module", "mate"),
    [
        (f"{EXPERT}.up_proj", f"{EXPERT}.gate_proj"),
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_unequal_ones_of_a_fused_group_are_a_fault(edited, layout, module, mate):
    """Engines use one for all members."""
    (fault,) = structure_faults(edited(layout, module, 7.0))
    assert fault.startswith("fused modules have different activation scales: ")
    assert f"{module} 7.0" in fault
    assert f"{mate} 1.0" in fault


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_experts_have_others(edited, layout):
    """They read the same input, but no engine fuses them by name."""
    assert structure_faults(edited(layout, f"{EXPERT}.down_proj", 7.0)) == []


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_they_are_converted_and_not_called_dropped(checkpoints, edited, tmp_path, old, new):
    source = edited(old, f"{EXPERT}.down_proj", 4.0)
    report = convert_checkpoint(source, tmp_path / "out", ConvertOptions(new))
    assert not any(name.endswith(INPUT[old]) for name in report.dropped)
    written = checkpoints.read(tmp_path / "out")
    scale = checkpoints.array(written[f"{EXPERT}.down_proj{INPUT[new]}"]).item()
    same = ("compressed-tensors" in (old, new)) is False
    assert scale == (4.0 if same else 0.25)
    assert sum(name.endswith(INPUT[new]) for name in written) == 13


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_faults_of_the_source_are_no_fault_of_ours(checkpoints, edited, tmp_path, old, new):
    """Unequal ones are passed on, with a warning that names the source."""
    source = edited(old, f"{EXPERT}.up_proj", 4.0)
    report = convert_checkpoint(source, tmp_path / "out", ConvertOptions(new))
    assert any("the source is faulty (1 faults)" in warning for warning in report.warnings)
    written = checkpoints.read(tmp_path / "out")
    assert checkpoints.array(written[f"{EXPERT}.gate_proj{INPUT[new]}"]).item() == 1.0
