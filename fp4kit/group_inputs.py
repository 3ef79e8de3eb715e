# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What happens to the buffer of a group before it is quantized: checks, activation, column sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from . import arrays
from .activated import opened_input
from .arrays import Raw
from .backends import engine_for
from .backends.base import Backend, Seed
from .backends.grouped import GroupedPlan
from .buffers import result_buffer, rows_of
from .errors import NonFiniteError, ShapeError
from .group_shapes import GroupShapes
from .measure import check_finite

#: Columns of the matrix that elementwise work on members of different lengths is arranged in.
ROW = 4096


def check_members(engine: Backend, group: GroupShapes, flat: Any, dtype: str, what: str) -> None:
    """Refuses NaN and infinity in members, not between or behind them.

    Raises:
        NonFiniteError: naming the member and what it belongs to.
    """
    for begin, end in group.stretches:
        if engine.scan(flat[begin:end].reshape(1, -1), dtype)[1]:
            continue
        for number, (shape, start) in enumerate(zip(group.dims, group.starts, strict=True)):
            if prod(shape) and begin <= start < end:
                part = flat[start : start + prod(shape)].reshape(shape)
                check_finite(engine, part, dtype, shape, f"member {number} of {what}")
        raise NonFiniteError(f"{what} holds NaN or infinity")  # pragma: no cover


@dataclass(frozen=True)
class GroupAhead:
    """An activation of a buffer whose members will be quantized.

    Attributes:
        raw: the buffer.
        source: its members.
        name: one of ACTIVATIONS.
        other: what the forward pass activated, for derivatives.
        group: the members of the result.
        shape: shape of the result's buffer.
    """

    raw: Raw
    source: GroupShapes
    name: str
    other: Raw | None
    group: GroupShapes
    shape: tuple[int, ...]

    @cached_property
    def _inputs(self) -> tuple[Any, Any]:
        """The buffer and `other`, flat: copied once if they are not contiguous."""
        size = prod(self.raw.data.shape)
        x = rows_of(self.raw, 1, size).reshape(-1)
        return x, None if self.other is None else rows_of(self.other, 1, size).reshape(-1)

    def fused(
        self,
        engine: Backend,
        plans: tuple[GroupedPlan, ...],
        seconds: tuple[Any, ...],
        packeds: tuple[Any, ...],
        block_scales: tuple[Any, ...],
        seed: Seed,
    ) -> bool:
        """Activates and quantizes at once. False: nothing was done, the backend cannot."""
        x, z = self._inputs
        dtype, starts = self.raw.dtype, self.source.starts
        return engine.quantize_grouped_activated(
            self.name, plans, starts, x, dtype, z, seconds, packeds, block_scales, seed
        )

    def run(self, refuses_nonfinite: bool, backend: str | None) -> Raw:
        """The activated buffer.

        Raises:
            NonFiniteError: if NaN and infinity are refused and a member holds some.
        """
        dtype, origin, halves = self.raw.dtype, self.raw.origin, self.name == "swiglu"
        engine = engine_for("activate", origin.device, dtype, None, None, backend)
        with arrays.device_scope(origin):
            x, z = self._inputs
            if refuses_nonfinite:
                check_members(engine, self.source, x, dtype, "the group")
                if z is not None:
                    check_members(engine, self.source, z, dtype, "activation_input")
            out = arrays.scratch(prod(self.shape), arrays.RAW_DTYPES[dtype], origin)
            for begin, end, cols in _blocks(self.source, halves):
                target = (
                    out[begin // 2 : begin // 2 + (end - begin) // 2] if halves else out[begin:end]
                )
                width = cols // 2 if halves else cols
                engine.activate(
                    self.name,
                    x[begin:end].reshape(-1, cols),
                    dtype,
                    None if z is None else z[begin:end].reshape(-1, cols),
                    target.reshape(-1, width),
                )
            return Raw(out.reshape(self.shape), dtype, origin)


def group_ahead(raw: Raw, group: GroupShapes, name: str, activation_input: Any) -> GroupAhead:
    """An activation of a group, checked.

    Raises:
        OptionError: for unknown or contradictory arguments.
        ShapeError: if the input of the activation does not fit, or a member cannot be halved.
    """
    other = opened_input(raw, name, activation_input)
    shape = tuple(raw.data.shape)
    if name != "swiglu":
        return GroupAhead(raw, group, name, other, group, shape)
    result = _halved(group)
    whole = shape[-1:] and shape[-1] % 2 == 0
    shape = (*shape[:-1], shape[-1] // 2) if whole else (prod(shape) // 2,)
    return GroupAhead(raw, group, name, other, result, shape)


def _halved(group: GroupShapes) -> GroupShapes:
    """The members as they are without the second half of each row.

    Raises:
        ShapeError: if a member cannot be halved.
    """
    for number, shape in enumerate(group.dims):
        if shape[1] % 2:
            raise ShapeError(
                f"activation='swiglu' needs an even last axis; member {number} of the group is "
                f"{shape}"
            )
    # Members do not overlap: neither do their halves, wherever they began.
    return GroupShapes(
        tuple((rows, cols // 2) for rows, cols in group.dims),
        tuple(start // 2 for start in group.starts),
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


def write_group_sums(raw: Raw, group: GroupShapes, dbias: Any, backend: str | None) -> None:
    """Fills `dbias` with the sums of each member's columns, one after the other or in a row each.

    Raises:
        ShapeError: if it does not fit.
    """
    engine = engine_for("column_sums", raw.origin.device, raw.dtype, None, None, backend)
    widths = [shape[1] for shape in group.dims]
    shape: tuple[int, ...] = (sum(widths),)
    if len(set(widths)) == 1 and getattr(dbias, "ndim", 1) == 2:
        shape = (len(widths), widths[0])
    with arrays.device_scope(raw.origin):
        target = result_buffer(dbias, shape, "float32", raw.origin).reshape(-1)
        flat = rows_of(raw, 1, prod(raw.data.shape)).reshape(-1)
        engine.grouped_column_sums(group.dims, group.starts, flat, raw.dtype, target)
