# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions: options, refusals, buffers, statistics, and reported faults of others.

Tests named after an id like A5 or B4 pin a fault that users of another tool met.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
import re
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import (
    BackendUnavailableError,
    DtypeError,
    NonFiniteError,
    OptionError,
    QuantizedTensor,
    ShapeError,
    arrays,
)
from fp4kit.backends import get_backend
from fp4kit.formats import (
    ALL_FORMATS,
    ALL_RECIPES,
    DTYPES,
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
)
from fp4kit.metrics import ErrorStats, error_sums

F32 = np.float32
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
MX_FORMATS = tuple(name for name, spec in ALL_FORMATS.items() if not spec.has_second_level)
CALLS = {
    "quantize": fp4kit.quantize,
    "quantize_dequantize": fp4kit.quantize_dequantize,
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def block(*values, size=16, fill=0.0):
    """One row of `size` elements that starts with `values`."""
    row = np.full((1, size), fill, F32)
    row[0, : len(values)] = values
    return row


def gaussian(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(F32).astype(NUMPY[dtype])


# ------------------------------------------------------------------------------------------------
# Options
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "given", "allowed"),
    [
        ({"format": "int4"}, "'int4'", "nvfp4, mxfp4, mxfp8, mxfp8_e5m2"),
        ({"format": 4}, "4", "nvfp4"),
        ({"recipe": "cutlass"}, "'cutlass'", "te, nvfuser, torchao, modelopt, compressed-tensors"),
        ({"format": "mxfp4", "scale_rule": "up"}, "'up'", "floor, ceil, even, rceil"),
        ({"scale_rule": "floor"}, "'floor'", "recipe"),
        ({"format": "mxfp8", "recipe": "comfy"}, "'comfy'", "scale_rule: floor"),
        ({"nonfinite": "clip"}, "'clip'", "raise, propagate"),
        ({"backend": "gpu"}, "'gpu'", "cuda, cpu, reference"),
        ({"second_level": False}, "te", "nvfuser or torchao"),
        ({"recipe": "comfy", "second_level": False}, "comfy", "nvfuser or torchao"),
        ({"decode_scale": 1.0}, "te", "amax"),
        ({"recipe": "nvfuser", "decode_scale": 1.0}, "decode_scale", "encode_scale"),
        ({"recipe": "torchao", "encode_scale": 1.0}, "encode_scale", "decode_scale"),
        ({"amax": 1.0, "encode_scale": 1.0, "recipe": "nvfuser"}, "amax, encode_scale", "one of"),
        ({"format": "mxfp4", "amax": 1.0}, "mxfp4", "has none"),
        ({"recipe": "nvfuser", "second_level": False, "amax": 1.0}, "nvfp4", "has none"),
    ],
)
def test_wrong_options_are_named(options, given, allowed, call):
    with pytest.raises(OptionError) as caught:
        call(np.ones((2, 32), F32), **{"backend": "reference", **options})
    message = str(caught.value)
    assert given in message
    assert allowed in message


@pytest.mark.parametrize(
    ("options", "given", "allowed"),
    [
        ({"scale_layout": "swizzled"}, "'swizzled'", "linear, swizzled_128x4, swizzled_8x4"),
        ({"nibble_order": "big"}, "'big'", "low_first, high_first"),
    ],
)
def test_wrong_storage_options_are_named(options, given, allowed):
    with pytest.raises(OptionError, match=re.escape(allowed)) as caught:
        fp4kit.quantize(np.ones((2, 32), F32), backend="reference", **options)
    assert given in str(caught.value)


def test_options_are_value_errors_and_share_a_base():
    assert issubclass(OptionError, ValueError)
    assert issubclass(ShapeError, ValueError)
    assert issubclass(NonFiniteError, ValueError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(BackendUnavailableError, RuntimeError)
    for error in (OptionError, ShapeError, NonFiniteError, DtypeError, BackendUnavailableError):
        assert issubclass(error, fp4kit.Fp4kitError)


def test_format_names_ignore_case(assert_tensors):
    x = gaussian((2, 32))
    lower = fp4kit.quantize(x, "mxfp8", backend="reference")
    assert_tensors(fp4kit.quantize(x, "MXFP8", backend="reference"), lower)


def test_defaults(backend, assert_tensors):
    x = gaussian((3, 64))
    for format, explicit in (
        ("nvfp4", {"recipe": "te"}),
        ("mxfp4", {"scale_rule": "even"}),
        ("mxfp8", {"scale_rule": "rceil"}),
        ("mxfp8_e5m2", {"scale_rule": "rceil"}),
    ):
        storage = {"scale_layout": "linear", "nibble_order": "low_first"}
        default = backend.quantize(x, format)
        assert_tensors(backend.quantize(x, format, **explicit, **storage), default)
        assert (default.recipe, default.scale_rule) == (
            explicit.get("recipe"),
            explicit.get("scale_rule"),
        )


# ------------------------------------------------------------------------------------------------
# Inputs
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "int32", "int64", "bool"])
def test_other_dtypes_are_refused_with_the_fix(dtype, call):
    x = np.ones((2, 32), dtype)
    functions = (call, fp4kit.amax, lambda x, backend: fp4kit.error_stats(x, x, backend=backend))
    for function in functions:
        with pytest.raises(DtypeError) as caught:
            function(x, backend="reference")
        message = str(caught.value)
        assert f"x is {dtype}" in message
        assert "float32, float16, bfloat16" in message
        assert "astype('float32')" in message


def test_lost_bfloat16_is_refused_with_the_fix():
    x = np.ones((2, 32), ml_dtypes.bfloat16).view("V2")
    with pytest.raises(DtypeError, match=r"view it as ml_dtypes\.bfloat16"):
        fp4kit.quantize(x)


@pytest.mark.parametrize("value", [[1.0] * 16, (1.0,), 3.0, "x", None, object()])
def test_objects_that_are_no_arrays_are_refused_with_the_fix(value, call):
    with pytest.raises(DtypeError, match=r"is not an array .*numpy\.asarray"):
        call(value)


def test_zero_dimensional_arrays_are_refused(call):
    with pytest.raises(ShapeError, match="last axis, but the array is 0-dimensional"):
        call(np.array(1.0, F32), backend="reference")


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("shape", [(4, 100), (5, 3), (3, 40, 1), (7,), (2, 60)])
def test_b7_ragged_rows_are_refused_or_padded_on_request(format, shape, call):
    x = np.ones(shape, F32)
    size = ALL_FORMATS[format].block_size
    with pytest.raises(ShapeError) as caught:
        call(x, format, backend="reference")
    message = str(caught.value)
    assert f"multiple of {size}" in message
    assert str(shape) in message
    assert "pass pad=True" in message
    result = call(x, format, pad=True, backend="reference")
    assert tuple(result.shape) == shape


