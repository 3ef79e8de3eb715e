# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 codes under a grid of scales (per tensor, channel or block of rows and columns)."""

from __future__ import annotations

import numpy as np

from .cpu_jit import jit
from .cpu_threads import run


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


def decode(
    codes: np.ndarray,
    table: np.ndarray,
    scale: np.ndarray,
    scale_row: np.ndarray,
    block_cols: int,
    out: np.ndarray,
) -> None:
    """Multiplies the value of each code by the scale of its block, in binary32.

    Args:
        codes: uint8 (rows, cols).
        table: float32 (256,), the value of each code.
        scale: float32 (scale rows, ceil(cols / block_cols)).
        scale_row: int64 (rows,), the row of `scale` for each row of codes.
        block_cols: columns that share a scale.
        out: float32 (rows, cols) to fill.
    """
    rows, cols = codes.shape
    run(
        lambda begin, end: decode_range(
            codes, table, scale, scale_row, block_cols, begin, end, out
        ),
        rows,
        cols,
    )
