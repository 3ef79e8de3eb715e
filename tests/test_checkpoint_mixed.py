# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP4 and FP8 in one checkpoint: compressed-tensors `mixed-precision`, ModelOpt, ComfyUI."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from command_line import fail, succeed
from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from fp4kit.errors import FileFormatError, OptionError

LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
OUT = "model.layers.0.self_attn.o_proj"
FP8_GROUP = {
    "targets": ["re:.*o_proj"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "format": "float-quantized",
}


def fp8_of(weight, per):
    """(codes, scale, decoded) with a scale per `channel` or per `tensor`."""
    values = weight.astype(np.float32)
    amax = np.abs(values).max(1, keepdims=True) if per == "channel" else np.abs(values).max()
    scale = np.asarray(amax / 448, np.float32)
    codes = (values / scale).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), scale, codes.astype(np.float32) * scale


def say_compressed(folder, checkpoints, format):
    config = checkpoints.config_of(folder)
    quantization = config["quantization_config"]
    quantization["format"] = "mixed-precision"
    quantization["config_groups"]["group_1"] = FP8_GROUP
    quantization["config_groups"]["group_0"]["targets"] = ["re:.*"]
    quantization["ignore"].remove(OUT)
    checkpoints.write_json(folder / "config.json", config)


def say_modelopt(folder, checkpoints, format):
    stored = checkpoints.read(folder)
    modules = [name.removesuffix(".weight_scale_2") for name in stored if name.endswith("_scale_2")]
    layers = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in modules}
    layers[OUT] = {"quant_algo": "FP8"}
    for document, key in (("config", "quantization_config"), ("hf_quant_config", "quantization")):
        path = folder / f"{document}.json"
        content = json.loads(path.read_text())
        content[key] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        content[key].pop("config_groups", None)
        content[key]["ignore" if document == "config" else "exclude_modules"].remove(OUT)
        checkpoints.write_json(path, content)


@pytest.fixture
def mixed(checkpoints, tmp_path):
    """(source, mixed directory, decoded FP8 weight) of a layout and format."""

    def make(layout, format="nvfp4"):
        tensors, config = checkpoints.llama(1)
        source = checkpoints.save(tmp_path / "source", tensors, config)
        options = CheckpointOptions(
            layout=layout,
            format=format,
            exclude=("*o_proj*",),
            activations="uncalibrated" if layout == "modelopt" else None,
        )
        target = tmp_path / "mixed"
        quantize_checkpoint(source, target, options)
        (path,) = target.glob("*.safetensors")
        stored, metadata = checkpoints.read_file(path)
        arrays = {name: (t[0], checkpoints.array(t)) for name, t in stored.items()}
        per = "channel" if layout == "compressed-tensors" else "tensor"
        codes, scale, decoded = fp8_of(arrays[f"{OUT}.weight"][1], per)
        arrays[f"{OUT}.weight"] = "F8_E4M3", codes
        arrays[f"{OUT}.weight_scale"] = "F32", scale
        if layout != "compressed-tensors":
            arrays[f"{OUT}.input_scale"] = "F32", np.ones((), np.float32)
        if layout == "comfy":
            facts = {"format": "float8_e4m3fn"}
            data = json.dumps(facts).encode()
            arrays[f"{OUT}.comfy_quant"] = "U8", np.frombuffer(data, np.uint8)
            record = json.loads(metadata["_quantization_metadata"])
            record["layers"][OUT] = facts
            metadata["_quantization_metadata"] = json.dumps(record)
        checkpoints.write_file(path, arrays, metadata)
        if layout == "compressed-tensors":
            say_compressed(target, checkpoints, format)
        elif layout == "modelopt":
            say_modelopt(target, checkpoints, format)
        return source, target, decoded

    return make


CASES = [*((layout, "nvfp4") for layout in LAYOUTS), ("compressed-tensors", "mxfp4")]