def test_b9_padding_never_enters_amax_or_error(backend, reference, assert_bits):
    x = np.full((512, 60), -2, F32)
    for format in ALL_FORMATS:
        q = backend.quantize(x, format, pad=True)
        assert q.shape == (512, 60)
        y = backend.dequantize(q)
        assert_bits(y, x)
        stats = backend.call(fp4kit.error_stats, x, q)
        assert (stats.elements, stats.mse, stats.zero_codes) == (512 * 60, 0.0, 0.0)
        whole = fp4kit.QuantizedTensor(**{**vars(q), "shape": (512, 64)})
        assert not backend.dequantize(whole)[:, 60:].any()


def test_padding_bytes_are_codes_of_plus_zero(backend):
    x = np.full((3, 5), -1.0, F32)
    for format, spec in ALL_FORMATS.items():
        for order in NIBBLE_ORDERS:
            packed = backend.quantize(x, format, pad=True, nibble_order=order).packed
            used = -(-5 // spec.codes_per_byte)
            assert packed.shape == (3, spec.packed_cols(5))
            assert not packed[:, used:].any()
            if spec.codes_per_byte == 2:
                shift = 4 if order == "low_first" else 0
                assert not (packed[:, used - 1] >> shift & 15).any()


# ------------------------------------------------------------------------------------------------
# NaN and infinity
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ALL_FORMATS)
def test_a26_nonfinite_values_are_counted_and_located(format, dtype, call, backend):
    x = np.ones((2, 3, 32), NUMPY[dtype])
    x[0, 2, 31] = np.inf
    x[1, 0, 0] = np.nan
    x[1, 2, 5] = -np.inf
    x[1, 2, 6] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        backend.call(call, x, format)
    message = str(caught.value)
    assert message.startswith("x holds 2 NaN and 2 infinite values, the first at index (0, 2, 31)")
    assert 'nonfinite="propagate"' in message


@pytest.mark.parametrize("position", [0, 3, 15, 16, 40, 63])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a26_one_bad_element_anywhere_is_found(position, value, backend):
    x = np.ones((1, 64), F32)
    x[0, position] = value
    kind = "1 NaN and 0" if np.isnan(value) else "0 NaN and 1"
    for given_amax in ({}, {"amax": 6.0}):
        with pytest.raises(NonFiniteError, match=rf"{kind} .* index \(0, {position}\)"):
            backend.quantize(x, **given_amax)


def test_a26_one_dimensional_index(backend):
    x = np.ones(48, F32)
    x[33] = np.nan
    with pytest.raises(NonFiniteError, match=r"index \(33,\)"):
        backend.quantize(x)


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_a26_propagate_keeps_the_neighbours_of_nan(format, backend, assert_bits):
    clean = gaussian((2, 64))
    x = clean.copy()
    x[0, 3] = np.nan
    clean[0, 3] = 0
    q, expected = (
        backend.quantize(x, format, nonfinite="propagate"),
        backend.quantize(clean, format),
    )
    assert_bits(q.block_scale, expected.block_scale)
    y, z = backend.dequantize(q), backend.dequantize(expected)
    others = np.arange(128) != 3
    assert_bits(y.ravel()[others], z.ravel()[others])
    element = ALL_FORMATS[format].element
    if element.name == "e2m1":
        top = backend.dequantize(dataclasses.replace(expected, packed=np.full_like(q.packed, 0x77)))
        assert y[0, 3] == top[0, 3]
    else:
        assert np.isnan(y[0, 3])


@pytest.mark.parametrize("format", MX_FORMATS)
def test_a26_propagated_infinity_saturates(format, backend):
    x = block(1, np.inf, -np.inf, 2, size=32)
    q = backend.quantize(x, format, scale_rule="rceil", nonfinite="propagate")
    assert q.block_scale.tolist() == [[254]]
    y = backend.dequantize(q)
    element = ALL_FORMATS[format].element
    with np.errstate(over="ignore"):
        largest = F32(element.max) * F32(2.0**127)
    assert y[0, 1] == largest == -y[0, 2]


# ------------------------------------------------------------------------------------------------
# Output buffers
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# Equal calls: what is remembered never shows
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amax", [None, 7.0])
def test_results_are_reused_again_and_again(amax, backend, assert_bits):
    first, second = gaussian((4, 64), "bfloat16"), gaussian((4, 64), "bfloat16") * F32(3)
    out = backend.put(backend.quantize(first, amax=amax))
    for x in (second, first, second):
        x = x.astype(NUMPY["bfloat16"])
        expected = backend.quantize(x, amax=amax)
        device = backend.put(x)
        assert fp4kit.quantize(device, amax=amax, backend=backend.name, out=out) is out
        for name in ("packed", "block_scale", "amax"):
            assert_bits(backend.get(getattr(out, name)), getattr(expected, name))
        decoded = backend.get(fp4kit.dequantize(out, backend=backend.name))
        assert_bits(decoded, backend.call(fp4kit.dequantize, expected))


def test_a_result_that_fit_once_is_still_checked(q):
    x = gaussian((4, 64))
    fp4kit.quantize(x, backend="reference", out=q)
    with pytest.raises(OptionError, match="out was made for"):
        fp4kit.quantize(x[:2], backend="reference", out=q)
    with pytest.raises(OptionError, match="out was made for"):
        fp4kit.quantize(x, scale_layout="swizzled_128x4", backend="reference", out=q)
    fp4kit.quantize(x, backend="reference", out=q)
    q.block_scale.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        fp4kit.quantize(x, backend="reference", out=q)


def test_used_tensors_copy_like_new_ones(q, assert_tensors):
    fp4kit.quantize(gaussian((4, 64)), backend="reference", out=q)
    fp4kit.dequantize(q, backend="reference")
    assert set(vars(q)) == {field.name for field in dataclasses.fields(q)}
    copies = (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), dataclasses.replace(q))
    for other in copies:
        assert_tensors(other, q)
    independent = copies[1]
    fp4kit.quantize(gaussian((4, 64)) * F32(5), backend="reference", out=independent)
    fp4kit.dequantize(independent, backend="reference")
    assert independent.amax[0] == q.amax[0] * F32(5)


def test_changed_codes_are_decoded_anew(q):
    before = fp4kit.dequantize(q, backend="reference")
    q.packed[...] ^= 0x88
    np.testing.assert_array_equal(fp4kit.dequantize(q, backend="reference"), -before)
    strided = np.zeros((4, 64), np.uint8)
    view = dataclasses.replace(q, packed=strided[:, ::2])
    assert not fp4kit.dequantize(view, backend="reference").any()
    strided[:, ::2] = q.packed
    np.testing.assert_array_equal(fp4kit.dequantize(view, backend="reference"), -before)


