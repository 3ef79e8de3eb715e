# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Panels: an array in pieces of 128 x 256 elements, each widened to float32 once.

A panel stays in the cache while its tiles are loaded for one direction, then for the other, and
128 rows of 4-bit codes fill a cache line of the packed transpose.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .buffers import aligned_output, read_only
from .elements import elements, index, narrow, widen
from .jit import jit
from .threads import run

PANEL_ROWS = 128
PANEL_COLS = 256


class Panel(NamedTuple):
    """A panel of an array.

    Attributes:
        x: float32 elements, rows of PANEL_COLS, flat.
        row: its first row in the array.
        col: its first column.
        rows: rows of it that exist.
        cols: columns of it that exist.
    """

    x: np.ndarray
    row: int
    col: int
    rows: int
    cols: int


@jit
def widen_panel(source, source_cols, panel):
    """Fills a panel from the flat elements of an array."""
    x = panel.x
    for r in range(panel.rows):
        first = index((panel.row + r) * source_cols + panel.col)
        target = index(r * PANEL_COLS)
        for c in range(index(panel.cols)):
            x[target + c] = widen(source[first + c])


@jit
def narrow_panel(panel, out_cols, out):
    """Copies a panel to its place among the flat elements of an array, rounded."""
    x = panel.x
    for r in range(panel.rows):
        source = index(r * PANEL_COLS)
        first = index((panel.row + r) * out_cols + panel.col)
        for c in range(index(panel.cols)):
            out[first + c] = narrow(x[source + c], out[first + c])


def each_panel(shape: tuple[int, int], work: Callable[[Panel], None], alone: str = "") -> None:
    """Calls work(panel) for each panel of an array of a shape, on all cores.

    Args:
        shape: rows and columns.
        work: releases the GIL; the elements of the panel are its to fill.
        alone: `rows` or `columns`: panels that share them are left to one thread.
    """
    rows, cols = shape
    down, across = -(-rows // PANEL_ROWS), -(-cols // PANEL_COLS)
    units, inside = {
        "": (down * across, 1), "rows": (down, across), "columns": (across, down)
    }[alone]  # fmt: skip

    def some(begin: int, end: int) -> None:
        x = np.empty(PANEL_ROWS * PANEL_COLS, np.float32)
        for number in range(begin * inside, end * inside):
            i, j = divmod(number, down)[::-1] if alone == "columns" else divmod(number, across)
            row, col = i * PANEL_ROWS, j * PANEL_COLS
            work(Panel(x, row, col, min(PANEL_ROWS, rows - row), min(PANEL_COLS, cols - col)))

    run(some, units, inside * PANEL_ROWS * PANEL_COLS)


def each_widened(x: np.ndarray, dtype: str, work: Callable[[Panel], None], alone: str = "") -> None:
    """:func:`each_panel` of a raw array (rows, cols), filled with its elements."""
    source, cols = read_only(elements(x, dtype)), x.shape[1]

    def widened(panel: Panel) -> None:
        widen_panel(source, cols, panel)
        work(panel)

    each_panel((x.shape[0], cols), widened, alone)


def fill_panels(out: np.ndarray, dtype: str, work: Callable[[Panel], None]) -> None:
    """Fills a raw array (rows, cols) panel by panel with what work(panel) leaves in the panel."""
    cols = out.shape[1]
    with aligned_output(out) as whole:
        result = elements(whole, dtype)

        def narrowed(panel: Panel) -> None:
            work(panel)
            narrow_panel(panel, cols, result)

        each_panel((out.shape[0], cols), narrowed)
