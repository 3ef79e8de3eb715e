# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Error statistics: by hand, at the corners, of chunks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import fp4kit
from fp4kit import ShapeError
from fp4kit.api.metrics import ErrorStats, error_sums
from fp4kit.formats import BLOCK_FORMATS
from sample_arrays import F32, gaussian


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
    for format in BLOCK_FORMATS:
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


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_quality_of_gaussian_data_is_what_it_should_be(format, backend):
    x = gaussian((256, 512))
    stats = backend.call(fp4kit.error_stats, x, backend.quantize(x, format))
    low, high = {"nvfp4": (20, 22), "mxfp4": (17, 20), "mxfp8": (30, 33)}.get(format, (24, 27))
    assert low < stats.sqnr < high
