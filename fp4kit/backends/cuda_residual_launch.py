# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Residual channels on CUDA: kernel instances, grids and arguments, as pure integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fp4kit.formats import DTYPES, NVFP4, SCALE_LAYOUTS

from .cuda_launch import ITEM_SIZES, VECTOR, WARP, Launch, fast_division, grid_for
from .cuda_module import (
    CXX_DTYPES,
    DEQUANTIZE_UNROLL,
    RESIDUAL_BLOCKS,
    THREADS,
    Instance,
    instance,
)
from .operations import ResidualPlan

#: Rows of a group (residual.cuh): four of their scales fill a sector.
GROUP_ROWS = 8
#: Blocks of a row that a warp takes where scales are tiled.
TILE_BLOCKS = 4
#: Words of shared memory that the rows of a step take, where one row takes no more.
STEP_WORDS = 8192
#: Bytes of a channel's place in shared memory, and the channels that it can tell apart.
PLACE_BYTES, MAX_PLACES = 2, 1 << 16
#: Bytes of the tables: factors of 128 scale bytes, and 16 bytes for each of 256.
FACTOR_TABLE, BYTE_TABLE = 512, 4096
#: Shared memory that the system takes of a multiprocessor for each thread block.
RESERVED = 1024
#: Fewer reordered rows are gathered from memory: thread blocks of groups would be too few.
STAGED_ROWS = 256


@dataclass(frozen=True)
class Limits:
    """What a device has.

    Attributes:
        multiprocessors: how many.
        shared_block: bytes of shared memory that a thread block may have.
        shared_multiprocessor: bytes of shared memory of a multiprocessor.
    """

    multiprocessors: int
    shared_block: int
    shared_multiprocessor: int


@cache
def quantize_kernel(kind: str, dtype: str, rounds: bool) -> Instance:
    """Quantization from an element type; `kind` is '', '_ordered' or '_any'."""
    name = f"quantize_residual{kind}_kernel"
    return instance(name, "quantize_residual.cu", CXX_DTYPES[dtype], rounds)


@cache
def dequantize_kernel(kind: str, dtype: str) -> Instance:
    """Dequantization to an element type; `kind` is '', '_ordered' or '_any'."""
    name = f"dequantize_residual{kind}_kernel"
    return instance(name, "dequantize_residual.cu", CXX_DTYPES[dtype])


def all_instances() -> list[Instance]:
    """Every kernel of residual channels."""
    result = []
    for kind in ("", "_ordered", "_any"):
        for dtype in DTYPES:
            result += [quantize_kernel(kind, dtype, rounds) for rounds in (True, False)]
            result.append(dequantize_kernel(kind, dtype))
    return result


def _options(plan: ResidualPlan, special: str) -> tuple[int, ...]:
    """The last arguments of every kernel; whether the mode is `special` is one of them."""
    return (
        SCALE_LAYOUTS.index(plan.scale_layout),
        int(plan.layout == "interleaved"),
        int(plan.mode == special),
        int(plan.nibble_order == "high_first"),
    )


