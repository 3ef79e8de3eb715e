# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Results that are written into arrays of the caller."""

from __future__ import annotations

import dataclasses
import functools
import re

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, NonFiniteError, OptionError, ShapeError
from fp4kit.formats import ALL_RECIPES, DTYPES, SCALE_LAYOUTS
from sample_arrays import F32, NUMPY, gaussian


@pytest.mark.parametrize("option", ["te", "torchao", "compressed-tensors", "mxfp4", "mxfp8"])
def test_quantize_into_out(option, backend, assert_tensors):
    options = {"recipe": option} if option in ALL_RECIPES else {"format": option}
    options |= {"scale_layout": "swizzled_8x4"}
    first, second = gaussian((9, 64)), gaussian((9, 64), seed=1) * F32(3)
    out = fp4kit.quantize(backend.put(first), backend=backend.name, **options)
    arrays = [out.packed, out.block_scale, out.amax, out.decode_scale, out.encode_scale]
    got = fp4kit.quantize(backend.put(second), backend=backend.name, out=out, **options)
    assert got is out
    after = [out.packed, out.block_scale, out.amax, out.decode_scale, out.encode_scale]
    assert all(one is other for one, other in zip(arrays, after, strict=True))
    assert_tensors(backend.get(out), backend.quantize(second, **options))


def test_quantize_out_clears_stale_padding(backend, assert_tensors):
    x = gaussian((9, 80))
    fresh = backend.quantize(x, scale_layout="swizzled_128x4", pad=True)
    stale = dataclasses.replace(
        fresh,
        packed=np.full_like(fresh.packed, 0xFF),
        block_scale=np.full_like(fresh.block_scale, 0xFF),
    )
    out = backend.put(stale)
    fp4kit.quantize(
        backend.put(x), backend=backend.name, scale_layout="swizzled_128x4", pad=True, out=out
    )
    assert_tensors(backend.get(out), fresh)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "mxfp4"},
        {"recipe": "nvfuser"},
        {"scale_layout": "swizzled_128x4"},
        {"nibble_order": "high_first"},
    ],
)
def test_quantize_refuses_an_out_made_for_another_call(changed, backend):
    x = backend.put(gaussian((4, 64)))
    out = fp4kit.quantize(x, backend=backend.name)
    with pytest.raises(OptionError, match="out was made for"):
        fp4kit.quantize(x, backend=backend.name, out=out, **changed)


def test_quantize_refuses_an_out_of_another_shape_or_that_cannot_be_written(backend):
    x = backend.put(gaussian((4, 64)))
    out = fp4kit.quantize(x, backend=backend.name)
    for other in (x[:2], x[:, :32], x.reshape(2, 2, 64)):
        with pytest.raises(OptionError, match="out was made for"):
            fp4kit.quantize(other, backend=backend.name, out=out)
    strided = dataclasses.replace(out, packed=out.packed[::-1])
    with pytest.raises(ShapeError, match=r"out\.packed must be C-contiguous"):
        fp4kit.quantize(x, backend=backend.name, out=strided)


def test_read_only_buffers_are_refused():
    x = gaussian((4, 64))
    q = fp4kit.quantize(x, backend="reference")
    q.packed.flags.writeable = False
    with pytest.raises(ShapeError, match=r"out\.packed is read-only"):
        fp4kit.quantize(x, backend="reference", out=q)
    out = np.zeros((4, 64), F32)
    out.flags.writeable = False
    with pytest.raises(ShapeError, match="out is read-only"):
        fp4kit.dequantize(q, backend="reference", out=out)


