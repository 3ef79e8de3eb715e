# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of every framework: the same framework and device out, the same bytes, no copy in."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, arrays
from fp4kit.formats import ALL_FORMATS, DTYPES

F32 = np.float32
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
HOST_BACKENDS = ("reference", "cpu")


def values(shape, dtype="float32"):
    return np.random.default_rng(7).normal(size=shape).astype(F32).astype(NUMPY[dtype])


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
# NumPy
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype, assert_bits):
    x = values((3, 64), dtype)
    q = fp4kit.quantize(x)
    for array in (q.packed, q.block_scale, q.amax):
        assert type(array) is np.ndarray
    for out_dtype in DTYPES:
        y = fp4kit.dequantize(q, out_dtype)
        assert type(y) is np.ndarray
        assert y.dtype == NUMPY[out_dtype]
    assert fp4kit.quantize_dequantize(x).dtype == x.dtype
    assert fp4kit.amax(x).dtype == F32
    assert_bits(fp4kit.amax(x), np.abs(x.astype(F32)).max(keepdims=True).reshape(1))


def test_numpy_subclasses_and_scalars():
    class Subclass(np.ndarray):
        pass

    q = fp4kit.quantize(values((2, 32)).view(Subclass))
    assert type(q.packed) is np.ndarray
    assert fp4kit.amax(F32(-3)).tolist() == [3.0]