def test_a_strided_scale_of_a_result_is_overwritten(q):
    scales = np.zeros(2, F32)[::2]
    out = dataclasses.replace(q, amax=scales)
    fp4kit.quantize(gaussian((4, 64)), amax=5.0, backend="reference", out=out)
    assert scales.tolist() == [5.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": ["nvfp4"]}, "format="),
        ({"recipe": ["te"]}, "recipe="),
        ({"nibble_order": {}}, "nibble_order="),
        ({"scale_layout": []}, "scale_layout="),
        ({"nonfinite": {}}, "nonfinite="),
    ],
)
def test_options_that_cannot_be_hashed(options, message):
    with pytest.raises(OptionError, match=message):
        fp4kit.quantize(np.ones((1, 16), F32), **options)


@pytest.mark.parametrize("pointer", [0, 7])
def test_f10_captured_floats_outlive_the_call(pointer, monkeypatch):
    """A replayed graph reads the buffer that a float was sent to."""

    class Stream:
        ptr = pointer

        def is_capturing(self):
            assert self.ptr, "the null stream must not be asked"
            return True

    runtime = SimpleNamespace(getDevice=lambda: 0)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, full=np.full))
    monkeypatch.setattr(arrays, "_captured", [])
    scale = arrays.ingest_scale(6.0, "amax", arrays.Origin("cupy", "cuda:0"))
    assert any(kept is scale for kept in arrays._captured) == bool(pointer)


# ------------------------------------------------------------------------------------------------
# QuantizedTensor
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def q():
    return fp4kit.quantize(gaussian((4, 64)), backend="reference")


def test_quantized_tensors_are_frozen(q):
    for field in dataclasses.fields(q):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(q, field.name, None)


def test_shapes_and_sizes(q):
    assert q.packed.shape == (4, 32)
    assert q.block_scale.shape == (4, 4)
    assert (q.packed.dtype, q.block_scale.dtype, q.amax.dtype) == (np.uint8, np.uint8, F32)
    assert q.nbytes == 4 * 32 + 16 + 4
    assert q.bits_per_element == 8 * q.nbytes / 256
    assert repr(q) == (
        "QuantizedTensor(nvfp4, shape=(4, 64), recipe='te', scale_layout='linear', "
        "nibble_order='low_first', 4.62 bits per element)"
    )


@pytest.mark.parametrize(
    ("format", "bits"), [("nvfp4", 4.5), ("mxfp4", 4.25), ("mxfp8", 8.25), ("mxfp8_e5m2", 8.25)]
)
def test_bits_per_element(format, bits):
    shape = (128, 4096)
    q = fp4kit.quantize(np.zeros(shape, F32), format, backend="reference")
    extra = 32 / math.prod(shape) if format == "nvfp4" else 0
    assert q.bits_per_element == bits + extra
    empty = fp4kit.quantize(np.zeros((0, 32), F32), format, backend="reference")
    assert empty.bits_per_element == 0.0


def test_source_dtype_is_recorded():
    for dtype in DTYPES:
        assert fp4kit.quantize(gaussian((2, 32), dtype), backend="reference").source_dtype == dtype


def test_leading_axes_are_kept(backend):
    for shape in ((64,), (3, 64), (2, 3, 64), (2, 1, 3, 64)):
        q = backend.quantize(gaussian(shape))
        assert q.shape == shape
        assert q.packed.shape == (*shape[:-1], 32)
        assert q.block_scale.shape == (*shape[:-1], 4)
        assert backend.dequantize(q).shape == shape


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a28_a_missing_second_level_is_refused(recipe):
    q = fp4kit.quantize(gaussian((4, 64)), recipe=recipe, backend="reference")
    direction, _ = q.second_level
    name = direction if direction == "amax" else f"{direction}_scale"
    if ALL_RECIPES[recipe].optional_second_level:
        one_level = dataclasses.replace(q, **{name: None})
        assert one_level.second_level is None
        return
    with pytest.raises(OptionError, match=rf"recipe {recipe} needs its second-level scale"):
        dataclasses.replace(q, **{name: None})


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a27_a_second_level_in_another_direction_is_refused(recipe):
    q = fp4kit.quantize(gaussian((4, 64)), recipe=recipe, backend="reference")
    names = {"amax": "amax", "decode": "decode_scale", "encode": "encode_scale"}
    direction, value = q.second_level
    for other, name in names.items():
        if other == direction:
            continue
        fields = {**vars(q), names[direction]: None, name: value}
        with pytest.raises(OptionError, match="convert_second_level"):
            QuantizedTensor(**fields)
        with pytest.raises(OptionError, match="more than one second-level scale"):
            QuantizedTensor(**{**fields, names[direction]: value})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"shape": (4, 32)}, ShapeError, r"packed has shape \(4, 32\), but nvfp4 .*take \(4, 16\)"),
        ({"shape": (2, 64)}, ShapeError, r"packed has shape"),
        ({"shape": (256,)}, ShapeError, r"take \(128,\)"),
        ({"shape": ()}, ShapeError, "at least one dimension"),
        ({"packed": np.zeros((4, 31), np.uint8)}, ShapeError, r"packed has shape \(4, 31\)"),
        ({"packed": np.zeros((4, 64), np.uint8)}, ShapeError, "packed has shape"),
        ({"block_scale": np.zeros((4, 2), np.uint8)}, ShapeError, r"take \(4, 4\)"),
        ({"block_scale": np.zeros((4, 5), np.uint8)}, ShapeError, "block_scale has shape"),
        ({"block_scale": np.zeros((128, 4), np.uint8)}, ShapeError, "linear scales"),
        ({"block_scale": np.zeros(16, np.uint8)}, ShapeError, "block_scale has shape"),
        ({"scale_layout": "swizzled_128x4"}, ShapeError, r"swizzled_128x4 .*take \(128, 4\)"),
        ({"scale_layout": "swizzled_8x4"}, ShapeError, r"take \(8, 4\)"),
        ({"scale_layout": "blocked"}, OptionError, "choose one of linear"),
        ({"nibble_order": "swapped"}, OptionError, "choose one of low_first"),
        ({"format": "fp4"}, OptionError, "choose one of nvfp4"),
        ({"format": "mxfp4"}, OptionError, "neither a recipe nor a second-level scale"),
        ({"recipe": "unknown"}, OptionError, "choose one of te"),
        ({"scale_rule": "even"}, OptionError, "takes a recipe"),
        ({"amax": np.zeros(0, F32)}, ShapeError, "0 second-level scales do not divide 4 rows"),
        ({"amax": np.zeros(3, F32)}, ShapeError, "3 second-level scales do not divide 4 rows"),
    ],
)
def test_b16_b18_inconsistent_tensors_are_refused(q, changed, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(q, **changed)


def test_b18_swizzled_scales_need_their_recorded_layout(backend, assert_bits):
    x = gaussian((130, 80))
    linear = backend.quantize(x)
    for layout in SCALE_LAYOUTS[1:]:
        q = backend.quantize(x, scale_layout=layout)
        assert_bits(backend.dequantize(q), backend.dequantize(linear))
        with pytest.raises(ShapeError):
            dataclasses.replace(q, scale_layout="linear")


def test_mx_tensors_take_a_rule_or_none():
    q = fp4kit.quantize(gaussian((2, 64)), "mxfp4", backend="reference")
    assert dataclasses.replace(q, scale_rule=None).scale_rule is None
    with pytest.raises(OptionError, match="choose one of floor"):
        dataclasses.replace(q, scale_rule="round")


def test_arrays_of_other_element_types_are_refused(q):
    wrong = dataclasses.replace(q, packed=q.packed.astype(np.int32))
    with pytest.raises(DtypeError, match=r"packed is int32; codes and scales are uint8"):
        fp4kit.dequantize(wrong, backend="reference")
    wrong = dataclasses.replace(q, amax=q.amax.astype(np.float64))
    with pytest.raises(DtypeError, match=r"float64; a second-level scale is a float or a float32"):
        fp4kit.dequantize(wrong, backend="reference")


def test_float8_views_are_read_as_bytes(q, assert_bits):
    typed = dataclasses.replace(q, block_scale=q.block_scale.view(ml_dtypes.float8_e4m3fn))
    expected = fp4kit.dequantize(q, backend="reference")
    assert_bits(fp4kit.dequantize(typed, backend="reference"), expected)


# ------------------------------------------------------------------------------------------------
# The second level
# ------------------------------------------------------------------------------------------------


def test_a27_conversions_of_amax_6(backend):
    q = backend.put(backend.quantize(np.full((1, 16), 6, F32)))
    assert backend.get(fp4kit.convert_second_level(q, "amax")).tolist() == [6.0]
    assert backend.get(fp4kit.convert_second_level(q, "encode")).tolist() == [448.0]
    decode = backend.get(fp4kit.convert_second_level(q, "decode"))
    assert decode.tolist() == [float(F32(0.0022321429))]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a27_recipes_keep_their_own_direction(recipe, backend):
    q = backend.quantize(np.full((1, 16), 6, F32), recipe=recipe)
    direction, value = q.second_level
    assert direction == ALL_RECIPES[recipe].direction
    wanted = {"amax": 6.0, "decode": 0.0022321429, "encode": 448.0}[direction]
    assert value.tolist() == [float(F32(wanted))]
    assert (q.amax is None) + (q.decode_scale is None) + (q.encode_scale is None) == 2


def test_a27_a_round_trip_of_conversions_is_exact_for_powers_of_two(backend):
    for exponent in range(-100, 100):
        amax = F32(2688 * 2.0**exponent)
        q = backend.quantize(np.full((1, 16), 1, F32), amax=float(amax))
        encode = backend.get(fp4kit.convert_second_level(backend.put(q), "encode"))
        other = fp4kit.QuantizedTensor(
            q.packed, q.block_scale, "nvfp4", q.shape, recipe="nvfuser", encode_scale=encode
        )
        back = backend.get(fp4kit.convert_second_level(backend.put(other), "amax"))
        assert back.tolist() == [float(amax)]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, np.nan, -1.0, 1e-45])
