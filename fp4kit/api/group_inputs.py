# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What happens to the buffer of a group before it is quantized: checks, activation, column sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from fp4kit import arrays
from fp4kit.arrays import Raw
from fp4kit.arrays.overlap import places
from fp4kit.backend.interface import Backend, Job, Prologue
from fp4kit.errors import NonFiniteError, ShapeError
from fp4kit.group_shapes import GroupShapes

from .backends import engine_for
from .buffers import result_buffer, rows_of
from .measure import check_finite
from .prologue import opened_input, refuse_lone_input


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
class GroupPrologue:
    """An activation, column sums, or both, of a buffer whose members will be quantized.

    Attributes:
        raw: the buffer.
        source: its members.
        name: one of `scheme.ACTIVATIONS`, or None.
        other: what the forward pass activated, for derivatives.
        group: the members of the result.
        shape: shape of the result's buffer.
        dbias: the array that takes the column sums, or None.
    """

    raw: Raw
    source: GroupShapes
    name: str | None
    other: Raw | None
    group: GroupShapes
    shape: tuple[int, ...]
    dbias: Any

    @cached_property
    def _inputs(self) -> tuple[Any, Any]:
        """The buffer and `other`, flat: copied once if they are not contiguous."""
        size = prod(self.raw.data.shape)
        x = rows_of(self.raw, 1, size).reshape(-1)
        return x, None if self.other is None else rows_of(self.other, 1, size).reshape(-1)

    def fused(self, engine: Backend, jobs: tuple[Job, ...]) -> bool:
        """Activates and quantizes at once. False: nothing was done, the backend cannot.

        The caller has made sure that there are no sums, no amax is to be measured and NaN is not
        refused.
        """
        x, z = self._inputs
        prologue = Prologue(self.name, x, self.raw.dtype, z)
        return engine.quantize_grouped_activated(prologue, self.source.starts, jobs)

    def run(self, refuses_nonfinite: bool, measures: bool, backend: str | None) -> Raw:
        """The buffer to quantize, the sums written.

        Args:
            refuses_nonfinite: whether NaN and infinity are refused.
            measures: whether the amaxes of the members are worth having.
            backend: as in `quantize_grouped`.

        Raises:
            ShapeError: if `dbias` does not fit.
            NonFiniteError: if NaN and infinity are refused and a member of an input holds some.
        """
        dtype, origin = self.raw.dtype, self.raw.origin
        operation = "column_sums" if self.name is None else "activate"
        engine = engine_for(operation, origin.device, dtype, None, backend)
        with arrays.device_scope(origin):
            sums = self._sums()
            x, z = self._inputs
            out = x
            if self.name is not None:
                # A function can hide what its input holds.
                if refuses_nonfinite:
                    check_members(engine, self.source, x, dtype, "the group")
                    if z is not None:
                        check_members(engine, self.source, z, dtype, "activation_input")
                out = arrays.scratch(prod(self.shape), arrays.RAW_DTYPES[dtype], origin)
            wants = measures or refuses_nonfinite
            prologue = Prologue(self.name, x, dtype, z, sums)
            scan = engine.activate_grouped(prologue, self.source, self.group, out, wants)
            return Raw(out.reshape(self.shape), dtype, origin, scan)

    def _sums(self) -> Any:
        """Where the sums of all members go, one after the other or in a row each."""
        if self.dbias is None:
            return None
        widths = [shape[1] for shape in self.group.dims]
        shape: tuple[int, ...] = (sum(widths),)
        if len(set(widths)) == 1 and arrays.ingest(self.dbias, "dbias").data.ndim == 2:
            shape = (len(widths), widths[0])
        other = None if self.other is None else self.other.data
        read = places(x=self.raw.data, activation_input=other)
        return result_buffer(self.dbias, shape, "float32", self.raw.origin, read, "dbias").reshape(
            -1
        )


def group_prologue(
    raw: Raw, group: GroupShapes, name: str | None, activation_input: Any, dbias: Any
) -> GroupPrologue:
    """What a call asks for, checked; something is.

    Raises:
        OptionError: for unknown or contradictory arguments.
        ShapeError: if the input of the activation does not fit, or a member cannot be halved.
    """
    shape = tuple(raw.data.shape)
    if name is None:
        refuse_lone_input(activation_input)
        return GroupPrologue(raw, group, None, None, group, shape, dbias)
    other = opened_input(raw, name, activation_input)
    if name != "swiglu":
        return GroupPrologue(raw, group, name, other, group, shape, dbias)
    result = _halved(group)
    whole = shape[-1:] and shape[-1] % 2 == 0
    shape = (*shape[:-1], shape[-1] // 2) if whole else (prod(shape) // 2,)
    return GroupPrologue(raw, group, name, other, result, shape, dbias)


@lru_cache(maxsize=256)
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
