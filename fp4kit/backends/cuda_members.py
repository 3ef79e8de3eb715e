# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups on CUDA: tables of members, kernel instances and arguments, as pure integer arithmetic.

All members are one launch: a thread block looks up in a table (`kernels_cu/members.cuh`) which
member its piece of work belongs to, a tile or a chunk. Nothing here knows CuPy, but for the pinned
copy of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4kit.formats import SCALE_LAYOUTS, SCALE_RULES
from fp4kit.scaling import second_level_range

from .base import Plan
from .cuda_activations import TILE_BYTES as SUM_TILE_BYTES
from .cuda_activations import TILE_ROWS as SUM_TILE_ROWS
from .cuda_launch import (
    AMAX_CHUNK,
    ITEM_SIZES,
    MAX_GRID,
    VECTOR,
    WARP,
    dequantize_access,
    dequantize_unroll,
    range_bits,
    rows_are_vectors,
)
from .cuda_module import (
    CXX_DTYPES,
    CXX_FORMATS,
    DEQUANTIZE_ACCESSES,
    LANE,
    THREADS,
    Instance,
    instance,
)
from .cuda_variants import (
    TILE_COLUMNS,
    TILE_ROWS,
    Directions,
    cxx_recipe,
    decoded_tile,
    is_padded,
    rotated,
    sign_mask_of,
    tile_config,
    variant_of,
)
from .grouped import GroupedPlan, filled

#: 64-bit words of a Member (members.cuh).
MEMBER_WORDS = 10
#: Rounds of a thread block that takes a chunk of lanes: enough to make its table worth while.
CHUNK_ROUNDS = 8
CHUNK_LANES = THREADS * CHUNK_ROUNDS
#: The same of strips, one a warp and round.
CHUNK_STRIPS = THREADS // WARP * CHUNK_ROUNDS


class Sides(NamedTuple):
    """The plans of a group's directions, None for one that is not asked for."""

    row: GroupedPlan | None
    column: GroupedPlan | None

    @property
    def any(self) -> GroupedPlan:
        """A plan, for what both share."""
        plan = self.row or self.column
        assert plan is not None
        return plan


@dataclass(frozen=True, eq=False)
class MemberTable:
    """Where the members of a group lie that have elements, for a kernel.

    Attributes:
        words: int64: the number of the first piece of work of each member, and the end; then
            `MEMBER_WORDS` for each.
        count: number of members in it.
        pieces: pieces of work of all of them.
    """

    words: NDArray[np.int64]
    count: int
    pieces: int

    @property
    def records(self) -> int:
        """The word where the members begin."""
        return self.words.size - self.count * MEMBER_WORDS

    @property
    def grid(self) -> tuple[int]:
        """A thread block for each piece."""
        if self.pieces > MAX_GRID:  # 2^44 elements at least: no memory holds them
            raise OverflowError(f"{self.pieces} pieces of work do not fit a CUDA grid")
        return (self.pieces,)

    @cached_property
    def pinned(self) -> Any:
        """The words in memory that the device can read while the host goes on."""
        import cupy

        memory = cupy.cuda.alloc_pinned_memory(self.words.nbytes)
        copy = np.ndarray(self.words.shape, np.int64, memory)
        copy[...] = self.words
        return copy


def sides_of(plans: tuple[GroupedPlan, ...]) -> Sides:
    """Which of one or two plans is for the rows, and which for the columns."""
    row = column = None
    for plan in plans:
        if first_plan(plan).is_columnwise:
            column = plan
        else:
            row = plan
    return Sides(row, column)


@lru_cache(maxsize=256)
def first_plan(plan: GroupedPlan) -> Plan:
    """The plan of a member, for what all share."""
    return plan.members[0]


@lru_cache(maxsize=256)
def has_elements(plan: GroupedPlan) -> bool:
    """Whether there is anything to do."""
    return bool(filled(plan))


@lru_cache(maxsize=256)
def per_vector(plan: GroupedPlan) -> bool:
    """Whether the members have a second-level value for each vector, not one for all."""
    return any(member.scales > 1 for member in plan.members)


@lru_cache(maxsize=256)
def any_padded(plan: GroupedPlan) -> bool:
    """Whether some scales have bytes that belong to no block."""
    return any(is_padded(plan.members[number]) for number in filled(plan))