def test_a2_no_conversion_gives_zero_infinity_or_nan(recipe, value):
    q = fp4kit.quantize(gaussian((2, 32)), recipe=recipe, backend="reference")
    direction, array = q.second_level
    name = direction if direction == "amax" else f"{direction}_scale"
    dead = dataclasses.replace(q, **{name: np.full_like(array, value)})
    for target in ("decode", "encode"):
        if target == direction:
            continue
        converted = fp4kit.convert_second_level(dead, target)
        assert np.isfinite(converted).all()
        if value != 1e-45 and not (direction == "amax" and np.isnan(value)):
            assert converted.tolist() == [1.0]


def test_converting_what_is_not_there_is_refused(q):
    with pytest.raises(OptionError, match="choose one of amax, decode, encode"):
        fp4kit.convert_second_level(q, "inverse")
    one_level = fp4kit.quantize(
        gaussian((2, 32)), recipe="nvfuser", second_level=False, backend="reference"
    )
    with pytest.raises(OptionError, match="has no second-level scale to convert"):
        fp4kit.convert_second_level(one_level, "amax")


def test_amax_may_be_given_in_every_form(backend, assert_tensors):
    x = gaussian((4, 64))
    expected = backend.quantize(x, amax=3.0)
    for value in (3, F32(3), np.float64(3), np.array(3, F32), np.array([3], F32)):
        assert_tensors(backend.quantize(x, amax=value), expected)
    measured = backend.quantize(x, amax=backend.call(fp4kit.amax, x))
    assert_tensors(measured, backend.quantize(x))


def test_amax_in_a_form_that_is_refused(backend):
    x = backend.put(gaussian((4, 64)))
    for value in (np.array([3.0]), np.array([3]), np.array([3], np.float16)):
        with pytest.raises(DtypeError, match="a second-level scale is a float or a float32 array"):
            fp4kit.quantize(x, amax=backend.put(value), backend=backend.name)
    for value in ([3.0], True):
        with pytest.raises(DtypeError):
            fp4kit.quantize(x, amax=value, backend=backend.name)
    with pytest.raises(OptionError, match="choose one of row_scaled, per_token"):
        fp4kit.quantize(x, amax="3", backend=backend.name)
    with pytest.raises(ShapeError, match="3 second-level scales do not divide the 4 rows"):
        fp4kit.quantize(x, amax=backend.put(np.ones(3, F32)), backend=backend.name)


def test_one_amax_per_expert_equals_each_expert_alone(backend, assert_bits):
    x = gaussian((3, 5, 64)) * np.array([1, 100, 0], F32)[:, None, None]
    for recipe in ALL_RECIPES:
        amaxes = np.array([backend.call(fp4kit.amax, expert)[0] for expert in x])
        q = backend.quantize(x, recipe=recipe, amax=amaxes)
        for number, expert in enumerate(x):
            alone = backend.quantize(expert, recipe=recipe)
            assert_bits(q.packed[number], alone.packed)
            assert_bits(q.block_scale[number], alone.block_scale)
            assert_bits(q.second_level[1][number : number + 1], alone.second_level[1])
            assert_bits(backend.dequantize(q)[number], backend.dequantize(alone))


# ------------------------------------------------------------------------------------------------
# Backends
# ------------------------------------------------------------------------------------------------


def test_backend_status():
    status = fp4kit.backend_status()
    assert [entry.name for entry in status] == ["cuda", "cpu", "reference"]
    for entry in status:
        assert entry.available == (entry.reason is None)
        assert bool(entry.details) == entry.available
        assert all(isinstance(value, str) for value in entry.details.values())
        with pytest.raises(dataclasses.FrozenInstanceError):
            entry.name = "other"
    available = {entry.name: entry.available for entry in status}
    assert available["reference"]
    assert available["cpu"]


