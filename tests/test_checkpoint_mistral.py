# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Mistral's own format: consolidated weights with params.json."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    plan_quantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import FileFormatError, OptionError


def native(checkpoints, folder, *, mla=False, shards=1, params=None):
    """A model directory of consolidated weights and params.json."""
    shapes = {"tok_embeddings.weight": (80, 64), "output.weight": (80, 64), "norm.weight": (64,)}
    names = {"wq": (64, 64), "wk": (32, 64), "wv": (32, 64), "wo": (64, 64)}
    if mla:
        names = {"wq_a": (32, 64), "wq_b": (64, 32), "wkv_a_with_mqa": (48, 64)}
        names |= {"wkv_b": (64, 32), "wo": (64, 64)}
    for layer in range(2):
        shapes |= {f"layers.{layer}.attention.{n}.weight": shape for n, shape in names.items()}
        mlp = {"w1": (96, 64), "w3": (96, 64), "w2": (64, 96)}
        if mla and layer:
            shapes[f"layers.{layer}.gate.weight"] = (2, 64)
            for part in ("experts.0", "experts.1", "shared_experts"):
                shapes |= {f"layers.{layer}.{part}.{n}.weight": s for n, s in mlp.items()}
        else:
            shapes |= {f"layers.{layer}.feed_forward.{n}.weight": s for n, s in mlp.items()}
    shapes["vision_language_adapter.w_in.weight"] = (64, 64)
    shapes["vision_encoder.transformer.layers.0.attention.wo.weight"] = (64, 64)
    tensors = {
        name: checkpoints.normal(shape, seed=number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    checkpoints.save(folder, tensors, None, base="consolidated", shards=shards)
    given = {"dim": 64, "n_layers": 2, "vocab_size": 80, "tied_embeddings": False}
    (folder / "params.json").write_text(json.dumps(given | (params or {})))
    return tensors, given


def params_of(folder):
    return json.loads((folder / "params.json").read_text())


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_mistral_native(checkpoints, tmp_path, mla, shards):
    """As vLLM reads it: `quantization` of params.json, stored and built names, no config.json."""
    source, out, back = (tmp_path / name for name in ("in", "out", "back"))
    tensors, given = native(checkpoints, source, mla=mla, shards=shards)
    size = 10**9 if shards == 1 else 20_000
    report = quantize_checkpoint(source, out, CheckpointOptions(max_shard_size=size))
    assert not list(out.glob("config.json"))
    assert all(name.startswith("consolidated") for name in report.shards)
    assert (out / "consolidated.safetensors.index.json").exists() == (shards > 1)
    params = params_of(out)
    quantization = params.pop("quantization")
    assert params == given
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "nvfp4-pack-quantized"
    ignore = quantization["ignore"]
    assert {"output", "lm_head", "re:vision_encoder.*", "re:vision_language_adapter.*"} <= {*ignore}
    quantized = {name.removesuffix("_packed") for name in checkpoints.read(out) if "packed" in name}
    assert "layers.0.feed_forward.w1.weight" in quantized
    if mla:
        assert {"layers.1.gate", "model.layers.1.mlp.gate"} <= {*ignore}
        assert "layers.1.experts.1.w2.weight" in quantized
        assert "layers.1.shared_experts.w3.weight" in quantized
        assert "layers.0.attention.wkv_b.weight" in quantized
    else:
        # vLLM reorders rows of wq and wk, but not of their codes; wv is fused with them.
        assert {"layers.0.attention.wq", "model.layers.0.self_attn.k_proj"} <= {*ignore}
        assert not any(".wq." in name or ".wk." in name or ".wv." in name for name in quantized)
        assert "layers.0.attention.wo.weight" in quantized
    assert structure_faults(out) == []
    dequantize_checkpoint(out, back, DequantizeOptions())
    assert params_of(back) == given
    assert not list(back.glob("config.json"))
    decoded = checkpoints.read(back)
    assert decoded.keys() == tensors.keys()
    for name, (_, array) in tensors.items():
        got = checkpoints.array(decoded[name]).astype(np.float32)
        assert got.shape == array.shape
        if name not in quantized:
            assert decoded[name][2] == array.tobytes()
    with pytest.raises(FileFormatError, match="quantized already"):
        plan_quantize_checkpoint(out, CheckpointOptions())


def test_verify_of_mistral_native(checkpoints, tmp_path):
    """By the names that readers build, as llm-compressor's recipe for Mistral Large 3 has them."""
    native(checkpoints, tmp_path / "in", mla=True)
    out = tmp_path / "out"
    quantize_checkpoint(tmp_path / "in", out, CheckpointOptions(exclude=("*wq_a*", "*wkv_a*")))
    params = params_of(out)
    recipe = ["lm_head", "re:vision_encoder.*", "re:vision_language_adapter.*", "re:.*gate$"]
    recipe += ["re:.*kv_a_proj_with_mqa$", "re:.*q_a_proj$"]
    for ignore, faults in (
        (recipe, 0),
        (recipe[1:], 1),
        ([*recipe, "model.layers.0.mlp.down_proj"], 1),
        (["output", *recipe[1:]], 1),
    ):
        params["quantization"]["ignore"] = ignore
        (out / "params.json").write_text(json.dumps(params))
        found = structure_faults(out)
        assert len(found) == faults
        assert all(fault.startswith("params.json: ") for fault in found)


def test_layouts_of_mistral_native(checkpoints, tmp_path):
    """vLLM refuses other methods in params.json."""
    source = tmp_path / "in"
    native(checkpoints, source)
    with pytest.raises(OptionError, match=r"Mistral's own format.*--layout compressed-tensors"):
        plan_quantize_checkpoint(source, CheckpointOptions(layout="modelopt"))
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    with pytest.raises(OptionError, match="Mistral's own format"):
        convert_checkpoint(tmp_path / "out", tmp_path / "x", ConvertOptions("modelopt"))
    convert_checkpoint(tmp_path / "out", tmp_path / "comfy", ConvertOptions("comfy"))
    assert "quantization" not in params_of(tmp_path / "comfy")
    convert_checkpoint(tmp_path / "comfy", tmp_path / "again", ConvertOptions("compressed-tensors"))
    assert checkpoints.digest(tmp_path / "again") == checkpoints.digest(tmp_path / "out")


def test_mistral_native_that_is_quantized_by_others(checkpoints, tmp_path):
    source = tmp_path / "in"
    fp8 = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    native(checkpoints, source, params=fp8)
    with pytest.raises(FileFormatError, match=r"quantized already by Mistral's fp8_e4m3"):
        plan_quantize_checkpoint(source, CheckpointOptions())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_both_forms_of_mistral(checkpoints, tmp_path, sharded, own):
    """The Hugging Face form is converted; the other is left out with its settings, and named."""
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2 if sharded else 1)
    native(checkpoints, source, shards=2 if own else 1)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    left = {path.name for path in source.glob("consolidated*")} | {"params.json"}
    assert set(report.left_out) == left
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert structure_faults(tmp_path / "out") == []