@lru_cache(maxsize=256)
def takes_vectors(plan: GroupedPlan, dtype: str) -> bool:
    """Whether every row of every member begins and ends on 16 bytes of the buffer."""
    return all(
        rows_are_vectors(plan.members[number].cols, dtype)
        and plan.starts[number] * ITEM_SIZES[dtype] % VECTOR == 0
        for number in filled(plan)
    )


# ------------------------------------------------------------------------------------------------
# Pieces of work
# ------------------------------------------------------------------------------------------------


def _tiles(plan: Plan) -> int:
    return -(-plan.rows // TILE_ROWS) * -(-plan.cols // TILE_COLUMNS)


def _lane_chunks(plan: Plan) -> int:
    return -(-plan.rows * plan.cols // (LANE * CHUNK_LANES))


def _strip_chunks(plan: Plan) -> int:
    return -(-_strips(plan) // CHUNK_STRIPS)


def _strips(plan: Plan) -> int:
    """Pieces of 32 stored scales of a swizzled_128x4 layout."""
    return prod(plan.scale_shape) // WARP


def amax_chunk(dtype: str) -> int:
    """Elements that a thread block of the amax takes."""
    return AMAX_CHUNK // ITEM_SIZES[dtype]


def _make_table(pieces: Sequence[int], members: NDArray[np.int64]) -> MemberTable:
    """A table of the pieces of work of each member, and of what there is to know about it."""
    count = len(members)
    # The second part begins on 16 bytes.
    first = np.zeros(count + 1 + (count + 1) % 2, np.int64)
    np.cumsum(pieces, out=first[1 : count + 1])
    words = np.concatenate([first, members.reshape(-1)])
    return MemberTable(words, count, int(first[count]))


def _table(sides: Sides, pieces: Callable[[Plan], int]) -> MemberTable:
    plan = sides.any
    numbers = filled(plan)
    members = np.zeros((len(numbers), MEMBER_WORDS), np.int64)
    members[:, 0] = np.array(plan.starts, np.int64)[numbers]
    members[:, 1] = [plan.members[number].rows for number in numbers]
    members[:, 2] = [plan.members[number].cols for number in numbers]
    members[:, 3] = numbers
    for place, side in ((4, sides.row), (7, sides.column)):
        if side is not None:
            offsets = (side.packed_offsets, side.scale_offsets, side.second_offsets)
            for number, values in enumerate(offsets):
                members[:, place + number] = np.array(values, np.int64)[numbers]
    return _make_table([pieces(plan.members[number]) for number in numbers], members)


@lru_cache(maxsize=256)
def tile_table(sides: Sides) -> MemberTable:
    """Pieces are tiles of TILE_ROWS x TILE_COLUMNS elements."""
    return _table(sides, _tiles)


@lru_cache(maxsize=256)
def amax_table(sides: Sides, dtype: str) -> MemberTable:
    """Pieces are `amax_chunk` elements."""
    chunk = amax_chunk(dtype)
    return _table(sides, lambda plan: -(-plan.rows * plan.cols // chunk))


@lru_cache(maxsize=256)
def lane_table(sides: Sides) -> MemberTable:
    """Pieces are CHUNK_LANES lanes."""
    return _table(sides, _lane_chunks)


@lru_cache(maxsize=256)
def piece_table(sides: Sides, dtype: str, access: str) -> MemberTable:
    """Pieces are the tiles of `dequantize_pieces.cuh`."""
    tile = THREADS * dequantize_unroll(first_plan(sides.any), dtype, access)
    return _table(sides, lambda plan: -(-plan.rows * _row_pieces(plan, dtype) // tile))


@lru_cache(maxsize=256)
def strip_table(sides: Sides) -> MemberTable:
    """Pieces are CHUNK_STRIPS strips."""
    return _table(sides, _strip_chunks)


# ------------------------------------------------------------------------------------------------
# Launches
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemberLaunch:
    """A kernel over the members of a group.

    Attributes:
        instance: the kernel.
        table: its pieces of work, one a thread block.
        scalars: what follows its arrays.
    """

    instance: Instance
    table: MemberTable
    scalars: tuple[int, ...]


def _directions(sides: Sides) -> Directions:
    """The directions of one member, standing for all."""
    return Directions(
        None if sides.row is None else first_plan(sides.row),
        None if sides.column is None else first_plan(sides.column),
    )


def _high_first(plan: Plan) -> int:
    return int(plan.nibble_order == "high_first")


def _rule(plan: Plan) -> int:
    return 0 if plan.scale_rule is None else SCALE_RULES.index(plan.scale_rule)


def _has_levels(plan: Plan) -> bool:
    return plan.has_second_level and plan.recipe is not None


@lru_cache(maxsize=256)
def quantize_flat_launch(sides: Sides, dtype: str) -> MemberLaunch | None:
    """For (x, second, packed, block_scale, table): the fast path of aligned rows, or None."""
    group = sides.row
    if group is None or sides.column is not None:
        return None
    plan = first_plan(group)
    members = [group.members[number] for number in filled(group)]
    whole = all(member.cols % plan.format.block_size == 0 for member in members)
    if plan.variant is not None or per_vector(group) or not whole:
        return None
    names = CXX_FORMATS[plan.format.name], CXX_DTYPES[dtype], cxx_recipe(plan), _has_levels(plan)
    if plan.scale_layout == "linear":
        kernel, table, chunk = "quantize_grouped_flat_kernel", lane_table(sides), CHUNK_LANES
    elif plan.scale_layout == "swizzled_128x4" and plan.format.block_size == LANE:
        if any(member.blocks % 4 or _strips(member) >= 2**31 for member in members):
            return None
        kernel, table, chunk = "quantize_grouped_tiled_kernel", strip_table(sides), CHUNK_STRIPS
    else:
        return None
    return MemberLaunch(
        instance(kernel, "quantize_grouped_flat.cu", *names),
        table,
        (chunk, _high_first(plan), _rule(plan)),
    )


def quantize_grouped_kernel(
    directions: Directions, dtype: str, vector: bool, one_level: bool
) -> Instance:
    """The instance that serves everything; `one_level` unless vectors have levels of their own."""
    config = tile_config(directions, dtype, vector, one_level)
    return instance("quantize_grouped_kernel", "quantize_grouped.cu", config)


def quantize_arguments(
    sides: Sides,
    x: int,
    table: tuple[int, int, int],
    tiles: int,
    row: tuple[int, int, int],
    column: tuple[int, int, int],
    seed: tuple[int, int],
) -> tuple[int, ...]:
    """Arguments of `quantize_grouped_kernel`.

    Args:
        sides: the plans.
        x: address of the buffer.
        table: addresses of the table's pieces and members, and the number of these.
        tiles: of all members.
        row: addresses of (second, packed, block_scale) of the rowwise result.
        column: the same of the columnwise one.
        seed: key and stream of the random numbers.
    """
    directions = _directions(sides)
    plan = directions.any
    key, stream = seed
    return (
        x,
        *table,
        tiles,
        *row,
        int(sides.row is not None and per_vector(sides.row)),
        *column,
        int(sides.column is not None and per_vector(sides.column)),
        _high_first(plan),
        _rule(plan),
        int(second_level_range(variant_of(plan).e4m3_max)),
        sign_mask_of(directions.row),
        sign_mask_of(directions.column),
        # The kernel takes the bits of an unsigned number.
        key - (1 << 64) if key >= 1 << 63 else key,
        stream,
    )


@lru_cache(maxsize=256)
def quantize_launch(sides: Sides, dtype: str, vector: bool) -> tuple[Instance, MemberTable]:
    """The kernel and table that `quantize_arguments` are for."""
    one_level = not any(group is not None and per_vector(group) for group in sides)
    kernel = quantize_grouped_kernel(_directions(sides), dtype, vector, one_level)
    return kernel, tile_table(sides)


@lru_cache(maxsize=256)
def dequantize_launch(group: GroupedPlan, dtype: str, vector: bool) -> MemberLaunch:
    """For (packed, block_scale, second, out, table); `vector` as `takes_vectors`, and aligned."""
    sides = sides_of((group,))
    plan = first_plan(group)
    if plan.is_columnwise:
        kernel = dequantize_columns_kernel(plan, dtype, per_vector(group))
        table = tile_table(sides)
    else:
        access = _dequantize_access(group, dtype, vector)
        kernel = dequantize_rows_kernel(plan, dtype, access)
        table = piece_table(sides, dtype, access)
    return MemberLaunch(
        kernel,
        table,
        (
            int(per_vector(group)),
            SCALE_LAYOUTS.index(plan.scale_layout),
            _high_first(plan),
            *range_bits(plan),
        ),
    )


def _row_pieces(plan: Plan, dtype: str) -> int:
    """16-byte pieces of a row of the result, the last one perhaps in part."""
    return -(-plan.cols // (VECTOR // ITEM_SIZES[dtype]))


def _dequantize_access(group: GroupedPlan, dtype: str, vector: bool) -> str:
    """The first of `DEQUANTIZE_ACCESSES` that fits all members: the last one that one needs."""
    scales = 2 if per_vector(group) else 1
    members = (group.members[number] for number in filled(group))
    needed = {dequantize_access(m, _row_pieces(m, dtype), scales, vector) for m in members}
    return max(needed, key=list(DEQUANTIZE_ACCESSES).index)


def dequantize_rows_kernel(plan: Plan, dtype: str, access: str) -> Instance:
    """Every member decoded, rowwise."""
    return instance(
        "dequantize_grouped_kernel",
        "dequantize_grouped.cu",
        CXX_FORMATS[plan.format.name],
        CXX_DTYPES[dtype],
        cxx_recipe(plan),
        _has_levels(plan),
        DEQUANTIZE_ACCESSES[access],
    )


def dequantize_columns_kernel(plan: Plan, dtype: str, many_levels: bool) -> Instance:
    """Every member decoded, columnwise."""
    arguments = decoded_tile(plan, dtype, many_levels)
    return instance("dequantize_grouped_columns_kernel", "dequantize_grouped.cu", *arguments)


@lru_cache(maxsize=256)
def amax_launch(group: GroupedPlan, dtype: str, vector: bool) -> MemberLaunch:
    """For (x, table, result): one amax a member, or one a vector, perhaps after the rotation."""
    sides = sides_of((group,))
    plan = first_plan(group)
    if not per_vector(group) and variant_of(plan).hadamard is None:
        return MemberLaunch(
            amax_kernel(dtype),
            amax_table(sides, dtype),
            (int(plan.is_columnwise), amax_chunk(dtype)),
        )
    return MemberLaunch(
        vector_amax_kernel(plan, dtype, vector),
        tile_table(sides),
        (int(per_vector(group)), sign_mask_of(plan)),
    )


def amax_kernel(dtype: str) -> Instance:
    """One amax a member."""
    return instance("grouped_amax_kernel", "amax_grouped.cu", CXX_DTYPES[dtype])


def vector_amax_kernel(plan: Plan, dtype: str, vector: bool) -> Instance:
    """One amax a vector, perhaps after the rotation."""
    turned, elements = rotated(plan, dtype)
    return instance(
        "grouped_vector_amax_kernel",
        "amax_grouped.cu",
        CXX_DTYPES[dtype],
        elements,
        plan.is_columnwise,
        turned,
        vector,
    )


@dataclass(frozen=True)
class SumLevel:
    """One launch of column sums, for (values, table, sums).

    Attributes:
        table: tiles of all members.
        size: numbers that it leaves.
        vector: whether aligned values are read 16 bytes at a time.
    """

    table: MemberTable
    size: int
    vector: bool


@lru_cache(maxsize=64)
def sum_levels(
    dims: tuple[tuple[int, int], ...], starts: tuple[int, ...], dtype: str
) -> tuple[SumLevel, ...]:
    """The launches that leave the column sums of all members, one after the other."""
    numbers = [number for number, shape in enumerate(dims) if prod(shape)]
    rows, cols = np.array(dims, np.int64).reshape(-1, 2)[numbers].T
    begin = np.array(starts, np.int64)[numbers]
    ends = np.cumsum([0, *(shape[1] for shape in dims)], dtype=np.int64)
    levels: list[SumLevel] = []
    while numbers and (not levels or rows.max() > 1):
        left = -(-rows // SUM_TILE_ROWS)
        last = left.max() == 1
        sizes = left * cols
        places = ends[:-1][numbers] if last else np.cumsum(sizes) - sizes
        members = np.zeros((len(numbers), MEMBER_WORDS), np.int64)
        members[:, :3] = np.stack([begin, rows, cols], axis=1)
        members[:, 6] = places
        across = -(-cols // (SUM_TILE_BYTES // ITEM_SIZES[dtype]))
        aligned = (np.stack([begin, cols]) * ITEM_SIZES[dtype] % VECTOR == 0).all()
        table = _make_table((left * across).tolist(), members)
        levels.append(SumLevel(table, int(ends[-1] if last else sizes.sum()), bool(aligned)))
        rows, begin, dtype = left, places, "float32"
    return tuple(levels)


def column_sums_kernel(dtype: str, vector: bool) -> Instance:
    """Two levels of the sums of an element type."""
    names = CXX_DTYPES[dtype], vector
    return instance("grouped_column_sums_kernel", "column_sums_grouped.cu", *names)


# ------------------------------------------------------------------------------------------------
# Instances for tests
# ------------------------------------------------------------------------------------------------