def test_default_backend_of_host_arrays_is_cpu(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the cpu backend was asked")

    monkeypatch.setattr(type(get_backend("cpu")), "quantize", refuse)
    with pytest.raises(AssertionError, match="cpu backend was asked"):
        fp4kit.quantize(np.ones((1, 16), F32))


def test_cuda_never_takes_host_arrays():
    x = np.ones((1, 16), F32)
    q = fp4kit.quantize(x, backend="reference")
    for function in (
        lambda: fp4kit.quantize(x, backend="cuda"),
        lambda: fp4kit.quantize_dequantize(x, backend="cuda"),
        lambda: fp4kit.dequantize(q, backend="cuda"),
        lambda: fp4kit.amax(x, backend="cuda"),
        lambda: fp4kit.swizzle(q.block_scale, backend="cuda"),
        lambda: fp4kit.unswizzle(np.zeros((128, 4), np.uint8), (1, 1), backend="cuda"),
        lambda: fp4kit.error_stats(x, q, backend="cuda"),
    ):
        with pytest.raises(BackendUnavailableError) as caught:
            function()
        assert set(caught.value.reasons) == {"cuda"}
        assert caught.value.reasons["cuda"] in str(caught.value)
        assert len(caught.value.reasons["cuda"]) > 10


def test_unavailable_backend_error_names_the_request():
    with pytest.raises(BackendUnavailableError) as caught:
        fp4kit.quantize(np.ones((1, 16), F32), recipe="comfy", backend="cuda")
    message = str(caught.value)
    assert "no backend can quantize float32 arrays on cpu as nvfp4 with recipe comfy" in message
    assert "cuda: " in message


@pytest.mark.gpu
def test_host_backends_never_take_device_arrays():
    reason = get_backend("cuda").unavailable_reason()
    if reason is not None:
        pytest.skip(f"cuda backend: {reason}")
    import cupy

    x = cupy.ones((1, 16), F32)
    for name in ("cpu", "reference"):
        with pytest.raises(BackendUnavailableError, match="copy the array to the host first"):
            fp4kit.quantize(x, backend=name)


# ------------------------------------------------------------------------------------------------
# Swizzle
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "blocks", "layout", "stored"),
    [
        (9, 1, "swizzled_8x4", (16, 4)),
        (128, 5, "swizzled_128x4", (128, 8)),
        (5, 128, "swizzled_128x4", (128, 128)),
        (256, 4, "swizzled_128x4", (256, 4)),
        (3, 3, "swizzled_128x4", (128, 4)),
        (1, 47, "swizzled_128x4", (128, 48)),
        (33, 94, "swizzled_8x4", (40, 96)),
        (5, 128, "linear", (5, 128)),
    ],
)
def test_b3_b4_rows_and_columns_are_padded_apart_with_zeros(rows, blocks, layout, stored, backend):
    scales = np.full((rows, blocks), 0x7E, np.uint8)
    out = backend.call(fp4kit.swizzle, scales, layout)
    assert out.shape == stored
    assert np.count_nonzero(out) == rows * blocks
    x = np.full((rows, blocks * 16), 3.0, F32)
    q = backend.quantize(x, scale_layout=layout)
    assert q.block_scale.shape == stored
    assert (q.block_scale == 0x7E).sum() == rows * blocks
    assert np.count_nonzero(q.block_scale) == rows * blocks


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("cols", [1504, 96])
def test_b6_padding_scales_never_enter_the_result(format, cols, backend, assert_bits):
    x = gaussian((33, cols))
    q = backend.quantize(x, format, scale_layout="swizzled_128x4")
    blocks = cols // ALL_FORMATS[format].block_size
    filled = backend.call(fp4kit.swizzle, np.full((33, blocks), 1, np.uint8))
    poisoned = np.where(filled == 0, np.uint8(0xFF), q.block_scale)
    other = dataclasses.replace(q, block_scale=poisoned)
    assert_bits(backend.dequantize(other), backend.dequantize(q))
    assert backend.call(fp4kit.error_stats, x, other) == backend.call(fp4kit.error_stats, x, q)


def test_unswizzle_needs_the_true_shape(backend):
    stored = backend.call(fp4kit.swizzle, np.ones((130, 5), np.uint8))
    assert stored.shape == (256, 8)
    for shape in ((128, 4), (128, 8), (130, 9), (260, 5), (0, 5)):
        with pytest.raises(ShapeError, match=r"2048 bytes given, but swizzled_128x4 scales of"):
            backend.call(fp4kit.unswizzle, stored, shape)
    with pytest.raises(ShapeError, match="at least one dimension"):
        backend.call(fp4kit.unswizzle, stored, ())
    with pytest.raises(ShapeError, match="at least one dimension"):
        backend.call(fp4kit.swizzle, np.array(1, np.uint8))
    for function in (
        lambda: backend.call(fp4kit.swizzle, stored, "rowmajor"),
        lambda: backend.call(fp4kit.unswizzle, stored, (130, 5), "rowmajor"),
    ):
        with pytest.raises(OptionError, match="choose one of linear, swizzled_128x4"):
            function()


def test_unswizzle_takes_any_shape_of_the_right_size(backend, assert_bits):
    scales = np.arange(1, 31, dtype=np.uint8).reshape(2, 3, 5)
    stored = backend.call(fp4kit.swizzle, scales)
    for shape in (stored.shape, (-1,), (4, -1)):
        again = backend.call(fp4kit.unswizzle, stored.reshape(shape), (2, 3, 5))
        assert_bits(again, scales)


def test_swizzle_refuses_wide_elements(backend):
    with pytest.raises(DtypeError, match=r"scales is float32; codes and scales are uint8"):
        backend.call(fp4kit.swizzle, np.ones((2, 2), F32))


# ------------------------------------------------------------------------------------------------
# Error statistics
# ------------------------------------------------------------------------------------------------


def test_error_stats_by_hand(backend):
    x = np.array([[3, 4, 0, 0]], F32)
    y = np.array([[3, 2, 0, 1]], F32)
    stats = backend.call(fp4kit.error_stats, x, y)
    assert stats.elements == 4
    assert stats.mse == 5 / 4
    assert stats.relative_rms == pytest.approx(100 * math.sqrt(5 / 25))
    assert stats.sqnr == pytest.approx(10 * math.log10(5))
    assert stats.max_abs_error == 2
    assert stats.cosine == pytest.approx((9 + 8) / (5 * math.sqrt(14)))
    assert stats.bits_per_element is None
    assert (stats.saturated, stats.zero_codes) == (None, None)
    assert (stats.scale_underflow, stats.scale_subnormal) == (None, None)


