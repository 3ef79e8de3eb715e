# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantizing a file on a GPU: what is launched for each chunk, and when its sums are looked at.

A tensor waits on the device for its amax, so that it is read once; one too large for that is read
twice, as on the CPU. Amax, second level and error sums stay on the device: the host sees them
later. Whether all elements are finite follows from their sum of squares, which in float64 is
finite for no other tensor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fp4kit.backend.interface import PendingSums, Plan
from fp4kit.io.metadata import QuantizedEntry
from fp4kit.io.quantize_plan import Piece, SecondLevel, TensorPlan, pieces_of, units
from fp4kit.io.read.source import Source
from fp4kit.io.stream import chunks, gpu_pipeline
from fp4kit.io.stream.chunks import Bytes, Chunk, DeviceBackend, Tally
from fp4kit.io.stream.gpu_memory import slot_size
from fp4kit.io.stream.gpu_pipeline import GpuPipeline, Resident

#: Slabs whose error sums may be under way; each holds 72 KiB.
PENDING = 16


WriteCodes = Callable[[QuantizedEntry, int, Bytes, Bytes], None]


WriteBytes = Callable[[str, int, Bytes], None]


@dataclass(frozen=True)
class Step:
    """One chunk of work.

    Attributes:
        piece: rows (or bytes, for copies) of one tensor.
        scan: whether it enters the amax.
        encode: whether it is quantized.
        end: whether it is the last one of its unit's pass.
    """

    piece: Piece
    scan: bool = False
    encode: bool = False
    end: bool = False


def _steps(works: Iterable[TensorPlan], resident_bytes: int) -> Iterator[Step]:
    """Every chunk of work in order; a unit that cannot stay on the device has two passes."""
    limit = min(gpu_pipeline.GPU_CHUNK_BYTES, chunks.CHUNK_BYTES)
    for unit in units(work for work in works if work.action != "skip"):
        pieces = [piece for work in unit for piece in pieces_of(work, limit)]
        entry = unit[0].entry
        if entry is None:
            yield from (Step(piece) for piece in pieces)
            continue
        largest = max(slot_size((p.last - p.first) * p.work.tensor.row_bytes) for p in pieces)
        scan = entry.plan.has_second_level
        apart = scan and len(pieces) > 1 and len(pieces) * largest > resident_bytes
        if apart:
            for piece in pieces:
                yield Step(piece, scan=True, end=piece is pieces[-1])
        for piece in pieces:
            end = piece is pieces[-1]
            yield Step(piece, scan=scan and not apart, encode=True, end=end)


@dataclass
class _Progress:
    """What is on the device of the unit at hand.

    Attributes:
        maxima: amax of each chunk so far.
        held: chunks that wait for the second level.
        entry: the unit's first tensor, whose element type its second level is computed in.
        second: the second level, once its kernel is launched.
    """

    maxima: list[Any] = field(default_factory=list)
    held: list[Resident[Step]] = field(default_factory=list)
    entry: QuantizedEntry | None = None
    second: Any = None


