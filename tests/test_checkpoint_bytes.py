# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of one byte in every dialect: FP8 of ComfyUI and DeepSeek-V4, MXFP4 packed as int8."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from command_line import fail, succeed
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from fp4kit.errors import FileFormatError

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
NAMES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
SPELLINGS = ("metadata", "markers", "scale_weight", "weight_scale")
MODULES = [f"model.diffusion_model.blocks.0.self_attn.{name}" for name in "qkvo"]


def fp8_codes(shape, dtype="F8_E4M3", seed=0):
    """Finite codes as bytes."""
    values = np.random.default_rng(seed).standard_normal(shape) * 50
    return values.astype(FP8[dtype]).view(np.uint8)


def scale_of(shape, rows, seed):
    count = rows if shape in ("rows", "column") else 1
    values = np.random.default_rng(seed).uniform(0.001, 0.01, count).astype(np.float32)
    return values.reshape({"scalar": (), "one": (1,), "rows": (rows,), "column": (rows, 1)}[shape])


def comfy_fp8(spelling, dtype="F8_E4M3", shape="scalar"):
    """(tensors, metadata, {weight: decoded float32}) of a single-file model."""
    tensors, layers, decoded = {}, {}, {}
    for number, module in enumerate(MODULES):
        codes = fp8_codes((48, 64), dtype, number)
        scale = scale_of(shape, 48, number)
        factor = scale.reshape(-1, 1) if scale.ndim else scale
        decoded[f"{module}.weight"] = codes.view(FP8[dtype]).astype(np.float32) * factor
        tensors[f"{module}.weight"] = dtype, codes
        name = "scale_weight" if spelling == "scale_weight" else "weight_scale"
        tensors[f"{module}.{name}"] = "F32", scale
        tensors[f"{module}.bias"] = "BF16", np.ones(48, ml_dtypes.bfloat16)
        facts = {"format": NAMES[dtype], "full_precision_matrix_mult": True}
        layers[module] = facts
        if spelling == "markers":
            data = json.dumps(facts).encode()
            tensors[f"{module}.comfy_quant"] = "U8", np.frombuffer(data, np.uint8)
        if spelling == "scale_weight":
            tensors[f"{module}.scale_input"] = "F32", np.ones(1, np.float32)
    if spelling == "scale_weight":
        tensors["model.diffusion_model.scaled_fp8"] = dtype, np.zeros(0, np.uint8)
    metadata = {"about": "kept"}
    if spelling == "metadata":
        record = {"format_version": "1.0", "layers": layers}
        metadata["_quantization_metadata"] = json.dumps(record)
    return tensors, metadata, decoded


@pytest.fixture
def stored(checkpoints, tmp_path):
    """Writes tensors as a single file, or as a directory."""

    def write(kind, tensors, metadata=None, config=None):
        if kind == "file":
            return checkpoints.write_file(tmp_path / "fp8.safetensors", tensors, metadata)
        return checkpoints.save(tmp_path / "fp8", tensors, config or {}, metadata=metadata)

    return write


def read(checkpoints, path):
    return checkpoints.read(path) if path.is_dir() else checkpoints.read_file(path)[0]


