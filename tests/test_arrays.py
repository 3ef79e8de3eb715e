# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of NumPy, CuPy and any array API: the same kind out, the same bytes, no copy in."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, arrays
from fp4kit.formats import ALL_FORMATS, DTYPES
from sample_arrays import F32, NUMPY, gaussian

HOST_BACKENDS = ("reference", "cpu")


# ------------------------------------------------------------------------------------------------
# NumPy
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype, assert_bits):
    x = gaussian((3, 64), dtype)
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

    q = fp4kit.quantize(gaussian((2, 32)).view(Subclass))
    assert type(q.packed) is np.ndarray
    assert fp4kit.amax(F32(-3)).tolist() == [3.0]


def test_memory_maps_are_read(tmp_path, assert_tensors):
    x = gaussian((4, 64))
    path = tmp_path / "x.bin"
    path.write_bytes(x.tobytes())
    mapped = np.memmap(path, F32, "r", shape=(4, 64))
    assert_tensors(fp4kit.quantize(mapped), fp4kit.quantize(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_input_is_not_copied(dtype):
    x = gaussian((4, 64), dtype)
    raw = arrays.ingest(x)
    assert raw.data.ctypes.data == x.ctypes.data
    assert raw.dtype == dtype
    assert raw.origin == arrays.Origin("numpy", "cpu")


@pytest.mark.parametrize("backend_name", HOST_BACKENDS)
def test_inputs_are_never_written(backend_name, assert_bits):
    x = gaussian((4, 60))
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
    x = gaussian((3, 64), dtype)
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


def test_dlpack_without_a_namespace_comes_back_as_numpy(assert_bits):
    class OnlyDLPack:
        def __init__(self, data):
            self.data = data

        def __dlpack__(self, **options):
            return self.data.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.data.__dlpack_device__()

    x = gaussian((1, 16))
    q = fp4kit.quantize(OnlyDLPack(x))
    assert type(q.packed) is np.ndarray
    assert_bits(q.packed, fp4kit.quantize(x).packed)


def test_array_api_objects_of_other_dtypes_are_refused():
    with pytest.raises(DtypeError, match="x is float64"):
        fp4kit.quantize(Minimal(np.ones((1, 16))))


# ------------------------------------------------------------------------------------------------
# Before ml_dtypes is imported
# ------------------------------------------------------------------------------------------------


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


@pytest.mark.gpu
def test_cupy_in_cupy_out(cupy, assert_bits):
    x = gaussian((3, 64))
    device = cupy.asarray(x)
    q = fp4kit.quantize(device)
    for array in (q.packed, q.block_scale, q.amax):
        assert isinstance(array, cupy.ndarray)
    assert_bits(cupy.asnumpy(q.packed), fp4kit.quantize(x).packed)
    assert arrays.ingest(device).data.data.ptr == device.data.ptr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_dtypes_keep_their_names(dtype, cupy, assert_bits):
    x = gaussian((3, 64), dtype)
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
    x = gaussian((64, 256))
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
