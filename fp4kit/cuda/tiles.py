# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the CUDA backend: tiles, searched rows, rotations, and amaxes of all these."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp4kit.backend.interface import Backend, Job, Plan, Prologue, RawArray, Rotation

from . import (
    ready as cuda_ready,
)
from . import (
    rotations as cuda_rotations,
)
from . import (
    run as cuda_run,
)
from . import (
    search as cuda_search,
)
from . import (
    variants as cuda_variants,
)
from .launch import rows_are_vectors, seed_arguments
from .run import address_of, addresses_of, current_device, is_aligned, scratch


def _clear_padding(job: Job) -> None:
    """Zeroes scales that belong to no block, where there are some, for kernels that do not."""
    if cuda_variants.is_padded(job.plan):
        job.block_scale.data.memset_async(0, job.block_scale.nbytes)


def _launch(
    tiles: cuda_ready.Tiles,
    sources: tuple[int, int],
    row: Job,
    column: Job,
    random: tuple[int, ...],
) -> None:
    """Kernels do not look at a direction without a plan."""
    taken = scratch(1, np.uint32, clear=True) if tiles.counts else None
    addresses = (*sources, *addresses_of(row), *addresses_of(column))
    tiles.ready.launch(address_of(taken), *addresses, *random)
    if tiles.repeats is not None:
        tiles.repeats.launch(row.block_scale.data.ptr, column.block_scale.data.ptr)


class CudaTiles(Backend):
    """The part of the CUDA backend that serves what is not plain, but for measured rows."""

    def ready_deviating(self, jobs: tuple[Job, ...], vector: bool) -> Callable[[int], None]:
        """The kernel for plans that are not plain, or for both directions.

        Args:
            jobs: of one direction, or of the rows and the columns.
            vector: whether the array and the codes of the first allow 16-byte accesses.
        """
        row, column = jobs[0], jobs[-1]
        plan, dtype, device = row.plan, row.dtype, current_device()
        if len(jobs) == 1 and cuda_search.searches_flat(plan, vector):
            launch = cuda_ready.quantize_searched(device, plan, dtype).launch
            results = addresses_of(row)

            def search(address: int) -> None:
                _clear_padding(row)
                launch(address, *results)

            return search
        directions = cuda_variants.directions_of(tuple(job.plan for job in jobs))
        vector = vector and is_aligned(column.packed.data.ptr)
        pieces = is_aligned(row.block_scale.data.ptr | column.block_scale.data.ptr)
        tiles = cuda_ready.quantize_tiles(device, directions, dtype, vector, pieces)
        random = seed_arguments(directions.any, row.seed)

        def work(address: int) -> None:
            for job in jobs:
                _clear_padding(job)
            _launch(tiles, (address, 0), row, column, random)

        return work

    def quantize_activated_tiles(
        self, prologue: Prologue, sources: tuple[int, int], jobs: tuple[Job, ...]
    ) -> bool:
        """`quantize_activated` by tiles, if they can be wide; `sources`: gate and factor."""
        assert prologue.activation is not None
        plan, dtype = jobs[0].plan, prologue.dtype
        directions = cuda_variants.directions_of(tuple(job.plan for job in jobs))
        gate, factor = sources
        vector = all(is_aligned(gate | factor | job.packed.data.ptr) for job in jobs)
        if not (vector and rows_are_vectors(plan.cols, dtype)):
            return False
        name = prologue.activation
        tiles = cuda_ready.quantize_activated_tiles(current_device(), directions, dtype, name)
        if tiles is None:
            return False
        for job in jobs:
            _clear_padding(job)
        random = seed_arguments(directions.any, jobs[0].seed)
        _launch(tiles, sources, jobs[0], jobs[-1], random)
        return True

    def plan_amax(self, plan: Plan, x: RawArray, dtype: str) -> RawArray:
        if not plan.is_columnwise and plan.scheme.rht is None:
            return self.amax(x, dtype, plan.scales)
        if plan.has_plain_amax:
            return self.amax(x, dtype, 1)
        result = scratch(plan.scales, np.float32, clear=True)
        self._vector_amax(plan, x, dtype, result, None)
        return result

    def plan_amax_both(
        self, row_plan: Plan, column_plan: Plan, x: RawArray, dtype: str
    ) -> tuple[RawArray, RawArray]:
        if not row_plan.has_plain_amax or column_plan.scheme.rht is None:
            return super().plan_amax_both(row_plan, column_plan, x, dtype)
        # One read for both.
        plain = scratch(1, np.float32, clear=True)
        result = scratch(column_plan.scales, np.float32, clear=True)
        self._vector_amax(column_plan, x, dtype, result, plain)
        return plain, result

    def _vector_amax(
        self, plan: Plan, x: RawArray, dtype: str, result: RawArray, plain: RawArray | None
    ) -> None:
        """Raises the amaxes of columns or rotated rows; beside rotated columns the plain one."""
        if x.size:
            launch = cuda_rotations.amax_launch(plan, dtype, is_aligned(x.data.ptr))
            results = (result, address_of(plain)) if plan.is_columnwise else (result,)
            cuda_run.launch(launch.instance, launch.grid, (x, *results, *launch.scalars))

    def rotate(
        self, x: RawArray, dtype: str, rotation: Rotation, out: RawArray, out_dtype: str
    ) -> None:
        aligned = is_aligned(x.data.ptr | out.data.ptr)
        launch = cuda_rotations.rotate_launch(x.shape, dtype, rotation, out_dtype, aligned)
        cuda_run.launch(launch.instance, launch.grid, (x, out, *launch.scalars))
