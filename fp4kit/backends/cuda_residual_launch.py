# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Residual channels on CUDA: kernel instances, grids and arguments, as pure integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fp4kit.formats import DTYPES, SCALE_LAYOUTS

from .cuda_launch import ITEM_SIZES, VECTOR, WARP, Launch, fast_division, grid_for
from .cuda_module import (
    CXX_DTYPES,
    DEQUANTIZE_UNROLL,
    RESIDUAL_BLOCKS,
    RESIDUAL_DEQUANTIZE_STAGED,
    RESIDUAL_QUANTIZE_STAGED,
    RESIDUAL_STAGED_THREADS,
    THREADS,
    Instance,
    instance,
)
from .operations import ResidualPlan

#: Rows of a group (residual_places.cuh): four of their scales fill a sector.
GROUP_ROWS = 8
#: Blocks of a row that a warp takes where scales are tiled.
TILE_BLOCKS = 4
#: Rows, or groups of rows, that a warp takes one after the other: a power of two, at most 16.
MAX_DEPTH = 8
#: Fewer of these where a warp would not have as many items.
ITEMS_PER_WARP = 4
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
    file = f"quantize_residual{'' if kind == '_any' else kind}.cu"
    return instance(f"quantize_residual{kind}_kernel", file, CXX_DTYPES[dtype], rounds)


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
        blocks: thread blocks that a multiprocessor has registers for.
        slots: how many pieces a thread may have under way, where rows are copied ahead.
    """

    together: int
    shared: int
    blocks: int
    slots: int = 0

    def grid(self, plan: ResidualPlan, limits: Limits) -> tuple[int, ...]:
        """As many thread blocks as run at once, or one for each group of rows."""
        fitting = limits.shared_multiprocessor // (self.shared + RESERVED)
        resident = limits.multiprocessors * max(1, min(self.blocks, fitting))
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
        return _slotted(together, shared, plan.cols, item_size, limits)
    if item_size == 2:
        shared += BYTE_TABLE
    if shared > limits.shared_block:
        return None
    return Staging(together, shared, RESIDUAL_DEQUANTIZE_STAGED)


def _slotted(
    together: int, shared: int, cols: int, item_size: int, limits: Limits
) -> Staging | None:
    """Adds slots: enough for a step, or as many as fit.

    Args:
        together: as in `Staging`.
        shared: bytes without slots.
        cols: channels.
        item_size: bytes of an element.
        limits: what the device has.
    """
    slot = RESIDUAL_STAGED_THREADS * VECTOR * 4 // item_size
    blocks = RESIDUAL_QUANTIZE_STAGED
    if blocks * (shared + slot + RESERVED) > limits.shared_multiprocessor:
        blocks = 1
    room = min(limits.shared_block, limits.shared_multiprocessor // blocks - RESERVED) - shared
    wanted = -(-together * cols * item_size // (VECTOR * RESIDUAL_STAGED_THREADS))
    slots = min(wanted, room // slot)
    return Staging(together, shared + slots * slot, blocks, slots) if slots > 0 else None


@dataclass(frozen=True)
class Walk:
    """How warps go over a tensor whose channels stay in order.

    Attributes:
        unit_blocks: blocks of a row that a warp takes: as many as it has lanes, or of fewer the
            same of each row of a group.
        units: of a row.
        depth: rows, or groups of rows, of an item.
        items: units times depths.
        rotation: how far items that are a row of units apart are moved along the row.
    """

    unit_blocks: int
    units: int
    depth: int
    items: int
    rotation: int

    def grid(self, resident: int) -> tuple[int, ...]:
        """Blocks, at most those that run at once."""
        return (min(-(-self.items * WARP // THREADS), resident),)

    def fits(self, plan: ResidualPlan) -> bool:
        """Whether what the kernel counts in 32 bits lets it."""
        stored_rows, stored_cols = plan.scale_shape
        return max(self.items, stored_rows) < 2**31 and stored_cols < 2**24

    def steps(self, plan: ResidualPlan) -> tuple[int, ...]:
        """From a lane's row to its next: in rows, elements, bytes of codes and bytes of scales."""
        if self.unit_blocks == WARP:
            rows = 1
        else:
            # In the 128x4 tile groups are pairs of neighbours, the rest of them 32 rows apart.
            rows = 2 if plan.scale_layout == "swizzled_128x4" else GROUP_ROWS
        scales = rows * plan.scale_shape[1]
        if plan.scale_layout == "swizzled_128x4":
            scales = GROUP_ROWS * TILE_BLOCKS
        return rows, rows * plan.cols, rows * plan.packed_shape[1], scales


