# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of torch and JAX: the same framework and device out, the same bytes, no copy in."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, arrays
from fp4kit.formats import ALL_FORMATS, DTYPES
from sample_arrays import gaussian


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def jnp():
    return pytest.importorskip("jax.numpy")


def torch_of(torch, x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def numpy_of_torch(torch, x):
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


# ------------------------------------------------------------------------------------------------
# torch
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_in_torch_out(dtype, format, torch, assert_bits):
    x = gaussian((3, 2, 64), dtype)
    expected = fp4kit.quantize(x, format)
    q = fp4kit.quantize(torch_of(torch, x), format)
    assert isinstance(q.packed, torch.Tensor)
    scales = torch.float32 if ALL_FORMATS[format].has_scale_grid else torch.uint8
    assert (q.packed.dtype, q.block_scale.dtype) == (torch.uint8, scales)
    assert_bits(q.packed.numpy(), expected.packed)
    assert_bits(q.block_scale.numpy(), expected.block_scale)
    if format == "nvfp4":
        assert q.amax.dtype == torch.float32
        assert_bits(q.amax.numpy(), expected.amax)
    assert (q.nbytes, q.bits_per_element) == (expected.nbytes, expected.bits_per_element)
    for out_dtype in DTYPES:
        y = fp4kit.dequantize(q, out_dtype)
        assert y.dtype == getattr(torch, out_dtype)
        wanted = fp4kit.dequantize(expected, out_dtype)
        assert_bits(numpy_of_torch(torch, y), wanted)
    fake = fp4kit.quantize_dequantize(torch_of(torch, x), format)
    assert fake.dtype == getattr(torch, dtype)
    assert_bits(numpy_of_torch(torch, fake), fp4kit.dequantize(expected, dtype))
    stats = fp4kit.error_stats(torch_of(torch, x), q)
    assert stats == fp4kit.error_stats(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_is_not_copied_on_ingest(dtype, torch):
    x = torch_of(torch, gaussian((4, 64), dtype))
    assert arrays.ingest(x).data.ctypes.data == x.data_ptr()
    strided = x[:, ::2]
    assert arrays.ingest(strided).data.ctypes.data == strided.data_ptr()
    codes = torch.zeros((4, 8), dtype=torch.uint8)
    assert arrays.ingest_bytes(codes, "codes").data.ctypes.data == codes.data_ptr()


def test_torch_results_own_their_memory(torch):
    x = torch.ones((2, 32))
    q = fp4kit.quantize(x)
    first = q.packed.clone()
    x.zero_()
    assert torch.equal(q.packed, first)
    q.packed.zero_()
    assert not q.packed.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_views(dtype, torch, assert_bits):
    base = gaussian((64, 96), dtype)
    tensor = torch_of(torch, base)
    for view in (
        lambda a: a[:, 16:80],
        lambda a: a[::2],
        lambda a: a[:, ::3],
        lambda a: a.T,
        lambda a: a[1:33, 5:37].T,
        lambda a: a.reshape(2, 32, 96)[:, 3:, :],
        lambda a: a.reshape(-1)[1:257].reshape(1, 256),
    ):
        expected = fp4kit.quantize(np.ascontiguousarray(view(base)))
        q = fp4kit.quantize(view(tensor))
        assert_bits(q.packed.numpy(), expected.packed)
        assert_bits(q.block_scale.numpy(), expected.block_scale)
    expanded = tensor[:1].expand(5, 96)
    assert expanded.stride(0) == 0
    q = fp4kit.quantize(expanded)
    assert_bits(q.packed.numpy(), np.repeat(fp4kit.quantize(base[:1]).packed, 5, axis=0))


def test_torch_tensors_that_require_grad(torch, assert_bits):
    x = torch.nn.Parameter(torch_of(torch, gaussian((4, 64))))
    q = fp4kit.quantize(x)
    assert not q.amax.requires_grad
    assert_bits(q.packed.numpy(), fp4kit.quantize(gaussian((4, 64))).packed)
    with pytest.raises(DtypeError, match=r"use fp4kit\.torch\.quantize_dequantize"):
        fp4kit.quantize_dequantize(x)
    with torch.no_grad():
        assert not fp4kit.quantize_dequantize(x).requires_grad
    assert x.requires_grad


def test_torch_other_dtypes_and_devices_are_refused(torch):
    for dtype in (torch.float64, torch.int32, torch.uint8, torch.bool):
        with pytest.raises(DtypeError, match=r"x\.float\(\)"):
            fp4kit.quantize(torch.ones((1, 16)).to(dtype))
    with pytest.raises(DtypeError, match="meta is not supported; move the tensor to cpu or cuda"):
        fp4kit.quantize(torch.ones((1, 16), device="meta"))


def test_torch_scales_of_float8_types(torch, assert_bits):
    for format, name in (("nvfp4", "float8_e4m3fn"), ("mxfp4", "float8_e8m0fnu")):
        q = fp4kit.quantize(torch_of(torch, gaussian((4, 64))), format)
        typed = dataclasses.replace(q, block_scale=q.block_scale.view(getattr(torch, name)))
        expected = fp4kit.dequantize(q).numpy()
        assert_bits(fp4kit.dequantize(typed).numpy(), expected)
        swizzled = fp4kit.swizzle(typed.block_scale)
        assert swizzled.dtype == torch.uint8
        assert_bits(swizzled.numpy(), fp4kit.swizzle(q.block_scale.numpy()))
    q = fp4kit.quantize(torch_of(torch, gaussian((4, 64))), "mxfp8")
    typed = dataclasses.replace(q, packed=q.packed.view(torch.float8_e4m3fn))
    assert_bits(fp4kit.dequantize(typed).numpy(), fp4kit.dequantize(q).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_out_buffers(dtype, torch, assert_bits):
    x = torch_of(torch, gaussian((4, 64), dtype))
    q = fp4kit.quantize(x)
    pointers = [q.packed.data_ptr(), q.block_scale.data_ptr(), q.amax.data_ptr()]
    doubled = (x.float() * 2).to(x.dtype)
    assert fp4kit.quantize(doubled, out=q) is q
    assert [q.packed.data_ptr(), q.block_scale.data_ptr(), q.amax.data_ptr()] == pointers
    assert_bits(q.amax.numpy(), 2 * fp4kit.quantize(x).amax.numpy())
    out = torch.zeros((4, 64), dtype=x.dtype)
    assert fp4kit.dequantize(q, dtype, out=out) is out
    assert_bits(numpy_of_torch(torch, out), numpy_of_torch(torch, fp4kit.dequantize(q, dtype)))


def test_torch_amax_arrays(torch, assert_bits):
    x = torch_of(torch, gaussian((4, 64)))
    measured = fp4kit.amax(x)
    assert isinstance(measured, torch.Tensor)
    assert measured.tolist() == [x.abs().max().item()]
    q = fp4kit.quantize(x, amax=measured)
    assert_bits(q.packed.numpy(), fp4kit.quantize(x).packed.numpy())
    converted = fp4kit.convert_second_level(q, "encode_scale")
    assert isinstance(converted, torch.Tensor)


# ------------------------------------------------------------------------------------------------
# JAX
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out(dtype, jnp, assert_bits):
    import jax

    x = gaussian((3, 64), dtype)
    for format in ALL_FORMATS:
        expected = fp4kit.quantize(x, format)
        q = fp4kit.quantize(jnp.asarray(x), format)
        assert isinstance(q.packed, jax.Array)
        assert q.packed.dtype == np.uint8
        assert_bits(np.asarray(q.packed), expected.packed)
        assert_bits(np.asarray(q.block_scale), expected.block_scale)
        y = fp4kit.dequantize(q, dtype)
        assert isinstance(y, jax.Array)
        assert_bits(np.asarray(y), fp4kit.dequantize(expected, dtype))
        assert fp4kit.error_stats(jnp.asarray(x), q) == fp4kit.error_stats(x, expected)
    assert isinstance(fp4kit.amax(jnp.asarray(x)), jax.Array)


def test_jax_is_not_copied_on_ingest(jnp):
    x = jnp.asarray(gaussian((64, 64)))
    assert arrays.ingest(x).data.ctypes.data == x.unsafe_buffer_pointer()


def test_jax_traced_arrays_are_refused(jnp):
    import jax

    with pytest.raises(DtypeError, match=r"call fp4kit outside jax\.jit"):
        jax.jit(fp4kit.amax)(jnp.ones((1, 16)))


def test_jax_arrays_cannot_be_written(jnp):
    x = jnp.asarray(gaussian((4, 64)))
    q = fp4kit.quantize(x)
    with pytest.raises(fp4kit.ShapeError, match="read-only"):
        fp4kit.dequantize(q, out=jnp.zeros((4, 64)))


# ------------------------------------------------------------------------------------------------
# Frameworks that are mixed
# ------------------------------------------------------------------------------------------------


def test_scales_may_come_from_another_framework_on_the_same_device(torch, assert_bits):
    x = gaussian((4, 64))
    q = fp4kit.quantize(x, amax=torch.tensor([3.0]))
    assert type(q.amax) is np.ndarray
    assert_bits(q.packed, fp4kit.quantize(x, amax=3.0).packed)


def test_statistics_may_compare_two_frameworks(torch):
    x = gaussian((4, 64))
    q = fp4kit.quantize(torch_of(torch, x))
    assert fp4kit.error_stats(x, q) == fp4kit.error_stats(x, fp4kit.quantize(x))
