# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and column sums on CUDA: kernel instances, grids and arguments, as integers.

Nothing here knows CuPy; :mod:`fp4kit.backends.cuda_operations` launches what these functions give.
"""

from __future__ import annotations

from fp4kit.activations import ACTIVATIONS, DERIVATIVES, SUM_ROWS
from fp4kit.formats import DTYPES

from .cuda_launch import ITEM_SIZES, VECTOR, Launch, fast_division, grid_for, rows_are_vectors
from .cuda_module import CXX_DTYPES, THREADS, Instance, instance

#: Functions that multiply with a second value (activations.cuh's has_factor).
WITH_FACTOR = ("swiglu", *DERIVATIVES)
#: Rows that a thread block of column_sums.cu takes: two levels of the sums.
TILE_ROWS = SUM_ROWS * SUM_ROWS
#: And bytes of each.
TILE_BYTES = THREADS // SUM_ROWS * VECTOR


def _function(name: str | None) -> str:
    return "kNoFunction" if name is None else f"k{name.capitalize()}"


def activate_kernel(name: str, dtype: str, vector: bool) -> Instance:
    """An activation of an element type, with 16-byte accesses or single ones."""
    return instance("activate_kernel", "activate.cu", CXX_DTYPES[dtype], _function(name), vector)


def column_sums_kernel(name: str | None, dtype: str, vector: bool) -> Instance:
    """Column sums of an element type, of its activation's results if one is named."""
    names = CXX_DTYPES[dtype], _function(name)
    return instance("column_sums_kernel", "column_sums.cu", *names, vector)


def sources(name: str, x: int, other: int, width: int, dtype: str) -> tuple[int, int]:
    """Addresses of what is activated and of what multiplies it (0 where nothing does).

    Args:
        name: one of ACTIVATIONS.
        x: address of the input.
        other: address of a derivative's second input.
        width: columns of the result.
        dtype: element type.
    """
    if name == "swiglu":
        return x, x + width * ITEM_SIZES[dtype]
    return (other, x) if name in DERIVATIVES else (x, 0)


def can_vector(name: str, width: int, dtype: str) -> bool:
    """Whether `activate_kernel` may take 16-byte pieces of aligned arrays."""
    return name != "swiglu" or rows_are_vectors(width, dtype)


def _unroll(name: str, vector: bool) -> int:
    """activate.cu's activate_unroll."""
    if not vector:
        return 4
    return 1 if name in WITH_FACTOR else 2


def activate_launch(name: str, dtype: str, rows: int, width: int, vector: bool) -> Launch:
    """For (gate, factor, out), out being (rows, width)."""
    size = rows * width
    unit = VECTOR // ITEM_SIZES[dtype] if vector else 1
    unroll = _unroll(name, vector)
    # A last block may count as far as its tile goes; and one must be there for the last elements.
    grid = grid_for(max(1, -(-(size // unit) // unroll)))
    row = width // unit if name == "swiglu" else 1
    magic, shift = fast_division(row, size // unit + THREADS * unroll)
    return Launch(activate_kernel(name, dtype, vector), grid, (size, row, magic, shift))


def partial_rows(rows: int) -> int:
    """Rows of sums that one launch of `column_sums_kernel` leaves."""
    return -(-rows // TILE_ROWS)


def column_sums_launch(name: str | None, dtype: str, rows: int, cols: int, vector: bool) -> Launch:
    """For (gate, factor, out, sums): without a name factor and out are not looked at."""
    across = -(-cols // (TILE_BYTES // ITEM_SIZES[dtype]))
    pitch = 2 * cols if name == "swiglu" else cols
    grid = grid_for(partial_rows(rows) * across * THREADS)
    return Launch(column_sums_kernel(name, dtype, vector), grid, (rows, cols, pitch, across))


def all_instances() -> list[Instance]:
    """Every kernel of these operations; tests compile each of them."""
    result = []
    for dtype in DTYPES:
        result += [column_sums_kernel(None, dtype, vector) for vector in (True, False)]
        for name in ACTIVATIONS:
            result.append(column_sums_kernel(name, dtype, True))
            result += [activate_kernel(name, dtype, vector) for vector in (True, False)]
    return result
