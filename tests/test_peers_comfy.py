# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Layout comfy, read by comfy-kitchen as ComfyUI does: single files and model directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
pytest.importorskip("comfy_kitchen", reason="the peers extra is not installed")

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
DTYPES = ["float32", "float16", "bfloat16"]
#: Linear weights of a diffusion model: rows that are and are not a multiple of 16 and 128, block
#: scales that are and are not a multiple of 4.
SHAPES = {
    "double_blocks.0.img_attn.qkv": (384, 128),
    "double_blocks.0.img_attn.proj": (24, 80),
    "double_blocks.0.img_mlp.0": (200, 64),
    "single_blocks.0.linear1": (130, 272),
    "single_blocks.0.linear2": (1, 16),
}
KEPT = {"img_in": (64, 64), "final_layer.linear": (32, 64)}


def stored(path):
    from safetensors.torch import load_file

    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def headers(path):
    from safetensors import safe_open

    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found = []
    for file in files:
        with safe_open(file, "pt") as opened:
            found.append(opened.metadata())
    return found


def diffusion(path, dtype, prefix="model.diffusion_model."):
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number, (name, shape) in enumerate((SHAPES | KEPT).items()):
        weight = torch.randn(shape, generator=generator) * 2.0 ** (number - 6)
        tensors[f"{prefix}{name}.weight"] = weight.to(getattr(torch, dtype))
        tensors[f"{prefix}{name}.bias"] = weight.sum(1).to(getattr(torch, dtype))
    save_file(tensors, path, metadata={"format": "pt", "modelspec.architecture": "flux"})
    return tensors


def decoded(path, shapes, dtype):
    """Every weight that the layers' markers call quantized, by comfy-kitchen."""
    from comfy_kitchen.tensor import QuantizedTensor, TensorCoreNVFP4Layout

    tensors = stored(path)
    weights = {}
    for marker in [name for name in tensors if name.endswith(".comfy_quant")]:
        assert json.loads(bytes(tensors[marker])) == {"format": "nvfp4"}
        name = f"{marker.removesuffix('.comfy_quant')}.weight"
        shape = tuple(shapes[name])
        assert TensorCoreNVFP4Layout.get_storage_shape(shape) == tuple(tensors[name].shape)
        parameters = TensorCoreNVFP4Layout.Params(
            scale=tensors[f"{name}_scale_2"],
            orig_dtype=getattr(torch, dtype),
            orig_shape=shape,
            block_scale=tensors[f"{name}_scale"],
        )
        whole = QuantizedTensor(tensors[name], "TensorCoreNVFP4Layout", parameters).dequantize()
        assert not whole[shape[0] :].any(), f"{name}: rows of padding"
        weights[name] = whole[: shape[0], : shape[1]]
    layers = {}
    for header in headers(path):
        record = json.loads(header["_quantization_metadata"])
        assert record["format_version"] == "1.0"
        layers |= record["layers"]
    modules = [name.removesuffix(".weight") for name in weights]
    assert layers == {module: {"format": "nvfp4"} for module in modules}
    return weights


def assert_same(weights, plain):
    assert weights
    for name, weight in weights.items():
        assert weight.dtype == plain[name].dtype, name
        assert torch.equal(weight.contiguous().view(torch.uint8), plain[name].view(torch.uint8)), (
            name
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["te", "comfy"])
def test_a_single_file(recipe, dtype, tmp_path):
    original = diffusion(tmp_path / "flux.safetensors", dtype)
    options = CheckpointOptions(layout="comfy", recipe=recipe)
    target = tmp_path / "flux-nvfp4.safetensors"
    quantize_checkpoint(tmp_path / "flux.safetensors", target, options)
    shapes = {name: tensor.shape for name, tensor in original.items()}
    for wanted in DTYPES:
        plain = tmp_path / f"{wanted}.safetensors"
        dequantize_checkpoint(target, plain, DequantizeOptions(dtype=wanted))
        weights = decoded(target, shapes, wanted)
        assert len(weights) == len(SHAPES)
        assert_same(weights, stored(plain))
    kept = original.keys() - weights.keys()
    assert_same({name: original[name] for name in kept}, stored(target))
    for name, weight in decoded(target, shapes, "float32").items():
        error = (weight - original[name].float()).norm() / original[name].float().norm()
        assert error < 0.15, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_comfy_kitchen(dtype, tmp_path):
    """Under recipe comfy, given the second level: its own is rounded to the weight's type."""
    import comfy_kitchen

    original = diffusion(tmp_path / "flux.safetensors", dtype)
    target = tmp_path / "flux-nvfp4.safetensors"
    options = CheckpointOptions(layout="comfy", recipe="comfy")
    quantize_checkpoint(tmp_path / "flux.safetensors", target, options)
    tensors = stored(target)
    for module in SHAPES:
        name = f"model.diffusion_model.{module}.weight"
        second = tensors[f"{name}_scale_2"]
        assert second == original[name].abs().max().float() / 2688
        codes, scales = comfy_kitchen.quantize_nvfp4(original[name], second, pad_16x=True)
        assert torch.equal(codes, tensors[name]), name
        expected = scales.view(torch.uint8).flatten()
        assert torch.equal(tensors[f"{name}_scale"].view(torch.uint8).flatten(), expected), name


@pytest.mark.parametrize("model", ["llama-tiny", "llama-tiny-sharded", "qwen3moe-tiny"])
@pytest.mark.parametrize("way", ["quantize", "convert"])
def test_model_directories(model, way, tmp_path):
    """Quantized into the layout, or converted from ModelOpt's export of the same model."""
    target = tmp_path / "comfy"
    if way == "quantize":
        quantize_checkpoint(GOLDEN / model, target, CheckpointOptions(layout="comfy"))
    else:
        source = GOLDEN / f"{model.removesuffix('-sharded')}--modelopt-W4A16_NVFP4_CFG"
        size = 20_000 if model.endswith("-sharded") else 10**9
        convert_checkpoint(source, target, ConvertOptions("comfy", max_shard_size=size))
        assert (len(headers(target)) > 1) == model.endswith("-sharded")
    shapes = {name: tensor.shape for name, tensor in stored(GOLDEN / model).items()}
    for dtype in DTYPES:
        dequantize_checkpoint(target, tmp_path / dtype, DequantizeOptions(dtype=dtype))
        weights = decoded(target, shapes, dtype)
        assert len(weights) == (32 if "moe" in model else 14)
        assert_same(weights, stored(tmp_path / dtype))
