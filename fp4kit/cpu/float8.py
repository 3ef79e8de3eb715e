# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 codes under a grid of scales (per tensor, channel or block of rows and columns)."""

from __future__ import annotations

import importlib

import numpy as np

from fp4kit.float_mode import by_ieee

from .load import read_only
from .threads import run


@by_ieee
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
    kernel = importlib.import_module("fp4kit.cpu.matrices").decode_range
    rows, cols = codes.shape
    codes, table, scale = read_only(codes), read_only(table), read_only(scale)
    scale_row = read_only(scale_row)
    run(
        lambda begin, end: kernel(codes, table, scale, scale_row, block_cols, begin, end, out),
        rows,
        cols,
    )