def test_error_stats_count_codes_and_scales_by_hand(backend):
    # Block 0: amax 6 -> scale 448, codes exact. Block 1: its scale underflows. Block 2: zero.
    # Block 3: a subnormal scale.
    x = np.zeros((1, 64), F32)
    x[0, :3] = [6, -6, 0.5]
    x[0, 16:18] = 1.3e-5
    x[0, 48] = 1.4e-5
    q = backend.quantize(x)
    assert q.block_scale.tolist() == [[0x7E, 0, 0, 1]]
    stats = backend.call(fp4kit.error_stats, x, q)
    # Saturated: 6, -6, and the two elements under the zero scale.
    assert stats.saturated == 4 / 64
    assert stats.zero_codes == (64 - 6) / 64
    assert stats.scale_underflow == 1 / 4
    assert stats.scale_subnormal == 1 / 4
    assert stats.max_abs_error == pytest.approx(1.3e-5)
    assert stats.bits_per_element == 8 * (32 + 4 + 4) / 64


def test_error_stats_of_mx_scales_by_hand(backend):
    x = np.zeros((1, 96), F32)
    x[0, 0] = 448
    x[0, 32] = 1e-37
    q = backend.quantize(x, "mxfp8")
    assert q.block_scale.tolist() == [[127, 0, 0]]
    stats = backend.call(fp4kit.error_stats, x, q)
    assert stats.saturated == 1 / 96
    assert stats.zero_codes == 94 / 96
    assert stats.scale_underflow == 0
    assert stats.scale_subnormal == 1 / 3


def test_error_stats_corners(backend):
    zero, one = np.zeros((2, 16), F32), np.ones((2, 16), F32)
    exact = backend.call(fp4kit.error_stats, one, one)
    assert (exact.mse, exact.relative_rms, exact.sqnr) == (0, 0, math.inf)
    assert exact.cosine == pytest.approx(1)
    nothing = backend.call(fp4kit.error_stats, zero, zero)
    assert (nothing.mse, nothing.relative_rms, nothing.sqnr) == (0, 0, math.inf)
    assert nothing.cosine == 1
    invented = backend.call(fp4kit.error_stats, zero, one)
    assert (invented.mse, invented.relative_rms, invented.sqnr) == (1, math.inf, -math.inf)
    assert invented.cosine == 0
    lost = backend.call(fp4kit.error_stats, one, zero)
    assert (lost.relative_rms, lost.sqnr, lost.cosine) == (100, 0, 0)
    opposite = backend.call(fp4kit.error_stats, one, -one)
    assert opposite.cosine == pytest.approx(-1)
    empty = backend.call(fp4kit.error_stats, zero[:0], zero[:0])
    assert (empty.elements, empty.mse, empty.sqnr, empty.cosine) == (0, 0, math.inf, 1)
    unbounded = backend.call(fp4kit.error_stats, np.full((1, 2), np.inf, F32), one[:1, :2])
    assert unbounded.max_abs_error == math.inf
    undefined = backend.call(fp4kit.error_stats, np.full((1, 2), np.nan, F32), one[:1, :2])
    assert math.isnan(undefined.mse)
    assert math.isnan(undefined.sqnr)
    assert math.isnan(undefined.max_abs_error)


def test_error_stats_are_plain_numbers_for_json(backend):
    one = np.ones((1, 16), F32)
    numbers = backend.call(fp4kit.error_stats, one, one).to_dict()
    assert numbers["sqnr"] is None
    assert numbers["mse"] == 0
    assert set(numbers) == {field.name for field in dataclasses.fields(ErrorStats)}


def test_error_stats_do_not_overflow_or_underflow(backend):
    for size in (1e38, 1e-38):
        x = np.full((2, 64), size, F32)
        y = x * F32(0.5)
        stats = backend.call(fp4kit.error_stats, x, y)
        assert stats.relative_rms == pytest.approx(50, rel=1e-6)
        assert stats.sqnr == pytest.approx(10 * math.log10(4), rel=1e-6)
        assert stats.cosine == pytest.approx(1)


def test_error_sums_of_slabs_add_up(backend):
    x = gaussian((64, 64))
    y = backend.dequantize(backend.quantize(x))
    whole = backend.call(error_sums, x, y)
    total = backend.call(error_sums, x[:20], y[:20])
    total += backend.call(error_sums, x[20:21], y[20:21])
    total += backend.call(error_sums, x[21:], y[21:])
    assert total.elements == whole.elements
    assert total.max_abs_error == whole.max_abs_error
    for name in ("sum_x2", "sum_y2", "sum_xy", "sum_d2"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_error_stats_of_a_tensor_equal_those_of_its_values(backend):
    x = gaussian((32, 64), "bfloat16")
    for format in ALL_FORMATS:
        q = backend.quantize(x, format)
        of_codes = backend.call(fp4kit.error_stats, x, q)
        of_values = backend.call(fp4kit.error_stats, x, backend.dequantize(q))
        for name in ("mse", "sqnr", "relative_rms", "cosine", "max_abs_error"):
            assert getattr(of_codes, name) == pytest.approx(getattr(of_values, name), rel=1e-12)
        assert of_codes.bits_per_element == q.bits_per_element


def test_error_stats_refuse_other_shapes(backend):
    x, q = gaussian((4, 64)), backend.quantize(gaussian((2, 64)))
    with pytest.raises(ShapeError, match=r"x has shape \(4, 64\), the quantized tensor \(2, 64\)"):
        backend.call(fp4kit.error_stats, x, q)
    with pytest.raises(ShapeError, match=r"x has shape \(4, 64\), y \(64, 4\)"):
        backend.call(fp4kit.error_stats, x, gaussian((64, 4)))


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_quality_of_gaussian_data_is_what_it_should_be(format, backend):
    x = gaussian((256, 512))
    stats = backend.call(fp4kit.error_stats, x, backend.quantize(x, format))
    low, high = {"nvfp4": (20, 22), "mxfp4": (17, 20), "mxfp8": (30, 33)}.get(format, (24, 27))
    assert low < stats.sqnr < high


# ------------------------------------------------------------------------------------------------
# Faults reported against tools of this kind
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("shape", [(1, 16), (3, 64), (2, 2, 32)])
def test_a2_a_zero_tensor_stays_zero_with_finite_scales(recipe, shape, backend, assert_bits):
    x = np.zeros(shape, F32)
    q = backend.quantize(x, recipe=recipe)
    assert not q.packed.any()
    byte = {"torchao": 0x08, "modelopt": 0x38, "compressed-tensors": 0x20}.get(recipe, 0)
    assert (q.block_scale == byte).all()
    assert np.isfinite(q.second_level[1]).all()
    assert_bits(backend.dequantize(q), x)
    if recipe == "te":
        for direction in ("encode", "decode"):
            converted = fp4kit.convert_second_level(backend.put(q), direction)
            assert backend.get(converted).tolist() == [1.0]


def test_a4_a_tiny_tensor_is_neither_zero_nor_nan(backend):
    x = np.full((1, 16), 1e-36, F32)
    q = backend.quantize(x)
    encode = fp4kit.convert_second_level(backend.put(q), "encode")
    assert backend.get(encode)[0] == np.finfo(F32).max
    assert q.block_scale.tolist() == [[0x66]]
    assert set(q.packed.ravel()) == {0x77}
    # 6 * (q / S) with S = FLT_MAX, not with its rounded (subnormal) inverse.
    assert backend.dequantize(q)[0, 0] == F32(6) * (F32(56) / np.finfo(F32).max)
    assert backend.dequantize(q)[0, 0] == pytest.approx(9.8741525e-37, rel=1e-7)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-36, 7.8e-36, 7.9e-36, 1e-30])
