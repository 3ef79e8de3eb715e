# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming tensors of a source through a backend: amax, codes, scales and error sums.

Tensors that share a second-level scale are one unit of work: their common amax is known before
the first block scale of any of them is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as with_changes
from functools import partial
from typing import Any

import numpy as np

from fp4kit.errors import NonFiniteError
from fp4kit.io.metadata import QuantizedEntry
from fp4kit.io.quantize_gpu import quantize_on_gpu
from fp4kit.io.quantize_plan import Piece, TensorPlan, pieces_of, units
from fp4kit.io.read.source import Source
from fp4kit.io.stream import chunks
from fp4kit.io.stream.chunks import (
    Bytes,
    Chunk,
    DeviceBackend,
    Tally,
    Write,
    WriteBehind,
    chunk_plan,
    read_ahead,
    row_ranges,
    rows_of,
    rows_view,
    scale_row_bytes,
)


@dataclass(frozen=True)
class Step:
    """Pieces that are read together, and what is done with them.

    Attributes:
        pieces: one piece, or all tensors of a unit as a whole.
        scan: whether they enter the amax.
        quantize: whether they are quantized.
    """

    pieces: tuple[Piece, ...]
    scan: bool = False
    quantize: bool = False


def _steps(works: list[TensorPlan]) -> Iterator[Step]:
    """Every chunk of work in order.

    A unit that is too large to be held gets a pass for its amax first, if its format needs one.
    """
    for unit in units(work for work in works if work.action != "skip"):
        pieces = [piece for work in unit for piece in pieces_of(work)]
        if unit[0].entry is None:
            yield from (Step((piece,)) for piece in pieces)
            continue
        fits = sum(work.tensor.spec.nbytes for work in unit) <= chunks.WHOLE_BYTES
        if fits and len(pieces) == len(unit):
            yield Step(tuple(pieces), scan=True, quantize=True)
            continue
        apart = len(pieces) > 1 and unit[0].entry.plan.has_second_level
        if apart:
            yield from (Step((piece,), scan=True) for piece in pieces)
        for piece in pieces:
            yield Step((piece,), scan=not apart, quantize=True)


def raise_nonfinite(source: Source, work: TensorPlan, engine: DeviceBackend) -> None:
    """Counts what is not finite in a whole tensor and raises."""
    nans = infinities = 0
    where = -1
    tensor = work.tensor
    shape = tensor.spec.shape
    for first, last in row_ranges(rows_of(shape), tensor.row_bytes):
        data = np.empty((last - first) * tensor.row_bytes, np.uint8)
        source.read(tensor.name, first * tensor.row_bytes, data.data)
        x = engine.put(rows_view(data, tensor.dtype, last - first, shape[-1]))
        found = engine.count_nonfinite(x, tensor.dtype)
        nans, infinities = nans + found[0], infinities + found[1]
        if where < 0 <= found[2]:
            where = first * shape[-1] + found[2]
    index = tuple(int(n) for n in np.unravel_index(where, shape))
    raise NonFiniteError(
        f"{source.path}: tensor {tensor.name!r} holds {nans} NaN and {infinities} infinite values, "
        f"the first at index {index}; clean it, or exclude it from quantizing"
    )


class _HostQuantizer:
    """The steps of a source on the CPU, or on a GPU chunk by chunk."""

    def __init__(
        self, source: Source, engine: DeviceBackend, write: Write, behind: WriteBehind
    ) -> None:
        self._source = source
        self._engine = engine
        self._write = write
        self._behind = behind

    def run(self, step: Step, data: list[Bytes]) -> None:
        """One step: all amaxes first, then codes and scales."""
        loaded = [
            self._engine.put(
                rows_view(part, piece.entry.dtype, piece.last - piece.first, piece.entry.plan.cols)
            )
            for piece, part in zip(step.pieces, data, strict=True)
        ]
        if step.scan:
            for piece, x in zip(step.pieces, loaded, strict=True):
                self._scan(piece.work, x)
        if step.quantize:
            for piece, x in zip(step.pieces, loaded, strict=True):
                self._quantize(piece, x)

    def _scan(self, work: TensorPlan, x: Any) -> None:
        amax, finite = self._engine.scan(x, work.tensor.dtype)
        if not finite:
            raise_nonfinite(self._source, work, self._engine)
        work.second.amax = max(work.second.amax, amax)

    def _quantize(self, piece: Piece, x: Any) -> None:
        entry, second = piece.entry, piece.work.second
        plan = chunk_plan(entry.plan, piece.last - piece.first)
        if plan.has_second_level and second.value is None:
            second.value = self._engine.second_level(second.amax, entry.plan, entry.dtype)
        packed = self._behind.buffer("packed", plan.packed_shape[0] * plan.packed_shape[1])
        scale = self._behind.buffer("scale", plan.scale_shape[0] * plan.scale_shape[1])
        piece.work.sums += self._engine.quantize(plan, x, entry.dtype, second.value, packed, scale)
        self._behind.submit(partial(write_codes, self._write, entry, piece.first, packed, scale))


def _quantize_on_host(
    source: Source,
    works: list[TensorPlan],
    engine: DeviceBackend | None,
    write: Write,
    tally: Tally,
) -> None:
    """Streams every tensor through the CPU; without an engine all are copied."""
    with WriteBehind() as behind:
        work = (Chunk(step, tuple(p.part(source) for p in step.pieces)) for step in _steps(works))
        for step, data in read_ahead(work):
            piece = step.pieces[0]
            if piece.work.entry is None:
                write(piece.work.tensor.name, piece.first, data[0])
            else:
                assert engine is not None
                _HostQuantizer(source, engine, write, behind).run(step, data)
            # Each of two passes over a tensor counts half.
            count = sum(len(part) for part in data)
            tally.add(count if step.scan == step.quantize else count / 2)
        behind.wait()


def write_codes(
    write: Write, entry: QuantizedEntry, first: int, packed: Bytes, scale: Bytes
) -> None:
    """Writes codes and scales of the rows from `first` on to their places in the output."""
    write(entry.names.packed, first * entry.plan.packed_shape[1], packed)
    write(entry.names.scale, first * scale_row_bytes(entry.plan), scale)


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
    works: list[TensorPlan],
    engine: DeviceBackend | None,
    write: Write,
    tally: Tally,
) -> None:
    """Quantizes and writes all tensors; their entries then know their second level.

    Args:
        source: where the tensors are read.
        works: what to do with each; tensors that share a second level stand next to each other.
        engine: where to compute; None if all are copied.
        write: writes bytes of an output tensor, from one thread at a time.
        tally: told about progress.

    Raises:
        NonFiniteError: if a tensor holds NaN or infinity.
    """
    if engine is not None and engine.on_gpu:
        bad = quantize_on_gpu(engine, source, works, tally, partial(write_codes, write), write)
        if bad is not None:
            raise_nonfinite(source, bad, engine)
    else:
        _quantize_on_host(source, works, engine, write, tally)
    for work in works:
        if work.entry is not None:
            work.entry = with_changes(work.entry, second=work.second.value)
            finish_tensor(write, work.entry)
