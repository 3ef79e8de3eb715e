# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What happens to each tensor of a source, and which tensors share a second level."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fp4kit.api.metrics import ErrorStats
from fp4kit.backend.interface import ErrorSums
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.report import (
    TensorReport,
    advice,
    grouped,
)
from fp4kit.io.storage import QuantizedEntry
from fp4kit.io.stream.chunks import ByteRange, byte_ranges, plan_ranges


def refuse_nothing(
    path: object, plans: Iterable[TensorPlan], idle: Sequence[str], *, padding: bool
) -> None:
    """Refuses a plan that quantizes nothing: an output that looks quantized must be so.

    Args:
        path: the source.
        plans: what would happen to each tensor.
        idle: lines about patterns that do nothing.
        padding: as for :func:`advice`.

    Raises:
        OptionError: with the reasons, and how many tensors have each.
    """
    planned = list(plans)
    if any(plan.entry is not None for plan in planned):
        return
    reasons = [plan.reason for plan in planned]
    why = grouped(reasons) or "it holds no tensor"
    help = "".join(f"; {part}" for part in (*idle, advice(reasons, padding=padding)) if part)
    raise OptionError(
        f"{path}: no tensor is quantized, so that nothing is written: {why}"
        f"{help}; --allow-nothing writes the output all the same"
    )


@dataclass(eq=False, slots=True)
class SecondLevel:
    """The second level of the tensors that share one.

    Attributes:
        value: the scale in the recipe's direction, once known; where groups of rows have one each,
            those known so far.
        given: whether it was known before any work, whatever the amax is.
    """

    value: NDArray[np.float32] | None = None
    given: bool = False

    def add(self, value: float) -> None:
        """Takes the scale of all rows, or of the next group of rows."""
        one = np.array([value], np.float32)
        self.value = one if self.value is None else np.concatenate([self.value, one])


@dataclass(eq=False, slots=True)
class TensorPlan:
    """What happens to one tensor of the source, and how far it has come.

    Attributes:
        tensor: the tensor.
        action: `quantize`, `transfer` (codes of another form are taken over), `dequantize`,
            `keep`, or `skip` (not even a copy is possible).
        reason: why it is not quantized.
        entry: the quantized tensor it becomes.
        origin: the quantized tensor it was.
        second: its second level; those that share one stand next to each other.
        weights: what an error of each column counts in a search of its scales, None for alike.
        sums: error sums so far.
        rounded: values of codes taken over that the new form does not hold.
    """

    tensor: SourceTensor
    action: str
    reason: str = ""
    entry: QuantizedEntry | None = None
    origin: QuantizedEntry | None = None
    second: SecondLevel = field(default_factory=SecondLevel)
    weights: NDArray[np.float32] | None = None
    sums: ErrorSums = field(default_factory=ErrorSums)
    rounded: int = 0

    @property
    def outputs(self) -> list[TensorSpec]:
        """The tensors it becomes in the output."""
        if self.entry is not None:
            return self.entry.specs
        return [] if self.action == "skip" else [self.tensor.spec]

    def weigh(self, moments: NDArray[np.float64] | None) -> None:
        """Takes the moments of its columns for its search, if it has one that can be weighed."""
        assert self.entry is not None
        scheme = self.entry.plan.scheme
        searched = scheme.scale_search == "sweep" and scheme.search_error == "mse"
        if searched and moments is not None and moments.any():
            # Only their ratios matter: the range of float32 does not.
            self.weights = (moments / moments.mean()).astype(np.float32)

    def report(self, measured: bool) -> TensorReport:
        """The report of the tensor, with statistics if it was quantized."""
        after = sum(spec.nbytes for spec in self.outputs)
        entry = self.entry or self.origin
        coded = measured and self.action == "quantize"
        return TensorReport.of(
            self.tensor,
            "keep" if self.action == "skip" else self.action,
            f"dropped: {self.reason}" if self.action == "skip" else self.reason,
            after,
            format=entry.format if entry else None,
            stats=ErrorStats.from_sums(self.sums, after) if coded else None,
            sums=self.sums if coded else None,
            facts=entry.facts() if entry and measured else {},
        )


def units(plans: Iterable[TensorPlan]) -> Iterator[list[TensorPlan]]:
    """Neighbours that share a second level, in order."""
    for _, members in groupby(plans, key=lambda plan: id(plan.second)):
        yield list(members)


@dataclass(frozen=True)
class Rows:
    """Rows (or bytes, for copies) `first` to `last` of one tensor."""

    plan: TensorPlan
    first: int
    last: int

    @property
    def count(self) -> int:
        """How many rows they are."""
        return self.last - self.first

    @property
    def nbytes(self) -> int:
        """Bytes of them in the source."""
        return self.count * self._unit

    @property
    def _unit(self) -> int:
        return self.plan.tensor.row_bytes if self.plan.entry is not None else 1

    def part(self, source: Source) -> ByteRange:
        """The bytes of the source that they are."""
        name = self.plan.tensor.name
        return ByteRange(source, name, self.first * self._unit, self.last * self._unit)

    def amax_part(self, source: Source) -> ByteRange:
        """The bytes that their amax is found in: those that they are, or what stands for them."""
        tensor = source.amaxes.get(self.plan.tensor.name, self.plan.tensor)
        first, last = (row * tensor.row_bytes for row in (self.first, self.last))
        return ByteRange(source, tensor.name, first, last)

    @property
    def entry(self) -> QuantizedEntry:
        """What the tensor becomes; they are not those of a copy."""
        assert self.plan.entry is not None
        return self.plan.entry


def rows_of_plan(plan: TensorPlan, limit: int | None = None) -> list[Rows]:
    """One tensor in chunks."""
    if plan.entry is None:
        return [Rows(plan, *span) for span in byte_ranges(plan.tensor, limit)]
    return [
        Rows(plan, *span) for span in plan_ranges(plan.entry.plan, plan.tensor.row_bytes, limit)
    ]


def refuse_collisions(path: object, plans: Iterable[TensorPlan]) -> None:
    """Refuses a plan in which two tensors would be written under one name."""
    owners: dict[str, str] = {}
    for plan in plans:
        for spec in plan.outputs:
            other = owners.setdefault(spec.name, plan.tensor.name)
            if other != plan.tensor.name:
                raise FileFormatError(
                    f"{path}: tensors {other!r} and {plan.tensor.name!r} would both be written as "
                    f"{spec.name!r}; exclude one of them from quantizing"
                )
