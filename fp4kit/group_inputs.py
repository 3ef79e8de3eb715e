# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What happens to the buffer of a group before it is quantized: checks, activation, column sums."""

from __future__ import annotations

from math import prod
from typing import Any

from . import arrays
from .activated import opened_input, refuse_lone_input
from .arrays import Raw
from .backends import engine_for
from .backends.base import Backend
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


def prepare_group(
    raw: Raw,
    group: GroupShapes,
    activation: str | None,
    activation_input: Any,
    dbias: Any,
    refuses_nonfinite: bool,
    backend: str | None,
) -> tuple[Raw, GroupShapes]:
    """The buffer to quantize, activated, and its members; their column sums go to `dbias`.

    Raises:
        OptionError: for unknown or contradictory arguments.
        ShapeError: if the input of the activation, or `dbias`, does not fit.
        NonFiniteError: if NaN and infinity are refused and a member holds some.
    """
    if activation is None:
        refuse_lone_input(activation_input)
    else:
        raw, group = _activated(
            raw, group, activation, activation_input, refuses_nonfinite, backend
        )
    if dbias is not None:
        _write_sums(raw, group, dbias, backend)
    return raw, group


def _activated(
    raw: Raw,
    group: GroupShapes,
    name: str,
    activation_input: Any,
    refuses_nonfinite: bool,
    backend: str | None,
) -> tuple[Raw, GroupShapes]:
    other = opened_input(raw, name, activation_input)
    dtype, origin, shape = raw.dtype, raw.origin, tuple(raw.data.shape)
    halves = name == "swiglu"
    result = _halved(group) if halves else group
    if halves:
        whole = shape[-1:] and shape[-1] % 2 == 0
        shape = (*shape[:-1], shape[-1] // 2) if whole else (prod(shape) // 2,)
    engine = engine_for("activate", origin.device, dtype, None, None, backend)
    size = prod(raw.data.shape)
    with arrays.device_scope(origin):
        x = rows_of(raw, 1, size).reshape(-1)
        z = None if other is None else rows_of(other, 1, size).reshape(-1)
        if refuses_nonfinite:
            check_members(engine, group, x, dtype, "the group")
            if z is not None:
                check_members(engine, group, z, dtype, "activation_input")
        out = arrays.scratch(prod(shape), arrays.RAW_DTYPES[dtype], origin)
        for begin, end, cols in _blocks(group, halves):
            target = out[begin // 2 : begin // 2 + (end - begin) // 2] if halves else out[begin:end]
            width = cols // 2 if halves else cols
            engine.activate(
                name,
                x[begin:end].reshape(-1, cols),
                dtype,
                None if z is None else z[begin:end].reshape(-1, cols),
                target.reshape(-1, width),
            )
        return Raw(out.reshape(shape), dtype, origin), result


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


def _write_sums(raw: Raw, group: GroupShapes, dbias: Any, backend: str | None) -> None:
    """The sums of each member's columns, one after the other or in a row each."""
    engine = engine_for("column_sums", raw.origin.device, raw.dtype, None, None, backend)
    widths = [shape[1] for shape in group.dims]
    shape: tuple[int, ...] = (sum(widths),)
    if len(set(widths)) == 1 and getattr(dbias, "ndim", 1) == 2:
        shape = (len(widths), widths[0])
    with arrays.device_scope(raw.origin):
        target = result_buffer(dbias, shape, "float32", raw.origin).reshape(-1)
        flat = rows_of(raw, 1, prod(raw.data.shape)).reshape(-1)
        engine.grouped_column_sums(group.dims, group.starts, flat, raw.dtype, target)
