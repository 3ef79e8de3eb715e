# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantizing the tensors of a source, chunk by chunk: amax, codes, scales and error sums.

Tensors that share a second-level scale are one unit: their common amax is known before the first
block scale of any of them is computed. A unit waits for it in memory where it fits, so that it is
read once; a larger one is read twice. Nothing here waits for a device: amax, second level and
error sums stay there, and the host sees them later. Whether all elements are finite follows from
their sum of squares, which in float64 is finite for no other tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from fp4kit.backend.interface import PendingSums, Plan
from fp4kit.backend.jobs import Job
from fp4kit.errors import NonFiniteError

from .quantize_plan import Rows, SecondLevel, TensorPlan, rows_of_plan, units
from .read.source import Source
from .storage import QuantizedEntry
from .stream.chunks import (
    ByteRange,
    Bytes,
    Chunk,
    Tally,
    Write,
    chunk_plan,
    row_ranges,
    rows_of,
    rows_view,
    scale_bytes,
    scale_range,
    scales_view,
)
from .stream.device import DeviceBackend
from .stream.gpu_pipeline import open_pipeline
from .stream.pipeline import Pipeline, Resident


@dataclass(frozen=True)
class Step:
    """What is done with a chunk.

    Attributes:
        rows: one range of rows, or all tensors of a unit as a whole.
        scan: whether they enter the amax.
        encode: whether they are quantized.
        end: whether it is the last one of its unit's pass.
    """

    rows: tuple[Rows, ...]
    scan: bool = False
    encode: bool = False
    end: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its rows in the source."""
        return sum(rows.nbytes for rows in self.rows)

    def parts(self, source: Source) -> tuple[ByteRange, ...]:
        """What is read for it."""
        if self.encode or not self.scan:
            return tuple(rows.part(source) for rows in self.rows)
        return tuple(rows.amax_part(source) for rows in self.rows)

    @property
    def is_pass(self) -> bool:
        """Whether it is in one of two passes over its tensor."""
        entry = self.rows[0].plan.entry
        if entry is None or self.rows[0].plan.second.given:
            return False
        return self.scan != self.encode and entry.plan.needs_amax


def _steps(plans: Iterable[TensorPlan], pipeline: Pipeline) -> Iterator[Step]:
    """Every chunk of work in order.

    A unit that is too large to be held gets a pass for its amax first, if its format needs one.
    """
    for unit in units(plan for plan in plans if plan.action != "skip"):
        ranges = [rows for plan in unit for rows in rows_of_plan(plan, pipeline.chunk_bytes)]
        entry = unit[0].entry
        if entry is None:
            yield from (Step((rows,)) for rows in ranges)
            continue
        for shared in _sharing(entry.plan, ranges):
            yield from _shared_steps(unit, shared, pipeline)


def _sharing(plan: Plan, ranges: list[Rows]) -> Iterator[list[Rows]]:
    """The ranges of a unit that share a second level: all of them, or those of a group of rows."""
    if not plan.groups_rows:
        yield ranges
        return
    for _, members in groupby(ranges, key=lambda rows: rows.first // plan.rows_per_scale):
        yield list(members)


def _shared_steps(unit: list[TensorPlan], ranges: list[Rows], pipeline: Pipeline) -> Iterator[Step]:
    """The chunks of tensors that share a second level, or of rows of one that do."""
    scan = ranges[0].entry.plan.needs_amax and not unit[0].second.given
    total = sum(rows.nbytes for rows in ranges)
    if len(ranges) == len(unit) and pipeline.reads_whole(total):
        yield Step(tuple(ranges), scan, encode=True, end=True)
        return
    apart = scan and len(ranges) > 1 and not pipeline.holds([rows.nbytes for rows in ranges])
    if apart:
        for rows in ranges:
            yield Step((rows,), scan=True, end=rows is ranges[-1])
    for rows in ranges:
        yield Step((rows,), scan and not apart, encode=True, end=rows is ranges[-1])


@dataclass
class _Unit:
    """What is on the device of the unit at hand.

    Attributes:
        maxima: amax of each chunk so far.
        held: chunks that wait for the second level.
        first: the unit's first tensor, whose element type its second level is computed in.
        second: the second level, once its kernel is launched.
    """

    maxima: list[Any] = field(default_factory=list)
    held: list[tuple[Step, Resident]] = field(default_factory=list)
    first: QuantizedEntry | None = None
    second: Any = None


class Quantizer:
    """Launches the kernels of every chunk of a source."""

    def __init__(self, backend: DeviceBackend | None, pipeline: Pipeline, write: Write) -> None:
        self._backend = backend
        self._pipeline = pipeline
        self._write = write
        self._pending: deque[tuple[TensorPlan, PendingSums]] = deque()
        self._seconds: list[tuple[SecondLevel, Any]] = []
        self._unit = _Unit()

    def run(self, source: Source, plans: list[TensorPlan], tally: Tally) -> TensorPlan | None:
        """Quantizes and writes everything; returns the first tensor that is not all finite."""
        steps = _steps(plans, self._pipeline)
        work = (Chunk(step, step.parts(source)) for step in steps)
        for step, staged in self._pipeline.staged(work):
            rows = step.rows[0]
            if rows.plan.entry is None:
                write = partial(self._write, rows.plan.tensor.name, rows.first)
                self._pipeline.store_host(staged, write)
            else:
                self._launch(step, self._pipeline.upload(staged))
            tally.add(step.nbytes / 2 if step.is_pass else step.nbytes)
            bad = self._collect(self._pipeline.pending)
            if bad is not None:
                return bad
        bad = self._collect(0)
        if bad is None:
            self._pipeline.finish()
            with self._pipeline.computing():
                for second, value in self._seconds:
                    second.add(float(value[0]))
        return bad

    def _launch(self, step: Step, chunk: Resident) -> None:
        assert self._backend is not None
        unit, kernels = self._unit, self._backend.kernels
        unit.first = first = unit.first or step.rows[0].entry
        with self._pipeline.computing():
            if step.rows[0].plan.second.given and unit.second is None:
                unit.second = self._backend.put(step.rows[0].plan.second.value)
            if step.scan:
                for rows, part in zip(step.rows, chunk.parts, strict=True):
                    # What stands for the rows has fewer columns.
                    cols = rows.entry.plan.cols if step.encode else -1
                    x = rows_view(part, rows.entry.dtype, rows.count, cols)
                    unit.maxima.append(kernels.amax(x, rows.entry.dtype, 1))
            if step.encode:
                unit.held.append((step, chunk))
            else:
                self._pipeline.free(chunk)
            if step.end and unit.maxima:
                amax = self._pipeline.largest(unit.maxima, kernels)
                unit.second = self._second_level(self._backend, step.rows[0].plan, amax)
                unit.maxima = []
            if unit.second is not None or not first.plan.needs_amax:
                for held, resident in unit.held:
                    for rows, part in zip(held.rows, resident.parts, strict=True):
                        self._encode(self._backend, rows, part, unit.second)
                    self._pipeline.free(resident)
                unit.held = []
        if step.end and step.encode:
            self._unit = _Unit()

    def _second_level(self, backend: DeviceBackend, work: TensorPlan, amax: Any) -> Any:
        """The second level of a unit, of which `work` is a tensor."""
        first = self._unit.first
        assert first is not None
        value = backend.serving(first.plan).second_level(amax, first.plan, first.dtype)
        self._seconds.append((work.second, value))
        return value

    def _encode(self, backend: DeviceBackend, rows: Rows, part: Any, second: Any) -> None:
        """Launches quantizing and measuring of some rows, and has the result written."""
        entry = rows.entry
        plan = chunk_plan(entry.plan, rows.count)
        x = rows_view(part, entry.dtype, plan.rows, plan.cols)
        counts = [math.prod(plan.packed_shape), scale_bytes(plan)]
        buffer, (packed, scale) = self._pipeline.result(counts)
        codes, scales = packed.reshape(plan.packed_shape), scales_view(scale, plan)
        job = Job(plan, x, entry.dtype, second, codes, scales, weights=rows.plan.weights)
        sums = backend.quantize(job)
        self._pending.append((rows.plan, sums))
        self._pipeline.store(
            buffer, counts, lambda host: write_codes(self._write, entry, rows.first, *host)
        )

    def _collect(self, left: int) -> TensorPlan | None:
        """Adds up the sums of all chunks but the last few; returns a tensor that is not finite."""
        while len(self._pending) > left:
            plan, pending = self._pending.popleft()
            sums = pending.result()
            if not math.isfinite(sums.sum_x2):
                return plan
            plan.sums += sums
        return None


def raise_nonfinite(source: Source, plan: TensorPlan, backend: DeviceBackend) -> None:
    """Counts what is not finite in a whole tensor and raises."""
    nans = infinities = 0
    where = -1
    tensor = plan.tensor
    shape = tensor.spec.shape
    for first, last in row_ranges(rows_of(shape), tensor.row_bytes):
        data = np.empty((last - first) * tensor.row_bytes, np.uint8)
        source.read(tensor.name, first * tensor.row_bytes, data.data)
        found = backend.count_nonfinite(data, tensor.dtype)
        nans, infinities = nans + found[0], infinities + found[1]
        if where < 0 <= found[2]:
            where = first * shape[-1] + found[2]
    index = tuple(int(n) for n in np.unravel_index(where, shape))
    raise NonFiniteError(
        f"{source.path}: tensor {tensor.name!r} holds {nans} NaN and {infinities} infinite values, "
        f"the first at index {index}; clean it, or exclude it from quantizing"
    )


def write_codes(
    write: Write, entry: QuantizedEntry, first: int, packed: Bytes, scale: Bytes
) -> None:
    """Writes codes and scales of the rows from `first` on to their places in the output."""
    write(entry.names.packed, first * entry.plan.packed_shape[1], packed)
    if first == 0 or not entry.plan.has_one_scale:
        write(entry.names.scale, scale_range(entry.plan, first, entry.plan.rows)[0], scale)


def finish_tensor(write: Write, entry: QuantizedEntry) -> None:
    """Writes what stands beside codes and scales: second level, constants, rows of padding."""
    if entry.names.second is not None:
        value = entry.stored_second().astype("<f4")
        write(entry.names.second, 0, value.view(np.uint8))
    for constant in entry.constants:
        write(constant.spec.name, 0, np.frombuffer(constant.data, np.uint8))
    rows, row = entry.plan.packed_shape
    added = entry.storage.code_rows(rows) - rows
    if added:
        write(entry.names.packed, rows * row, np.zeros(added * row, np.uint8))


def quantize_tensors(
    source: Source,
    plans: list[TensorPlan],
    backend: DeviceBackend | None,
    write: Write,
    tally: Tally,
) -> None:
    """Quantizes and writes all tensors; their entries then know their second level.

    Args:
        source: where the tensors are read.
        plans: what to do with each; tensors that share a second level stand next to each other.
        backend: where to compute; None if all are copied.
        write: writes bytes of an output tensor, from one thread at a time.
        tally: told about progress.

    Raises:
        NonFiniteError: if a tensor holds NaN or infinity.
    """
    with open_pipeline(backend, source) as pipeline:
        bad = Quantizer(backend, pipeline, write).run(source, plans, tally)
    if bad is not None and backend is not None:
        raise_nonfinite(source, bad, backend)
    for plan in plans:
        if plan.entry is not None:
            plan.entry = with_changes(plan.entry, second=plan.second.value)
            finish_tensor(write, plan.entry)