class _Quantizer:
    """Launches the kernels of every chunk of a file."""

    def __init__(
        self,
        engine: DeviceBackend,
        pipeline: GpuPipeline,
        write_codes: WriteCodes,
        writes: WriteBytes,
    ) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self._write_codes = write_codes
        self._write_bytes = writes
        self._pending: deque[tuple[TensorPlan, PendingSums]] = deque()
        self._seconds: list[tuple[SecondLevel, Any]] = []
        self._now = _Progress()

    def run(self, source: Source, works: list[TensorPlan], tally: Tally) -> TensorPlan | None:
        """Quantizes and writes everything; returns the first tensor that is not all finite."""
        steps = _steps(works, self._pipeline.resident_bytes)
        work = [Chunk(step, (step.piece.part(source),)) for step in steps]
        for step, staged in self._pipeline.staged(work):
            piece = step.piece
            if piece.work.entry is None:
                write = partial(self._write_bytes, piece.work.tensor.name, piece.first)
                self._pipeline.store_host(staged, write)
            else:
                self._launch(self._pipeline.upload(step, staged))
            # Each of two passes over a tensor counts half.
            halved = step.scan != step.encode and _needs_amax(step)
            tally.add(staged.count / 2 if halved else staged.count)
            bad = self._collect(PENDING)
            if bad is not None:
                return bad
        bad = self._collect(0)
        if bad is None:
            self._pipeline.finish()
            with self._pipeline.computing():
                for second, value in self._seconds:
                    second.value = np.array([float(value[0])], np.float32)
        return bad

    def _launch(self, chunk: Resident[Step]) -> None:
        step, now = chunk.key, self._now
        entry = step.piece.entry
        now.entry = first = now.entry or entry
        with self._pipeline.computing():
            if step.scan:
                plan = chunks.chunk_plan(entry.plan, step.piece.last - step.piece.first)
                now.maxima.append(self._engine.backend.amax(_rows(chunk, plan), entry.dtype, 1))
            if step.encode:
                now.held.append(chunk)
            else:
                self._pipeline.free(chunk)
            if step.end and now.maxima:
                amax = now.maxima[0]
                if len(now.maxima) > 1:
                    every = self._pipeline.gather(now.maxima).reshape(1, -1)
                    amax = self._engine.backend.amax(every, "float32", 1)
                now.second = self._engine.backend.second_level(amax, first.plan, first.dtype)
                now.maxima = []
                self._seconds.append((step.piece.work.second, now.second))
            if now.second is not None or not entry.plan.has_second_level:
                for held in now.held:
                    self._encode(held, now.second)
                now.held = []
        if step.end and step.encode:
            self._now = _Progress()

    def _encode(self, chunk: Resident[Step], second: Any) -> None:
        """Launches quantizing and measuring of a chunk, and has the result written."""
        piece, backend = chunk.key.piece, self._engine.backend
        entry = piece.entry
        plan = chunks.chunk_plan(entry.plan, piece.last - piece.first)
        x = _rows(chunk, plan)
        counts = [math.prod(plan.packed_shape), math.prod(plan.scale_shape)]
        buffer, (packed, scale) = self._pipeline.result(counts)
        codes, scales = packed.reshape(plan.packed_shape), scale.reshape(plan.scale_shape)
        backend.quantize(plan, x, entry.dtype, second, codes, scales)
        sums = backend.quantized_error_sums_async(plan, x, entry.dtype, codes, scales, second)
        self._pending.append((piece.work, sums))
        self._pipeline.store(
            buffer, counts, lambda host: self._write_codes(entry, piece.first, host[0], host[1])
        )
        self._pipeline.free(chunk)

    def _collect(self, left: int) -> TensorPlan | None:
        """Adds up the sums of all chunks but the last few; returns a tensor that is not finite."""
        while len(self._pending) > left:
            work, pending = self._pending.popleft()
            sums = pending.result()
            if not math.isfinite(sums.sum_x2):
                return work
            work.sums += sums
        return None


def _needs_amax(step: Step) -> bool:
    return step.piece.work.entry is not None and step.piece.entry.plan.has_second_level


def _rows(chunk: Resident[Step], plan: Plan) -> Any:
    return chunks.rows_view(chunk.parts[0], chunk.key.piece.entry.dtype, plan.rows, plan.cols)


def quantize_on_gpu(
    engine: DeviceBackend,
    source: Source,
    works: list[TensorPlan],
    tally: Tally,
    write_codes: WriteCodes,
    write_bytes: WriteBytes,
) -> TensorPlan | None:
    """Quantizes the tensors of a source on a GPU, and copies the others.

    Args:
        engine: on the GPU.
        source: the file.
        works: what to do with each tensor; sums and second levels are filled in.
        tally: told about progress.
        write_codes: writes codes and scales of rows from a number on; called by one thread at a
            time, in any order.
        write_bytes: the same for bytes of a tensor that is copied.

    Returns:
        The first tensor that holds NaN or infinity, as soon as one is found, else None.
    """
    with GpuPipeline(engine, [source], writers=gpu_pipeline.MAX_WRITERS) as pipeline:
        return _Quantizer(engine, pipeline, write_codes, write_bytes).run(source, works, tally)
