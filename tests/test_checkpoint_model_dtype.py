# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""config.json says the element type that readers get, whatever the model had."""

import json

import pytest

from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.plan.model_dtype import model_dtype, stating

F32, BF16 = {"dtype": "float32"}, {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"model_type": "llama", **F32}, BF16),
        ({"model_type": "llama", "torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}),
        (
            {"model_type": "llama", **F32, "torch_dtype": "float32"},
            BF16 | {"torch_dtype": "bfloat16"},
        ),
        ({"model_type": "llama", **BF16}, {}),
        ({"model_type": "llama"}, {"torch_dtype": "bfloat16"}),
        ({"model_type": "x", "text_config": F32}, BF16 | {"text_config": BF16}),
        (
            {"model_type": "x", **F32, "thinker_config": {"text_config": {**F32, "a": 1}}},
            BF16 | {"thinker_config": {"text_config": {**BF16, "a": 1}}},
        ),
        # What is no element type of a model, and other keys, are left alone.
        ({"model_type": "x", "dtype": None}, {}),
        ({"model_type": "x", "dtype": "auto", "mamba_ssm_cache_dtype": "float32"}, {}),
        ({"_class_name": "FluxTransformer2DModel"}, {}),
        ({}, {}),
    ],
)
def test_what_changes(config, changes):
    before = json.dumps(config)
    assert stating(config, "bfloat16") == changes
    assert json.dumps(config) == before


@pytest.mark.parametrize("value", [None, 3, [], "auto", {"x": 1}])
def test_what_is_no_type_is_none(value):
    assert model_dtype({"dtype": value}) is None


@pytest.fixture
def source(checkpoints, tmp_path):
    """A function that writes a small model whose weights are of a type, and gives its folder."""

    def write(dtype, *keys):
        codes = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
        tensors, config = checkpoints.llama(dtype=codes[dtype])
        del config["dtype"]
        config |= dict.fromkeys(keys, dtype)
        checkpoints.save(tmp_path / "source", tensors, config)
        return tmp_path / "source"

    return write


def quantized(source, folder, layout="compressed-tensors"):
    return quantize_checkpoint(source, folder, CheckpointOptions(layout=layout))


def stated(checkpoints, folder):
    return {k: v for k, v in checkpoints.config_of(folder).items() if "dtype" in k}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_quantize_and_dequantize(dtype, key, checkpoints, source, tmp_path):
    report = quantized(source(dtype, key), tmp_path / "out")
    assert stated(checkpoints, tmp_path / "out") == {key: "bfloat16"}
    assert len(report.warnings) == (dtype != "bfloat16")
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back", DequantizeOptions(dtype))
    assert stated(checkpoints, tmp_path / "back") == {key: dtype}


def test_a_type_that_only_the_weights_have(checkpoints, source, tmp_path):
    quantized(source("float32"), tmp_path / "out")
    assert stated(checkpoints, tmp_path / "out") == {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("layout", ["modelopt"])
def test_other_layouts_keep_it(layout, checkpoints, source, tmp_path):
    report = quantized(source("float16", "dtype"), tmp_path / "out", layout)
    assert stated(checkpoints, tmp_path / "out") == {"dtype": "float16"}
    assert not report.warnings
    options = ConvertOptions("compressed-tensors")
    report = convert_checkpoint(tmp_path / "out", tmp_path / "converted", options)
    assert stated(checkpoints, tmp_path / "converted") == {"dtype": "bfloat16"}
    assert any("float16" in text for text in report.warnings)
