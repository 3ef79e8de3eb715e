# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 under float32 scales on the CPU: see :mod:`fp4kit.reference.grid` for what is computed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np

from fp4kit.backend.grid import GridBackend
from fp4kit.backend.interface import Job, Plan, RawArray
from fp4kit.backend.operations import Operations
from fp4kit.float_mode import computes_by_ieee
from fp4kit.reference import scaling
from fp4kit.reference.grid import LIMITS, scales_of, zero_scale

from .backend import CpuBackend
from .load import aligned, padded_rows, read_only, words_of
from .threads import run

#: Words in a piece of work where one scale serves all: 8192 elements.
PIECE = 4096


@cache
def grid_kernels() -> Any:
    """The kernels; importing them imports numba."""
    return importlib.import_module("fp4kit.cpu.grid_kernels")


def _rules(plan: Plan, dtype: str, *, measures: bool) -> Any:
    element, recipe = plan.format.element, plan.grid_recipe
    return grid_kernels().Rules(
        element.mantissa_bits,
        element.bias,
        np.float32(element.max),
        measures,
        recipe.rounds_scale,
        recipe.rounds_quotient,
        LIMITS[dtype][0],
        zero_scale(recipe, dtype),
    )


def _run(plan: Plan, name: str, source: Any, rules: Any, scale: Any, target: Any) -> None:
    """Runs a kernel (source, begin, end, cut, rules, scale, target) over a matrix."""
    jitted, measures = grid_kernels(), getattr(rules, "measures", False)
    assert plan.grid is not None
    rows, cols = plan.grid
    width = -(-plan.cols // 2)
    across, flat = plan.scale_shape[1], scale.reshape(-1)
    if flat.size > 1 and plan.scale_shape[0] == 1 and cols == 1:
        # Each column has a scale of its own, and so has what an odd number of them is padded with.
        flat = np.append(flat, np.ones(flat.size % 2, np.float32))
        cut = jitted.Cut(plan.rows, width, 1, width, 1, 0)
        work, count, size = getattr(jitted, f"{name}_columns"), plan.rows, 2 * width
    else:
        if flat.size == 1 and not measures:
            # One long row: whatever the shape is, pieces of it are work for all cores.
            total = plan.rows * width
            cut = jitted.Cut(1, total, 1, PIECE, -(-total // PIECE), 0)
        else:
            tile = width if across == 1 else cols // 2
            cut = jitted.Cut(plan.rows, width, rows, tile, across, 1)
        work = getattr(jitted, f"{name}_rectangles")
        count = cut.across * -(-cut.rows // cut.tile_rows)
        size = 2 * cut.tile_rows * cut.tile_words
    run(lambda b, e: work(source, b, e, cut, rules, flat, target), count, size)


@computes_by_ieee(Operations)
class CpuGridBackend(GridBackend, CpuBackend):
    """The numba kernels for formats with float32 scales."""

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        return scales_of(amax, plan.grid_recipe, plan.format.element, dtype)

    def _fill(self, job: Job) -> None:
        plan, packed, scale = job.plan, job.packed, job.block_scale
        if job.second is not None:
            scale[...] = scaling.usable(job.second).reshape(plan.scale_shape)
        even = plan.cols + plan.cols % 2
        words = read_only(words_of(padded_rows(job.x, even), job.dtype))
        codes = packed
        if packed.shape[1] != even or packed.ctypes.data % 2:
            codes = np.empty((plan.rows, even), np.uint8)
        rules = _rules(plan, job.dtype, measures=job.second is None)
        _run(plan, "quantize", words, rules, scale, codes.reshape(-1).view(np.uint16))
        if codes is not packed:
            packed[...] = codes[:, : plan.cols]

    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        plan = job.plan
        even = plan.cols + plan.cols % 2
        codes = padded_rows(job.packed, even).reshape(-1)
        if codes.ctypes.data % 2:
            codes = codes.copy()
        whole, table = aligned(out, plan.rows, even), read_only(plan.format.element.values)
        words = read_only(codes.view(np.uint16))
        _run(plan, "dequantize", words, table, job.block_scale, words_of(whole, dtype))
        if whole is not out:
            out[...] = whole[:, : plan.cols]
