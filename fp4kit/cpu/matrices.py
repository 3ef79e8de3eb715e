# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What checkpoints do with matrices outside of quantization, on all cores.

numba is imported with :mod:`fp4kit.cpu.matrix_kernels`, when a function is first called.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import numpy as np

from fp4kit import arrays
from fp4kit.float_mode import by_ieee
from fp4kit.reference import codecs

from .buffers import read_only
from .threads import run


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("fp4kit.cpu.matrix_kernels")


def transpose(source: np.ndarray, first: int, step: int, out: np.ndarray, at: int) -> None:
    """out[j, at + i] = source[i, first + j * step] for all rows j of `out` and i of `source`.

    Args:
        source: (rows, columns), C-contiguous.
        first: the column that becomes the first row.
        step: distance between columns.
        out: of the same element type, C-contiguous.
        at: the column of `out` that the first row of `source` becomes.
    """
    kernel, source = _kernels().transpose_range, read_only(source)
    run(lambda begin, end: kernel(source, first, step, begin, end, out, at), len(out), len(source))


@by_ieee
def decode_float8(
    codes: np.ndarray,
    table: np.ndarray,
    scale: np.ndarray,
    scale_row: np.ndarray,
    block_cols: int,
    out: np.ndarray,
) -> None:
    """Multiplies the value of each FP8 code by the scale of its block, in binary32.

    Args:
        codes: uint8 (rows, cols).
        table: float32 (256,), the value of each code.
        scale: float32 (scale rows, ceil(cols / block_cols)).
        scale_row: int64 (rows,), the row of `scale` for each row of codes.
        block_cols: columns that share a scale.
        out: float32 (rows, cols) to fill.
    """
    kernels, (rows, cols) = _kernels(), codes.shape
    grid = kernels.Grid(read_only(table), read_only(scale), read_only(scale_row), block_cols)
    codes = read_only(codes)
    run(lambda begin, end: kernels.decode_range(codes, grid, begin, end, out), rows, cols)


@by_ieee
def round_float32(values: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """Rounds once, nearest even: :func:`fp4kit.reference.codecs.from_float32` on all cores.

    Args:
        values: float32, flat, C-contiguous.
        dtype: `bfloat16`, `float16` or `float32`.
        out: uint8, flat, C-contiguous, aligned for the element type; takes as many elements.
    """
    kernels = _kernels()
    raw = out.view(arrays.RAW_DTYPES[dtype])
    even = len(values) // 2 * 2
    pairs = read_only(values[:even].view(np.uint64))
    words = raw[:even].view(kernels.WORD_TYPES[dtype])
    run(lambda begin, end: kernels.round_range(pairs, begin, end, words), len(pairs), 2)
    raw[even:] = codecs.from_float32(values[even:], dtype)