def test_a4_tiny_tensors_of_every_size_and_recipe(recipe, size, backend):
    x = np.full((2, 32), size, F32)
    y = backend.dequantize(backend.quantize(x, recipe=recipe))
    assert np.isfinite(y).all()
    assert (y >= 0).all()
    if size >= 1e-36 and recipe == "te":
        assert (np.abs(y / x - 1) < 0.07).all()


@pytest.mark.parametrize("format", MX_FORMATS)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-37, 1e-30, 1e38, 3.4e38])
def test_a18_extreme_finite_blocks_give_finite_values(format, rule, size, backend):
    x = np.full((1, 32), size, F32)
    q = backend.quantize(x, format, scale_rule=rule)
    y = backend.dequantize(q)
    assert q.block_scale[0, 0] != 255
    assert not np.isnan(y).any()
    if size == 1e-37 and rule == "rceil" and format == "mxfp8":
        assert q.block_scale.tolist() == [[0]]
        assert y[0, 0] == F32(18 * 2.0**-127)
    # 3.4e38 rounds to 2^128 in E4M3, which binary32 does not have.
    if 1e-37 <= size <= 1e38 and format == "mxfp8":
        assert (np.abs(y / x - 1) < 0.125).all()


def test_a5_the_cliff_of_a_small_block_beside_a_large_one(backend):
    for size, byte, codes, value in (
        (1.4e-5, 0x01, 0x55, 1.3079e-5),
        (1.3e-5, 0x00, 0x77, 0.0),
    ):
        x = np.zeros((1, 32), F32)
        x[0, 0], x[0, 16:] = 6, size
        q = backend.quantize(x)
        assert q.block_scale.tolist() == [[0x7E, byte]]
        # Under a zero scale the codes saturate although they decode to 0.
        assert set(q.packed[0, 8:]) == {codes}
        assert backend.dequantize(q)[0, 31] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a5_no_underflowed_block_becomes_nan(recipe, backend):
    x = np.zeros((1, 32 * 40), F32)
    x[0, 0] = 6
    x[0, 16:] = (6 * 0.7 ** (np.arange(16, 1280) // 16)).astype(F32)
    y = backend.dequantize(backend.quantize(x, recipe=recipe))
    assert np.isfinite(y).all()
    assert (np.abs(y) <= 6.7).all()


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a9_ties_go_to_the_even_code(recipe, backend):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = block(*ties, *(-tie for tie in ties), 6)
    wanted = [0, 1, 1, 2, 2, 4, 4]
    calls = {0x38: {"amax": 2688.0}}
    if recipe in ("te", "nvfuser"):
        calls[0x7E] = {}  # measured amax 6: scale 448, and fl(1/448) * 448 is 1
    for byte, options in calls.items():
        q = backend.quantize(x, recipe=recipe, **options)
        assert q.block_scale.tolist() == [[byte]]
        y = backend.dequantize(q)[0]
        assert np.abs(y[:7]).tolist() == pytest.approx(wanted, rel=1e-6)
        assert np.abs(y[7:14]).tolist() == pytest.approx(wanted, rel=1e-6)
        codes = np.stack([q.packed[0] & 15, q.packed[0] >> 4], axis=-1).ravel()
        assert codes[:7].tolist() == [0, 2, 2, 4, 4, 6, 6]
        assert (codes[7:14] & 7).tolist() == [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("order", NIBBLE_ORDERS)
def test_a10_every_code_decodes_by_the_book(order, backend, assert_bits):
    even, odd = np.arange(0, 16, 2, dtype=np.uint8), np.arange(1, 16, 2, dtype=np.uint8)
    packed = even | odd << 4 if order == "low_first" else odd | even << 4
    q = QuantizedTensor(
        packed[None],
        np.full((1, 1), 0x38, np.uint8),
        "nvfp4",
        (1, 16),
        recipe="nvfuser",
        nibble_order=order,
    )
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.array([[*magnitudes, *(-m for m in magnitudes)]], F32)
    expected[0, 8] = -0.0
    assert_bits(backend.dequantize(q), expected)


def test_a10_the_reported_bytes(backend, assert_bits):
    packed = np.array([[0x10, 0x98, 0, 0, 0, 0, 0, 0]], np.uint8)
    q = QuantizedTensor(packed, np.full((1, 1), 0x38, np.uint8), "nvfp4", (1, 16), recipe="torchao")
    assert_bits(backend.dequantize(q)[0, :4], np.array([0, 0.5, -0.0, -0.5], F32))


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a11_signs_of_zero_follow_one_policy_per_recipe(recipe, backend):
    x = block(6, -0.2, -0.0, 0.0, 0.2)
    q = backend.quantize(x, recipe=recipe, amax=6.0)
    codes = np.stack([q.packed[0] & 15, q.packed[0] >> 4], axis=-1).ravel()
    keeps = ALL_RECIPES[recipe].keeps_negative_zero
    assert codes[:5].tolist() == [7, 8, 8 if keeps else 0, 0, 0]
    y = backend.dequantize(q)[0, :5]
    decodes = ALL_RECIPES[recipe].decodes_negative_zero
    assert np.signbit(y).tolist() == [False, decodes, keeps, False, False]


@pytest.mark.parametrize("format", MX_FORMATS)
def test_a11_mx_formats_keep_the_sign_of_zero(format, backend):
    x = block(4, -0.0, 0.0, -1e-6, size=32)
    y = backend.dequantize(backend.quantize(x, format))
    assert np.signbit(y[0, :4]).tolist() == [False, True, False, True]


def test_a12_every_e4m3_scale_byte_decodes_exactly(backend, assert_bits):
    scale = np.arange(256, dtype=np.uint8)[:, None]
    packed = np.full((256, 8), 0x22, np.uint8)
    q = QuantizedTensor(packed, scale, "nvfp4", (256, 16), recipe="torchao")
    y = backend.dequantize(q)[:, 0]
    assert_bits(y, scale.ravel().view(ml_dtypes.float8_e4m3fn).astype(F32))
    assert y[1:8].tolist() == [k * 2.0**-9 for k in range(1, 8)]
    assert np.isnan(y[[0x7F, 0xFF]]).all()
    assert y[0x80] == 0
    assert np.signbit(y[0x80])


def test_every_e8m0_scale_byte_decodes_exactly(backend, assert_bits):
    scale = np.arange(256, dtype=np.uint8)[:, None]
    for format, one in (("mxfp4", 0x22), ("mxfp8", 0x38), ("mxfp8_e5m2", 0x3C)):
        packed = np.full((256, ALL_FORMATS[format].packed_cols(32)), one, np.uint8)
        y = backend.dequantize(QuantizedTensor(packed, scale, format, (256, 32)))[:, 0]
        assert_bits(y, scale.ravel().view(ml_dtypes.float8_e8m0fnu).astype(F32))


#: amax -> mxfp4 scale byte under floor, even, and the third rule of the reports.
A15_BYTES = {
    3.0: (126, 126, 126),
    3.0000002: (126, 126, 127),
    3.5: (126, 127, 127),
    4.0: (127, 127, 127),
    6.0: (127, 127, 127),
    6.0000005: (127, 127, 128),
    6.5: (127, 127, 128),
    7.0: (127, 128, 128),
    7.9999995: (127, 128, 128),
    8.0: (128, 128, 128),
}


@pytest.mark.parametrize("position", [0, 13, 31])
@pytest.mark.parametrize("amax", A15_BYTES)
def test_a15_the_rules_and_their_bytes(amax, position, backend):
    x = np.zeros((1, 32), F32)
    x[0, position] = -amax
    got = {
        rule: int(backend.quantize(x, "mxfp4", scale_rule=rule).block_scale[0, 0])
        for rule in SCALE_RULES
    }
    floor, even, rceil = A15_BYTES[amax]
    # The reports' third rule is ceil(log2(amax/6)), rceil here. OCP's ceil rounds the exponent of
    # amax itself up, so it is one above floor unless amax is a power of two.
    ceil = floor + (amax not in (4.0, 8.0))
    assert got == {"floor": floor, "even": even, "rceil": rceil, "ceil": ceil}


def test_a15_the_rule_is_recorded(backend):
    for rule in SCALE_RULES:
        assert backend.quantize(gaussian((1, 32)), "mxfp4", scale_rule=rule).scale_rule == rule


@pytest.mark.parametrize(
    ("amax", "byte"), [(3.0, 126), (3.0000002, 127), (6.0, 127), (6.0000005, 128), (12.0, 128)]
)
def test_rceil_is_exact_at_six_times_powers_of_two(amax, byte, backend):
    q = backend.quantize(block(amax, size=32), "mxfp4", scale_rule="rceil")
    assert q.block_scale.tolist() == [[byte]]


def test_a16_scales_are_not_built_with_a_rounding_cast(backend):
    # ml_dtypes rounds ties of E8M0 up: 3.0 -> 4.0, 0.75 -> 1.0; no rule does that.
    for amax, wanted in ((3.0, 126), (0.75, 124)):
        q = backend.quantize(block(amax, size=32), "mxfp4", scale_rule="floor")
        assert q.block_scale.tolist() == [[wanted]]
    for dead in (0.0, -0.0):
        q = backend.quantize(block(dead, size=32), "mxfp4")
        assert q.block_scale.tolist() == [[0]]


def test_a17_exponents_are_floored_below_one(backend):
    q = backend.quantize(block(0.3, size=32), "mxfp8", scale_rule="floor")
    assert q.block_scale.tolist() == [[127 + math.floor(math.log2(0.3)) - 8]]


def test_a19_floor_saturates_the_top_of_a_block(backend):
    x = block(960, 957, size=32)
    q = backend.quantize(x, "mxfp8", scale_rule="floor")
    assert q.block_scale.tolist() == [[128]]
    assert backend.dequantize(q)[0, :2].tolist() == [896, 896]
    higher = backend.quantize(x, "mxfp8", scale_rule="ceil")
    assert higher.block_scale.tolist() == [[129]]
    assert backend.dequantize(higher)[0, :2].tolist() == [960, 960]


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_a24_blocks_never_straddle_rows(format, backend, assert_bits):
    x = np.stack([np.full(24, 100, F32), np.full(24, 0.01, F32)])
    q = backend.quantize(x, format, pad=True)
    y = backend.dequantize(q)
    assert (np.abs(y[0] - 100) < 10).all()
    if format != "nvfp4":
        assert (np.abs(y[1] - 0.01) < 0.002).all()
    top = backend.quantize(x[:1], format, pad=True)
    assert_bits(q.packed[:1], top.packed)
    assert_bits(q.block_scale[:1], top.block_scale)


#: Options under which the bytes too stay: others drop the sign of zero (modelopt,
#: compressed-tensors), or store equal values under half the scale (ceil, rceil).
SAME_BYTES = ("te", "nvfuser", "torchao", "comfy", "floor", "even")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 64), (3, 24), (33, 96)])
def test_a24_requantizing_changes_nothing(shape, dtype, backend, assert_bits):
    x = gaussian(shape, dtype)
    for options in (
        *({"recipe": recipe} for recipe in ALL_RECIPES),
        *({"format": name, "scale_rule": rule} for name in MX_FORMATS for rule in SCALE_RULES),
    ):
        q = backend.quantize(x, pad=True, **options)
        y = backend.dequantize(q)
        amax = {}
        if q.second_level is not None:
            direction, value = q.second_level
            amax = {direction if direction == "amax" else f"{direction}_scale": value}
        again = backend.quantize(y, pad=True, **options, **amax)
        assert_bits(backend.dequantize(again) + F32(0), y + F32(0), str(options))
        if SAME_BYTES.count(options.get("recipe", options.get("scale_rule"))):
            assert_bits(again.packed, q.packed, str(options))
            assert_bits(again.block_scale, q.block_scale, str(options))