def test_memory_maps_are_read(tmp_path, assert_tensors):
    x = values((4, 64))
    path = tmp_path / "x.bin"
    path.write_bytes(x.tobytes())
    mapped = np.memmap(path, F32, "r", shape=(4, 64))
    assert_tensors(fp4kit.quantize(mapped), fp4kit.quantize(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_input_is_not_copied(dtype):
    x = values((4, 64), dtype)
    raw = arrays.ingest(x)
    assert raw.data.ctypes.data == x.ctypes.data
    assert raw.dtype == dtype
    assert raw.origin == arrays.Origin("numpy", "cpu")


@pytest.mark.parametrize("backend_name", HOST_BACKENDS)
def test_inputs_are_never_written(backend_name, assert_bits):
    x = values((4, 60))
    before = x.copy()
    q = fp4kit.quantize(x, pad=True, backend=backend_name)
    packed, scale = q.packed.copy(), q.block_scale.copy()
    fp4kit.dequantize(q, backend=backend_name)
    fp4kit.quantize_dequantize(x, pad=True, backend=backend_name)
    fp4kit.error_stats(x, q, backend=backend_name)
    assert_bits(x, before)
    assert_bits(q.packed, packed)
    assert_bits(q.block_scale, scale)


@pytest.mark.parametrize("value", [[1.0, 2.0], (1.0,), 1.5, "12", b"12", range(3), {}, None])
def test_lists_and_other_objects_are_refused(value):
    for function in (
        fp4kit.quantize,
        fp4kit.amax,
        lambda v: fp4kit.error_stats(v, np.ones(1, F32)),
        lambda v: fp4kit.swizzle(v),
    ):
        with pytest.raises(DtypeError, match=r"numpy\.asarray\(x, numpy\.float32\)"):
            function(value)


def test_object_and_structured_arrays_are_refused():
    for x in (np.array([[None] * 16]), np.zeros((1, 16), "f4,f4"), np.array([["a"] * 16])):
        with pytest.raises(DtypeError, match="fp4kit takes float32, float16, bfloat16"):
            fp4kit.quantize(x)


# ------------------------------------------------------------------------------------------------
# torch
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_in_torch_out(dtype, format, torch, assert_bits):
    x = values((3, 2, 64), dtype)
    expected = fp4kit.quantize(x, format)
    q = fp4kit.quantize(torch_of(torch, x), format)
    assert isinstance(q.packed, torch.Tensor)
    assert (q.packed.dtype, q.block_scale.dtype) == (torch.uint8, torch.uint8)
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
    x = torch_of(torch, values((4, 64), dtype))
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
    base = values((64, 96), dtype)
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
    x = torch.nn.Parameter(torch_of(torch, values((4, 64))))
    q = fp4kit.quantize(x)
    assert not q.amax.requires_grad
    assert_bits(q.packed.numpy(), fp4kit.quantize(values((4, 64))).packed)
    y = fp4kit.quantize_dequantize(x)
    assert not y.requires_grad
    assert x.requires_grad


def test_torch_other_dtypes_and_devices_are_refused(torch):
    for dtype in (torch.float64, torch.int32, torch.uint8, torch.bool):
        with pytest.raises(DtypeError, match=r"x\.float\(\)"):
            fp4kit.quantize(torch.ones((1, 16)).to(dtype))
    with pytest.raises(DtypeError, match="meta is not supported; move the tensor to cpu or cuda"):
        fp4kit.quantize(torch.ones((1, 16), device="meta"))


def test_torch_scales_of_float8_types(torch, assert_bits):
    for format, name in (("nvfp4", "float8_e4m3fn"), ("mxfp4", "float8_e8m0fnu")):
        q = fp4kit.quantize(torch_of(torch, values((4, 64))), format)
        typed = dataclasses.replace(q, block_scale=q.block_scale.view(getattr(torch, name)))
        expected = fp4kit.dequantize(q).numpy()
        assert_bits(fp4kit.dequantize(typed).numpy(), expected)
        swizzled = fp4kit.swizzle(typed.block_scale)
        assert swizzled.dtype == torch.uint8
        assert_bits(swizzled.numpy(), fp4kit.swizzle(q.block_scale.numpy()))
    q = fp4kit.quantize(torch_of(torch, values((4, 64))), "mxfp8")
    typed = dataclasses.replace(q, packed=q.packed.view(torch.float8_e4m3fn))
    assert_bits(fp4kit.dequantize(typed).numpy(), fp4kit.dequantize(q).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_out_buffers(dtype, torch, assert_bits):
    x = torch_of(torch, values((4, 64), dtype))
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
    x = torch_of(torch, values((4, 64)))
    measured = fp4kit.amax(x)
    assert isinstance(measured, torch.Tensor)
    assert measured.tolist() == [x.abs().max().item()]
    q = fp4kit.quantize(x, amax=measured)
    assert_bits(q.packed.numpy(), fp4kit.quantize(x).packed.numpy())
    converted = fp4kit.convert_second_level(q, "encode")
    assert isinstance(converted, torch.Tensor)


# ------------------------------------------------------------------------------------------------
# JAX
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out(dtype, jnp, assert_bits):
    import jax

    x = values((3, 64), dtype)
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
    x = jnp.asarray(values((64, 64)))
    assert arrays.ingest(x).data.ctypes.data == x.unsafe_buffer_pointer()


def test_jax_traced_arrays_are_refused(jnp):
    import jax

    with pytest.raises(DtypeError, match=r"call fp4kit outside jax\.jit"):
        jax.jit(fp4kit.amax)(jnp.ones((1, 16)))


def test_jax_arrays_cannot_be_written(jnp):
    x = jnp.asarray(values((4, 64)))
    q = fp4kit.quantize(x)
    with pytest.raises(fp4kit.ShapeError, match="read-only"):
        fp4kit.dequantize(q, out=jnp.zeros((4, 64)))


# ------------------------------------------------------------------------------------------------
# Anything with DLPack and an array-API namespace
# ------------------------------------------------------------------------------------------------


class Namespace:
    """The least that hands results back."""

    @staticmethod
    def from_dlpack(x):
        return Minimal(np.from_dlpack(x))


class Minimal:
    """The least an array-API array can be."""

    def __init__(self, data):
        self.data = data

    @property
    def shape(self):
        return self.data.shape

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()

    def __array_namespace__(self, api_version=None):
        return Namespace


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_array_api_objects(dtype, assert_bits):
    x = values((3, 64), dtype)
    for format in ALL_FORMATS:
        expected = fp4kit.quantize(x, format)
        q = fp4kit.quantize(Minimal(x), format)
        assert isinstance(q.packed, Minimal)
        assert_bits(q.packed.data, expected.packed)
        assert_bits(q.block_scale.data, expected.block_scale)
        y = fp4kit.dequantize(q, dtype)
        assert isinstance(y, Minimal)
        assert_bits(y.data, fp4kit.dequantize(expected, dtype))
        assert fp4kit.error_stats(Minimal(x), q) == fp4kit.error_stats(x, expected)
    assert isinstance(fp4kit.amax(Minimal(x)), Minimal)


def test_dlpack_without_a_namespace_is_refused_with_the_fix():
    class OnlyDLPack:
        def __init__(self, data):
            self.data = data

        def __dlpack__(self, **options):
            return self.data.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.data.__dlpack_device__()

    with pytest.raises(DtypeError, match=r"pass numpy\.from_dlpack\(x\)"):
        fp4kit.quantize(OnlyDLPack(values((1, 16))))


def test_array_api_objects_of_other_dtypes_are_refused():
    with pytest.raises(DtypeError, match="x is float64"):
        fp4kit.quantize(Minimal(np.ones((1, 16))))


# ------------------------------------------------------------------------------------------------
# Frameworks that are mixed, or not there
# ------------------------------------------------------------------------------------------------


def test_scales_may_come_from_another_framework_on_the_same_device(torch, assert_bits):
    x = values((4, 64))
    q = fp4kit.quantize(x, amax=torch.tensor([3.0]))
    assert type(q.amax) is np.ndarray
    assert_bits(q.packed, fp4kit.quantize(x, amax=3.0).packed)


def test_statistics_may_compare_two_frameworks(torch):
    x = values((4, 64))
    q = fp4kit.quantize(torch_of(torch, x))
    assert fp4kit.error_stats(x, q) == fp4kit.error_stats(x, fp4kit.quantize(x))


def test_numpy_bfloat16_works_before_anyone_imported_ml_dtypes():
    code = (
        "import sys, numpy as np, fp4kit\n"
        "assert 'ml_dtypes' not in sys.modules\n"
        "q = fp4kit.quantize(np.ones((1, 16), np.float32), backend='reference')\n"
        "y = fp4kit.dequantize(q, 'bfloat16', backend='reference')\n"
        "assert y.dtype.name == 'bfloat16', y.dtype\n"
        "fp4kit.quantize(y, backend='reference')\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------
# CUDA devices
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy():
    from fp4kit.backends import get_backend

    reason = get_backend("cuda").unavailable_reason()
    if reason is not None:
        pytest.skip(f"cuda backend: {reason}")
    import cupy

    return cupy


@pytest.mark.gpu
def test_cupy_in_cupy_out(cupy, assert_bits):
    x = values((3, 64))
    device = cupy.asarray(x)
    q = fp4kit.quantize(device)
    for array in (q.packed, q.block_scale, q.amax):
        assert isinstance(array, cupy.ndarray)
    assert_bits(cupy.asnumpy(q.packed), fp4kit.quantize(x).packed)
    assert arrays.ingest(device).data.data.ptr == device.data.ptr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_dtypes_keep_their_names(dtype, cupy, assert_bits):
    x = values((3, 64), dtype)
    device = cupy.asarray(x.view(np.uint8)).view(NUMPY[dtype])
    y = fp4kit.quantize_dequantize(device)
    assert y.dtype == NUMPY[dtype]
    assert_bits(cupy.asnumpy(y.view(np.uint8)).view(NUMPY[dtype]), fp4kit.quantize_dequantize(x))


@pytest.mark.gpu
def test_scales_on_another_device_are_refused(cupy):
    x = cupy.ones((2, 32), F32)
    with pytest.raises(DtypeError, match="amax lies on cpu, the input on cuda:0; move it there"):
        fp4kit.quantize(x, amax=np.ones(1, F32))
    with pytest.raises(DtypeError, match="move one of them first"):
        fp4kit.error_stats(x, fp4kit.quantize(np.ones((2, 32), F32)))


@pytest.mark.gpu
@pytest.mark.parametrize("option", [{"recipe": "te"}, {"recipe": "torchao"}, {"format": "mxfp8"}])
def test_f9_f10_quantize_under_stream_capture(option, cupy, assert_bits):
    """No host read, no allocation that capture forbids: with out= and nonfinite="propagate"."""
    x = values((64, 256))
    device = cupy.asarray(x)
    options = {**option, "nonfinite": "propagate"}
    out = fp4kit.quantize(device, **options)
    result = cupy.zeros((64, 256), F32)
    fp4kit.dequantize(out, out=result)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        fp4kit.quantize(device, out=out, **options)
        fp4kit.dequantize(out, out=result)
        stream.synchronize()
        stream.begin_capture()
        fp4kit.quantize(device, out=out, **options)
        fp4kit.dequantize(out, out=result)
        graph = stream.end_capture()
        device[...] = cupy.asarray(x * F32(3))
        graph.launch(stream)
        stream.synchronize()
    expected = fp4kit.quantize(x * F32(3), **option)
    assert_bits(cupy.asnumpy(out.packed), expected.packed)
    assert_bits(cupy.asnumpy(out.block_scale), expected.block_scale)
    assert_bits(cupy.asnumpy(result), fp4kit.dequantize(expected))
