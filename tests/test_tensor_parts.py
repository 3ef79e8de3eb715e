# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of quantized tensors: rows, ranges and blocks of their arrays."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from fp4kit import OptionError
from fp4kit.formats import SCALE_LAYOUTS
from sample_arrays import F32, gaussian, quantized

LAYOUTS = st.sampled_from(SCALE_LAYOUTS)
DIRECTIONS = st.sampled_from(["rowwise", "columnwise"])
FORMATS = st.sampled_from(["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"])


@pytest.fixture
def q():
    return quantized(gaussian((4, 64)))


@st.composite
def indices(draw, shape):
    """Numbers, then a range, then whole axes, most of them at multiples of 8."""

    def bound(size):
        return draw(st.none() | st.integers(-2, 20).map(lambda n: 8 * n) | st.integers(0, size))

    leading = min(draw(st.integers(0, 2)), len(shape) - 1)
    numbers = [draw(st.integers(-size, size - 1)) for size in shape[:leading]]
    chosen = [*numbers, slice(bound(shape[len(numbers)]), bound(shape[len(numbers)]))]
    if draw(st.booleans()):
        chosen = [*chosen, Ellipsis, slice(bound(shape[-1]), bound(shape[-1]))]
    if len(chosen) > len(shape) + (Ellipsis in chosen):
        chosen = chosen[: len(shape)]
    return tuple(chosen) if len(chosen) > 1 else chosen[0]


def _index_and_options():
    shapes = st.sampled_from([(64,), (160, 64), (4, 128, 32), (2, 2, 32, 64), (3, 40, 48)])
    return shapes.flatmap(lambda shape: st.tuples(st.just(shape), indices(shape)))


@given(_index_and_options(), FORMATS, DIRECTIONS, LAYOUTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_parts_decode_to_parts(chosen, format, direction, layout, row_scaled):
    shape, index = chosen
    options = {"direction": direction, "scale_layout": layout, "pad": True}
    if row_scaled and format == "nvfp4":
        options["second_level"] = "row_scaled"
    q = quantized(gaussian(shape), format, **options)
    whole = q.dequantize(backend="reference")
    try:
        part = q[index]
    except OptionError:
        return
    expected = whole[index]
    assert part.shape == expected.shape
    np.testing.assert_array_equal(part.dequantize(backend="reference"), expected)
    assert not part.packed.size or np.shares_memory(part.packed, q.packed)
    assert part == part[...] == pickle.loads(pickle.dumps(part))


def test_parts_at_any_row_are_views_of_linear_scales(q):
    for index in (1, slice(1, 3), (slice(None), slice(16, 48)), (2, slice(32, None)), -1):
        part = q[index]
        assert np.shares_memory(part.packed, q.packed)
        assert np.shares_memory(part.block_scale, q.block_scale)
        assert part.amax is q.amax
        np.testing.assert_array_equal(part.dequantize(), q.dequantize()[index])
    assert [row.shape for row in q] == [(64,)] * 4


@pytest.mark.parametrize(("layout", "height"), [("swizzled_128x4", 128), ("swizzled_8x4", 8)])
def test_parts_of_swizzled_scales_are_whole_tiles(layout, height, assert_tensors):
    x = gaussian((2 * height + 3, 80))
    q = quantized(x, amax=5.0, scale_layout=layout)
    for rows in (slice(0, height), slice(height, None), slice(height, 2 * height), slice(0, 0)):
        part = q[rows]
        assert not part.block_scale.size or np.shares_memory(part.block_scale, q.block_scale)
        assert_tensors(part, quantized(x[rows], amax=5.0, scale_layout=layout))
    for rows in (slice(0, 5), slice(3, None), 1):
        with pytest.raises(OptionError, match=f"take multiples of {height}, or quantize with"):
            q[rows]
    with pytest.raises(OptionError, match="a part of the last axis do not lie together"):
        q[:, 16:]


def test_parts_of_second_levels():
    x = gaussian((6, 2, 32))
    rows = quantized(x, second_level="row_scaled")
    assert rows[1:3].amax.tolist() == rows.amax.reshape(6, 2)[1:3].ravel().tolist()
    experts = quantized(x, amax=np.array([1, 2, 3], F32))
    assert experts[2:4].amax.tolist() == [2]
    assert experts[2:].amax.tolist() == [2, 3]
    assert experts[5, 1].amax.tolist() == [3]
    with pytest.raises(OptionError, match=r"rows 2 \.\. 8 take parts of groups of 4 .*of 4, or"):
        experts[1:4]


def test_parts_of_square_tiles(assert_tensors):
    x = gaussian((64, 64))
    q = quantized(x, amax=5.0, block_shape="2d")
    assert_tensors(q[16:48], quantized(x[16:48], amax=5.0, block_shape="2d"))
    with pytest.raises(OptionError, match=r"rows 8 \.\. 24 cut through square tiles of 16"):
        q[8:24]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 3), "single elements of the last axis"),
        (slice(0, 4, 2), "has a step"),
        ((slice(None), slice(8, 24)), "cut through blocks of 16"),
        ("rows", "neither a whole number nor a range"),
        (True, "neither a whole number nor a range"),
        ([0, 1], "neither a whole number nor a range"),
        (np.array([True, False]), "neither a whole number nor a range"),
        (None, "neither a whole number nor a range"),
        (slice("a", "b"), "no range of whole numbers"),
        (1.0, "neither a whole number nor a range"),
    ],
)
def test_parts_that_are_refused(q, index, message):
    with pytest.raises(OptionError, match=message):
        q[index]
    with pytest.raises(OptionError, match="rows that do not follow each other"):
        quantized(gaussian((4, 4, 16)))[1:3, 1:3]


