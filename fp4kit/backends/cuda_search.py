# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The fast path of searched scales along rows: its kernel, grid and arguments, from plans.

Nothing here knows CuPy; :mod:`fp4kit.backends.cuda` launches what these functions return.
"""

from __future__ import annotations

from functools import lru_cache

from fp4kit.scaling import second_level_range
from fp4kit.variant import Variant

from .base import Plan
from .cuda_launch import fast_division, grid_for
from .cuda_module import CXX_DTYPES, CXX_LAYOUTS, LANE, Instance, instance
from .cuda_variants import CXX_ERRORS, CXX_SEARCHES, Directions, variant_of


def is_flat(directions: Directions, vector: bool) -> bool:
    """Whether `quantize_searched_kernel` can: rows of whole, aligned blocks under one level."""
    plan = directions.row
    if plan is None or directions.column is not None or not vector:
        return False
    variant = variant_of(plan)
    searched = Variant(
        scale_search=variant.scale_search, error=variant.error, e4m3_max=variant.e4m3_max
    )
    whole = plan.cols % LANE == 0 and plan.rows * plan.blocks < 2**31
    searches = variant.scale_search is not None and variant == searched
    return searches and whole and plan.scales == 1


@lru_cache(maxsize=1024)
def quantize_searched_kernel(plan: Plan, dtype: str) -> Instance:
    """The instance for a plan that `is_flat`."""
    variant = variant_of(plan)
    return instance(
        "quantize_searched_kernel",
        "quantize_searched.cu",
        CXX_DTYPES[dtype],
        CXX_SEARCHES[variant.scale_search],
        CXX_ERRORS[variant.error],
        CXX_LAYOUTS[plan.scale_layout],
    )


def quantize_searched_arguments(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A block of threads for each 256 lanes, and the numbers after (x, second, packed, scale)."""
    lanes = plan.rows * plan.blocks
    return grid_for(lanes), (
        lanes,
        plan.blocks,
        plan.scale_shape[1],
        *fast_division(plan.blocks, lanes),
        int(plan.nibble_order == "high_first"),
        int(second_level_range(variant_of(plan).e4m3_max)),
    )
