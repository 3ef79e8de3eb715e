# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of quantized tensors by index, where blocks and layout allow: views, nothing is decoded."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from operator import index as as_integer
from typing import TYPE_CHECKING, Any, NamedTuple

from fp4kit.backend.prepared import TILE_ROWS
from fp4kit.errors import OptionError, brief
from fp4kit.formats import GRID_BLOCK
from fp4kit.layout import TILE

if TYPE_CHECKING:
    from fp4kit.plan import Plan

    from .prepared import PreparedTensor
    from .tensor import QuantizedTensor

_INSTEAD = "decode first: q.dequantize()[...]"


class _Range(NamedTuple):
    """Elements begin .. end - 1 of an axis of `size`, or of leading axes as one."""

    begin: int
    end: int
    size: int

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end) == (0, self.size)

    def divided(self, step: int) -> slice:
        """The same of groups of `step`, a last one that is not whole included."""
        return slice(self.begin // step, -(-self.end // step))

    def starts_groups(self, step: int) -> bool:
        """Whether the range begins and ends where groups of `step` do (or the axis does)."""
        ends = self.end % step == 0 or self.end == self.size
        return self.begin % step == 0 and (ends or self.begin == self.end)


class _Index(NamedTuple):
    """An index of every dimension: numbers, at most one range, then whole axes; and the last axis.

    Attributes:
        lead: index of the leading dimensions, as arrays take it.
        rows: the same of the leading dimensions flattened.
        cols: range of the last axis.
        shape: logical shape of the result.
    """

    lead: tuple[int | slice, ...]
    rows: _Range
    cols: _Range
    shape: tuple[int, ...]


def part_of(q: QuantizedTensor, index: Any) -> QuantizedTensor:
    """See :meth:`QuantizedTensor.__getitem__`."""
    wanted, plan = _parsed(index, q.shape), q.plan()
    if plan.grid is not None:
        return _part_of_grid(q, wanted, plan)
    vectors, along = (
        (wanted.cols, wanted.rows) if plan.is_columnwise else (wanted.rows, wanted.cols)
    )
    _check_blocks(plan, vectors, along, q.scheme.block_shape == "2d")
    block = plan.format.block_size
    blocks = along.divided(block)
    # Codes that pad the last block come along.
    in_block = block // plan.format.codes_per_byte
    codes = slice(blocks.start * in_block, blocks.stop * in_block)
    if not plan.is_columnwise:
        packed = q.packed[(*wanted.lead, codes)]
        linear = (*wanted.lead, blocks)
    elif plan.transposes:
        packed = q.packed[vectors.begin : vectors.end, codes]
        linear = (slice(vectors.begin, vectors.end), blocks)
    else:
        packed = q.packed[codes, vectors.begin : vectors.end]
        linear = (blocks, slice(vectors.begin, vectors.end))
    if plan.scale_layout == "linear":
        scales = q.block_scale[linear]
    else:
        scales = _tiles(plan, q.block_scale, vectors, along)
    return replace(
        q, packed=packed, block_scale=scales, shape=wanted.shape, **_second_level(q, plan, vectors)
    )


def part_of_prepared(q: PreparedTensor, index: Any) -> PreparedTensor:
    """See :meth:`PreparedTensor.__getitem__`."""
    wanted, plan = _parsed(index, q.shape), q.plan()
    vectors, along = (
        (wanted.cols, wanted.rows) if plan.is_columnwise else (wanted.rows, wanted.cols)
    )
    axis = "columns" if plan.is_columnwise else "rows"
    if not along.is_whole or not vectors.starts_groups(TILE_ROWS):
        raise OptionError(
            f"tiles hold {TILE_ROWS} {axis} and all that lies along their blocks; take {axis} in "
            f"multiples of {TILE_ROWS} and the other axis as a whole, or part of q.restore()"
        )
    tiles = q.tiles[vectors.divided(TILE_ROWS)]
    return replace(q, tiles=tiles, shape=wanted.shape, **_second_level(q, plan, vectors))


def _part_of_grid(q: QuantizedTensor, wanted: _Index, plan: Plan) -> QuantizedTensor:
    """The part of a tensor with float32 scales: codes lie as the array does."""
    rows, cols = wanted.rows, wanted.cols
    lead = (slice(rows.begin, rows.end),) if plan.is_columnwise else wanted.lead
    packed = q.packed[(*lead, slice(cols.begin, cols.end))]
    scales = q.block_scale
    if plan.is_columnwise:
        scales = scales[:, cols.begin : cols.end]
    elif q.scheme.granularity == "channel":
        scales = scales[lead]
    elif q.scheme.granularity == "block":
        for axis, one in (("rows", rows), ("the last axis", cols)):
            if not one.starts_groups(GRID_BLOCK):
                raise OptionError(
                    f"{axis} {one.begin} .. {one.end} cut through blocks of {GRID_BLOCK}; take "
                    f"multiples of {GRID_BLOCK}, or {_INSTEAD}"
                )
        scales = scales[rows.divided(GRID_BLOCK), cols.divided(GRID_BLOCK)]
        scales = scales[: -(-(rows.end - rows.begin) // GRID_BLOCK)]
    return replace(q, packed=packed, block_scale=scales, shape=wanted.shape)


def _parsed(index: Any, shape: tuple[int, ...]) -> _Index:
    """Every dimension's index.

    Raises:
        IndexError: for too many indices, or a number out of range.
        OptionError: for what is no range of consecutive rows.
    """
    given = index if isinstance(index, tuple) else (index,)
    if sum(one is Ellipsis for one in given) > 1:
        raise IndexError("an index has one ellipsis at most")
    if Ellipsis in [one for one in given if one is Ellipsis]:
        place = [one is Ellipsis for one in given].index(True)
        missing = max(len(shape) - len(given) + 1, 0)
        given = (*given[:place], *[slice(None)] * missing, *given[place + 1 :])
    if len(given) > len(shape):
        raise IndexError(f"{len(given)} indices for a tensor of {len(shape)} dimensions")
    given = (*given, *[slice(None)] * (len(shape) - len(given)))
    ranges = [_range_of(one, size) for one, size in zip(given, shape, strict=True)]
    *lead, cols = ranges
    if isinstance(cols, int):
        raise OptionError(
            f"index {brief(index)} takes single elements of the last axis, which lie in blocks; "
            f"take a range of whole blocks, or {_INSTEAD}"
        )
    begin, end, kept, scattered = 0, 1, [], False
    for one, size in zip(lead, shape[:-1], strict=True):
        own = _Range(one, one + 1, size) if isinstance(one, int) else one
        scattered |= end - begin > 1 and not own.is_whole
        begin, end = begin * size + own.begin, (end - 1) * size + own.end
        if not isinstance(one, int):
            kept.append(one.end - one.begin)
    if scattered:
        raise OptionError(
            f"index {brief(index)} takes rows that do not follow each other; take numbers, then "
            f"one range, then whole axes (q[i, a:b]), or {_INSTEAD}"
        )
    rows = _Range(begin, max(end, begin), prod(shape[:-1]))
    if 0 in kept:
        rows = rows._replace(end=rows.begin)
    places = tuple(one if isinstance(one, int) else slice(one.begin, one.end) for one in lead)
    return _Index(places, rows, cols, (*kept, cols.end - cols.begin))


def _range_of(one: Any, size: int) -> int | _Range:
    if isinstance(one, slice):
        try:
            begin, end, step = one.indices(size)
        except TypeError:
            raise OptionError(f"index {brief(one)} is no range of whole numbers") from None
        if step != 1:
            raise OptionError(f"index {brief(one)} has a step; take neighbours, or {_INSTEAD}")
        return _Range(begin, max(begin, end), size)
    if isinstance(one, bool) or not hasattr(one, "__index__") or getattr(one, "shape", None):
        raise OptionError(f"index {brief(one)} is neither a whole number nor a range; {_INSTEAD}")
    number = as_integer(one)
    if not -size <= number < size:
        raise IndexError(f"index {number} of an axis of {size}")
    return number % size


def _check_blocks(plan: Plan, vectors: _Range, along: _Range, square: bool) -> None:
    """Refuses parts that cut through blocks, square tiles or layout tiles.

    Raises:
        OptionError: with the multiples that are possible.
    """
    block = plan.format.block_size
    axis, other = ("rows", "the last axis") if plan.is_columnwise else ("the last axis", "rows")
    if not along.starts_groups(block):
        raise OptionError(
            f"{axis} {along.begin} .. {along.end} cut through blocks of {block}; take multiples of "
            f"{block}, or {_INSTEAD}"
        )
    if square and not vectors.starts_groups(block):
        raise OptionError(
            f"{other} {vectors.begin} .. {vectors.end} cut through square tiles of {block}; take "
            f"multiples of {block}, or {_INSTEAD}"
        )
    if plan.scale_layout == "linear":
        return
    height = TILE[plan.scale_layout][0]
    if not along.is_whole:
        raise OptionError(
            f"{plan.scale_layout} scales of a part of {axis} do not lie together; quantize with "
            f"scale_layout='linear', or {_INSTEAD}"
        )
    if not vectors.starts_groups(height):
        raise OptionError(
            f"{other} {vectors.begin} .. {vectors.end} cut through tiles of {plan.scale_layout} "
            f"scales; take multiples of {height}, or quantize with scale_layout='linear'"
        )


def _tiles(plan: Plan, scales: Any, vectors: _Range, along: _Range) -> Any:
    """The swizzled scales of whole tiles of vectors: they lie together."""
    if vectors.begin == vectors.end or along.begin == along.end:
        return scales.reshape(-1)[:0].reshape(vectors.end - vectors.begin, plan.blocks)
    height = TILE[plan.scale_layout][0]
    tiles = vectors.divided(height)
    return scales[tiles.start * height : tiles.stop * height]


def _second_level(
    q: QuantizedTensor | PreparedTensor, plan: Plan, vectors: _Range
) -> dict[str, Any]:
    """The second-level values of a range of vectors, by the field that holds them.

    Raises:
        OptionError: if the range takes parts of several groups that share one.
    """
    (name, values), count = _level_of(q), plan.scales
    if values is None or count == 1:
        return {}
    shared = plan.rows_per_scale
    flat = values.reshape(-1)
    groups = vectors.divided(shared)
    if vectors.begin == vectors.end:
        first = min(groups.start, count - 1)
        return {name: flat[first : first + 1]}
    if groups.stop - groups.start > 1 and (vectors.begin % shared or vectors.end % shared):
        what = "columns" if plan.is_columnwise else "rows"
        raise OptionError(
            f"{what} {vectors.begin} .. {vectors.end} take parts of groups of {shared} that share "
            f"a second-level scale; take multiples of {shared}, or a part of one group"
        )
    return {name: flat[groups]}


def _level_of(q: QuantizedTensor | PreparedTensor) -> tuple[str, Any]:
    for name in ("amax", "decode_scale", "encode_scale"):
        value = getattr(q, name)
        if value is not None:
            return name, value
    return "", None
