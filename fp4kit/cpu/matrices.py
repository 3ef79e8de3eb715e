# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The numba kernels of `cpu_float8` and `cpu_transpose`, which import them when first needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import jit, numba

TILE = 64
#: Elements between rows of the buffer; no power of two.
STRIDE = TILE + 8

index: Any = numba.uint64


@jit
def decode_range(
    codes: np.ndarray,
    table: np.ndarray,
    scale: np.ndarray,
    scale_row: np.ndarray,
    block_cols: int,
    begin: int,
    end: int,
    out: np.ndarray,
) -> None:
    """Decodes rows begin..end; see :func:`decode`."""
    cols = codes.shape[1]
    for row in range(begin, end):
        for block in range(scale.shape[1]):
            factor = scale[scale_row[row], block]
            for col in range(block * block_cols, min((block + 1) * block_cols, cols)):
                out[row, col] = table[codes[row, col]] * factor


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
