# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 under float32 scales on CUDA: which kernel, which arguments.

What is computed stands in :mod:`fp4kit.reference.grid`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp4kit.backend.grid import GridBackend
from fp4kit.backend.interface import Job, Plan, RawArray
from fp4kit.formats import E4M3, E5M2, GRID_BLOCK, ElementType
from fp4kit.reference.grid import LIMITS, zero_scale

from . import run
from .backend import CudaBackend
from .compile import CXX_DTYPES, Instance, instance
from .geometry import GRID_UNROLL, LANE, THREADS
from .launch import ITEM_SIZES, VECTOR, fast_division, grid_for

CXX_ELEMENTS = {E4M3.name: "E4m3", E5M2.name: "E5m2"}
SPANS = {"all": "kSpanAll", "column": "kSpanColumn", "tile": "kSpanTile"}
#: Groups of 16 that a thread holds of a row if there are threads for it, and at most, by bytes of
#: an element.
LIGHT, MOST = {2: 4, 4: 2}, {2: 8, 4: 4}
SMALLEST_TEAM = 8
SQUARE_GROUPS = GRID_BLOCK * GRID_BLOCK // LANE // THREADS


def scales_kernel(dtype: str, element: ElementType, from_amax: bool) -> Instance:
    """Amaxes of an input type, or given scales, to scales."""
    names = CXX_DTYPES[dtype], CXX_ELEMENTS[element.name]
    return instance("grid_scales_kernel", "grid/quantize.cu", *names, from_amax)


def quantize_kernel(
    dtype: str, element: ElementType, rounds: bool, span: str, vector: bool
) -> Instance:
    """Codes under known scales."""
    names = CXX_DTYPES[dtype], CXX_ELEMENTS[element.name]
    return instance("quantize_grid_kernel", "grid/quantize.cu", *names, rounds, SPANS[span], vector)


def measured_kernel(
    dtype: str, element: ElementType, rounds: bool, square: bool, team: tuple[int, int]
) -> Instance:
    """Scales and codes from one read, by teams of (threads, groups of 16 of each)."""
    names = CXX_DTYPES[dtype], CXX_ELEMENTS[element.name]
    return instance(
        "quantize_grid_measured_kernel",
        "grid/quantize.cu",
        *names,
        rounds,
        square,
        f"Team<{team[0]}, {team[1]}>",
    )


def any_kernel(dtype: str, element: ElementType, rounds: bool) -> Instance:
    """Scales and codes of tiles of any shape and alignment."""
    names = CXX_DTYPES[dtype], CXX_ELEMENTS[element.name]
    return instance("quantize_grid_any_kernel", "grid/quantize.cu", *names, rounds)


def dequantize_kernel(dtype: str, element: ElementType, span: str, vector: bool) -> Instance:
    """Codes to elements."""
    names = CXX_DTYPES[dtype], CXX_ELEMENTS[element.name]
    return instance("dequantize_grid_kernel", "grid/dequantize.cu", *names, SPANS[span], vector)


def _tile(plan: Plan) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    assert plan.grid is not None
    return plan.grid


def span_of(plan: Plan) -> str:
    """What each scale spans."""
    if plan.scale_shape == (1, 1):
        return "all"
    return "column" if plan.scale_shape[0] == 1 and _tile(plan)[1] == 1 else "tile"


