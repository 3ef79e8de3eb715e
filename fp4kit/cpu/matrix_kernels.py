# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The numba kernels of :mod:`fp4kit.cpu.matrices`."""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .elements import WORD_TYPES as WORD_TYPES
from .elements import high, index, join, low
from .jit import jit, jit_of

#: A tile goes through a small buffer: a power of two between rows, as weights have it, would map
#: all of a tile's lines to the same few places of the cache.
TILE = 64
#: Elements between rows of the buffer; no power of two.
STRIDE = TILE + 8


class Grid(NamedTuple):
    """The scales of FP8 codes; see :func:`fp4kit.cpu.matrices.decode_float8`."""

    table: np.ndarray
    scale: np.ndarray
    scale_row: np.ndarray
    block_cols: int


@jit
def decode_range(codes, grid, begin, end, out):
    """Decodes rows begin..end."""
    cols, size = codes.shape[1], grid.block_cols
    table, scale, scale_row = grid.table, grid.scale, grid.scale_row
    for row in range(begin, end):
        for block in range(scale.shape[1]):
            factor = scale[scale_row[row], block]
            for col in range(block * size, min((block + 1) * size, cols)):
                out[row, col] = table[codes[row, col]] * factor


@jit
def round_range(pairs, begin, end, out):
    """Rounds pairs begin..end of float32 (u64 words) to the element type of the words of `out`."""
    for i in range(begin, end):
        out[i] = join(low(pairs[i]), high(pairs[i]), out[i])


@jit_of(announced=False, allocates=True)
def transpose_range(source, first, step, begin, end, out, at):
    """Fills rows begin..end of `out`; see :func:`fp4kit.cpu.matrices.transpose`."""
    tile = np.empty(TILE * STRIDE, source.dtype)
    # Unsigned, or numba would look at every index whether it is negative.
    rows, begin, end = index(source.shape[0]), index(begin), index(end)
    first, step, at = index(first), index(step), index(at)
    side, stride = index(TILE), index(STRIDE)
    for column in range(begin, end, side):
        columns = min(side, end - column)
        for row in range(index(0), rows, side):
            count = min(side, rows - row)
            for i in range(count):
                for j in range(columns):
                    tile[i * stride + j] = source[row + i, first + (column + j) * step]
            for j in range(columns):
                for i in range(count):
                    out[column + j, at + row + i] = tile[i * stride + j]
