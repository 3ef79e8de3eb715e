# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing a quantized checkpoint with the one that it was made from, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fp4kit.api.metrics import ErrorStats
from fp4kit.backend.interface import ErrorSums
from fp4kit.checkpoint.compare import rejoin_like
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.components import component_faults, is_pipeline
from fp4kit.checkpoint.read.directory import Checkpoint, listed
from fp4kit.checkpoint.views.logical import LogicalSource
from fp4kit.checkpoint.views.opened import open_logical, open_quantized
from fp4kit.errors import Fp4kitError
from fp4kit.formats import DTYPES
from fp4kit.io.compare import cast_like
from fp4kit.io.dequantize import entry_parts
from fp4kit.io.metadata import QuantizedEntry
from fp4kit.io.read.source import SourceTensor
from fp4kit.io.stream.chunks import (
    ByteRange,
    Bytes,
    Chunk,
    DeviceBackend,
    Progress,
    Tally,
    byte_ranges,
    chunk_plan,
    read_ahead,
    row_ranges,
    row_step,
    rows_of,
)

#: Signal to noise ratio in dB that 4-bit weights reach by far unless something is wrong with
#: them: a wrong second level, a wrong order of nibbles or scales.
MIN_SQNR = 8.0


@dataclass(eq=False)
class Pair:
    """A logical tensor of the source and what became of it.

    Attributes:
        original: the tensor of the source.
        entry: its quantized form, None if it was kept.
        sums: error sums so far.
        decoded: what a view of the result decodes it to: FP8, or a weight that AWQ smoothed.
        differing: bytes found unequal so far, for tensors that were kept.
    """

    original: SourceTensor
    entry: QuantizedEntry | None
    decoded: SourceTensor | None = None
    sums: ErrorSums = field(default_factory=ErrorSums)
    differing: int = 0

    def faults(self) -> Iterator[str]:
        """What is wrong with it."""
        name = self.original.name
        if self.entry is None and self.decoded is None:
            if self.differing:
                yield f"{name}: is not quantized, but {self.differing} bytes differ from the source"
            return
        stats = ErrorStats.from_sums(self.sums, None)
        if not stats.sqnr >= MIN_SQNR:
            yield far(name, stats)


def far(name: str, stats: ErrorStats) -> str:
    """The fault of a quantized tensor whose values are not those of the source."""
    return (
        f"{name}: its values are far from the source: SQNR {stats.sqnr:.2f} dB, largest error "
        f"{stats.max_abs_error:.3g}"
    )


@dataclass(frozen=True)
class Step:
    """Rows (or bytes, of a kept tensor) `first` to `last` of a pair."""

    pair: Pair
    first: int
    last: int


def _pairs(
    source: LogicalSource, result: LogicalSource, entries: dict[str, QuantizedEntry]
) -> tuple[list[Pair], list[str]]:
    """Tensors of both, and the faults seen on the way."""
    faults = []
    names = set(result.tensors) | set(entries)
    lost = [name for name in source.tensors if name not in names]
    if lost:
        faults.append(f"{len(lost)} tensors of the source are missing: {listed(lost)}")
    extra = [name for name in (*result.tensors, *entries) if name not in source.tensors]
    if extra:
        faults.append(f"{len(extra)} tensors are not in the source: {listed(extra)}")
    pairs = []
    for name, original in source.tensors.items():
        entry, kept = entries.get(name), result.tensors.get(name)
        if entry is None and kept is None:
            continue
        shape = entry.shape if entry is not None else kept.spec.shape if kept else ()
        if shape != original.spec.shape:
            faults.append(
                f"{name}: has shape {list(shape)}, in the source {list(original.spec.shape)}"
            )
        elif entry is None and kept is not None and result.is_decoded(name):
            pairs.append(Pair(original, None, kept))
        elif entry is None and kept is not None and source.is_decoded(name):
            if kept.dtype in DTYPES:
                pairs.append(Pair(source.cast(name, kept.dtype), None))
        elif entry is None and kept is not None and kept.dtype != original.dtype:
            faults.append(f"{name}: is {kept.dtype}, in the source {original.dtype}")
        else:
            pairs.append(Pair(original, entry))
    return pairs, faults


