# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of arrays in one buffer: the plan of a group, and the operations member by member."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from fp4kit.group_shapes import GroupShapes
from fp4kit.plan import Plan

from .jobs import NO_SEED, Job, Prologue, RawArray, Seed

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
    """The seed of a member: each has its own subsequence, the first that of the group."""
    key, subsequence = seed
    return key, (subsequence + number) % (1 << 32)


def group_amax(engine: Backend, plan: GroupedPlan, x: RawArray, dtype: str, out: RawArray) -> None:
    """Fills float32 (plan.second_offsets[-1],) with `Backend.plan_amax` of every member."""
    for number, member in enumerate(plan.members):
        target = _second(plan, number, out)
        assert target is not None
        if member.rows and member.cols:
            target[...] = engine.plan_amax(member, _array(plan, number, x), dtype)
        else:
            target[...] = 0


def _member(job: Job, number: int, seed: Seed) -> Job:
    """The job of a member by itself."""
    plan: GroupedPlan = job.plan
    return Job(
        plan.members[number],
        None if job.x is None else _array(plan, number, job.x),
        job.dtype,
        _second(plan, number, job.second),
        _codes(plan, number, job.packed),
        _scales(plan, number, job.block_scale),
        seed,
    )


def quantize_group(engine: Backend, jobs: tuple[Job, ...]) -> None:
    """Quantizes every member of a flat buffer in one or two directions (rows, then columns).

    Args:
        engine: backend.
        jobs: one for each direction; their seed is of the first member, see :func:`member_seed`.
    """
    for number in filled(jobs[0].plan):
        own = [_member(job, number, member_seed(job.seed, number)) for job in jobs]
        if len(own) == 1:
            engine.quantize(own[0])
        else:
            engine.quantize_both(own[0], own[1])


def dequantize_group(engine: Backend, job: Job, out: RawArray, dtype: str) -> None:
    """Decodes every member into its place in flat `out`; the rest of it is left alone."""
    for number in filled(job.plan):
        own = _member(job, number, NO_SEED)
        target = _array(job.plan, number, out)
        engine.dequantize(own._replace(plan=own.plan.decoding), target, dtype)


def activate_group(engine: Backend, prologue: Prologue, source: GroupShapes, out: RawArray) -> None:
    """Fills flat `out` with `Operations.activate` of all members; see `Backend.activate_grouped`.

    Results begin where members of x do, or at half of these elements if they are halved.
    """
    halves = prologue.activation == "swiglu"
    x, other = prologue.x, prologue.other
    for begin, end, cols in _blocks(source, halves):
        target = out[begin // 2 : begin // 2 + (end - begin) // 2] if halves else out[begin:end]
        own = Prologue(
            prologue.activation,
            x[begin:end].reshape(-1, cols),
            prologue.dtype,
            None if other is None else other[begin:end].reshape(-1, cols),
        )
        engine.activate(own, target.reshape(-1, cols // 2 if halves else cols))


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