def _stored_groups(plan: ResidualPlan) -> int:
    """Groups of rows, padded rows of the scales included."""
    return -(-plan.scale_shape[0] // GROUP_ROWS)


@dataclass(frozen=True)
class Staging:
    """How reordered rows pass through shared memory.

    Attributes:
        together: rows (pairs of rows of a 16-bit type) of a step.
        shared: bytes of shared memory.
    """

    together: int
    shared: int

    def grid(self, plan: ResidualPlan, limits: Limits) -> tuple[int, ...]:
        """As many thread blocks as run at once, or one for each group of rows."""
        fitting = limits.shared_multiprocessor // (self.shared + RESERVED)
        resident = limits.multiprocessors * max(1, min(RESIDUAL_BLOCKS, fitting))
        return (min(_stored_groups(plan), resident),)


def staging(
    plan: ResidualPlan, dtype: str, quantizes: bool, aligned: bool, limits: Limits
) -> Staging | None:
    """How to stage rows in another order, or None if they should be gathered from memory."""
    if not aligned or not STAGED_ROWS <= plan.rows < 2**31 or plan.cols > MAX_PLACES:
        return None
    item_size = ITEM_SIZES[dtype]
    together = GROUP_ROWS * item_size // 4
    while together > 1 and together * plan.cols > STEP_WORDS:
        together //= 2
    shared = (4 * together + PLACE_BYTES) * plan.cols
    if quantizes:
        shared += FACTOR_TABLE + GROUP_ROWS * TILE_BLOCKS * -(-plan.blocks // TILE_BLOCKS)
    elif item_size == 2:
        shared += BYTE_TABLE
    return Staging(together, shared) if shared <= limits.shared_block else None


def quantize_launch(
    plan: ResidualPlan, dtype: str, ordered: bool, aligned: bool, limits: Limits
) -> Launch:
    """For (x, scale, order, packed, block_scale).

    Args:
        plan: what to do.
        dtype: element type of x.
        ordered: whether there is an order.
        aligned: whether x, packed and block_scale may be moved in vectors.
        limits: what the device has.
    """
    stored_rows, stored_cols = plan.scale_shape
    options = _options(plan, "weight")
    if ordered:
        stage = staging(plan, dtype, True, aligned, limits)
        if stage is not None:
            magic, shift = fast_division(plan.main_blocks, 2**31 - 1)
            return Launch(
                quantize_kernel("_ordered", dtype, plan.rounds),
                stage.grid(plan, limits),
                (
                    _stored_groups(plan),
                    plan.rows,
                    plan.main_blocks,
                    plan.first,
                    plan.blocks,
                    stored_cols,
                    stage.together,
                    magic,
                    shift,
                    *options,
                ),
                stage.shared,
            )
    units, items = _items(plan)
    if not ordered and aligned and items < 2**31 and stored_cols < 2**24:
        magic, shift = fast_division(units, items)
        resident = limits.multiprocessors * RESIDUAL_BLOCKS
        return Launch(
            quantize_kernel("", dtype, plan.rounds),
            (min(-(-items // THREADS), resident),),
            (
                items,
                plan.rows,
                plan.main_blocks,
                plan.first,
                plan.blocks,
                stored_rows,
                stored_cols,
                units,
                magic,
                shift,
                *options,
            ),
        )
    items = stored_rows * plan.main_blocks
    magic, shift = fast_division(plan.main_blocks, items)
    return Launch(
        quantize_kernel("_any", dtype, plan.rounds),
        grid_for(items),
        (
            items,
            plan.rows,
            plan.main_blocks,
            plan.first,
            plan.blocks,
            stored_rows,
            stored_cols,
            magic,
            shift,
            *options,
        ),
    )


def _items(plan: ResidualPlan) -> tuple[int, int]:
    """Units of a row that a thread's number is divided by, and threads: spread() of residual.cuh.

    A thread takes a block; where scales are tiled, a warp takes four of each row of a group.
    """
    if plan.scale_layout == "linear":
        return plan.main_blocks, plan.rows * plan.main_blocks
    units = -(-plan.main_blocks // TILE_BLOCKS)
    return units, _stored_groups(plan) * units * WARP


def dequantize_launch(
    plan: ResidualPlan, dtype: str, ordered: bool, aligned: bool, limits: Limits
) -> Launch:
    """For (packed, block_scale, scale, order, out); as `quantize_launch`, for packed and out."""
    stored_cols = plan.scale_shape[1]
    places = (plan.main_blocks, plan.first, plan.blocks, stored_cols)
    options = _options(plan, "activation")
    if ordered:
        stage = staging(plan, dtype, False, aligned, limits)
        if stage is not None:
            magic, shift = fast_division(plan.main_blocks, 2**31 - 1)
            return Launch(
                dequantize_kernel("_ordered", dtype),
                stage.grid(plan, limits),
                (_stored_groups(plan), plan.rows, *places, stage.together, magic, shift, *options),
                stage.shared,
            )
    row_pieces = plan.cols // (VECTOR // ITEM_SIZES[dtype])
    few = plan.rows < 2**31 and row_pieces < 2**30 and stored_cols < 2**24
    if not ordered and aligned and few:
        pieces = plan.rows * row_pieces
        magic, shift = fast_division(row_pieces, row_pieces + THREADS * DEQUANTIZE_UNROLL)
        return Launch(
            dequantize_kernel("", dtype),
            grid_for(-(-pieces // DEQUANTIZE_UNROLL)),
            (pieces, *places, row_pieces, magic, shift, *options),
        )
    items = plan.rows * plan.main_blocks
    magic, shift = fast_division(plan.main_blocks, items)
    return Launch(
        dequantize_kernel("_any", dtype),
        grid_for(items),
        (items, *places, magic, shift, *options),
    )
