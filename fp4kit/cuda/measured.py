# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Rows with second levels of their own on CUDA: measured and quantized in one read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from fp4kit.backend.interface import NO_SEED, Backend, Plan, RawArray, Seed
from fp4kit.formats import ALL_RECIPES, DTYPES, NVFP4, Recipe
from fp4kit.reference.scaling import PER_TOKEN_SMALLEST
from fp4kit.variant import PLAIN

from .compile import (
    CXX_DTYPES,
    CXX_LAYOUTS,
    CXX_RECIPES,
    LANE,
    THREADS,
    Instance,
    instance,
    seed_types,
)
from .launch import (
    ITEM_SIZES,
    VECTOR,
    Launch,
    rounds_stochastically,
    rows_are_vectors,
    seed_arguments,
)
from .ready import Ready, multiprocessors, resident_blocks, seed_count
from .run import current_device, is_aligned, scratch
from .variants import is_padded

#: The fewest threads that share a row.
SMALLEST_TEAM = 8
#: Lanes of a thread that leave room for many thread blocks, by bytes of an element, and the most
#: that fit its registers.
LIGHT_LANES = {2: 4, 4: 2}
MOST_LANES = {2: 8, 4: 4}
#: What the kernel counts (rows, 16-byte pieces of the input, stored scales) stays below this.
COUNTED = 2**31


class Team(NamedTuple):
    """The threads that share a row.

    Attributes:
        size: how many, a power of two.
        lanes: lanes of 16 elements that each of them takes.
    """

    size: int
    lanes: int


def team_for(rows: int, cols: int, dtype: str, processors: int) -> Team | None:
    """The team for rows of a length, None if they do not fit the registers of a thread block."""
    row_lanes = -(-cols // LANE)
    light, most = (lanes[ITEM_SIZES[dtype]] for lanes in (LIGHT_LANES, MOST_LANES))
    size = SMALLEST_TEAM
    while size < THREADS and row_lanes > size * light:
        size *= 2
    if rows * size <= processors * THREADS:
        # Too few rows to fill the device: each gets as many threads as have something to do.
        while size < THREADS and row_lanes > size:
            size *= 2
    lanes = -(-row_lanes // size)
    return Team(size, lanes) if lanes <= most else None


def is_measured(plan: Plan, dtype: str) -> bool:
    """Whether the kernel does what a plan asks for, given a team."""
    variant = plan.variant or PLAIN
    supported = (variant.axis, variant.block, variant.scale_search, variant.hadamard)
    pieces = plan.rows * plan.cols * ITEM_SIZES[dtype] // VECTOR
    return (
        plan.has_second_level
        and plan.rows_per_scale == 1
        and supported == ("row", "1d", None, None)
        and rows_are_vectors(plan.cols, dtype)
        and max(plan.rows, pieces, prod(plan.scale_shape)) < COUNTED
    )


def measured_kernel(plan: Plan, dtype: str, team: Team) -> Instance:
    """The instance for a plan, an element type and a team."""
    assert plan.recipe is not None
    variant = plan.variant or PLAIN
    return instance(
        "quantize_per_token_kernel",
        "quantize/per_token.cu",
        CXX_DTYPES[dtype],
        CXX_RECIPES[plan.recipe.name],
        variant.per_token,
        CXX_LAYOUTS[plan.scale_layout],
        f"Team<{team.size}, {team.lanes}>",
        *seed_types(rounds_stochastically(plan)),
    )


def measured_launch(plan: Plan, dtype: str, team: Team, resident: int) -> Launch:
    """For (x, second, packed, block_scale), and what follows from the seed.

    `resident` blocks run at once.
    """
    variant = plan.variant or PLAIN
    smallest = PER_TOKEN_SMALLEST if variant.per_token else np.float32(0)
    return Launch(
        measured_kernel(plan, dtype, team),
        (min(-(-plan.rows * team.size // THREADS), resident),),
        (
            plan.rows,
            plan.cols * ITEM_SIZES[dtype] // VECTOR,
            plan.blocks,
            plan.scale_shape[1],
            int(plan.nibble_order == "high_first"),
            int(smallest.view(np.uint32)),
        ),
    )


@lru_cache(maxsize=1024)
def _ready(device: int, plan: Plan, dtype: str) -> Ready | None:
    """As `measured_launch`; None if no kernel does it."""
    team = team_for(plan.rows, plan.cols, dtype, multiprocessors(device))
    if team is None or not is_measured(plan, dtype):
        return None
    resident = resident_blocks(device, measured_kernel(plan, dtype, team))
    launch = measured_launch(plan, dtype, team, resident)
    return Ready(device, launch, addresses=4 + seed_count(plan))


class MeasuredRows(Backend):
    """The part of the CUDA backend that measures rows as it quantizes them."""

    def quantize_measured(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        packed: RawArray,
        block_scale: RawArray,
        seed: Seed = NO_SEED,
    ) -> RawArray | None:
        source, codes = x.data.ptr, packed.data.ptr
        ready = _ready(current_device(), plan, dtype)
        if ready is None or not is_aligned(source | codes):
            return None
        second = scratch(plan.scales, np.float32)
        if is_padded(plan):
            block_scale.data.memset_async(0, block_scale.nbytes)
        random = seed_arguments(plan, seed)
        ready.launch(source, second.data.ptr, codes, block_scale.data.ptr, *random)
        return second


def sample_instances() -> list[Instance]:
    """Instances that tests compile; rows of other lengths make more of them."""
    return list(dict.fromkeys(_samples()))


def _plan(recipe: Recipe, layout: str = "linear", **options: object) -> Plan:
    variant = replace(PLAIN, **options) if options else None  # type: ignore[arg-type]
    return Plan(NVFP4, recipe, None, 64, 64, scale_layout=layout, variant=variant)


def _samples() -> Iterator[Instance]:
    te = ALL_RECIPES["te"]
    for number, layout in enumerate(CXX_LAYOUTS):
        for dtype in DTYPES:
            yield measured_kernel(_plan(te, layout), dtype, Team(64 << number, 2))
    for lanes in range(1, MOST_LANES[2] + 1):
        yield measured_kernel(_plan(te, per_token=True), "bfloat16", Team(THREADS, lanes))
    for size in (8, 16, 32, 64, 128, 256):
        yield measured_kernel(_plan(te, per_token=True), "bfloat16", Team(size, LIGHT_LANES[2]))
    yield measured_kernel(_plan(te), "float32", Team(THREADS, MOST_LANES[4]))
    for per_token in (False, True):
        plan = _plan(te, per_token=per_token, rounding="stochastic")
        yield measured_kernel(plan, "bfloat16", Team(32, 4))
    for recipe in ALL_RECIPES.values():
        yield measured_kernel(_plan(recipe), "float16", Team(128, 3))
