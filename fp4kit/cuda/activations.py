# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and column sums on CUDA: kernel instances, grids and arguments, as integers.

Nothing here knows CuPy; :mod:`fp4kit.cuda.operations` launches what these functions give.
"""

from __future__ import annotations

from fp4kit.backend.interface import Plan
from fp4kit.formats import ALL_RECIPES, BLOCK_FORMATS, DTYPES
from fp4kit.reference.activations import ACTIVATIONS, DERIVATIVES, SUM_ROWS
from fp4kit.scheme import as_scheme

from .compile import CXX_DTYPES, CXX_FORMATS, CXX_LAYOUTS, Instance, function_name, instance
from .geometry import LANE, THREADS
from .launch import (
    ITEM_SIZES,
    VECTOR,
    Launch,
    fast_division,
    flat_scalars,
    grid_for,
    rows_are_vectors,
)
from .variants import cxx_recipe

#: Functions that multiply with a second value (activation/activations.cuh's has_factor).
WITH_FACTOR = ("swiglu", *DERIVATIVES)
#: Rows that a thread block of reduce/column_sums.cu takes: two levels of the sums.
TILE_ROWS = SUM_ROWS * SUM_ROWS
#: And bytes of each.
TILE_BYTES = THREADS // SUM_ROWS * VECTOR


def activate_kernel(name: str, dtype: str, vector: bool) -> Instance:
    """An activation of an element type, with 16-byte accesses or single ones."""
    return instance(
        "activate_kernel", "activation/activate.cu", CXX_DTYPES[dtype], function_name(name), vector
    )


def column_sums_kernel(name: str | None, dtype: str, vector: bool) -> Instance:
    """Column sums of an element type, of its activation's results if one is named."""
    names = CXX_DTYPES[dtype], function_name(name)
    return instance("column_sums_kernel", "reduce/column_sums.cu", *names, vector)


def sources(name: str | None, x: int, other: int, width: int, dtype: str) -> tuple[int, int]:
    """Addresses of what is activated and of what multiplies it (0 where nothing does).

    Args:
        name: one of ACTIVATIONS, or None.
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
    """activation/activate.cu's activate_unroll."""
    if not vector:
        return 4
    return 1 if name in WITH_FACTOR else 2


def activate_launch(name: str, dtype: str, rows: int, width: int, vector: bool) -> Launch:
    """For (gate, factor, out, measured), out being (rows, width)."""
    size = rows * width
    unit = VECTOR // ITEM_SIZES[dtype] if vector else 1
    unroll = _unroll(name, vector)
    # A last block may count as far as its tile goes; and one must be there for the last elements.
    grid = grid_for(max(1, -(-(size // unit) // unroll)))
    row = width // unit if name == "swiglu" else 1
    magic, shift = fast_division(row, size // unit + THREADS * unroll)
    return Launch(activate_kernel(name, dtype, vector), grid, (size, row, magic, shift))


def quantize_activated_kernel(plan: Plan, dtype: str, name: str) -> Instance:
    """Quantized rows of an activation of an element type."""
    names = _quantized(plan, dtype, name)
    return instance("quantize_rowwise_activated_kernel", "quantize/rowwise.cu", *names)


def quantize_sums_kernel(plan: Plan, dtype: str, name: str | None) -> Instance:
    """Quantized rows and column sums of an element type, or of its activation."""
    return instance(
        "quantize_rowwise_column_sums_kernel",
        "quantize/rowwise_column_sums.cu",
        *_quantized(plan, dtype, name),
    )


def _quantized(plan: Plan, dtype: str, name: str | None) -> tuple[str | bool, ...]:
    return (
        CXX_FORMATS[plan.format.name],
        CXX_DTYPES[dtype],
        cxx_recipe(plan),
        plan.has_second_level,
        CXX_LAYOUTS[plan.scale_layout],
        function_name(name),
    )


def quantize_sums_launch(plan: Plan, dtype: str, name: str | None) -> Launch:
    """For (gate, factor, second, packed, block_scale, sums)."""
    _, rows, blocks, stored_rows, stored_cols, _, _, high_first, rule, padded = flat_scalars(plan)
    lanes = plan.cols // LANE
    across = -(-lanes // (THREADS // SUM_ROWS))
    pitch = 2 * lanes if name == "swiglu" else lanes
    shape = rows, blocks, stored_rows, stored_cols, pitch, across
    grid = grid_for(partial_rows(rows) * across * THREADS)
    return Launch(quantize_sums_kernel(plan, dtype, name), grid, (*shape, high_first, rule, padded))


def quantize_activated_launch(plan: Plan, dtype: str, name: str, resident: int) -> Launch:
    """For (gate, factor, second, packed, block_scale); `resident` blocks run at once."""
    scalars = flat_scalars(plan)
    grid = (min(-(-scalars[0] // THREADS), resident),)
    return Launch(quantize_activated_kernel(plan, dtype, name), grid, scalars)


def partial_rows(rows: int) -> int:
    """Rows of sums that one launch of `column_sums_kernel` leaves."""
    return -(-rows // TILE_ROWS)


def column_sums_launch(name: str | None, dtype: str, rows: int, cols: int, vector: bool) -> Launch:
    """For (gate, factor, out, sums, measured): factor and out serve named functions only."""
    across = -(-cols // (TILE_BYTES // ITEM_SIZES[dtype]))
    pitch = 2 * cols if name == "swiglu" else cols
    grid = grid_for(partial_rows(rows) * across * THREADS)
    return Launch(column_sums_kernel(name, dtype, vector), grid, (rows, cols, pitch, across))


def all_instances() -> list[Instance]:
    """Every kernel of these operations, but of the fused ones samples; tests compile each."""
    result = _fused_samples()
    for dtype in DTYPES:
        result += [column_sums_kernel(None, dtype, vector) for vector in (True, False)]
        for name in ACTIVATIONS:
            result.append(column_sums_kernel(name, dtype, True))
            result += [activate_kernel(name, dtype, vector) for vector in (True, False)]
    return result


def _fused_samples() -> list[Instance]:
    """Each function, type, format, layout and recipe at least once, with sums and without."""

    def plan(format: str, recipe: str = "te", layout: str = "linear") -> Plan:
        own = {"recipe": recipe} if BLOCK_FORMATS[format].has_second_level else {}
        scheme = as_scheme(format, {**own, "scale_layout": layout})
        return Plan(scheme.parts[0], 64, 64)

    formats, layouts = list(BLOCK_FORMATS), list(CXX_LAYOUTS)
    result = []
    for number, name in enumerate(ACTIVATIONS):
        format, layout = formats[number % len(formats)], layouts[number % len(layouts)]
        result += [quantize_activated_kernel(plan("nvfp4"), dtype, name) for dtype in DTYPES]
        result.append(quantize_activated_kernel(plan(format, layout=layout), "bfloat16", name))
        result.append(quantize_sums_kernel(plan("nvfp4"), DTYPES[number % len(DTYPES)], name))
    for recipe in ALL_RECIPES:
        result.append(quantize_activated_kernel(plan("nvfp4", recipe), "bfloat16", "dgelu"))
    for number, format in enumerate(formats):
        one = plan(format, layout=layouts[number % len(layouts)])
        result += [quantize_sums_kernel(one, dtype, None) for dtype in DTYPES]
    return list(dict.fromkeys(result))