def test_a_failed_call_leaves_out_alone(backend, assert_tensors):
    x = gaussian((4, 64))
    out = backend.put(backend.quantize(x))
    before = backend.quantize(x)
    bad = x.copy()
    bad[0, 0] = np.nan
    with pytest.raises(NonFiniteError):
        fp4kit.quantize(backend.put(bad), backend=backend.name, out=out)
    assert_tensors(backend.get(out), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_and_fake_quantize_into_out(dtype, backend, assert_bits):
    x = gaussian((3, 2, 32), dtype)
    q = fp4kit.quantize(backend.put(x), backend=backend.name)
    expected = backend.get(fp4kit.dequantize(q, dtype, backend=backend.name))
    out = backend.put(np.ones((3, 2, 32), NUMPY[dtype]))
    assert fp4kit.dequantize(q, dtype, backend=backend.name, out=out) is out
    assert_bits(backend.get(out), expected)
    out = backend.put(np.ones((3, 2, 32), NUMPY[dtype]))
    got = fp4kit.quantize_dequantize(backend.put(x), backend=backend.name, out=out)
    assert got is out
    assert_bits(backend.get(out), expected)


def test_fake_quantize_in_place(backend, assert_bits):
    x = gaussian((8, 64), "bfloat16")
    expected = backend.call(fp4kit.quantize_dequantize, x)
    array = backend.put(x.copy())
    fp4kit.quantize_dequantize(array, backend=backend.name, out=array)
    assert_bits(backend.get(array), expected)


def test_wrong_result_buffers_are_refused(backend):
    x = gaussian((4, 64))
    q = backend.put(backend.quantize(x))
    for out in (
        np.zeros((4, 32), F32),
        np.zeros((2, 2, 64), F32),
        np.zeros((4, 64), np.float16),
        np.zeros((4, 64), ml_dtypes.bfloat16),
    ):
        with pytest.raises(ShapeError, match=r"out is .*, the result float32 \(4, 64\)"):
            fp4kit.dequantize(q, backend=backend.name, out=backend.put(out))
        with pytest.raises(ShapeError, match="out is"):
            fp4kit.quantize_dequantize(backend.put(x), backend=backend.name, out=backend.put(out))
    strided = backend.put(np.zeros((4, 128), F32))[:, ::2]
    with pytest.raises(ShapeError, match="C-contiguous"):
        fp4kit.dequantize(q, backend=backend.name, out=strided)
    with pytest.raises(DtypeError):
        fp4kit.dequantize(q, backend=backend.name, out=backend.put(np.zeros((4, 64), np.float64)))


SCALES = np.arange(1, 211, dtype=np.uint8).reshape(2, 15, 7)


def round_trip(scales, layout, **options):
    return fp4kit.unswizzle(fp4kit.swizzle(scales, layout), scales.shape, layout, **options)


#: Functions whose `out` is one float or scale bytes, what they are given, and the result's type.
RESULTS = {
    "amax": (fp4kit.amax, gaussian((3, 2, 40)), F32),
    "amax of nothing": (fp4kit.amax, np.zeros((0, 16), F32), F32),
}
for layout in SCALE_LAYOUTS:
    for name, function in (("swizzle", fp4kit.swizzle), ("unswizzle", round_trip)):
        function = functools.partial(function, layout=layout)
        RESULTS[f"{name} {layout}"] = (function, SCALES, np.uint8)
        RESULTS[f"{name} {layout} of nothing"] = (function, SCALES[:0], np.uint8)


@pytest.mark.parametrize("name", RESULTS)
def test_amax_and_scales_into_out(name, backend, assert_bits):
    function, x, dtype = RESULTS[name]
    x = backend.put(x)
    expected = backend.get(function(x, backend=backend.name))
    out = backend.put(np.full(expected.shape, 77, dtype))
    assert function(x, backend=backend.name, out=out) is out
    assert_bits(backend.get(out), expected)
    if dtype == np.uint8:  # as a slice of something larger, which starts on any byte
        store = backend.put(np.full(expected.size + 6, 77, dtype))
        out = store[3:-3].reshape(expected.shape)
        assert function(x, backend=backend.name, out=out) is out
        wanted = np.concatenate([[77] * 3, expected.ravel(), [77] * 3]).astype(dtype)
        assert_bits(backend.get(store), wanted)


@pytest.mark.parametrize("name", [name for name in RESULTS if "nothing" not in name])
def test_amax_and_scales_refuse_wrong_out(name, backend):
    function, x, dtype = RESULTS[name]
    x = backend.put(x)
    shape = function(x, backend=backend.name).shape
    wanted = re.escape(f"the result {np.dtype(dtype)} {shape}")
    for other in ((*shape[:-1], shape[-1] + 1), (1, *shape), ()):
        with pytest.raises(ShapeError, match=wanted):
            function(x, backend=backend.name, out=backend.put(np.zeros(other, dtype)))
    for other in (np.float64, np.int32, np.uint16):
        with pytest.raises(DtypeError, match=f"out is {np.dtype(other)}"):
            function(x, backend=backend.name, out=backend.put(np.zeros(shape, other)))
    if dtype == F32:
        with pytest.raises(ShapeError, match=wanted):
            function(x, backend=backend.name, out=backend.put(np.zeros(shape, np.float16)))
    else:
        strided = backend.put(np.zeros((*shape, 2), dtype))[..., 0]
        with pytest.raises(ShapeError, match="out must be C-contiguous"):
            function(x, backend=backend.name, out=strided)
    with pytest.raises(DtypeError, match="is not an array"):
        function(x, backend=backend.name, out=[0])
    if backend.on_gpu:
        with pytest.raises(DtypeError, match="out lies on cpu, the input on cuda:0"):
            function(x, backend=backend.name, out=np.zeros(shape, dtype))
        return
    out = np.zeros(shape, dtype)
    out.flags.writeable = False
    with pytest.raises(ShapeError, match="out is read-only"):
        function(x, backend=backend.name, out=out)
    assert not out.any()


def test_results_are_not_lost_in_foreign_byte_order():
    out = np.zeros(1, ">f4")
    with pytest.raises(DtypeError, match="out is >f4; it must be float32 in native byte order"):
        fp4kit.amax(np.ones(3, F32), backend="reference", out=out)
    q = fp4kit.quantize(gaussian((4, 64)), backend="reference")
    with pytest.raises(DtypeError, match="native byte order"):
        fp4kit.dequantize(q, backend="reference", out=np.zeros((4, 64), ">f4"))


def test_unknown_result_dtypes_are_refused(backend):
    q = backend.put(backend.quantize(gaussian((4, 64))))
    for dtype in ("float64", "fp16", "int8", None):
        with pytest.raises(OptionError, match="float32, float16, bfloat16"):
            fp4kit.dequantize(q, dtype, backend=backend.name)
