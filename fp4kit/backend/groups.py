# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of arrays in one buffer: the plan of a group, and the operations member by member."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

from fp4kit.group_shapes import GroupShapes
from fp4kit.plan import NO_SEED, Plan, RawArray, Seed

if TYPE_CHECKING:
    from .interface import Backend

#: Columns of the matrix that elementwise work on members of different lengths is arranged in.
ROW = 4096


@dataclass(frozen=True, eq=False)
class GroupedPlan:
    """The plans of a group's members in one direction, and where their parts lie.

    Attributes:
        members: one plan each; any may be empty.
        starts: element of the buffer where each member begins, row-major from there.
    """

    members: tuple[Plan, ...]
    starts: tuple[int, ...]

    @cached_property
    def packed_offsets(self) -> tuple[int, ...]:
        """Byte where each member's codes begin, and the end (n + 1)."""
        return _prefix(prod(plan.packed_shape) for plan in self.members)

    @cached_property
    def scale_offsets(self) -> tuple[int, ...]:
        """Byte where each member's block scales begin, layout padding included, and the end."""
        return _prefix(prod(plan.scale_shape) for plan in self.members)

    @cached_property
    def second_offsets(self) -> tuple[int, ...]:
        """Place of each member's first second-level value, and the end."""
        return _prefix(plan.scales for plan in self.members)


def _prefix(sizes: Iterator[int]) -> tuple[int, ...]:
    return (0, *accumulate(sizes))


def _array(plan: GroupedPlan, number: int, flat: RawArray) -> RawArray:
    """A member of a flat buffer, (rows, cols)."""
    member = plan.members[number]
    start = plan.starts[number]
    return flat[start : start + member.rows * member.cols].reshape(member.rows, member.cols)


def _codes(plan: GroupedPlan, number: int, packed: RawArray) -> RawArray:
    begin, end = plan.packed_offsets[number : number + 2]
    return packed[begin:end].reshape(plan.members[number].packed_shape)


def _scales(plan: GroupedPlan, number: int, block_scale: RawArray) -> RawArray:
    begin, end = plan.scale_offsets[number : number + 2]
    return block_scale[begin:end].reshape(plan.members[number].scale_shape)


def _second(plan: GroupedPlan, number: int, second: RawArray | None) -> RawArray | None:
    if second is None:
        return None
    begin, end = plan.second_offsets[number : number + 2]
    return second[begin:end]


def filled(plan: GroupedPlan) -> list[int]:
    """Numbers of the members that have elements."""
    return [i for i, member in enumerate(plan.members) if member.rows and member.cols]


def member_seed(seed: Seed, number: int) -> Seed:
    """The seed of a member: each has its own stream, the group's first one being the first's."""
    key, stream = seed
    return key, (stream + number) % (1 << 32)


def group_amax(engine: Backend, plan: GroupedPlan, x: RawArray, dtype: str, out: RawArray) -> None:
    """Fills float32 (plan.second_offsets[-1],) with `Backend.plan_amax` of every member."""
    for number, member in enumerate(plan.members):
        target = _second(plan, number, out)
        assert target is not None
        if member.rows and member.cols:
            target[...] = engine.plan_amax(member, _array(plan, number, x), dtype)
        else:
            target[...] = 0


