# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of the CUDA backend: tiles, searched rows, rotations, and amaxes of all these."""

from __future__ import annotations

import numpy as np

from fp4kit.backend.interface import NO_SEED, Backend, Plan, RawArray, Seed

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
from .run import Result, address_of, current_device, is_aligned, scratch
from .variants import Directions, variant_of


def _clear_padding(plan: Plan, result: Result) -> None:
    """Zeroes scales that belong to no block, where there are some, for kernels that do not."""
    if cuda_variants.is_padded(plan):
        result.block_scale.data.memset_async(0, result.block_scale.nbytes)


def _launch(
    tiles: cuda_ready.Tiles,
    sources: tuple[int, int],
    row: Result,
    column: Result,
    random: tuple[int, ...],
) -> None:
    """Kernels do not look at a direction without a plan."""
    taken = scratch(1, np.uint32, clear=True) if tiles.counts else None
    addresses = (*sources, *row.addresses(), *column.addresses())
    tiles.ready.launch(address_of(taken), *addresses, *random)
    if tiles.repeats is not None:
        tiles.repeats.launch(row.block_scale.data.ptr, column.block_scale.data.ptr)


class CudaTiles(Backend):
    """The part of the CUDA backend that serves what is not plain, but for measured rows."""

    def quantize_variant(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        second: RawArray | None,
        packed: RawArray,
        block_scale: RawArray,
        seed: Seed,
        vector: bool,
    ) -> None:
        """`quantize` of a plan with a variant; `vector`: everything allows 16-byte accesses."""
        result = Result(second, packed, block_scale)
        if cuda_search.searches_flat(plan, vector):
            _clear_padding(plan, result)
            ready = cuda_ready.quantize_searched(current_device(), plan, dtype)
            ready.launch(x.data.ptr, *result.addresses())
            return
        directions = cuda_variants.directions_of((plan,))
        self._quantize_tiles(directions, x, dtype, result, result, seed, vector)

    def quantize_both(
        self,
        row_plan: Plan,
        column_plan: Plan,
        x: RawArray,
        dtype: str,
        row_second: RawArray | None,
        column_second: RawArray | None,
        row_packed: RawArray,
        row_scale: RawArray,
        column_packed: RawArray,
        column_scale: RawArray,
        seed: Seed = NO_SEED,
    ) -> None:
        row = Result(row_second, row_packed, row_scale)
        column = Result(column_second, column_packed, column_scale)
        directions = Directions(row_plan, column_plan)
        aligned = row.is_aligned_with(x.data.ptr) and column.is_aligned_with(x.data.ptr)
        vector = aligned and rows_are_vectors(row_plan.cols, dtype)
        self._quantize_tiles(directions, x, dtype, row, column, seed, vector)

    def _quantize_tiles(
        self,
        directions: Directions,
        x: RawArray,
        dtype: str,
        row: Result,
        column: Result,
        seed: Seed,
        vector: bool,
    ) -> None:
        """One launch for the directions that have a plan."""
        for plan, result in ((directions.row, row), (directions.column, column)):
            if plan is not None:
                _clear_padding(plan, result)
        pieces = row.takes_pieces() and column.takes_pieces()
        tiles = cuda_ready.quantize_tiles(current_device(), directions, dtype, vector, pieces)
        _launch(tiles, (x.data.ptr, 0), row, column, seed_arguments(directions.any, seed))

    def quantize_activated_tiles(
        self,
        name: str,
        plans: tuple[Plan, ...],
        sources: tuple[int, int],
        dtype: str,
        results: tuple[Result, ...],
        seed: Seed,
    ) -> bool:
        """`quantize_activated` by tiles, if they can be wide; `sources`: gate and factor."""
        row, column = results[0], results[-1]
        directions = cuda_variants.directions_of(plans)
        gate, factor = sources
        vector = all(result.is_aligned_with(gate | factor) for result in results)
        if not (vector and rows_are_vectors(plans[0].cols, dtype)):
            return False
        tiles = cuda_ready.quantize_activated_tiles(current_device(), directions, dtype, name)
        if tiles is None:
            return False
        for plan, result in zip(plans, results, strict=True):
            _clear_padding(plan, result)
        _launch(tiles, sources, row, column, seed_arguments(directions.any, seed))
        return True

    def plan_amax(self, plan: Plan, x: RawArray, dtype: str) -> RawArray:
        if plan.variant is None or (not plan.is_columnwise and plan.variant.hadamard is None):
            return self.amax(x, dtype, plan.scales)
        if plan.has_plain_amax:
            return self.amax(x, dtype, 1)
        result = scratch(plan.scales, np.float32, clear=True)
        self._vector_amax(plan, x, dtype, result, None)
        return result

    def plan_amax_both(
        self, row_plan: Plan, column_plan: Plan, x: RawArray, dtype: str
    ) -> tuple[RawArray, RawArray]:
        if not row_plan.has_plain_amax or variant_of(column_plan).hadamard is None:
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
        self,
        x: RawArray,
        dtype: str,
        axis: str,
        mask: int,
        rounding: str,
        inverse: bool,
        out: RawArray,
        out_dtype: str,
    ) -> None:
        rows, cols = x.shape
        aligned = is_aligned(x.data.ptr | out.data.ptr)
        launch = cuda_rotations.rotate_launch(
            rows, cols, dtype, axis, mask, rounding, inverse, out_dtype, aligned
        )
        cuda_run.launch(launch.instance, launch.grid, (x, out, *launch.scalars))
