# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantized directories of each layout, plain and as AWQ exports them."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions

LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
DOWN = "model.layers.0.mlp.down_proj"
OUT = "model.layers.0.self_attn.o_proj"
PRE = ".pre_quant_scale"


def factors(columns, seed=0, dtype="BF16"):
    values = 1 + 7 * np.random.default_rng(seed).random(columns)
    return values.astype({"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}[dtype])


def edit(checkpoints, folder, change, metadata=None):
    """Rewrites the only weight file of a directory (or a file)."""
    path = folder if folder.is_file() else next(folder.glob("*.safetensors"))
    stored, header = checkpoints.read_file(path)
    tensors = {name: (t[0], checkpoints.array(t).copy()) for name, t in stored.items()}
    change(tensors)
    if metadata is not None:
        metadata(header)
    checkpoints.write_file(path, tensors, header)
    return folder


@pytest.fixture(scope="module")
def good(checkpoints, tmp_path_factory):
    """A source, what AWQ makes of it, and that quantized in each layout."""
    folder = tmp_path_factory.mktemp("awq")
    tensors, config = checkpoints.llama(1)
    checkpoints.save(folder / "source", tensors, config)
    smoothed = dict(tensors)
    for number, module in enumerate((DOWN, OUT)):
        weight = tensors[f"{module}.weight"][1].astype(np.float32)
        scaled = weight / factors(weight.shape[1], number).astype(np.float32)
        smoothed[f"{module}.weight"] = "BF16", scaled.astype(ml_dtypes.bfloat16)
    checkpoints.save(folder / "smoothed", smoothed, config)
    for layout in LAYOUTS:
        options = CheckpointOptions(layout=layout, activations="uncalibrated")
        quantize_checkpoint(folder / "smoothed", folder / layout, options)
    return folder


@pytest.fixture
def awq(checkpoints, good, tmp_path):
    """A quantized directory with the scales of its inputs, as AWQ exports it."""

    def make(layout, dtype="BF16", said=True):
        target = tmp_path / f"awq-{layout}"
        shutil.copytree(good / layout, target)

        def change(tensors):
            for number, module in enumerate((DOWN, OUT)):
                columns = 96 if module == DOWN else 64
                tensors[module + PRE] = dtype, factors(columns, number, dtype)

        edit(checkpoints, target, change)
        for document, key in (
            ("config", "quantization_config"),
            ("hf_quant_config", "quantization"),
        ):
            path = target / f"{document}.json"
            if layout == "modelopt" and said:
                content = json.loads(path.read_text())
                content[key]["quant_algo"] = "NVFP4_AWQ"
                path.write_text(json.dumps(content))
        return target

    return make


def decoded(checkpoints, good, layout, tmp_path):
    """The stored weights, without the scales of their inputs."""
    target = tmp_path / "plain"
    dequantize_checkpoint(good / layout, target, DequantizeOptions("float32"))
    return {name: checkpoints.array(t) for name, t in checkpoints.read(target).items()}
