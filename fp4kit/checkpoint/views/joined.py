# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Single experts, shown as the fused tensors that they were: the inverse of `expert_views`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp4kit.checkpoint.models.experts import ExpertPart, FusedTensor
from fp4kit.io.containers import DTYPE_CODES, DTYPES
from fp4kit.io.dequantize import entry_parts
from fp4kit.io.metadata import QuantizedEntry
from fp4kit.io.read.source import Source
from fp4kit.io.stream import chunks
from fp4kit.io.stream.chunks import chunk_plan, row_step
from fp4kit.io.stream.device import DeviceBackend

from .base import READ_BYTES, Bytes, RowView, TransposedMatrices, described


def _read(part: chunks.ByteRange) -> Bytes:
    data = np.empty(part.stop - part.start, np.uint8)
    part.source.read(part.name, part.start, data.data)
    return data


class EntryView(RowView):
    """Rows of a quantized weight, decoded."""

    def __init__(
        self, source: Source, entry: QuantizedEntry, backend: DeviceBackend, dtype: str
    ) -> None:
        """Shows a weight of a layout."""
        self._source = source
        self._entry = entry
        self._backend = backend
        self._dtype = dtype
        self.consumed = tuple(spec.name for spec in entry.parts)
        self.tensor = described(
            entry.name, DTYPE_CODES[dtype], entry.shape, entry.stored, entry.plan.format.name
        )

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        plan, step = self._entry.plan, row_step(self._entry.plan)
        begin = first - first % step
        end = min(-(-last // step) * step, plan.rows)
        packed, scale = (_read(part) for part in entry_parts(self._source, self._entry, begin, end))
        whole = (begin, end) == (first, last)
        target = out if whole else np.empty((end - begin, out.shape[1]), np.uint8)
        self._backend.dequantize(
            chunk_plan(plan.decoding, end - begin),
            packed,
            scale,
            self._entry.second,
            target.reshape(-1),
            self._dtype,
        )
        if not whole:
            out[:] = target[first - begin : last - begin]


class JoinedView(RowView):
    """Single experts as one tensor [E, out, in], or biases as one [E, out]."""

    def __init__(self, source: Source, fused: FusedTensor, dtype: str) -> None:
        """Puts experts together."""
        self._source = source
        self._experts: list[list[ExpertPart]] = [[] for _ in range(fused.shape[0])]
        stored = 0
        for part in fused.parts():
            self._experts[part.expert].append(part)
            stored += source.tensors[part.name].stored
        self._outputs = fused.outputs
        #: Bytes of a row; of a bias, every element is one.
        self.width = fused.inputs * (DTYPES[DTYPE_CODES[dtype]].bits // 8)
        shape = (fused.shape[0], fused.outputs)
        self.tensor = described(
            fused.name,
            DTYPE_CODES[dtype],
            shape if fused.is_bias else (*shape, fused.inputs),
            stored,
            f"{fused.shape[0]} experts, put together ({fused.layout.note})",
        )
        self.consumed = tuple(part.name for members in self._experts for part in members)

    def rows(self, first: int, last: int, out: Bytes) -> None:
        """Rows of the tensor; those of a bias are whole experts."""
        per_row = out.shape[1] // self.width
        self.outputs(first * per_row, last * per_row, out.reshape(-1, self.width))

    def outputs(self, first: int, last: int, out: Bytes) -> None:
        """Fills what belongs to some outputs, experts one after the other."""
        done = first
        while done < last:
            expert, begin = divmod(done, self._outputs)
            end = min(begin + last - done, self._outputs)
            target = out[done - first : done - first + end - begin]
            for part in self._experts[expert]:
                self._read(part, begin, end, target)
            done += end - begin

    def _read(self, part: ExpertPart, begin: int, end: int, out: Bytes) -> None:
        """Fills the rows of one part that lie in begin..end of an expert."""
        low = min(max(-(-(begin - part.start) // part.step), 0), part.rows)
        high = min(max(-(-(end - part.start) // part.step), low), part.rows)
        if low == high:
            return
        at = part.start + low * part.step - begin
        target = out[at : at + (high - low - 1) * part.step + 1 : part.step]
        data = target if part.step == 1 else np.empty(target.shape, np.uint8)
        self._source.read(part.name, low * self.width, data.reshape(-1).data)
        if part.step > 1:
            target[:] = data


class JoinedTransposed(TransposedMatrices):
    """Single experts as one tensor [E, in, out]."""

    def __init__(self, joined: JoinedView) -> None:
        super().__init__(joined, joined.tensor.note)
        self._joined = joined

    def chunks(  # noqa: D102
        self, matrix: int, begin: int, end: int
    ) -> Iterator[tuple[int, Bytes, int]]:
        width = self._joined.width
        count = max(min(READ_BYTES // width, self._out), 1)
        buffer = np.empty((count, width), np.uint8)
        for row in range(0, self._out, count):
            chunk = buffer[: min(count, self._out - row)]
            start = matrix * self._out + row
            self._joined.outputs(start, start + len(chunk), chunk)
            yield row, chunk, begin


def join(source: Source, fused: FusedTensor, dtype: str) -> RowView:
    """The view of a fused tensor whose parts a source has."""
    joined = JoinedView(source, fused, dtype)
    return JoinedTransposed(joined) if fused.layout.transposed and not fused.is_bias else joined
