# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Launch geometry: grids and scalar arguments from plans, as pure integer arithmetic.

Nothing here knows CuPy. Results are cached by plan, so that repeated calls cost a lookup.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from fp4kit.backend.interface import Plan, Seed
from fp4kit.formats import SCALE_LAYOUTS, SCALE_RULES
from fp4kit.layout import TILE
from fp4kit.reference.philox import round_keys
from fp4kit.reference.scaling import ONE, second_level_range

from .compile import (
    Instance,
    dequantize_rowwise_kernel,
    quantize_dequantize_kernel,
    quantize_rowwise_any_kernel,
    quantize_rowwise_kernel,
    quantize_rowwise_swizzled_kernel,
    quantized_error_sums_kernel,
)
from .geometry import (
    DEQUANTIZE_UNROLL,
    DEQUANTIZE_UNROLL_HEAVY,
    FLAT_BLOCKS,
    FUSED_BLOCKS,
    FUSED_UNROLL,
    LANE,
    QUANTIZE_UNROLL,
    THREADS,
)

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
WARP = 32
#: Bytes of a vector access.
VECTOR = 16
MAX_GRID = 2**31 - 1
#: Bytes that a block of `amax_kernel` reads: one round of its loads in flight.
AMAX_CHUNK = 32768
#: Blocks of the error kernels: fixed, so that sums do not depend on the device.
ERROR_BLOCKS = 1024
#: Columns of a row of partial sums, as reduce/error_sums.cu numbers them; the last is a maximum.
ERROR_FIELDS = (
    "sum_x2",
    "sum_y2",
    "sum_xy",
    "sum_d2",
    "saturated",
    "zero_codes",
    "scale_underflow",
    "scale_subnormal",
    "max_abs_error",
)
#: Tiles that a warp of the swizzle kernels takes side by side, and strips of each layout's tile.
TILE_GROUP = 8
STRIPS = {"swizzled_128x4": 32, "swizzled_8x4": 2}


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, the scalars after its arrays, bytes of shared memory, threads."""

    instance: Instance
    grid: tuple[int, ...]
    scalars: tuple[int, ...]
    shared: int = 0
    threads: int = THREADS


def grid_for(threads: int) -> tuple[int, ...]:
    """Blocks for a number of threads."""
    blocks = -(-threads // THREADS)
    if blocks > MAX_GRID:  # 2^43 elements at least: no memory holds them
        raise OverflowError(f"{threads} threads do not fit a CUDA grid")
    return (blocks,)


def fast_division(divisor: int, largest: int) -> tuple[int, int]:
    """(magic, shift) of common/scale_layout.cuh's FastDivide for dividends 0..largest.

    magic = floor(2^shift / d) + 1 exceeds 2^shift / d by at most 1, so the quotient's error is at
    most n / 2^shift, less than 1/d for n < 2^31. Magic 0 stands for a plain 64-bit division.
    """
    if largest >= 2**31:
        return 0, 0
    if divisor > largest:
        return 1, 31
    shift = 31 + (divisor - 1).bit_length()
    return (1 << shift) // divisor + 1, shift


def rows_are_vectors(cols: int, dtype: str) -> bool:
    """Whether each row is a whole number of 16-byte pieces."""
    return cols * ITEM_SIZES[dtype] % VECTOR == 0


def _rule(plan: Plan) -> int:
    return 0 if plan.scale_rule is None else SCALE_RULES.index(plan.scale_rule)


def _high_first(plan: Plan) -> int:
    return int(plan.nibble_order == "high_first")


def _lanes(plan: Plan) -> int:
    return plan.rows * plan.blocks * (plan.format.block_size // LANE)


def quantizes_flat(plan: Plan, scales: int, vector: bool) -> bool:
    """Whether the flat kernels do what a plan asks for."""
    whole = plan.cols % plan.format.block_size == 0
    supported = plan.scheme.deviations <= {"rounding"}
    return supported and vector and whole and scales <= 1 and _lanes(plan) < 2**31


def rounds_stochastically(plan: Plan) -> bool:
    """Whether kernels take a seed."""
    return plan.scheme.rounding == "stochastic"


def seed_arguments(plan: Plan, seed: Seed) -> tuple[int, ...]:
    """What quantizing kernels take of a seed, of the types `seed_types`: nothing without need."""
    return _seed_words(seed) if rounds_stochastically(plan) else ()


@lru_cache(maxsize=256)
def _seed_words(seed: Seed) -> tuple[int, ...]:
    """The subsequence, and a key for each round as signed numbers of 64 bits."""
    key, subsequence = seed
    words = [low | high << 32 for low, high in round_keys(key)]
    return (subsequence, *(word - (word >> 63 << 64) for word in words))


@lru_cache(maxsize=1024)
def quantize_launch(
    plan: Plan, dtype: str, scales: int, vector: bool, multiprocessors: int
) -> Launch:
    """For (x, second, packed, block_scale), and `seed_arguments` if rounding is stochastic.

    The flat kernels if they can, else the general one, which plain plans can take.
    """
    if quantizes_flat(plan, scales, vector):
        tile_cols = TILE[plan.scale_layout][1]
        # Blocks of 32 would fill half sectors only, and were slower than the flat kernel.
        tiled = plan.scale_layout == "swizzled_128x4" and plan.format.block_size == LANE
        # Padding can make a few rows many: its strips are counted in 32 bits as well.
        fits = prod(plan.scale_shape) // WARP < 2**31
        if tiled and fits and plan.blocks % tile_cols == 0:
            return _quantize_tiled_launch(plan, dtype, multiprocessors)
        return _quantize_flat_launch(plan, dtype, multiprocessors)
    assert plan.is_plain
    return _quantize_any_launch(plan, dtype, scales, vector)


def _filling_grid(lanes: int, dtype: str, multiprocessors: int) -> tuple[int, ...]:
    """A thread for each lane, as far as they all run at once."""
    return (min(-(-lanes // THREADS), multiprocessors * FLAT_BLOCKS[ITEM_SIZES[dtype]]),)


def flat_scalars(plan: Plan) -> tuple[int, ...]:
    """What the flat kernels take after their arrays and the seed."""
    stored_rows, stored_cols = plan.scale_shape
    blocks = plan.rows * plan.blocks
    return (
        _lanes(plan),
        plan.rows,
        plan.blocks,
        stored_rows,
        stored_cols,
        *fast_division(plan.blocks, blocks),
        _high_first(plan),
        _rule(plan),
        int(stored_rows * stored_cols != blocks),
    )


def _quantize_flat_launch(plan: Plan, dtype: str, multiprocessors: int) -> Launch:
    return Launch(
        quantize_rowwise_kernel(
            plan.format,
            dtype,
            plan.recipe,
            plan.has_second_level,
            plan.scale_layout,
            rounds_stochastically(plan),
        ),
        _filling_grid(_lanes(plan), dtype, multiprocessors),
        flat_scalars(plan),
    )


def _quantize_tiled_launch(plan: Plan, dtype: str, multiprocessors: int) -> Launch:
    stored_rows, stored_cols = plan.scale_shape
    # A strip is 32 stored scales, padded rows included.
    strips = stored_rows * stored_cols // WARP
    return Launch(
        quantize_rowwise_swizzled_kernel(
            plan.format, dtype, plan.recipe, plan.has_second_level, rounds_stochastically(plan)
        ),
        _filling_grid(strips * WARP, dtype, multiprocessors),
        (strips, plan.rows, plan.blocks, _high_first(plan), _rule(plan)),
    )


def _quantize_any_launch(plan: Plan, dtype: str, scales: int, vector: bool) -> Launch:
    """The grid covers the padding of the scales."""
    stored_rows, stored_cols = plan.scale_shape
    lanes_each = plan.format.block_size // LANE
    lanes = stored_rows * stored_cols * lanes_each
    unroll = QUANTIZE_UNROLL[ITEM_SIZES[dtype]] if vector else 1
    magic, shift = fast_division(stored_cols, stored_rows * stored_cols + THREADS * unroll)
    return Launch(
        quantize_rowwise_any_kernel(plan.format, dtype, plan.recipe, plan.has_second_level, vector),
        grid_for(-(-lanes // unroll)),
        (
            plan.rows,
            plan.cols,
            plan.blocks,
            stored_cols,
            lanes,
            magic,
            shift,
            scales,
            plan.rows_per_scale,
            SCALE_LAYOUTS.index(plan.scale_layout),
            _high_first(plan),
            _rule(plan),
        ),
    )


def range_bits(plan: Plan) -> tuple[int, int]:
    """Bits of the range that second levels of te map amaxes onto, and of its reciprocal."""
    largest = np.float32(second_level_range(plan.scheme.e4m3_max))
    value, reciprocal = np.array([largest, ONE / largest], np.float32).view(np.uint32).tolist()
    return value, reciprocal


def row_pieces(plan: Plan, dtype: str) -> int:
    """16-byte pieces of a row of a decoded array, the last one perhaps in part."""
    return -(-plan.cols // (VECTOR // ITEM_SIZES[dtype]))


def dequantize_access(plan: Plan, dtype: str, scales: int, vector: bool) -> str:
    """One of `DEQUANTIZE_ACCESSES`."""
    if not vector:
        return "single"
    whole = plan.cols % plan.format.block_size == 0
    if whole and plan.scale_layout == "linear" and scales == 1:
        return "flat"
    # The others count rows, the places of a row and the bytes of a row of tiles in 32 bits.
    if plan.rows >= 2**31 or row_pieces(plan, dtype) >= 2**30 or plan.scale_shape[1] >= 2**24:
        return "single"
    return "tiled" if scales == 1 else "rows"


def dequantize_unroll(plan: Plan, dtype: str, access: str) -> int:
    """dequantize/rowwise.cuh's function of the same name."""
    if access == "single":
        return 1
    heavy = ITEM_SIZES[dtype] == 4 or plan.format.codes_per_byte == 1
    return DEQUANTIZE_UNROLL_HEAVY if access == "flat" and heavy else DEQUANTIZE_UNROLL