def team_for(cols: int, dtype: str) -> tuple[int, int] | None:
    """(threads, groups of 16 of each) for a row, None if it is too long for a thread block."""
    groups, size = -(-cols // LANE), ITEM_SIZES[dtype]
    threads = SMALLEST_TEAM
    while threads < THREADS and groups > threads * LIGHT[size]:
        threads *= 2
    each = -(-groups // threads)
    return (threads, each) if each <= MOST[size] else None


def _rounds(plan: Plan, dtype: str) -> bool:
    return plan.grid_recipe.rounds_quotient and dtype != "float32"


def _rules(plan: Plan, dtype: str) -> tuple[int, int, int]:
    """What kernels take of a recipe for an input type."""
    recipe = plan.grid_recipe
    limits = np.array([LIMITS[dtype][0], zero_scale(recipe, dtype)], np.float32)
    largest, zero = limits.view(np.uint32).tolist()
    return int(recipe.rounds_scale), largest, zero


def _groups(plan: Plan, span: str) -> tuple[int, tuple[int, ...]]:
    """(groups of 16, scalars) of the kernels that take 16 elements at a time."""
    rows, cols = plan.rows, plan.cols
    if span == "all":  # one long row, whatever the shape is
        rows, cols = 1, rows * cols
    row_groups = -(-cols // LANE)
    groups = rows * row_groups
    shift = _tile(plan)[0].bit_length() - 1 if span == "tile" else 0
    division = fast_division(row_groups, groups + GRID_UNROLL * THREADS)
    return groups, (cols, row_groups, *division, groups, plan.scale_shape[1], shift)


def _is_vector(plan: Plan, span: str, *arrays: RawArray) -> bool:
    cols = plan.rows * plan.cols if span == "all" else plan.cols
    return cols % LANE == 0 and run.are_aligned(*arrays)


def _scales(given: RawArray, plan: Plan, dtype: str, out: RawArray, *, from_amax: bool) -> None:
    kernel = scales_kernel(dtype, plan.format.element, from_amax)
    run.launch(kernel, grid_for(given.size), (given, out, given.size, *_rules(plan, dtype)))


class CudaGridBackend(GridBackend, CudaBackend):
    """The CUDA kernels for formats with float32 scales."""

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        result = run.scratch(amax.size, np.float32)
        _scales(amax, plan, dtype, result, from_amax=True)
        return result

    def _fill(self, job: Job) -> None:
        plan, dtype, x = job.plan, job.dtype, job.x
        if job.second is not None:
            _scales(job.second, plan, dtype, job.block_scale, from_amax=False)
        elif self._measured(job):
            return
        else:
            amax = self.plan_amax(plan, x, dtype)
            _scales(amax, plan, dtype, job.block_scale, from_amax=True)
        span = span_of(plan)
        vector = _is_vector(plan, span, x, job.packed)
        kernel = quantize_kernel(dtype, plan.format.element, _rounds(plan, dtype), span, vector)
        groups, scalars = _groups(plan, span)
        grid = grid_for(-(-groups // GRID_UNROLL))
        run.launch(kernel, grid, (x, job.block_scale, job.packed, *scalars))

    def _measured(self, job: Job) -> bool:
        """Scales and codes from one read; False, and nothing is done, for very long rows."""
        plan, dtype, element = job.plan, job.dtype, job.plan.format.element
        rounds, rules = _rounds(plan, dtype), _rules(plan, dtype)
        down, across = plan.scale_shape
        arrays = (job.x, job.block_scale, job.packed)
        square = plan.grid == (GRID_BLOCK, GRID_BLOCK)
        team = (THREADS, SQUARE_GROUPS) if square else team_for(plan.cols, dtype)
        if plan.cols % LANE or not run.are_aligned(job.x, job.packed):
            kernel = any_kernel(dtype, element, rounds)
            tile = (plan.rows, plan.cols, across, *_tile(plan))
            run.launch(kernel, (down * across,), (*arrays, *tile, *rules))
            return True
        if team is None:
            return False
        kernel = measured_kernel(dtype, element, rounds, square, team)
        scalars = (plan.rows, plan.cols, across, down * across, *rules)
        run.launch(kernel, grid_for(down * across * team[0]), (*arrays, *scalars))
        return True

    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        plan, span = job.plan, span_of(job.plan)
        vector = _is_vector(plan, span, job.packed, out)
        kernel = dequantize_kernel(dtype, plan.format.element, span, vector)
        groups, scalars = _groups(plan, span)
        threads = -(-groups * LANE * ITEM_SIZES[dtype] // (VECTOR * GRID_UNROLL))
        grid = grid_for(threads if vector else groups)
        run.launch(kernel, grid, (job.packed, job.block_scale, out, *scalars))


def sample_instances() -> list[Instance]:
    """Instances that tests compile; rows of other lengths make more of them."""
    return list(dict.fromkeys(_samples()))


def _samples() -> Iterator[Instance]:
    for element, dtypes in ((E4M3, CXX_DTYPES), (E5M2, ("bfloat16",))):
        for dtype in dtypes:
            for from_amax in (False, True):
                yield scales_kernel(dtype, element, from_amax)
            for vector in (True, False):
                for span in SPANS:
                    yield dequantize_kernel(dtype, element, span, vector)
                    for rounds in (False, dtype != "float32"):
                        yield quantize_kernel(dtype, element, rounds, span, vector)
            for rounds in (False, dtype != "float32"):
                yield any_kernel(dtype, element, rounds)
                yield measured_kernel(dtype, element, rounds, True, (THREADS, SQUARE_GROUPS))
    for dtype in CXX_DTYPES:
        for threads in (8, 64, THREADS):
            yield measured_kernel(dtype, E4M3, dtype != "float32", False, (threads, 2))
        most = (THREADS, MOST[ITEM_SIZES[dtype]])
        yield measured_kernel(dtype, E4M3, dtype != "float32", False, most)
