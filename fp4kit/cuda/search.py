# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The fast path of searched scales along rows: its kernel, grid and arguments, from plans.

Nothing here knows CuPy; :mod:`fp4kit.cuda.backend` launches what these functions return.
"""

from __future__ import annotations

from functools import lru_cache

from fp4kit.backend.interface import Plan
from fp4kit.reference.scaling import second_level_range

from .compile import CXX_DTYPES, CXX_LAYOUTS, Instance, instance
from .geometry import LANE
from .launch import Launch, fast_division, grid_for
from .variants import CXX_ERRORS, CXX_SEARCHES


def searches_flat(plan: Plan, vector: bool) -> bool:
    """Whether the kernel here can do it: blocks of rows, whole and aligned, with one level."""
    searches = plan.scheme.deviations == {"scale_search"}
    whole = plan.cols % LANE == 0 and plan.rows * plan.blocks < 2**31
    return searches and vector and whole and plan.scales == 1


@lru_cache(maxsize=1024)
def quantize_searched_kernel(plan: Plan, dtype: str) -> Instance:
    """The instance for a plan that `searches_flat`."""
    return instance(
        "quantize_rowwise_search_kernel",
        "search/rowwise_search.cu",
        CXX_DTYPES[dtype],
        CXX_SEARCHES[plan.scheme.scale_search],
        CXX_ERRORS[plan.scheme.search_error],
        CXX_LAYOUTS[plan.scale_layout],
    )


def quantize_searched_launch(plan: Plan, dtype: str, blocks: int) -> Launch:
    """For (x, second, packed, block_scale), on at most so many blocks of threads."""
    lanes = plan.rows * plan.blocks
    return Launch(
        quantize_searched_kernel(plan, dtype),
        (min(*grid_for(lanes), blocks),),
        (
            lanes,
            plan.blocks,
            plan.scale_shape[1],
            *fast_division(plan.blocks, lanes),
            int(plan.nibble_order == "high_first"),
            int(second_level_range(plan.scheme.e4m3_max)),
        ),
    )
