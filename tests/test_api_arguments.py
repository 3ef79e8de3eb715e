# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions: options and inputs, and what is said of those that are refused.

Tests named after an id like A5 or B4 pin a fault, see test_reported_faults.py.
"""

from __future__ import annotations

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import BackendUnavailableError, DtypeError, NonFiniteError, OptionError, ShapeError
from fp4kit.formats import BLOCK_FORMATS, DTYPES, NIBBLE_ORDERS
from sample_arrays import F32, MX_FORMATS, NUMPY, block, gaussian

CALLS = {
    "quantize": fp4kit.quantize,
    "quantize_dequantize": fp4kit.quantize_dequantize,
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


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
        ({"second_level": "none"}, "te", "nvfuser or torchao"),
        ({"recipe": "comfy", "second_level": "none"}, "comfy", "nvfuser or torchao"),
        ({"decode_scale": 1.0}, "te", "amax"),
        ({"recipe": "nvfuser", "decode_scale": 1.0}, "decode_scale", "encode_scale"),
        ({"recipe": "torchao", "encode_scale": 1.0}, "encode_scale", "decode_scale"),
        ({"amax": 1.0, "encode_scale": 1.0, "recipe": "nvfuser"}, "amax, encode_scale", "one of"),
        ({"format": "mxfp4", "amax": 1.0}, "mxfp4", "has none"),
        ({"recipe": "nvfuser", "second_level": "none", "amax": 1.0}, "nvfp4", "has none"),
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


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(4, 100), (5, 3), (3, 40, 1), (7,), (2, 60)])
def test_b7_ragged_rows_are_refused_or_padded_on_request(format, shape, call):
    x = np.ones(shape, F32)
    size = BLOCK_FORMATS[format].block_size
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
    for format in BLOCK_FORMATS:
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
    for format, spec in BLOCK_FORMATS.items():
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
@pytest.mark.parametrize("format", BLOCK_FORMATS)
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


@pytest.mark.parametrize("format", BLOCK_FORMATS)
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
    element = BLOCK_FORMATS[format].element
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
    element = BLOCK_FORMATS[format].element
    with np.errstate(over="ignore"):
        largest = F32(element.max) * F32(2.0**127)
    assert y[0, 1] == largest == -y[0, 2]