# ------------------------------------------------------------------------------------------------
# ComfyUI's FP8
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("shape", ["scalar", "one", "rows", "column"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_dequantize(checkpoints, stored, tmp_path, spelling, dtype, shape, kind):
    """F7: value times scale; no scale, marker or record is left over."""
    tensors, metadata, decoded = comfy_fp8(spelling, dtype, shape)
    source = stored(kind, tensors, metadata)
    out = tmp_path / ("out.safetensors" if kind == "file" else "out")
    succeed("dequantize", source, "-o", out, "--dtype", "float32", "--device", "cpu")
    written = read(checkpoints, out)
    assert written.keys() == decoded.keys() | {f"{module}.bias" for module in MODULES}
    for name, values in decoded.items():
        assert written[name] == ("F32", values.shape, values.tobytes())
    if kind == "file":
        header = checkpoints.read_file(out)[1]
        assert "_quantization_metadata" not in header
        assert header["about"] == "kept"


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_quantize_for_comfy(checkpoints, stored, tmp_path, spelling, kind):
    tensors, metadata, decoded = comfy_fp8(spelling, shape="column")
    source = stored(kind, tensors, metadata)
    out = tmp_path / ("out.safetensors" if kind == "file" else "out")
    report = quantize_checkpoint(source, out, CheckpointOptions(layout="comfy"))
    assert value_faults(out, source) == []
    assert structure_faults(out) == []
    written = read(checkpoints, out)
    for module in MODULES:
        facts = json.loads(written[f"{module}.comfy_quant"][2])
        assert facts == {"format": "nvfp4"}
        assert f"{module}.scale_weight" not in written
    shared = max(checkpoints.amax(decoded[f"{module}.weight"]) for module in MODULES)
    assert shared > 0
    name = f"{MODULES[3]}.weight"
    own = checkpoints.quantized(
        decoded[name], checkpoints.amax(decoded[name]), nibble_order="high_first"
    )
    assert written[name][2] == np.asarray(own.packed).tobytes()
    if spelling == "scale_weight":
        why = report.dropped["model.diffusion_model.scaled_fp8"]
        assert "only says that the file was FP8" in why


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("shape", ["scalar", "one", "column"])
def test_quantize_a_plain_file(checkpoints, stored, tmp_path, spelling, shape):
    tensors, metadata, decoded = comfy_fp8(spelling, shape=shape)
    source, out = stored("file", tensors, metadata), tmp_path / "out.safetensors"
    succeed("quantize", source, "-o", out, "--device", "cpu")
    written, header = checkpoints.read_file(out)
    assert "_quantization_metadata" not in header
    suffixes = (".bias", ".weight_packed", ".weight_scale", ".weight_global_scale")
    assert written.keys() == {module + suffix for module in MODULES for suffix in suffixes}
    for name, values in decoded.items():
        own = checkpoints.quantized(values, checkpoints.amax(values))
        assert written[f"{name}_packed"][2] == np.asarray(own.packed).tobytes()


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_quantize_a_directory_for_engines(checkpoints, stored, tmp_path, layout, spelling):
    tensors, metadata, _ = comfy_fp8(spelling)
    tensors = {name.replace("model.diffusion_model.", "model."): t for name, t in tensors.items()}
    if metadata.get("_quantization_metadata"):
        text = metadata["_quantization_metadata"]
        metadata["_quantization_metadata"] = text.replace("model.diffusion_model.", "model.")
    source = stored("directory", tensors, metadata)
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(layout=layout))
    assert structure_faults(tmp_path / "out") == []
    assert value_faults(tmp_path / "out", source) == []


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("dtype", FP8)
def test_a_plain_cast_is_decoded_where_it_is_asked_for(checkpoints, stored, tmp_path, kind, dtype):
    tensors, _, _ = comfy_fp8("weight_scale", dtype)
    tensors = {name: t for name, t in tensors.items() if not name.endswith("_scale")}
    source = stored(kind, tensors)
    suffix = ".safetensors" if kind == "file" else ""
    out, small, plain = (tmp_path / f"{name}{suffix}" for name in ("out", "small", "plain"))
    commands = [("dequantize", source, "-o", out), ("quantize", source, "-o", small)]
    commands[1] += ("--layout", "comfy")
    if kind == "file":
        commands.append(("quantize", source, "-o", plain))
    for command in commands:
        message = fail(*command, "--device", "cpu")
        assert "has no scale" in message
        assert "--unscaled-fp8" in message
        assert not command[3].exists()
        succeed(*command, "--device", "cpu", "--unscaled-fp8")
    written = read(checkpoints, out)
    for name in [f"{module}.weight" for module in MODULES]:
        values = tensors[name][1].view(FP8[dtype]).astype(np.float32)
        kind_ = ml_dtypes.bfloat16
        expected = written[name][0], values.shape, values.astype(kind_).tobytes()
        assert written[name] == expected
        assert written[name][0] == "BF16"
    assert value_faults(small, source) == []


def test_a_plain_cast_may_have_any_neighbours(checkpoints, stored, tmp_path):
    """There is no quantization whose meaning they could change."""
    codes = fp8_codes((48, 64))
    tensors = {"a.weight": ("F8_E4M3", codes), "a.gamma": ("F8_E4M3", codes[0])}
    source, out = stored("file", tensors), tmp_path / "out.safetensors"
    dequantize_checkpoint(source, out, DequantizeOptions("float32", unscaled_fp8=True))
    written, _ = checkpoints.read_file(out)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert written["a.weight"][2] == values.tobytes()
    assert written["a.gamma"][2] == values[0].tobytes()


@pytest.mark.parametrize("spelling", ["metadata", "markers", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_activation_scales_of_fp8_have_other_forms(checkpoints, stored, tmp_path, spelling, shape):
    tensors, metadata, decoded = comfy_fp8(spelling)
    for module in MODULES:
        tensors[f"{module}.input_scale"] = "BF16", np.ones(shape, ml_dtypes.bfloat16)
    source, out = stored("file", tensors, metadata), tmp_path / "out.safetensors"
    report = dequantize_checkpoint(source, out, DequantizeOptions("float32"))
    assert {f"{module}.input_scale" for module in MODULES} <= report.dropped.keys()
    written, _ = checkpoints.read_file(out)
    assert written.keys() == decoded.keys() | {f"{module}.bias" for module in MODULES}


def test_a_lost_scale_is_no_plain_cast(checkpoints, stored, tmp_path):
    tensors, metadata, _ = comfy_fp8("weight_scale")
    del tensors[f"{MODULES[1]}.weight_scale"]
    source = stored("directory", tensors, metadata)
    with pytest.raises(FileFormatError, match=r"self_attn\.k\.weight.* has no scale"):
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())


def test_a_marker_that_lies(checkpoints, stored, tmp_path):
    tensors, metadata, _ = comfy_fp8("markers")
    data = json.dumps({"format": "float8_e5m2"}).encode()
    tensors[f"{MODULES[0]}.comfy_quant"] = "U8", np.frombuffer(data, np.uint8)
    source = stored("file", tensors, metadata)
    with pytest.raises(FileFormatError, match="is F8_E4M3, its marker says float8_e5m2"):
        dequantize_checkpoint(source, tmp_path / "out.safetensors", DequantizeOptions())


def test_marked_integers_are_decoded(checkpoints, stored, tmp_path):
    """As the embedding of published NVFP4 text encoders: int8 with a scale per row."""
    tensors, metadata, _ = comfy_fp8("markers")
    codes = np.random.default_rng(0).integers(-127, 128, (40, 64)).astype(np.int8)
    scale = scale_of("column", 40, 3)
    data = json.dumps({"format": "int8_tensorwise"}).encode()
    tensors |= {
        "model.embed_tokens.weight": ("I8", codes),
        "model.embed_tokens.weight_scale": ("F32", scale),
        "model.embed_tokens.comfy_quant": ("U8", np.frombuffer(data, np.uint8)),
    }
    source, out = stored("file", tensors, metadata), tmp_path / "out.safetensors"
    dequantize_checkpoint(source, out, DequantizeOptions("float32"))
    written, _ = checkpoints.read_file(out)
    expected = codes.astype(np.float32) * scale
    assert written["model.embed_tokens.weight"] == ("F32", (40, 64), expected.tobytes())
