# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Columns of one matrix as rows of another, tile by tile.

Each tile goes through a small buffer: a power of two between rows, as weights have it, would map
all of a tile's lines to the same few places of the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .cpu_jit import jit, numba
from .cpu_threads import run

TILE = 64
#: Elements between rows of the buffer; no power of two.
STRIDE = TILE + 8

index: Any = numba.uint64


@jit
def transpose_range(
    source: Any, first: Any, step: Any, begin: Any, end: Any, out: Any, at: Any
) -> None:
    """Fills rows begin..end of `out`; see :func:`transpose`."""
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


def transpose(source: np.ndarray, first: int, step: int, out: np.ndarray, at: int) -> None:
    """out[j, at + i] = source[i, first + j * step] for all rows j of `out` and i of `source`.

    Args:
        source: (rows, columns), C-contiguous.
        first: the column that becomes the first row.
        step: distance between columns.
        out: of the same element type, C-contiguous.
        at: the column of `out` that the first row of `source` becomes.
    """
    run(
        lambda begin, end: transpose_range(source, first, step, begin, end, out, at),
        len(out),
        len(source),
    )
