# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Experts of gpt-oss in the output: weights and biases go together, whatever they came from.

What real readers make of the values is in test_peers_gpt_oss.py.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from fp4kit.checkpoint.operations import quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.directory import Checkpoint

EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 32
PREFIX = "model.layers.0.mlp.experts"
PROJECTIONS = {"gate_up_proj": (2 * INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
SINGLE = [f"{PREFIX}.{e}.{p}_proj" for e in range(EXPERTS) for p in ("gate", "up", "down")]


def model(folder, mxfp4):
    """A model directory with one layer of experts.

    Returns:
        Its tensors, and the bias that each single expert should have.
    """
    rng = np.random.default_rng(0)
    tensors = {}
    for role, (out, inputs) in PROJECTIONS.items():
        name = f"{PREFIX}.{role}"
        if mxfp4:
            shape = (EXPERTS, out, inputs // 32)
            tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
            tensors[f"{name}_scales"] = rng.integers(115, 125, shape, np.uint8)
        else:
            weight = rng.standard_normal((EXPERTS, inputs, out))
            tensors[name] = weight.astype(ml_dtypes.bfloat16)
        bias = rng.standard_normal((EXPERTS, out)).astype(ml_dtypes.bfloat16)
        tensors[f"{name}_bias"] = bias
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    if mxfp4:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    gate_up, down = (tensors[f"{PREFIX}.{role}_bias"] for role in PROJECTIONS)
    biases = {}
    for e in range(EXPERTS):
        biases[f"{PREFIX}.{e}.gate_proj.bias"] = gate_up[e, ::2]
        biases[f"{PREFIX}.{e}.up_proj.bias"] = gate_up[e, 1::2]
        biases[f"{PREFIX}.{e}.down_proj.bias"] = down[e]
    return tensors, biases


def written(source, target, **options):
    """{name: bytes} of the result."""
    quantize_checkpoint(source, target, CheckpointOptions(**options))
    found = {}
    with Checkpoint(target) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            data = bytearray(tensor.spec.nbytes)
            checkpoint.read(name, 0, memoryview(data))
            found[name] = bytes(data)
    return found


@pytest.mark.parametrize("mxfp4", [True, False], ids=["mxfp4", "bfloat16"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_quantized_experts_have_their_own_biases(mxfp4, layout, tmp_path):
    _, biases = model(tmp_path / "in", mxfp4)
    got = written(tmp_path / "in", tmp_path / "out", layout=layout)
    packed = "weight_packed" if layout == "compressed-tensors" else "weight"
    assert {name for name in got if name.endswith((packed, ".bias", "_bias"))} == {
        f"{module}.{part}" for module in SINGLE for part in (packed, "bias")
    }
    for name, bias in biases.items():
        assert got[name] == bias.tobytes(), name


def test_decoded_experts_that_are_kept_have_their_own_biases(tmp_path):
    _, biases = model(tmp_path / "in", mxfp4=True)
    got = written(tmp_path / "in", tmp_path / "out", exclude=("*experts*.weight",))
    assert set(got) == {f"{module}.{part}" for module in SINGLE for part in ("weight", "bias")}
    for name, bias in biases.items():
        assert got[name] == bias.tobytes(), name


def test_float_experts_that_are_kept_stay_fused(tmp_path):
    tensors, _ = model(tmp_path / "in", mxfp4=False)
    got = written(tmp_path / "in", tmp_path / "out", exclude=("*experts*.weight",))
    assert set(got) == set(tensors)
    for name, tensor in tensors.items():
        assert got[name] == tensor.tobytes(), name
