# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How thread blocks divide small products: real sizes on an H200."""

import pytest

from fp4kit.cuda import matmul_shapes
from fp4kit.cuda.matmul_shapes import MOST_SHARED, PREPARED, ROWS, Shape
from fp4kit.formats import get_format

FORMATS = ("nvfp4", "mxfp4")
SIZES = [(28672, 8192), (8192, 28672), (4096, 4096), (14336, 4096), (5120, 17408), (151936, 2048)]


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("form", [PREPARED, ROWS])
def test_real_sizes_have_a_shape(form, tokens):
    for rows, depth in SIZES:
        for name in FORMATS:
            spec = get_format(name)
            sizes = matmul_shapes.Sizes(tokens, rows, depth)
            shape = matmul_shapes.choose(spec, form, sizes, 132, MOST_SHARED)
            assert shape is not None
            assert shape.shared(spec, form, depth) <= MOST_SHARED
            assert shape.tokens >= tokens
            assert shape.threads <= 1024


def test_thread_blocks_have_as_much_to_do():
    shape = Shape(14, 1, 1, 2, 4, 16, True)
    assert shape.span(28672, 1, 132) == 14  # 128 blocks
    assert shape.span(151936, 1, 132) == 12  # 792 of 9496 tiles, not 679 of which some are seventh
    assert shape.span(2048, 64, 132) == 13  # ten for each member, of which a block takes five
    assert shape._replace(groups=7, tiles=2).span(4096, 1, 132) == 2  # whole warps
    assert shape._replace(staged=False).span(2048, 64, 132) == 14


@pytest.mark.parametrize("tokens", [8, 100, 288, 1000, 4096])
@pytest.mark.parametrize("form", [PREPARED, ROWS])
def test_members_have_a_shape(form, tokens):
    spec, sizes = get_format("nvfp4"), matmul_shapes.Sizes(tokens, 2048, 4096)
    shape = matmul_shapes.choose_for_members(spec, form, sizes, 64, 132, MOST_SHARED)
    assert shape is not None
    assert shape.staged
    assert shape.tokens >= min(tokens / 64, 64)
    assert shape.shared(spec, form, 4096) <= MOST_SHARED
    # A device of 99 KiB has one as well, for a few rows.
    small = matmul_shapes.choose_for_members(
        spec, form, sizes._replace(tokens=64), 64, 132, 99 << 10
    )
    assert small is not None
    assert small.tokens == 8
