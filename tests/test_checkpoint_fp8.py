# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose weights are all FP8: what is read of them, and what verify says."""

import numpy as np
import pytest

from fp4kit.checkpoint.operations import dequantize_checkpoint
from fp4kit.checkpoint.options import DequantizeOptions
from fp4kit.checkpoint.read.directory import CONFIG, HF_QUANT_CONFIG
from fp4kit.checkpoint.verify.structure import structure_faults

KEPT = ("lm_head", "model.embed_tokens")


def compressed_tensors(modules):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def modelopt(modules):
    return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": list(KEPT)}


@pytest.fixture(params=[compressed_tensors, modelopt])
def folder(request, checkpoints, tmp_path):
    """A small model in FP8 as another tool stores it."""
    tensors, config = checkpoints.llama(layers=1)
    stored = {}
    for name, (dtype, array) in tensors.items():
        if array.ndim != 2 or name.startswith(KEPT):
            stored[name] = dtype, array
            continue
        codes = np.full(array.shape, 0x38, np.uint8)  # 1.0
        per_tensor = request.param is modelopt
        scale = np.full(() if per_tensor else (len(array), 1), 0.5, np.float32)
        stored |= {name: ("F8_E4M3", codes), f"{name}_scale": ("F32", scale)}
        if per_tensor:
            stored[f"{name.removesuffix('weight')}input_scale"] = "F32", np.ones((), np.float32)
    config["quantization_config"] = request.param(stored)
    path = tmp_path / "fp8"
    checkpoints.save(path, stored, config)
    if request.param is modelopt:
        own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": list(KEPT)}
        checkpoints.write_json(path / HF_QUANT_CONFIG, {"quantization": own})
    return path


def test_verify_knows_weights_in_fp8(folder):
    assert structure_faults(folder) == []


def test_verify_misses_what_the_ignore_list_lacks(folder, checkpoints):
    config = checkpoints.config_of(folder)
    config["quantization_config"]["ignore"] = []
    checkpoints.write_json(folder / CONFIG, config)
    (folder / HF_QUANT_CONFIG).unlink(missing_ok=True)
    faults = structure_faults(folder)
    assert any("lm_head is not quantized, but not in the ignore list" in fault for fault in faults)


def test_weights_in_fp8_are_decoded(folder, checkpoints, tmp_path):
    dequantize_checkpoint(folder, tmp_path / "out", DequantizeOptions("float32"))
    tensors = checkpoints.read(tmp_path / "out")
    assert not any(name.endswith("_scale") for name in tensors)
    array = checkpoints.array(tensors["model.layers.0.mlp.up_proj.weight"])
    assert (array == 0.5).all()
