# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""AWQ's scales of inputs are folded, kept for readers that know them, or refused."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from awq_checkpoints import DOWN, OUT, PRE, decoded, edit, factors
from command_line import succeed
from fp4kit.checkpoint.inspect import inspect_checkpoint
from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from fp4kit.errors import FileFormatError, OptionError


@pytest.mark.parametrize("layout", ["modelopt", "comfy"])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_the_scales_are_folded(checkpoints, good, awq, tmp_path, layout, dtype):
    """F1: W * s for each column, rounded once to binary32; the parameter disappears."""
    stored = decoded(checkpoints, good, layout, tmp_path)
    source = awq(layout, dtype)
    for out in ("float32", "bfloat16"):
        dequantize_checkpoint(source, tmp_path / out, DequantizeOptions(out))
    wide, narrow = (checkpoints.read(tmp_path / out) for out in ("float32", "bfloat16"))
    assert wide.keys() == stored.keys()
    for number, module in enumerate((DOWN, OUT)):
        name = f"{module}.weight"
        s = factors(stored[name].shape[1], number, dtype).astype(np.float32)
        expected = stored[name] * s
        assert wide[name][2] == expected.tobytes()
        assert narrow[name][2] == expected.astype(ml_dtypes.bfloat16).tobytes()
    others = [name for name in stored if DOWN not in name and OUT not in name]
    assert all(wide[name][2] == stored[name].tobytes() for name in others)


@pytest.mark.parametrize("layout", ["modelopt", "comfy"])
def test_the_effective_weight_is_compared(checkpoints, good, awq, layout):
    """`verify --against` sees W; without the scales it sees something else."""
    source = awq(layout)
    assert structure_faults(source) == []
    assert value_faults(source, good / "source") == []
    # Against what the codes were made from, the scales are too many.
    assert len(value_faults(source, good / "smoothed")) == 2

    def lose(tensors):
        del tensors[DOWN + PRE]

    edit(checkpoints, source, lose)
    (fault,) = value_faults(source, good / "source")
    assert fault.startswith(f"{DOWN}.weight: its values are far from the source")


@pytest.mark.parametrize(("old", "new"), [("modelopt", "comfy"), ("comfy", "modelopt")])
def test_convert_keeps_them_for_readers_that_know_them(checkpoints, awq, tmp_path, old, new):
    source = awq(old)
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(new))
    before, after = checkpoints.read(source), checkpoints.read(tmp_path / "out")
    for module in (DOWN, OUT):
        assert after[module + PRE] == before[module + PRE]
    assert structure_faults(tmp_path / "out") == []
    if new == "modelopt":
        config = checkpoints.config_of(tmp_path / "out")["quantization_config"]
        own = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
        assert config["quant_algo"] == own["quant_algo"] == "NVFP4_AWQ"
        assert own["pre_quant_scale"] is True
    for folder in (source, tmp_path / "out"):
        dequantize_checkpoint(folder, tmp_path / f"{folder.name}-d", DequantizeOptions("float32"))
    values = [checkpoints.read(tmp_path / f"{name}-d") for name in (source.name, "out")]
    assert values[0].keys() == values[1].keys()
    for name, one in values[0].items():
        # Recipes differ in the sign of zero.
        assert (checkpoints.array(one) == checkpoints.array(values[1][name])).all()


@pytest.mark.parametrize("old", ["modelopt", "comfy"])
def test_convert_refuses_readers_that_do_not(awq, tmp_path, old):
    with pytest.raises(OptionError, match=r"2 modules have scales of AWQ.*fp4kit dequantize"):
        convert_checkpoint(awq(old), tmp_path / "out", ConvertOptions("compressed-tensors"))
    assert not (tmp_path / "out").exists()


def test_weights_only_is_said_to_be_unusual(checkpoints, good, tmp_path):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions(layout="comfy"))
    edit(checkpoints, tmp_path / "q", lambda t: t.update({DOWN + PRE: ("BF16", factors(96))}))
    report = convert_checkpoint(tmp_path / "q", tmp_path / "out", ConvertOptions("modelopt"))
    assert any("AWQ" in warning and "activation scales" in warning for warning in report.warnings)


def test_compressed_tensors_has_no_such_scale(awq, tmp_path):
    source = awq("compressed-tensors")
    with pytest.raises(FileFormatError, match="pre_quant_scale: is not understood"):
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())
    assert any(DOWN + PRE in fault for fault in structure_faults(source))


def test_a_config_that_has_readers_ignore_them(awq):
    faults = structure_faults(awq("modelopt", said=False))
    assert len(faults) == 2
    assert all("quant_algo has readers ignore it" in fault for fault in faults)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (np.ones(5, np.float32), "a float for each of the 96 columns"),
        (np.full(96, np.nan, np.float32), "NaN or infinite scale"),
        (np.full(96, np.inf, np.float32), "NaN or infinite scale"),
    ],
)
def test_scales_that_do_not_fit(checkpoints, awq, tmp_path, values, match):
    source = awq("modelopt")
    edit(checkpoints, source, lambda tensors: tensors.update({DOWN + PRE: ("F32", values)}))
    with pytest.raises(FileFormatError, match=match):
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())
    assert any(match in fault for fault in structure_faults(source))


def test_scales_that_are_not_above_zero(checkpoints, awq):
    source = awq("comfy")
    values = np.where(np.arange(96) == 3, 0, 1).astype(np.float32)
    edit(checkpoints, source, lambda tensors: tensors.update({DOWN + PRE: ("F32", values)}))
    assert structure_faults(source) == [f"{DOWN}{PRE}: holds a scale that is not above 0"]


def test_inspect_knows_them(awq):
    report = inspect_checkpoint(awq("modelopt"))
    names = [tensor.name for tensor in report.tensors]
    assert DOWN + PRE not in names
    facts = {tensor.name: tensor.facts for tensor in report.tensors}
    assert facts[f"{DOWN}.weight"]["pre_quant_scale"] == DOWN + PRE
    assert "pre_quant_scale" not in facts["model.layers.0.mlp.up_proj.weight"]


def test_single_files_of_comfy(checkpoints, tmp_path):
    """As published: odd rows that are padded, a marker that announces the scales."""
    weight = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    s = factors(96, 1).astype(np.float32)
    tensors = {f"{DOWN}.weight": ("BF16", (weight / s).astype(ml_dtypes.bfloat16))}
    source = checkpoints.write_file(tmp_path / "in.safetensors", tensors)
    quantized, out = tmp_path / "q.safetensors", tmp_path / "out.safetensors"
    succeed("quantize", source, "-o", quantized, "--layout", "comfy", "--device", "cpu")
    marker = json.dumps({"format": "nvfp4", "pre_quant_scale": True, "group_size": 16}).encode()

    def change(stored):
        stored[DOWN + PRE] = "F32", s
        stored[f"{DOWN}.comfy_quant"] = "U8", np.frombuffer(marker, np.uint8)

    edit(checkpoints, quantized, change)
    succeed("dequantize", quantized, "-o", out, "--dtype", "float32", "--device", "cpu")
    written, _ = checkpoints.read_file(out)
    assert written.keys() == {f"{DOWN}.weight"}
    values = checkpoints.array(written[f"{DOWN}.weight"])
    assert values.shape == weight.shape
    assert np.linalg.norm(values - weight) < 0.15 * np.linalg.norm(weight)
    assert structure_faults(quantized) == []
