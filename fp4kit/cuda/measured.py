# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Rows with second levels of their own on CUDA: measured and quantized in one read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from fp4kit.backend.interface import Backend, Job, Plan, RawArray
from fp4kit.formats import ALL_RECIPES, DTYPES, Recipe
from fp4kit.reference.scaling import PER_TOKEN_SMALLEST
from fp4kit.scheme import Scheme

from .compile import CXX_DTYPES, CXX_LAYOUTS, CXX_RECIPES, Instance, instance, seed_types
from .geometry import LANE, THREADS
from .launch import (
    ITEM_SIZES,
    VECTOR,
    Launch,
    rounds_stochastically,
    rows_are_vectors,
    seed_arguments,
)
from .ready import Ready, multiprocessors, resident_blocks, seed_count
from .run import addresses_of, current_device, is_aligned, scratch
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
    pieces = plan.rows * plan.cols * ITEM_SIZES[dtype] // VECTOR
    return (
        plan.has_second_level
        and plan.rows_per_scale == 1
        and plan.scheme.deviations <= {"second_level", "rounding"}
        and rows_are_vectors(plan.cols, dtype)
        and max(plan.rows, pieces, prod(plan.scale_shape)) < COUNTED
    )


def measured_kernel(plan: Plan, dtype: str, team: Team) -> Instance:
    """The instance for a plan, an element type and a team."""
    assert plan.recipe is not None
    return instance(
        "quantize_per_token_kernel",
        "quantize/per_token.cu",
        CXX_DTYPES[dtype],
        CXX_RECIPES[plan.recipe.name],
        plan.scheme.second_level == "per_token",
        CXX_LAYOUTS[plan.scale_layout],
        f"Team<{team.size}, {team.lanes}>",
        *seed_types(rounds_stochastically(plan)),
    )


def measured_launch(plan: Plan, dtype: str, team: Team, resident: int) -> Launch:
    """For (x, second, packed, block_scale), and what follows from the seed.

    `resident` blocks run at once.
    """
    per_token = plan.scheme.second_level == "per_token"
    smallest = PER_TOKEN_SMALLEST if per_token else np.float32(0)
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

    def quantize_measured(self, job: Job) -> RawArray | None:
        second = scratch(job.plan.scales, np.float32)
        run = self.ready_measured(job._replace(second=second))
        if run is None:
            return None
        run(job.x.data.ptr)
        return second

    def ready_measured(self, job: Job) -> Callable[[int], None] | None:
        """The kernel that fills the job's second level too; None if none does it."""
        plan, codes = job.plan, job.packed.data.ptr
        ready = _ready(current_device(), plan, job.dtype)
        if ready is None or not is_aligned(job.x.data.ptr | codes):
            return None
        launch, padded = ready.launch, is_padded(plan)
        rest = (*addresses_of(job), *seed_arguments(plan, job.seed))

        def work(address: int) -> None:
            if padded:
                job.block_scale.data.memset_async(0, job.block_scale.nbytes)
            launch(address, *rest)

        return work


def sample_instances() -> list[Instance]:
    """Instances that tests compile; rows of other lengths make more of them."""
    return list(dict.fromkeys(_samples()))


def _plan(recipe: Recipe, layout: str = "linear", **options: str) -> Plan:
    scheme = Scheme("nvfp4", recipe=recipe.name, scale_layout=layout, **options)  # type: ignore[arg-type]
    return Plan(scheme.parts[0], 64, 64)


def _samples() -> Iterator[Instance]:
    te = ALL_RECIPES["te"]
    for number, layout in enumerate(CXX_LAYOUTS):
        for dtype in DTYPES:
            yield measured_kernel(_plan(te, layout), dtype, Team(64 << number, 2))
    for lanes in range(1, MOST_LANES[2] + 1):
        yield measured_kernel(_plan(te, second_level="per_token"), "bfloat16", Team(THREADS, lanes))
    for size in (8, 16, 32, 64, 128, 256):
        yield measured_kernel(
            _plan(te, second_level="per_token"), "bfloat16", Team(size, LIGHT_LANES[2])
        )
    yield measured_kernel(_plan(te), "float32", Team(THREADS, MOST_LANES[4]))
    for level in ("row_scaled", "per_token"):
        plan = _plan(te, second_level=level, rounding="stochastic")
        yield measured_kernel(plan, "bfloat16", Team(32, 4))
    for recipe in ALL_RECIPES.values():
        yield measured_kernel(_plan(recipe), "float16", Team(128, 3))