def test_a24_requantizing_with_a_measured_amax(backend, assert_bits):
    for seed in range(20):
        q = backend.quantize(gaussian((4, 64), seed=seed))
        again = backend.quantize(backend.dequantize(q))
        assert_bits(again.packed, q.packed)
        assert_bits(again.block_scale, q.block_scale)


def test_b1_nibble_order_is_explicit(backend, assert_bits):
    x = block(0.5, -6)
    low = backend.quantize(x, amax=6.0)
    high = backend.quantize(x, amax=6.0, nibble_order="high_first")
    assert low.packed[0, 0] == 0xF1
    assert high.packed[0, 0] == 0x1F
    assert (low.nibble_order, high.nibble_order) == ("low_first", "high_first")
    assert_bits(backend.dequantize(low), backend.dequantize(high))


def test_b14_empty_inputs_give_empty_outputs_of_contract_shapes(backend):
    for format, spec in ALL_FORMATS.items():
        for layout in SCALE_LAYOUTS:
            for shape in ((0, 128), (4, 0), (0, 0), (2, 0, 64), (0,)):
                q = backend.quantize(np.zeros(shape, F32), format, scale_layout=layout)
                cols = shape[-1]
                assert q.shape == shape
                assert q.packed.shape == (*shape[:-1], spec.packed_cols(cols))
                assert q.block_scale.size == 0
                assert backend.dequantize(q).shape == shape
                stats = backend.call(fp4kit.error_stats, np.zeros(shape, F32), q)
                assert stats.elements == 0
