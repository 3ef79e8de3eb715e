# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups on CUDA: where the members lie, and how the work on them is cut, as integer arithmetic.

All members are one launch: a thread block looks up in a table (`kernels_cu/members.cuh`) which
member its piece of work belongs to: a tile, a chunk or a round. Nothing here knows CuPy, but for
the pinned copy of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.groups import GroupedPlan, filled
from fp4kit.backend.interface import Plan
from fp4kit.group_shapes import GroupShapes
from fp4kit.layout import TILE
from fp4kit.reference.activations import SUM_ROWS

from . import device as cuda_device
from .activations import TILE_ROWS as SUM_TILE_ROWS
from .geometry import LANE, THREADS
from .launch import (
    AMAX_CHUNK,
    ITEM_SIZES,
    MAX_GRID,
    VECTOR,
    WARP,
    dequantize_unroll,
    row_pieces,
    rows_are_vectors,
)
from .variants import TALL_COLUMNS, TALL_ROWS, TILE_COLUMNS, TILE_ROWS, is_padded

#: 64-bit words of a Member (common/members.cuh).
MEMBER_WORDS = 10
#: 32-bit words of tables that are parameters of kernels: with the other parameters no more than
#: 4096 bytes (86 members), or 32764 where these are possible (272, 731).
FEW_WORDS = (951, 2999, 8047)
#: Stretches of pieces for each thread block that a device holds at once: more of them keep what is
#: read side by side, and all multiprocessors busy to the end.
STRETCHES = 12
#: Pieces of a stretch that are worth what a thread block does ahead of it.
LEAST_STRETCH = 4
#: Strips of a round, one a warp.
ROUND_STRIPS = THREADS // WARP
#: Rows and columns of a tile of the layout that strips are for.
SWIZZLED_ROWS, SWIZZLED_COLS = TILE["swizzled_128x4"]
#: Rows of a strip where not all of a tile's exist, and how many such strips there are at least:
#: those that write padding.
SHORT_ROWS, SHORT_STRIPS = 8, 4


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
        few: the same in 32 bits, as a kernel takes it as FewMembers (members.cuh); one element.
            None if it does not fit.
    """

    words: NDArray[np.int64]
    count: int
    pieces: int
    few: NDArray[np.void] | None

    @property
    def kind(self) -> str:
        """What kernels take (common/members.cuh)."""
        if self.few is None:
            return "ManyMembers"
        return f"FewMembers<{self.few.nbytes // 4 - 1}>"

    @property
    def records(self) -> int:
        """The word where the members begin."""
        return self.words.size - self.count * MEMBER_WORDS

    @property
    def grid(self) -> tuple[int]:
        """A thread block for each piece."""
        self._check_pieces()
        return (self.pieces,)

    def stretches(self, blocks: int) -> tuple[int, tuple[int]]:
        """Pieces that a thread block takes one after the other, and thread blocks.

        Args:
            blocks: thread blocks that the device holds at once.
        """
        self._check_pieces()
        evenly = -(-self.pieces // blocks)
        stretch = max(min(evenly, LEAST_STRETCH), -(-evenly // STRETCHES))
        return stretch, (-(-self.pieces // stretch),)

    def _check_pieces(self) -> None:
        if self.pieces > MAX_GRID:  # 2^43 elements at least: no memory holds them
            raise OverflowError(f"{self.pieces} pieces of work do not fit a CUDA grid")

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


def is_halved(plan: GroupedPlan, starts: tuple[int, ...]) -> bool:
    """Whether members begin at half of these numbers, exactly, as rows of swiglu do."""
    return all(starts[number] == 2 * plan.starts[number] for number in filled(plan))


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


def _tiles(plan: Plan, columns: int) -> int:
    return -(-plan.rows // TILE_ROWS) * -(-plan.cols // columns)


def _folded_tiles(plan: Plan) -> int:
    """Of the whole rows of tiles, and those that the strips of the last one fill."""
    across = -(-plan.cols // TALL_COLUMNS)
    down, rest = divmod(plan.rows, TALL_ROWS)
    height = plan.format.block_size
    return down * across + -(-(-(-rest // height) * across) // (TALL_ROWS // height))


def _lane_rounds(plan: Plan) -> int:
    return -(-plan.rows * plan.cols // (LANE * THREADS))


def _strip_rounds(plan: Plan) -> int:
    """Of the whole tiles, and of the last row of tiles if its rows do not all exist."""
    across = plan.scale_shape[1] // SWIZZLED_COLS
    down, rest = divmod(plan.rows, SWIZZLED_ROWS)
    whole = down * across * SWIZZLED_ROWS * SWIZZLED_COLS // (WARP * ROUND_STRIPS)
    short = max(-(-rest // SHORT_ROWS), SHORT_STRIPS) if rest else 0
    return whole + -(-short * across // ROUND_STRIPS)


def strips(plan: Plan) -> int:
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
    return MemberTable(words, count, int(first[count]), _few(first[: count + 1], members))


def _few(first: NDArray[np.int64], members: NDArray[np.int64]) -> NDArray[np.void] | None:
    """FewMembers: the count, the members, where their pieces begin and end."""
    words = np.concatenate([members.reshape(-1), first])
    rooms = [room for room in FEW_WORDS if room >= words.size]
    if not rooms or words.max() >= 1 << 32:
        return None
    if rooms[0] > FEW_WORDS[0] and not cuda_device.has_large_parameters():
        return None
    image = np.zeros(1 + rooms[0], np.uint32)
    image[0] = len(members)
    image[1 : 1 + words.size] = words
    return image.view(np.dtype((np.void, image.nbytes)))


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
def tile_table(sides: Sides, columns: int = TILE_COLUMNS) -> MemberTable:
    """Pieces are tiles of TILE_ROWS rows and so many columns."""
    return _table(sides, lambda plan: _tiles(plan, columns))


@lru_cache(maxsize=256)
def folded_table(sides: Sides) -> MemberTable:
    """Pieces are tiles of tiles/remainder_rows.cuh."""
    return _table(sides, _folded_tiles)


@lru_cache(maxsize=256)
def amax_table(sides: Sides, dtype: str) -> MemberTable:
    """Pieces are `amax_chunk` elements."""
    chunk = amax_chunk(dtype)
    return _table(sides, lambda plan: -(-plan.rows * plan.cols // chunk))


@lru_cache(maxsize=256)
def lane_table(sides: Sides) -> MemberTable:
    """Pieces are rounds of a lane for each thread."""
    return _table(sides, _lane_rounds)


@lru_cache(maxsize=256)
def piece_table(sides: Sides, dtype: str, access: str) -> MemberTable:
    """Pieces are the tiles of `dequantize/rowwise.cuh`."""
    tile = THREADS * dequantize_unroll(first_plan(sides.any), dtype, access)
    return _table(sides, lambda plan: -(-plan.rows * row_pieces(plan, dtype) // tile))


@lru_cache(maxsize=256)
def strip_table(sides: Sides) -> MemberTable:
    """Pieces are rounds of ROUND_STRIPS strips."""
    return _table(sides, _strip_rounds)


@dataclass(frozen=True)
class SumLevel:
    """One launch of column sums.

    Attributes:
        table: tiles of all members.
        size: numbers that it leaves.
        vector: whether aligned arrays are accessed 16 bytes at a time.
    """

    table: MemberTable
    size: int
    vector: bool


def _sum_lanes(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Threads side by side of a tile of members of so many rows: as many as there are.

    Pieces of whole 64 bytes, so that tiles do not share what memory gives at once.
    """
    groups = np.minimum(-(-rows // SUM_ROWS), SUM_ROWS)
    return THREADS // groups // 4 * 4


@lru_cache(maxsize=64)
def sum_levels(source: GroupShapes, group: GroupShapes, dtype: str) -> tuple[SumLevel, ...]:
    """The launches that leave the column sums of all members, one after the other.

    Args:
        source: the members, or what they are made of by an activation.
        group: the members whose columns are summed.
        dtype: element type.
    """
    numbers = [number for number, shape in enumerate(group.dims) if prod(shape)]
    rows, cols = np.array(group.dims, np.int64).reshape(-1, 2)[numbers].T
    begin, out = (np.array(each.starts, np.int64)[numbers] for each in (source, group))
    ends = np.cumsum([0, *(shape[1] for shape in group.dims)], dtype=np.int64)
    levels: list[SumLevel] = []
    while numbers and (not levels or rows.max() > 1):
        left = -(-rows // SUM_TILE_ROWS)
        last = left.max() == 1
        sizes = left * cols
        places = ends[:-1][numbers] if last else np.cumsum(sizes) - sizes
        members = np.zeros((len(numbers), MEMBER_WORDS), np.int64)
        lanes = _sum_lanes(rows)
        # As reduce/column_sums.cu has it.
        members[:, :7] = np.stack([begin, rows, cols, numbers, out, lanes, places], axis=1)
        across = -(-cols // (lanes * (VECTOR // ITEM_SIZES[dtype])))
        aligned = (np.stack([begin, out, cols]) * ITEM_SIZES[dtype] % VECTOR == 0).all()
        table = _make_table((left * across).tolist(), members)
        levels.append(SumLevel(table, int(ends[-1] if last else sizes.sum()), bool(aligned)))
        rows, begin, out, dtype = left, places, places, "float32"
    return tuple(levels)
