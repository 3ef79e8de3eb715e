# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Swizzled scales: padding, shapes, refusals.

Tests named after an id like A5 or B4 pin a fault, see test_reported_faults.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, OptionError, ShapeError
from fp4kit.formats import BLOCK_FORMATS
from sample_arrays import F32, gaussian


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


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("cols", [1504, 96])
def test_b6_padding_scales_never_enter_the_result(format, cols, backend, assert_bits):
    x = gaussian((33, cols))
    q = backend.quantize(x, format, scale_layout="swizzled_128x4")
    blocks = cols // BLOCK_FORMATS[format].block_size
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
