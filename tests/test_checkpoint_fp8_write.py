# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints quantized to FP8: the bytes of the array API, the JSON, verify, and back."""

import json

import numpy as np
import pytest

import fp4kit
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.read.directory import CONFIG, HF_QUANT_CONFIG
from fp4kit.errors import OptionError

WEIGHT = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
#: Layout and granularity; what the scale's name adds, its shape, and what the JSON says.
CASES = [
    ("compressed-tensors", None, "channel", "_scale", (200, 1)),
    ("compressed-tensors", "tensor", "tensor", "_scale", (1,)),
    ("compressed-tensors", "block", "block", "_scale", (2, 1)),
    ("modelopt", None, "tensor", "_scale", ()),
    ("deepseek", None, "block", "_scale_inv", (2, 1)),
]


@pytest.fixture
def source(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(layers=1, hidden=64, intermediate=200)
    path = tmp_path / "model"
    checkpoints.save(path, tensors, config)
    return path


def options(layout, granularity):
    activations = "uncalibrated" if layout == "modelopt" else None
    return CheckpointOptions("fp8", layout, granularity=granularity, activations=activations)


@pytest.mark.parametrize(("layout", "granularity", "means", "suffix", "shape"), CASES)
def test_weights_are_those_of_the_array_api(
    layout, granularity, means, suffix, shape, source, checkpoints, tmp_path
):
    target, back = tmp_path / "fp8", tmp_path / "back"
    quantize_checkpoint(source, target, options(layout, granularity))
    given, stored = checkpoints.read(source), checkpoints.read(target)
    x = checkpoints.array(given[WEIGHT])
    chosen = {"granularity": means}
    if means == "tensor":  # engines fuse it with the other: one scale for both
        both = [
            np.abs(checkpoints.array(given[name]).astype(np.float32)).max()
            for name in (WEIGHT, GATE)
        ]
        chosen["amax"] = np.array([max(both)], np.float32)
    q = fp4kit.quantize(x, "fp8", **chosen)
    assert checkpoints.array(stored[WEIGHT]).tobytes() == q.packed.tobytes()
    scale = checkpoints.array(stored[f"{WEIGHT}{suffix}"])
    assert scale.shape == shape
    assert scale.tobytes() == q.block_scale.tobytes()
    dequantize_checkpoint(target, back, DequantizeOptions("bfloat16"))
    decoded = checkpoints.array(checkpoints.read(back)[WEIGHT])
    assert decoded.tobytes() == fp4kit.dequantize(q, "bfloat16").tobytes()
    assert fp4kit.verify(target, against=source).faults == []


def config_of(folder):
    return json.loads((folder / CONFIG).read_text())["quantization_config"]


def test_json_of_compressed_tensors(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", options("compressed-tensors", "block"))
    config = config_of(tmp_path / "out")
    assert config["format"] == "float-quantized"
    assert config["quantization_status"] == "compressed"
    assert config["config_groups"]["group_0"]["weights"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
        "symmetric": True,
        "dynamic": False,
    }
    assert config["ignore"] == ["lm_head"]


def test_json_of_deepseek(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", options("deepseek", None))
    assert config_of(tmp_path / "out") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def test_json_of_modelopt(source, checkpoints, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", options("modelopt", None))
    config = config_of(tmp_path / "out")
    assert config["quant_algo"] == "FP8"
    own = json.loads((tmp_path / "out" / HF_QUANT_CONFIG).read_text())["quantization"]
    assert own["quant_algo"] == "FP8"
    assert "group_size" not in own
    scale = checkpoints.array(
        checkpoints.read(tmp_path / "out")["model.layers.0.mlp.up_proj.input_scale"]
    )
    assert (scale.shape, float(scale)) == ((), 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (CheckpointOptions("fp8", "modelopt"), "pass --activations uncalibrated"),
        (
            CheckpointOptions("fp8", "deepseek", granularity="channel"),
            "holds fp8 with granularity block",
        ),
        (
            CheckpointOptions("fp8", "deepseek", activations="uncalibrated"),
            "leave --activations out",
        ),
        (CheckpointOptions("fp8", "comfy"), "layout comfy holds nvfp4"),
        (CheckpointOptions("fp8_e5m2"), "layout compressed-tensors holds"),
    ],
)
def test_what_a_layout_does_not_hold_is_refused(given, message, source, tmp_path):
    with pytest.raises(OptionError, match=message):
        quantize_checkpoint(source, tmp_path / "out", given)
    assert not (tmp_path / "out").exists()
