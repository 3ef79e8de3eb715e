# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Live comparison with the peers whose recipes fp4kit offers, on torch CPU.

The golden vectors pin these bytes already; this file says whether the peers installed today still
give them. It is skipped unless the extra `peers` is installed (`make peers` does).
"""

import ml_dtypes
import numpy as np
import pytest

import fp4kit

torch = pytest.importorskip("torch", reason="the peers extra is not installed")

KINDS = ("normal", "heavy", "tiny blocks", "zero blocks")
DTYPES = ("float32", "bfloat16")


def make_input(kind, dtype, shape=(64, 256), seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if kind == "heavy":
        x = rng.standard_t(3, shape)
    blocks = x.reshape(shape[0], -1, 16)
    if kind == "tiny blocks":
        blocks *= np.exp2(rng.integers(-18, 1, blocks.shape[:2]))[..., None]
    if kind == "zero blocks":
        blocks *= rng.integers(0, 2, blocks.shape[:2])[..., None]
    x = blocks.reshape(shape) + 0.0  # no negative zeros: the peers differ there on purpose
    return x.astype(np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def to_torch(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def to_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().ravel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_torchao_gives_the_same_nvfp4_bytes(kind, dtype):
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = make_input(kind, dtype)
    tensor = to_torch(x)
    scale = module.per_tensor_amax_to_scale(tensor.float().abs().max())
    peer = module.NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=scale)
    q = fp4kit.quantize(x, recipe="torchao")
    np.testing.assert_array_equal(q.decode_scale, scale.numpy().ravel())
    np.testing.assert_array_equal(q.packed.ravel(), to_bytes(peer.qdata))
    np.testing.assert_array_equal(q.block_scale.ravel(), to_bytes(peer.scale))
    back = fp4kit.dequantize(q, "bfloat16").view(np.uint8)
    np.testing.assert_array_equal(back.ravel(), to_bytes(peer.dequantize(torch.bfloat16)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_torchao_swizzles_the_same_way(kind, dtype):
    module = pytest.importorskip("torchao.prototype.mx_formats.utils")
    x = make_input(kind, dtype, shape=(130, 320))
    linear = fp4kit.quantize(x).block_scale
    peer = module.to_blocked(torch.from_numpy(linear))
    swizzled = fp4kit.quantize(x, scale_layout="swizzled_128x4").block_scale
    np.testing.assert_array_equal(swizzled.ravel(), peer.numpy().ravel())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_modelopt_gives_the_same_nvfp4_bytes(kind, dtype):
    module = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    x = make_input(kind, dtype)
    peer, scale, second = module.NVFP4QTensor.quantize(to_torch(x), 16)
    q = fp4kit.quantize(x, recipe="modelopt")
    np.testing.assert_array_equal(q.decode_scale, second.numpy().ravel())
    np.testing.assert_array_equal(q.packed.ravel(), to_bytes(peer._quantized_data))
    np.testing.assert_array_equal(q.block_scale.ravel(), to_bytes(scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_comfy_kitchen_gives_the_same_nvfp4_bytes(kind, dtype):
    module = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
    x = make_input(kind, dtype)
    q = fp4kit.quantize(x, recipe="comfy", scale_layout="swizzled_128x4", nibble_order="high_first")
    second = torch.from_numpy(q.decode_scale).reshape(())
    codes, scales = module.quantize_nvfp4(to_torch(x), second)
    np.testing.assert_array_equal(q.packed.ravel(), to_bytes(codes))
    np.testing.assert_array_equal(q.block_scale.ravel(), to_bytes(scales))
    back = module.dequantize_nvfp4(codes, second, scales, output_type=torch.float32)
    np.testing.assert_array_equal(fp4kit.dequantize(q).ravel(), back.numpy().ravel())


def compressed_tensors_scheme(format_name):
    module = pytest.importorskip("compressed_tensors.quantization")
    arguments = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    if format_name == "nvfp4":
        arguments |= {"strategy": "tensor_group", "group_size": 16}
    else:
        arguments |= {"strategy": "group", "group_size": 32}
    return module.QuantizationScheme(
        targets=["Linear"], weights=module.QuantizationArgs(**arguments)
    )


@pytest.mark.parametrize("recipe", ["compressed-tensors", "te", "modelopt"])
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_tensors_decompresses_the_written_file(kind, recipe, tmp_path):
    """What `fp4kit quantize` writes, read by safetensors and decoded by compressed-tensors."""
    base = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    safetensors = pytest.importorskip("safetensors.torch")
    from fp4kit.io.quantize import quantize_file
    from fp4kit.io.report import QuantizeOptions
    from fp4kit.scheme import Scheme

    x = make_input(kind, "bfloat16")
    safetensors.save_file({"a.weight": to_torch(x)}, tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    quantize_file(tmp_path / "in.safetensors", target, QuantizeOptions(Scheme(recipe=recipe)))
    loaded = safetensors.load_file(target)
    state = {name.removeprefix("a."): tensor for name, tensor in loaded.items()}
    assert set(state) == {"weight_packed", "weight_scale", "weight_global_scale"}
    scheme = compressed_tensors_scheme("nvfp4")
    decoded = base.NVFP4PackedCompressor.decompress(dict(state), scheme)["weight"]
    encode = state["weight_global_scale"].numpy()
    same = fp4kit.QuantizedTensor(
        packed=state["weight_packed"].numpy(),
        block_scale=state["weight_scale"].view(torch.uint8).numpy(),
        format="nvfp4",
        shape=x.shape,
        recipe="compressed-tensors",
        encode_scale=encode,
    )
    ours = fp4kit.dequantize(same, "bfloat16").view(np.uint8)
    np.testing.assert_array_equal(ours.ravel(), to_bytes(decoded.to(torch.bfloat16)))