def _walk(plan: ResidualPlan, resident: int) -> Walk:
    wide = plan.scale_layout == "linear" and plan.main_blocks >= WARP
    unit_blocks = WARP if wide else TILE_BLOCKS
    units = -(-plan.main_blocks // unit_blocks)
    down = plan.rows if wide else _stored_groups(plan)
    depth = MAX_DEPTH
    wanted = ITEMS_PER_WARP * resident * THREADS // WARP
    while depth > 1 and -(-down // depth) * units < wanted:
        depth //= 2
    # About the golden section, and odd: soon everywhere, and not twice at one place before that.
    rotation = units * 5 // 8 | 1
    return Walk(unit_blocks, units, depth, -(-down // depth) * units, rotation)


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
    places = (plan.rows, plan.main_blocks, plan.first, plan.blocks)
    options = _options(plan, "weight")
    if ordered:
        stage = staging(plan, dtype, True, aligned, limits)
        if stage is not None:
            divide = fast_division(plan.main_blocks, 2**31 - 1)
            return Launch(
                quantize_kernel("_ordered", dtype, plan.rounds),
                stage.grid(plan, limits),
                (
                    *(_stored_groups(plan), *places, stored_cols),
                    *(stage.together, stage.slots, *divide, *options),
                ),
                stage.shared,
                RESIDUAL_STAGED_THREADS,
            )
    resident = limits.multiprocessors * RESIDUAL_BLOCKS[ITEM_SIZES[dtype]]
    walk = _walk(plan, resident)
    if not ordered and aligned and walk.fits(plan):
        divide = fast_division(walk.units, walk.items + walk.units)
        return Launch(
            quantize_kernel("", dtype, plan.rounds),
            walk.grid(resident),
            (
                *(walk.items, walk.depth, walk.unit_blocks, walk.units, *divide, walk.rotation),
                *(*walk.steps(plan), *places, stored_rows, stored_cols, *options),
            ),
        )
    items = stored_rows * plan.main_blocks
    divide = fast_division(plan.main_blocks, items)
    return Launch(
        quantize_kernel("_any", dtype, plan.rounds),
        grid_for(items),
        (items, *places, stored_rows, stored_cols, *divide, *options),
    )


def dequantize_launch(
    plan: ResidualPlan, dtype: str, ordered: bool, aligned: bool, limits: Limits
) -> Launch:
    """For (packed, block_scale, scale, order, out); as `quantize_launch`, for packed and out."""
    places = (plan.main_blocks, plan.first, plan.blocks, plan.scale_shape[1])
    options = _options(plan, "activation")
    if ordered:
        stage = staging(plan, dtype, False, aligned, limits)
        if stage is not None:
            divide = fast_division(plan.main_blocks, 2**31 - 1)
            return Launch(
                dequantize_kernel("_ordered", dtype),
                stage.grid(plan, limits),
                (_stored_groups(plan), plan.rows, *places, stage.together, *divide, *options),
                stage.shared,
            )
    row_pieces = plan.cols // (VECTOR // ITEM_SIZES[dtype])
    few = plan.rows < 2**31 and row_pieces < 2**30 and plan.scale_shape[1] < 2**24
    if not ordered and aligned and few:
        pieces = plan.rows * row_pieces
        divide = fast_division(row_pieces, row_pieces + THREADS * DEQUANTIZE_UNROLL)
        return Launch(
            dequantize_kernel("", dtype),
            grid_for(-(-pieces // DEQUANTIZE_UNROLL)),
            (pieces, *places, row_pieces, *divide, *options),
        )
    items = plan.rows * plan.main_blocks
    return Launch(
        dequantize_kernel("_any", dtype),
        grid_for(items),
        (items, *places, *fast_division(plan.main_blocks, items), *options),
    )
