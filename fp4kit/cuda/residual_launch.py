# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Residual channels on CUDA: kernel instances, grids and arguments, as pure integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from fp4kit.backend.operations import ResidualPlan
from fp4kit.formats import DTYPES, SCALE_LAYOUTS

from .compile import CXX_DTYPES, Instance, instance
from .geometry import (
    DEQUANTIZE_UNROLL,
    RESIDUAL_BLOCKS,
    RESIDUAL_DEQUANTIZE_STAGED,
    RESIDUAL_STAGED_THREADS,
    THREADS,
)
from .launch import ITEM_SIZES, VECTOR, WARP, Launch, fast_division, grid_for

#: Rows of a group (residual/places.cuh): four of their scales fill a sector.
GROUP_ROWS = 8
#: Blocks of a row that a warp takes where scales are tiled.
TILE_BLOCKS = 4
#: Rows, or groups of rows, that a warp takes one after the other: a power of two, at most 16.
MAX_DEPTH = 8
#: Fewer of these where a warp would not have as many items.
ITEMS_PER_WARP = 4
#: Words of shared memory that the rows of a step take, where one row takes no more: of one that
#: dequantizes, and of one that quantizes.
STEP_WORDS, RING_WORDS = 8192, 16384
#: Rows of a step that quantizes, and its buffers in a ring, at most.
STEP_ROWS, MOST_BUFFERS = 4, 3
#: Words beside the staged ones of each row (or pair), and bytes of the ring's barriers.
STAGED_GAP, RING_BARRIERS = 4, 48
#: Bytes of a word, which holds a channel of one or two rows.
WORD = 4
#: Bytes of a channel's place in shared memory, and the channels that it can tell apart.
PLACE_BYTES, MAX_PLACES = 2, (1 << 16) - 1
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
    """Quantization from an element type; `kind` is '' or '_any'."""
    name = f"quantize_residual{kind}_kernel"
    return instance(name, "residual/quantize.cu", CXX_DTYPES[dtype], rounds)


@cache
def quantize_ordered_kernel(dtype: str, rounds: bool, together: int, ahead: bool) -> Instance:
    """Quantization of staged rows; `together` as in `Staging`, `ahead` with several buffers."""
    name, file = "quantize_residual_reordered_kernel", "residual/quantize_reordered.cu"
    return instance(name, file, CXX_DTYPES[dtype], rounds, f"u32({together})", ahead)


@cache
def dequantize_kernel(kind: str, dtype: str) -> Instance:
    """Dequantization to an element type; `kind` is '', '_reordered' or '_any'."""
    name = f"dequantize_residual{kind}_kernel"
    return instance(name, "residual/dequantize.cu", CXX_DTYPES[dtype])


def all_instances() -> list[Instance]:
    """Every kernel of residual channels."""
    result = []
    for dtype in DTYPES:
        result += [dequantize_kernel(kind, dtype) for kind in ("", "_reordered", "_any")]
        for rounds in (True, False):
            result += [quantize_kernel(kind, dtype, rounds) for kind in ("", "_any")]
            result += [
                quantize_ordered_kernel(dtype, rounds, together, ahead)
                for together, ahead in ((1, False), (1, True), (2, True), (4, True))
                if together * WORD // ITEM_SIZES[dtype] <= STEP_ROWS
            ]
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
        threads: of a thread block.
        buffers: steps that have memory of their own.
        scale_sets: groups of rows whose scales have.
    """

    together: int
    shared: int
    blocks: int
    threads: int = THREADS
    buffers: int = 1
    scale_sets: int = 0

    def grid(self, plan: ResidualPlan, limits: Limits) -> tuple[int, ...]:
        """As many thread blocks as run at once, or one for each group of rows."""
        fitting = limits.shared_multiprocessor // (self.shared + RESERVED)
        resident = limits.multiprocessors * max(1, min(self.blocks, fitting))
        return (min(_stored_groups(plan), resident),)


def _can_stage(plan: ResidualPlan, aligned: bool) -> bool:
    return aligned and STAGED_ROWS <= plan.rows < 2**31 and plan.cols <= MAX_PLACES


def _together(plan: ResidualPlan, dtype: str, rows: int, words: int) -> int:
    """Rows, or pairs of rows, of a step that takes no more rows or words than these if it can."""
    together = rows * ITEM_SIZES[dtype] // WORD
    while together > 1 and together * plan.cols > words:
        together //= 2
    return together


def quantize_staging(
    plan: ResidualPlan, dtype: str, aligned: bool, limits: Limits
) -> Staging | None:
    """How to stage rows in another order, or None if they should be gathered from memory.

    More buffers are worth more than longer steps: warps wait for each other less.
    """
    if not _can_stage(plan, aligned):
        return None
    scales = GROUP_ROWS * TILE_BLOCKS * -(-plan.blocks // TILE_BLOCKS)
    together = _together(plan, dtype, STEP_ROWS, RING_WORDS)
    steps = [together >> i for i in range(together.bit_length())]
    choices = [(each, buffers) for each in steps for buffers in range(MOST_BUFFERS, 1, -1)]
    for each, buffers in (*choices, (1, 1)):
        group_steps = GROUP_ROWS * ITEM_SIZES[dtype] // WORD // each
        needed = 1 - (1 - buffers) // group_steps
        scale_sets = 1 << (needed - 1).bit_length()
        shared = FACTOR_TABLE + RING_BARRIERS + PLACE_BYTES * plan.cols + scale_sets * scales
        shared += buffers * each * WORD * (plan.cols + STAGED_GAP)
        if shared <= limits.shared_block:
            blocks, threads = _ring_threads(each * plan.main_blocks, shared, limits)
            return Staging(each, shared, blocks, threads, buffers, scale_sets)
    return None


def _ring_threads(items: int, shared: int, limits: Limits) -> tuple[int, int]:
    """Thread blocks of a multiprocessor and the threads of each: together as many as can be."""
    most = WARP * -(-items // WARP)
    fitting = limits.shared_multiprocessor // (shared + RESERVED)
    choices = [
        (blocks, min(most, RESIDUAL_STAGED_THREADS // blocks // WARP * WARP))
        for blocks in range(1, min(fitting, RESIDUAL_STAGED_THREADS // WARP) + 1)
    ]
    return max(choices, key=prod, default=(1, min(most, RESIDUAL_STAGED_THREADS)))


def dequantize_staging(
    plan: ResidualPlan, dtype: str, aligned: bool, limits: Limits
) -> Staging | None:
    """The same of the way back."""
    if not _can_stage(plan, aligned):
        return None
    together = _together(plan, dtype, GROUP_ROWS, STEP_WORDS)
    shared = (WORD * together + PLACE_BYTES) * plan.cols
    if ITEM_SIZES[dtype] == 2:
        shared += BYTE_TABLE
    if shared > limits.shared_block:
        return None
    return Staging(together, shared, RESIDUAL_DEQUANTIZE_STAGED)


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
        stage = quantize_staging(plan, dtype, aligned, limits)
        if stage is not None:
            return Launch(
                quantize_ordered_kernel(dtype, plan.rounds, stage.together, stage.buffers > 1),
                stage.grid(plan, limits),
                (
                    *(_stored_groups(plan), *places, stored_cols),
                    *(stage.buffers, stage.scale_sets, *options),
                ),
                stage.shared,
                stage.threads,
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
        stage = dequantize_staging(plan, dtype, aligned, limits)
        if stage is not None:
            divide = fast_division(plan.main_blocks, 2**31 - 1)
            return Launch(
                dequantize_kernel("_reordered", dtype),
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