def test_indices_out_of_range(q):
    for index in (4, -5, (0, slice(None), 0), (Ellipsis, Ellipsis)):
        with pytest.raises(IndexError):
            q[index]


# ------------------------------------------------------------------------------------------------
# Float32 scales
# ------------------------------------------------------------------------------------------------

GRIDS = {
    "tensor": {"granularity": "tensor"},
    "channel": {"granularity": "channel"},
    "columns": {"granularity": "channel", "direction": "columnwise"},
    "block": {"granularity": "block"},
}


@pytest.mark.parametrize("options", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("shape", [(3, 130, 200), (200,), (1, 40), (0, 16), (16, 0)])
def test_tensors_with_float32_scales(options, shape):
    q = quantized(gaussian(shape), "fp8", **options)
    scales, codes = q.block_scale_values(), q.codes()
    assert (scales.dtype, codes.shape) == (F32, shape)
    assert q.nbytes == codes.size + 4 * scales.size
    assert pickle.loads(pickle.dumps(q)) == q == copy.deepcopy(q) == q[...]
    assert q != dataclasses.replace(q, block_scale=q.block_scale + F32(1)) or not scales.size
    assert repr(q).startswith("QuantizedTensor('fp8', ")
    if codes.size:
        rows = codes.reshape(-1, shape[-1])
        spread = scales.reshape(-1, scales.shape[-1])
        if options["granularity"] == "block":
            spread = spread.repeat(128, 0).repeat(128, 1)[: rows.shape[0], : rows.shape[1]]
        values = (fp4kit.ALL_FORMATS["fp8"].element.values[rows] * spread).reshape(shape)
        np.testing.assert_allclose(q.dequantize(), values, rtol=1e-6)


@pytest.mark.parametrize("options", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize(
    "index",
    [
        1,
        slice(0, 0),
        slice(1, 3),
        (0, slice(0, 128)),
        (slice(0, 2), slice(None), slice(128, None)),
        (0, slice(0, 0), slice(128, 128)),
    ],
)
def test_parts_of_float32_scales(options, index):
    q = quantized(gaussian((3, 128, 200)), "fp8", **options)
    part = q[index]
    np.testing.assert_array_equal(part.dequantize(), q.dequantize()[index])
    assert not part.packed.size or np.shares_memory(part.packed, q.packed)