@lru_cache(maxsize=1024)
def dequantize_launch(plan: Plan, dtype: str, scales: int, vector: bool) -> Launch:
    """For (packed, block_scale, second, out)."""
    a_row = row_pieces(plan, dtype)
    pieces = plan.rows * a_row
    access = dequantize_access(plan, dtype, scales, vector)
    unroll = dequantize_unroll(plan, dtype, access)
    # What is divided by the pieces of a row: the number of any piece, or one counted from the start
    # of the row that the tile of a thread block starts in.
    largest = pieces if access == "single" else a_row + THREADS * unroll
    magic, shift = fast_division(a_row, largest)
    return Launch(
        dequantize_rowwise_kernel(plan.format, dtype, plan.recipe, plan.has_second_level, access),
        grid_for(-(-pieces // unroll)),
        (
            pieces,
            plan.cols,
            plan.blocks,
            plan.scale_shape[1],
            a_row,
            magic,
            shift,
            scales,
            plan.rows_per_scale,
            SCALE_LAYOUTS.index(plan.scale_layout),
            _high_first(plan),
            *range_bits(plan),
        ),
    )


@lru_cache(maxsize=1024)
def quantize_dequantize_launch(plan: Plan, dtype: str, scales: int, multiprocessors: int) -> Launch:
    """For (x, second, out)."""
    blocks = plan.rows * plan.blocks
    lanes = blocks * (plan.format.block_size // LANE)
    flat = plan.cols % plan.format.block_size == 0 and scales == 1
    tiles = -(-lanes // (THREADS * FUSED_UNROLL[ITEM_SIZES[dtype]]))
    magic, shift = fast_division(plan.blocks, blocks + THREADS)
    return Launch(
        quantize_dequantize_kernel(plan.format, dtype, plan.recipe, plan.has_second_level, flat),
        (min(tiles, multiprocessors * FUSED_BLOCKS),) if flat else grid_for(lanes),
        (
            lanes,
            tiles,
            plan.cols,
            plan.blocks,
            magic,
            shift,
            scales,
            plan.rows_per_scale,
            _rule(plan),
        ),
    )


@lru_cache(maxsize=1024)
def quantized_error_launch(plan: Plan, dtype: str, scales: int, vector: bool) -> Launch:
    """For (x, packed, block_scale, second, ..., partials), partials after the scalars."""
    blocks = plan.rows * plan.blocks
    magic, shift = fast_division(plan.blocks, blocks + THREADS)
    return Launch(
        quantized_error_sums_kernel(plan.format, dtype),
        (ERROR_BLOCKS,),
        (
            plan.rows,
            plan.cols,
            plan.blocks,
            plan.scale_shape[1],
            magic,
            shift,
            scales,
            plan.rows_per_scale,
            SCALE_LAYOUTS.index(plan.scale_layout),
            _high_first(plan),
            plan.recipe.index if plan.recipe is not None else 0,
            int(second_level_range(plan.scheme.e4m3_max)),
            int(vector),
        ),
    )


@lru_cache(maxsize=1024)
def amax_geometry(
    size: int, groups: int, item_size: int
) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
    """Grid and (group size, chunk size, chunks of a group, chunks) of `amax_kernel`."""
    group_size = size // groups
    chunk_size = AMAX_CHUNK // item_size
    group_chunks = -(-group_size // chunk_size)
    chunks = groups * group_chunks
    return (min(chunks, MAX_GRID),), (group_size, chunk_size, group_chunks, chunks)


def swizzle_geometry(rows: int, cols: int, layout: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Grid and (tile rows, tiles in a row) of the swizzle kernels."""
    tile_rows, tile_cols = TILE[layout]
    down, across = -(-rows // tile_rows), -(-cols // tile_cols)
    groups = -(-across // TILE_GROUP)
    return grid_for(down * groups * TILE_GROUP * STRIPS[layout]), (down, across)
