# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every backend equals the reference: amax, swizzle, error sums. See test_parity.py."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import fp4kit
from fp4kit.api.metrics import error_sums
from fp4kit.formats import DTYPES, SCALE_LAYOUTS
from parity_cases import DTYPE_PAIRS, OPTIONS, assert_sums, generator, raw_bits, values
from sample_arrays import F32, NUMPY


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(dtype, fast_backend, reference, assert_bits):
    shapes = [(), (0,), (1,), (3,), (17,), (5, 7), (3, 0), (2, 3, 5), (300_001,)]
    for shape in shapes:
        x = values(shape, dtype, "amax")
        assert_bits(fast_backend.call(fp4kit.amax, x), reference.call(fp4kit.amax, x), str(shape))
        assert reference.call(fp4kit.amax, x)[0] == np.abs(x.astype(F32)).max(initial=0)
    for number in range(20):
        x = raw_bits((number + 1, 37), dtype, "amax", number)
        assert_bits(fast_backend.call(fp4kit.amax, x), reference.call(fp4kit.amax, x))
    special = np.array([[np.nan, -np.inf], [np.nan, np.nan], [-0.0, np.nan], [-3, 2]], F32)
    for row in special.astype(NUMPY[dtype]):
        assert_bits(fast_backend.call(fp4kit.amax, row), reference.call(fp4kit.amax, row))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_swizzle(layout, fast_backend, reference, assert_bits):
    shapes = [(1, 1), (3, 3), (9, 1), (127, 7), (128, 4), (129, 5), (5, 128), (130, 47), (2, 3, 6)]
    for shape in [*shapes, (0, 4), (4, 0), (7,)]:
        scales = generator(shape).integers(1, 256, shape).astype(np.uint8)
        expected = reference.call(fp4kit.swizzle, scales, layout)
        assert_bits(fast_backend.call(fp4kit.swizzle, scales, layout), expected, str(shape))
        for backend in (reference, fast_backend):
            back = backend.call(fp4kit.unswizzle, expected, shape, layout)
            assert_bits(back, scales, f"{backend.name} {shape}")


@pytest.mark.parametrize("option", OPTIONS)
def test_error_sums(option, fast_backend, reference):
    options = {**OPTIONS[option], "pad": True}
    for shape, dtype in itertools.product([(129, 80), (5, 3), (512, 60), (0, 64), (40,)], DTYPES):
        x = values(shape, dtype, "sums")
        q = reference.quantize(x, scale_layout=SCALE_LAYOUTS[len(shape)], **options)
        expected = reference.call(error_sums, x, q)
        assert_sums(fast_backend.call(error_sums, x, q), expected)


@pytest.mark.parametrize("options", [
    {"scale_search": "four_over_six", "e4m3_max": 256},
    {"scale_search": "sweep", "e4m3_max": 256, "direction": "columnwise",
     "scale_layout": "swizzled_128x4"},
    {"scale_search": "four_over_six", "e4m3_max": 256, "direction": "columnwise",
     "block_shape": "2d"},
    {"scale_search": "four_over_six", "e4m3_max": 256, "second_level": "row_scaled"},
    {"direction": "columnwise", "recipe": "nvfuser", "nibble_order": "high_first"},
    {"direction": "columnwise", "second_level": "per_token"},
    {"direction": "columnwise", "format": "mxfp8"},
])  # fmt: skip
def test_error_sums_of_variants(options, fast_backend, reference):
    for shape, dtype in itertools.product([(129, 80), (5, 3), (2, 24, 60)], DTYPES):
        # Amaxes whose encode scale is clamped under one range and not under the other, too.
        for factor in (1, 2.0**-120):
            x = (values(shape, dtype, "sums").astype(F32) * F32(factor)).astype(NUMPY[dtype])
            q = reference.quantize(x, pad=True, **options)
            expected = reference.call(error_sums, x, q)
            assert_sums(fast_backend.call(error_sums, x, q), expected)


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPE_PAIRS)
def test_error_sums_of_arrays(dtype, out_dtype, fast_backend, reference):
    for shape in [(129, 80), (5, 3), (3,), (), (0, 64), (512, 60), (600, 500)]:
        x = values(shape, dtype, "sums")
        y = values(shape, out_dtype, "sums")
        expected = reference.call(error_sums, x, y)
        assert_sums(fast_backend.call(error_sums, x, y), expected)


def test_error_sums_of_nonfinite_values(fast_backend, reference):
    for first, second in (
        (np.nan, 1.0),
        (np.inf, 1.0),
        (np.inf, np.inf),
        (1.0, np.nan),
        (-np.inf, np.inf),
    ):
        for size in (2, 33, 1000):
            x, y = np.ones((1, size), F32), np.ones((1, size), F32)
            x[0, size // 2], y[0, size // 2] = first, second
            with np.errstate(invalid="ignore"):
                expected = reference.call(error_sums, x, y)
            assert_sums(fast_backend.call(error_sums, x, y), expected)


@given(
    shape=st.tuples(st.integers(0, 300), st.integers(0, 40)),
    layout=st.sampled_from(SCALE_LAYOUTS),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_unswizzle_inverts_swizzle(shape, layout, seed, backend, assert_bits):
    scales = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    stored = backend.call(fp4kit.swizzle, scales, layout)
    assert np.count_nonzero(stored) == np.count_nonzero(scales)
    assert_bits(backend.call(fp4kit.unswizzle, stored, shape, layout), scales)