def quantize_group(
    engine: Backend,
    plans: tuple[GroupedPlan, ...],
    x: RawArray,
    dtype: str,
    seconds: tuple[RawArray | None, ...],
    packeds: tuple[RawArray, ...],
    block_scales: tuple[RawArray, ...],
    seed: Seed = NO_SEED,
) -> None:
    """Quantizes every member of a flat buffer in one or two directions (rows, then columns).

    Args:
        engine: backend.
        plans: one for each direction.
        x: flat elements.
        dtype: element type of `x`.
        seconds: float32 (plan.second_offsets[-1],) each, or None.
        packeds: uint8 (plan.packed_offsets[-1],) each.
        block_scales: uint8 (plan.scale_offsets[-1],) each.
        seed: of the first member; see :func:`member_seed`.
    """
    for number in filled(plans[0]):
        array = _array(plans[0], number, x)
        own = member_seed(seed, number)
        parts: list[Any] = [
            (
                plan.members[number],
                _second(plan, number, second),
                _codes(plan, number, packed),
                _scales(plan, number, block_scale),
            )
            for plan, second, packed, block_scale in zip(
                plans, seconds, packeds, block_scales, strict=True
            )
        ]
        if len(parts) == 1:
            ((member, second, packed, block_scale),) = parts
            engine.quantize(member, array, dtype, second, packed, block_scale, own)
            continue
        (row_plan, row_second, row_packed, row_scale), (plan, second, packed, block_scale) = parts
        engine.quantize_both(
            row_plan, plan, array, dtype, row_second, second, row_packed, row_scale, packed,
            block_scale, own,
        )  # fmt: skip


def dequantize_group(
    engine: Backend,
    plan: GroupedPlan,
    packed: RawArray,
    block_scale: RawArray,
    second: RawArray | None,
    out: RawArray,
    dtype: str,
) -> None:
    """Decodes every member into its place in flat `out`; the rest of it is left alone."""
    for number in filled(plan):
        engine.dequantize(
            plan.members[number].decoding,
            _codes(plan, number, packed),
            _scales(plan, number, block_scale),
            _second(plan, number, second),
            _array(plan, number, out),
            dtype,
        )


def activate_group(
    engine: Backend,
    name: str,
    source: GroupShapes,
    x: RawArray,
    dtype: str,
    other: RawArray | None,
    out: RawArray,
) -> None:
    """Fills flat `out` with `Operations.activate` of all members; see `Backend.activate_grouped`.

    Results begin where members of x do, or at half of these elements if they are halved.
    """
    halves = name == "swiglu"
    for begin, end, cols in _blocks(source, halves):
        target = out[begin // 2 : begin // 2 + (end - begin) // 2] if halves else out[begin:end]
        engine.activate(
            name,
            x[begin:end].reshape(-1, cols),
            dtype,
            None if other is None else other[begin:end].reshape(-1, cols),
            target.reshape(-1, cols // 2 if halves else cols),
        )


def _blocks(group: GroupShapes, by_rows: bool) -> list[tuple[int, int, int]]:
    """Ranges of elements, and the columns to arrange them in, that take in all members.

    What lies between members is worked on as well where that makes the ranges few.

    Args:
        group: the members.
        by_rows: whether rows matter; otherwise any columns will do.
    """
    filled = [
        (start, start + prod(shape), shape[1])
        for shape, start in zip(group.dims, group.starts, strict=True)
        if prod(shape)
    ]
    if not filled:
        return []
    begin, end, cols = filled[0][0], filled[-1][1], filled[0][2]
    if all((start - begin) % cols == 0 and own == cols for start, _, own in filled):
        return [(begin, end, cols)]
    if by_rows:
        return filled
    middle = end - (end - begin) % ROW
    ranges = ((begin, middle, ROW), (middle, end, max(end - middle, 1)))
    return [block for block in ranges if block[0] < block[1]]


def group_column_sums(
    engine: Backend, group: GroupShapes, x: RawArray, dtype: str, out: RawArray
) -> None:
    """Fills `out` with `Operations.column_sums` of every member of flat `x`, one after the other.

    Args:
        engine: backend.
        group: the members.
        x: flat elements.
        dtype: element type of `x`.
        out: float32 (sum of the columns,).
    """
    place = 0
    for (rows, cols), start in zip(group.dims, group.starts, strict=True):
        target = out[place : place + cols]
        place += cols
        if rows and cols:
            array = x[start : start + rows * cols].reshape(rows, cols)
            engine.column_sums(array, dtype, target)
        else:
            target[...] = 0
