# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A plan as the numbers that the kernels of panels take."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from fp4kit.backend.interface import Plan
from fp4kit.options import SCALE_SEARCHES, SEARCH_ERRORS

from .buffers import records
from .scale_search import NO_SEARCH
from .scaling import Rules, rules_of


class PlanNumbers(NamedTuple):
    """What a kernel has to know of a plan.

    Attributes:
        rules: what scales and codes are made by.
        rows: rows of the array.
        cols: columns of it.
        columnwise: whether the codes are columnwise.
        is_2d: whether blocks are squares, which are worked on in rows.
        in_columns: columnwise and not 2-D: a tile is one block each of some columns.
        size: block size.
        bits: of a code.
        high_first: 1 if the even element takes the high nibble, else 0.
        has_second: whether there is a second level.
        vectors_per_second: vectors that share one second-level value.
        per_token: whether element factors are those of per-token scales.
        search: NO_SEARCH, FOUR_OVER_SIX or SWEEP.
        error: what a search compares.
        rotated: whether to rotate.
        mask: signs of the rotation.
        to_bfloat: whether to round rotated values.
        stochastic: how to round.
        key: of the random numbers.
        subsequence: of the random numbers.
        vector_stride: distance of the scales of neighbouring vectors.
        block_stride: distance of the scales of neighbouring blocks.
    """

    rules: Rules
    rows: int
    cols: int
    columnwise: bool
    is_2d: bool
    in_columns: bool
    size: int
    bits: int
    high_first: int
    has_second: bool
    vectors_per_second: int
    per_token: bool
    search: int
    error: int
    rotated: bool
    mask: int
    to_bfloat: bool
    stochastic: bool
    key: np.uint64
    subsequence: int
    vector_stride: int
    block_stride: int


@cache
def plan_numbers(plan: Plan, dtype: str) -> PlanNumbers:
    """A plan as numbers, with no seed."""
    scheme, is_2d = plan.scheme, plan.scheme.block_shape == "2d"
    search, error = scheme.scale_search, scheme.search_error
    # Scales that stay in the order of the data stand one below the other.
    data_order = plan.is_columnwise and not plan.transposes and plan.scale_layout == "linear"
    return PlanNumbers(
        rules=rules_of(plan, dtype),
        rows=plan.rows,
        cols=plan.cols,
        columnwise=plan.is_columnwise,
        is_2d=is_2d,
        in_columns=plan.is_columnwise and not is_2d,
        size=plan.format.block_size,
        bits=plan.format.element.bits,
        high_first=int(plan.nibble_order == "high_first"),
        has_second=plan.has_second_level,
        vectors_per_second=plan.rows_per_scale,
        per_token=scheme.second_level == "per_token",
        search=SCALE_SEARCHES.index(search) + 1 if search is not None else NO_SEARCH,
        error=SEARCH_ERRORS.index(error) if error is not None else 0,
        rotated=scheme.rht is not None,
        mask=scheme.rht or 0,
        to_bfloat=scheme.rht_rounding == "bf16",
        stochastic=scheme.rounding == "stochastic",
        key=np.uint64(0),
        subsequence=0,
        vector_stride=1 if data_order else plan.blocks,
        block_stride=plan.cols if data_order else 1,
    )


@cache
def plan_record(plan: Plan, dtype: str) -> np.ndarray:
    """:func:`plan_numbers` as the kernels take them: one record."""
    return records(plan_numbers(plan, dtype))
