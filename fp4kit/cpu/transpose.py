# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Columns of one matrix as rows of another, tile by tile.

Each tile goes through a small buffer: a power of two between rows, as weights have it, would map
all of a tile's lines to the same few places of the cache.
"""

from __future__ import annotations

import importlib

import numpy as np

from .load import read_only
from .threads import run


def transpose(source: np.ndarray, first: int, step: int, out: np.ndarray, at: int) -> None:
    """out[j, at + i] = source[i, first + j * step] for all rows j of `out` and i of `source`.

    Args:
        source: (rows, columns), C-contiguous.
        first: the column that becomes the first row.
        step: distance between columns.
        out: of the same element type, C-contiguous.
        at: the column of `out` that the first row of `source` becomes.
    """
    kernel = importlib.import_module("fp4kit.cpu.matrices").transpose_range
    source = read_only(source)
    run(
        lambda begin, end: kernel(source, first, step, begin, end, out, at),
        len(out),
        len(source),
    )