@pytest.mark.parametrize(("layout", "format"), CASES)
def test_it_is_verified_and_decoded(checkpoints, mixed, tmp_path, layout, format):
    """F16: the FP8 weights exactly, the others as without them."""
    source, folder, decoded = mixed(layout, format)
    assert structure_faults(folder) == []
    assert value_faults(folder, source) == []
    dequantize_checkpoint(folder, tmp_path / "out", DequantizeOptions("float32"))
    written = checkpoints.read(tmp_path / "out")
    assert written.keys() == checkpoints.read(source).keys()
    assert written[f"{OUT}.weight"] == ("F32", decoded.shape, decoded.tobytes())
    succeed("inspect", folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_cannot_hold_it(mixed, tmp_path, layout):
    _, folder, _ = mixed(layout)
    other = "modelopt" if layout != "modelopt" else "compressed-tensors"
    with pytest.raises(OptionError, match=rf"weights in FP8.*1: '{OUT}\.weight'.*dequantize"):
        convert_checkpoint(folder, tmp_path / "out", ConvertOptions(other))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_fp8_are_compared_too(checkpoints, mixed, layout):
    source, folder, _ = mixed(layout)
    (path,) = folder.glob("*.safetensors")
    stored, metadata = checkpoints.read_file(path)
    arrays = {name: (t[0], checkpoints.array(t).copy()) for name, t in stored.items()}
    arrays[f"{OUT}.weight_scale"][1][...] *= 3
    checkpoints.write_file(path, arrays, metadata)
    (fault,) = value_faults(folder, source)
    assert fault.startswith(f"{OUT}.weight: its values are far from the source")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_of_fp8_that_are_no_scale(checkpoints, mixed, tmp_path, layout, value):
    _, folder, _ = mixed(layout)
    (path,) = folder.glob("*.safetensors")
    stored, metadata = checkpoints.read_file(path)
    arrays = {name: (t[0], checkpoints.array(t).copy()) for name, t in stored.items()}
    arrays[f"{OUT}.weight_scale"][1].reshape(-1)[-1] = value
    checkpoints.write_file(path, arrays, metadata)
    (fault,) = structure_faults(folder)
    assert f"'{OUT}.weight_scale': holds a NaN or infinite scale" in fault
    assert "NaN or infinite" in fail("dequantize", folder, "-o", tmp_path / "out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_scale_is_missed(checkpoints, mixed, tmp_path, layout):
    _, folder, _ = mixed(layout)
    (path,) = folder.glob("*.safetensors")
    stored, metadata = checkpoints.read_file(path)
    lost = f"{OUT}.weight_scale"
    arrays = {name: (t[0], checkpoints.array(t)) for name, t in stored.items() if name != lost}
    checkpoints.write_file(path, arrays, metadata)
    with pytest.raises(FileFormatError, match=rf"{OUT}\.weight.* has no scale"):
        dequantize_checkpoint(folder, tmp_path / "out", DequantizeOptions())
    assert any("has no scale" in fault for fault in structure_faults(folder))


def test_a_config_that_says_less(checkpoints, mixed):
    """FP8 under a config that knows NVFP4 only: engines would read it as NVFP4."""
    _, folder, _ = mixed("compressed-tensors")
    config = checkpoints.config_of(folder)
    del config["quantization_config"]["config_groups"]["group_1"]
    checkpoints.write_json(folder / "config.json", config)
    faults = structure_faults(folder)
    assert f"{OUT}.weight: is float8_e4m3fn, the config says nvfp4 only" in faults


def test_groups_of_several_formats_need_the_word(checkpoints, mixed):
    _, folder, _ = mixed("compressed-tensors")
    config = checkpoints.config_of(folder)
    config["quantization_config"]["format"] = "nvfp4-pack-quantized"
    checkpoints.write_json(folder / "config.json", config)
    assert any("its own format is not 'mixed-precision'" in f for f in structure_faults(folder))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda layers: layers.pop(OUT), f"{OUT}: is quantized, but quantized_layers does not"),
        (lambda layers: layers.update(x={"quant_algo": "FP8"}), "x: quantized_layers calls it FP8"),
        (lambda layers: layers.update(x={"quant_algo": "W4A8_AWQ"}), "'W4A8_AWQ' is not read here"),
        (lambda layers: layers.update(x=5), "is no object"),
        (lambda layers: layers.update(x={"quant_algo": "FP8", "rotate": True}), "'rotate'"),
        (lambda layers: layers.clear(), "names no module"),
    ],
)
def test_layers_of_modelopt(checkpoints, mixed, change, match):
    _, folder, _ = mixed("modelopt")
    for document, key in (("config", "quantization_config"), ("hf_quant_config", "quantization")):
        path = folder / f"{document}.json"
        content = json.loads(path.read_text())
        change(content[key]["quantized_layers"])
        checkpoints.write_json(path, content)
    assert any(match in fault for fault in structure_faults(folder))


def test_unknown_algorithms_are_named(checkpoints, mixed, tmp_path):
    _, folder, _ = mixed("compressed-tensors")
    config = checkpoints.config_of(folder)
    group = config["quantization_config"]["config_groups"]["group_1"]
    group["weights"] = {"num_bits": 4, "type": "int", "group_size": 32}
    group["format"] = "pack-quantized"
    checkpoints.write_json(folder / "config.json", config)
    message = fail("dequantize", folder, "-o", tmp_path / "out", "--device", "cpu")
    assert "'pack-quantized' is not read here" in message
