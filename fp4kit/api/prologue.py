# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a quantize call does first: an activation, and sums over the rows of what is quantized.

A backend may do both in one pass with the quantization (`quantize_activated`), or in one pass of
their own that measures the result too (`activate_measured`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from fp4kit import arrays
from fp4kit.arrays import Raw
from fp4kit.arrays.overlap import Place, places
from fp4kit.backend.interface import Backend, Job, Prologue
from fp4kit.errors import DtypeError, OptionError, ShapeError
from fp4kit.reference.activations import DERIVATIVES

from .backends import engine_for
from .buffers import result_buffer, rows_of
from .measure import check_finite


@dataclass(frozen=True)
class ArrayPrologue:
    """An activation, column sums, or both, of an array that will be quantized.

    Attributes:
        raw: the array.
        name: one of `scheme.ACTIVATIONS`, or None.
        other: what the forward pass activated, for derivatives.
        dbias: the array that takes the column sums, or None.
    """

    raw: Raw
    name: str | None
    other: Raw | None
    dbias: Any

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is quantized."""
        shape = tuple(self.raw.data.shape)
        return (*shape[:-1], shape[-1] // 2) if self.name == "swiglu" else shape

    @cached_property
    def _inputs(self) -> tuple[Any, Any]:
        """The array and `other`, rows flattened: copied once if they are not contiguous."""
        shape = tuple(self.raw.data.shape)
        rows, cols = prod(shape[:-1]), shape[-1]
        x = rows_of(self.raw, rows, cols)
        return x, None if self.other is None else rows_of(self.other, rows, cols)

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the arrays beside `raw` lie."""
        other = None if self.other is None else self.other.data
        sums = None if self.dbias is None else arrays.ingest(self.dbias, "dbias").data
        return places(activation_input=other, dbias=sums)

    def fused(self, engine: Backend, jobs: Sequence[Job]) -> bool:
        """All at once, and the sums written. False: nothing was done, the backend cannot.

        The caller has made sure that nothing is empty, no amax is to be measured and NaN is not
        refused.

        Args:
            engine: backend.
            jobs: of one direction, or of the rows and the columns.

        Raises:
            ShapeError: if `dbias` does not fit.
        """
        return engine.quantize_activated(self._prologue(), tuple(jobs))

    def _prologue(self) -> Prologue:
        x, z = self._inputs
        return Prologue(self.name, x, self.raw.dtype, z, self._sums())

    def _sums(self) -> Any:
        if self.dbias is None:
            return None
        other = None if self.other is None else self.other.data
        read = places(x=self.raw.data, activation_input=other)
        return result_buffer(self.dbias, self.shape[-1:], "float32", self.raw.origin, read, "dbias")

    def run(self, refuses_nonfinite: bool, measures: bool, backend: str | None) -> Raw:
        """The array to quantize, the sums written.

        Args:
            refuses_nonfinite: whether NaN and infinity are refused.
            measures: whether the amax of the result is worth having.
            backend: as in `quantize`.

        Raises:
            ShapeError: if `dbias` does not fit.
            NonFiniteError: if NaN and infinity are refused and an input holds some.
        """
        dtype, origin = self.raw.dtype, self.raw.origin
        operation = "column_sums" if self.name is None else "activate"
        engine = engine_for(operation, origin.device, dtype, None, backend)
        width = self.shape[-1]
        with arrays.device_scope(origin):
            prologue = self._prologue()
            x, z = self._inputs
            out = x
            if self.name is not None:
                self._check(engine, x, z, refuses_nonfinite)
                out = arrays.scratch((len(x), width), arrays.RAW_DTYPES[dtype], origin)
            scan = None
            if out.size:
                wants = measures or refuses_nonfinite
                scan = engine.activate_measured(prologue, out, wants)
            elif prologue.sums is not None:
                prologue.sums[...] = 0
            return Raw(out.reshape(self.shape), dtype, origin, scan)

    def _check(self, engine: Any, x: Any, z: Any, refuses_nonfinite: bool) -> None:
        """A function can hide what its input holds: relu makes 0 of minus infinity."""
        if refuses_nonfinite and x.size:
            shape, dtype = tuple(self.raw.data.shape), self.raw.dtype
            check_finite(engine, x, dtype, shape, "x")
            if z is not None:
                check_finite(engine, z, dtype, shape, "activation_input")


def prologue_of(raw: Raw, name: str | None, activation_input: Any, dbias: Any) -> ArrayPrologue:
    """What a call asks for, checked; something is.

    Raises:
        OptionError: for unknown or contradictory arguments.
        ShapeError: if the input of the activation does not fit, or x has no columns to sum up.
        DtypeError: if the two inputs lie on different devices.
    """
    shape = tuple(raw.data.shape)
    if name is None:
        refuse_lone_input(activation_input)
        if not shape:
            raise ShapeError("dbias needs an array of at least one dimension, got shape ()")
        return ArrayPrologue(raw, None, None, dbias)
    other = opened_input(raw, name, activation_input)
    if not shape or (name == "swiglu" and shape[-1] % 2):
        raise ShapeError(f"activation={name!r} needs an even last axis, got shape {shape}")
    return ArrayPrologue(raw, name, other, dbias)


def opened_input(raw: Raw, name: str, activation_input: Any) -> Raw | None:
    """The input of a derivative's activation beside `raw`, or None where there is none to have.

    Raises:
        OptionError: for an input that it lacks or does not take.
        ShapeError: if the two do not fit.
        DtypeError: if they lie on different devices.
    """
    if (activation_input is not None) != (name in DERIVATIVES):
        raise OptionError(
            f"activation={name!r} {'needs' if name in DERIVATIVES else 'takes no'} "
            "activation_input: x is the incoming gradient of "
            f"{', '.join(DERIVATIVES)}, activation_input what the forward pass activated"
        )
    if activation_input is None:
        return None
    other = arrays.ingest(activation_input, "activation_input")
    shape = tuple(raw.data.shape)
    if (other.dtype, other.data.shape) != (raw.dtype, raw.data.shape):
        raise ShapeError(
            f"activation_input is {other.dtype} {tuple(other.data.shape)}, x {raw.dtype} {shape}"
        )
    if other.origin.device != raw.origin.device:
        raise DtypeError(
            f"activation_input lies on {other.origin.device}, x on {raw.origin.device}"
        )
    return other


def refuse_lone_input(activation_input: Any) -> None:
    """Refuses the input of an activation where none is named.

    Raises:
        OptionError: with the activations that take one.
    """
    if activation_input is not None:
        raise OptionError(f"activation_input belongs to {', '.join(DERIVATIVES)}; name one")
