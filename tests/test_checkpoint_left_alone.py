# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What is excluded is never refused, understood or not; what has lost its scale always is."""

from __future__ import annotations

import numpy as np
import pytest

from command_line import fail, succeed
from fp4kit.checkpoint.models.reader_faults import reader_faults
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.errors import FileFormatError
from test_checkpoint_packed_bytes import deepseek_v4

ODD = "model.layers.0.odd.weight"
#: Tensors that stop a conversion where they are not excluded, by what they are.
FOREIGN = {
    "FP8 without a scale": {ODD: ("F8_E4M3", np.full((64, 64), 0x38, np.uint8))},
    "int8 with a scale": {
        ODD: ("I8", np.ones((64, 64), np.int8)),
        ODD.replace("weight", "scales"): ("F32", np.ones((64, 1), np.float32)),
    },
}
PATTERNS = ("*.odd.*", "re:.*odd", "*odd*")


@pytest.fixture(params=FOREIGN)
def foreign(request, checkpoints):
    tensors, config = checkpoints.llama(1)
    # The writer of tests knows these bytes as unsigned ones.
    checkpoints.DTYPES.setdefault("I8", np.dtype(np.int8))
    return {**tensors, **FOREIGN[request.param]}, config


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_directories(checkpoints, foreign, tmp_path, layout, pattern):
    tensors, config = foreign
    source = checkpoints.save(tmp_path / "in", tensors, config)
    with pytest.raises(FileFormatError, match="odd"):
        quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(layout=layout))
    options = CheckpointOptions(layout=layout, exclude=(pattern,))
    quantize_checkpoint(source, tmp_path / "out", options)
    written, given = checkpoints.read(tmp_path / "out"), checkpoints.stored(tensors)
    for name in tensors:
        if "odd" in name:
            assert written[name] == given[name]
    assert any(name.endswith("o_proj.weight_scale") for name in written)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_plain_files(checkpoints, foreign, tmp_path, pattern):
    tensors, _ = foreign
    source = checkpoints.write_file(tmp_path / "in.safetensors", tensors)
    target = tmp_path / "out.safetensors"
    assert "odd" in fail("quantize", source, "-o", target, "--device", "cpu")
    succeed("quantize", source, "-o", target, "--device", "cpu", "--exclude", pattern)
    assert checkpoints.read_file(target)[0][ODD] == checkpoints.stored(tensors)[ODD]


@pytest.mark.parametrize("lost", ["layers.0.ffn.experts.1.w2.scale", "layers.0.attn.wo_b.scale"])
def test_a_lost_scale_is_named(checkpoints, tmp_path, lost):
    """Beside others that are there: the bytes are codes, and no integers of the model's own."""
    tensors, config, _ = deepseek_v4(checkpoints)
    weight = lost.replace(".scale", ".weight")
    assert tensors.pop(lost)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    with pytest.raises(FileFormatError, match=rf"{weight}.*no scale"):
        quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    with pytest.raises(FileFormatError, match=rf"{weight}.*no scale"):
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())


@pytest.mark.parametrize(("formats", "count"), [(["nvfp4"], 1), (["mxfp4"], 0)])
def test_faults_of_one_format(formats, count):
    assert len(reader_faults({"model_type": "hrm_text"}, formats, ["layers.0.gqkv"])) == count