def _chunks(
    source: LogicalSource, result: LogicalSource, pairs: list[Pair]
) -> Iterator[Chunk[Step]]:
    for pair in pairs:
        name, entry, decoded = pair.original.name, pair.entry, pair.decoded
        if decoded is not None:
            rows, widths = rows_of(decoded.spec.shape), (pair.original.row_bytes, decoded.row_bytes)
            for first, last in row_ranges(rows, max(widths)):
                own, other = (
                    ByteRange(where, name, first * width, last * width)
                    for where, width in zip((source, result), widths, strict=True)
                )
                yield Chunk(Step(pair, first, last), (own, other))
            continue
        if entry is None:
            for first, last in byte_ranges(pair.original):
                parts = (ByteRange(source, name, first, last), ByteRange(result, name, first, last))
                yield Chunk(Step(pair, first, last), parts)
            continue
        row = pair.original.row_bytes
        for first, last in row_ranges(entry.plan.rows, row, row_step(entry.plan)):
            own = ByteRange(source, name, first * row, last * row)
            coded = entry_parts(result.checkpoint, entry, first, last)
            yield Chunk(Step(pair, first, last), (own, *coded))


def _measure(engine: DeviceBackend | None, step: Step, parts: list[Bytes]) -> None:
    pair, entry, decoded = step.pair, step.pair.entry, step.pair.decoded
    if decoded is not None:
        assert engine is not None
        pair.sums += engine.sums(parts[0], pair.original.dtype, parts[1], decoded.dtype)
        return
    if entry is None:
        pair.differing += int(np.count_nonzero(parts[0] != parts[1]))
        return
    assert engine is not None
    plan = chunk_plan(entry.plan, step.last - step.first)
    dtype = pair.original.dtype
    pair.sums += engine.quantized_sums(plan, parts[0], dtype, parts[1], parts[2], entry.second)


def value_faults(
    path: Path,
    against: Path,
    *,
    experts_layout: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[str]:
    """Every tensor of a quantized checkpoint that is not what its source makes it.

    Kept tensors must be equal byte for byte; the values of quantized ones must be near.

    Args:
        path: the quantized checkpoint.
        against: what it was made from.
        experts_layout: how fused experts of the source are stored, None to decide by model type
            and sizes.
        device: `cpu` or a CUDA device.
        progress: called with (bytes done, bytes in all) of the source.

    Returns:
        One line per fault; empty if there is none.
    """
    try:
        if is_pipeline(path):
            return component_faults(
                path,
                lambda name: value_faults(
                    path / name,
                    against / name,
                    experts_layout=experts_layout,
                    device=device,
                    progress=progress,
                ),
            )
        with ExitStack() as stack:
            result = stack.enter_context(Checkpoint(path))
            opened = open_quantized(result)
            entries = {} if opened.quantized is None else opened.quantized.entries
            # What the result has fused stays fused: how it lies need not be known.
            stacked = {
                name
                for name, tensor in opened.source.tensors.items()
                if len(tensor.spec.shape) == 3
            }
            # A cast to FP8 is taken as one: values that were lost show in the comparison.
            options = CheckpointOptions(experts_layout=experts_layout, unscaled_fp8=True)
            cast = cast_like(opened.source.tensors.values())
            original = stack.enter_context(Checkpoint(against, cast=cast))
            source, _, _ = open_logical(original, options, stacked.__contains__)
            rejoin_like(source, opened.source.tensors.keys() | entries.keys())
            return _compare(source, opened.source, entries, device, progress)
    except Fp4kitError as error:
        return [str(error)]


def _compare(
    source: LogicalSource,
    result: LogicalSource,
    entries: dict[str, QuantizedEntry],
    device: str,
    progress: Progress | None,
) -> list[str]:
    pairs, faults = _pairs(source, result, entries)
    coded = [pair for pair in pairs if pair.entry is not None or pair.decoded is not None]
    engine = None
    if coded:
        plans = [pair.entry.plan for pair in coded if pair.entry is not None]
        engine = DeviceBackend(
            device, {pair.original.dtype for pair in coded}, "error_stats", plans
        )
    tally = Tally(progress, sum(pair.original.spec.nbytes for pair in pairs))
    for step, parts in read_ahead(_chunks(source, result, pairs)):
        if len(parts[0]):
            _measure(engine, step, parts)
        tally.add(len(parts[0]))
    for pair in pairs:
        faults.extend(pair.faults())
    return faults
