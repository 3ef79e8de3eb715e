# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Faults reported against tools of this kind.

Tests named after an id like A5 or B4 pin a fault that users of another tool met.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import QuantizedTensor
from fp4kit.formats import (
    ALL_RECIPES,
    BLOCK_FORMATS,
    DTYPES,
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
)
from sample_arrays import F32, MX_FORMATS, block, gaussian


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
        for direction in ("encode_scale", "decode_scale"):
            converted = fp4kit.convert_second_level(backend.put(q), direction)
            assert backend.get(converted).tolist() == [1.0]


def test_a4_a_tiny_tensor_is_neither_zero_nor_nan(backend):
    x = np.full((1, 16), 1e-36, F32)
    q = backend.quantize(x)
    encode = fp4kit.convert_second_level(backend.put(q), "encode_scale")
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
        packed = np.full((256, BLOCK_FORMATS[format].packed_cols(32)), one, np.uint8)
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


@pytest.mark.parametrize("format", BLOCK_FORMATS)
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
            amax = {direction: value}
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
    for format, spec in BLOCK_FORMATS.items():
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
