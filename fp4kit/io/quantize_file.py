# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantizing a file: plan from headers alone, then stream every tensor through a backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from dataclasses import replace as with_changes
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.backends.base import ErrorSums, Plan
from fp4kit.errors import FileFormatError, NonFiniteError, OptionError
from fp4kit.formats import DTYPES, get_format
from fp4kit.metrics import ErrorStats
from fp4kit.planning import plan_quantize
from fp4kit.variant import search_variant

from .description import METADATA_KEY, QuantizedEntry, describe, find_quantized, orphan_codes
from .files import check_output, output_suffix
from .gpu_quantize import quantize_tensors
from .naming import Patterns
from .report import FileReport, QuantizeOptions, TensorReport
from .safetensors import SafetensorsWriter, TensorSpec
from .slabs import (
    Bytes,
    Engine,
    Part,
    Progress,
    Slab,
    Tally,
    WriteBehind,
    byte_ranges,
    read_ahead,
    row_ranges,
    row_step,
    rows_of,
    rows_view,
    scale_row_bytes,
    slab_plan,
)
from .source import Source, SourceTensor, open_source


@dataclass
class TensorPlan:
    """What happens to one tensor of the source, and how far it has come.

    Attributes:
        tensor: the tensor.
        action: `quantize`, `keep` or `skip` (not even a copy is possible).
        reason: why it is not quantized.
        entry: the quantized tensor it becomes.
        amax: largest magnitude seen so far.
        second: second-level scale, once known.
        sums: error sums so far.
    """

    tensor: SourceTensor
    action: str
    reason: str = ""
    entry: QuantizedEntry | None = None
    amax: np.float32 = np.float32(0)  # noqa: RUF009 - an immutable scalar
    second: NDArray[np.float32] | None = None
    sums: ErrorSums = field(default_factory=ErrorSums)

    @property
    def outputs(self) -> list[TensorSpec]:
        """The tensors it becomes in the output."""
        if self.entry is not None:
            return self.entry.parts
        return [self.tensor.spec] if self.action == "keep" else []

    def report(self, measured: bool) -> TensorReport:
        """The report of the tensor, with statistics if it was quantized."""
        after = sum(spec.nbytes for spec in self.outputs)
        entry = self.entry
        return TensorReport(
            name=self.tensor.name,
            shape=self.tensor.spec.shape,
            dtype=self.tensor.dtype,
            action="keep" if self.action == "skip" else self.action,
            reason=f"dropped: {self.reason}" if self.action == "skip" else self.reason,
            format=entry.plan.format.name if entry else None,
            bytes_before=self.tensor.stored,
            bytes_after=after,
            stats=ErrorStats.from_sums(self.sums, after) if entry and measured else None,
            sums=self.sums if entry and measured else None,
            facts=entry.facts() if entry and measured else {},
        )


@dataclass(frozen=True)
class Step:
    """One slab of work on one tensor: rows (or bytes, for copies) `first` to `last`."""

    work: TensorPlan
    first: int
    last: int
    scan: bool = False
    quantize: bool = False


def _reason_to_keep(tensor: SourceTensor, include: Patterns, exclude: Patterns, block: int) -> str:
    """Why a tensor is not quantized; "" if it is."""
    shape = tensor.spec.shape
    if tensor.note:
        return tensor.note
    if tensor.dtype not in DTYPES:
        return f"{tensor.dtype} is not quantized"
    excluded = exclude.match(tensor.name)
    if excluded is not None:
        return f"excluded by {excluded}"
    if include and include.match(tensor.name) is None:
        return "not included"
    if len(shape) < 2:
        return f"{len(shape)}-D"
    if 0 in shape:
        return "empty"
    if shape[-1] % block:
        return f"last axis {shape[-1]} is not a multiple of {block}"
    return ""


def _plan_for(shape: tuple[int, ...], options: QuantizeOptions) -> Plan:
    return plan_quantize(
        shape,
        options.format,
        recipe=options.recipe,
        scale_rule=options.scale_rule,
        scale_layout=options.scale_layout,
        nibble_order=options.nibble_order,
        variant=search_variant(options.scale_search, options.error, options.e4m3_max),
    )


def _refuse_quantized(source: Source) -> None:
    """Refuses a source that holds quantized tensors already: nothing is quantized twice."""
    entries = find_quantized(source)
    names = [entry.name for entry in entries] + orphan_codes(source, entries)
    if names or METADATA_KEY in source.metadata:
        listed = ", ".join(repr(name) for name in names[:3])
        raise FileFormatError(
            f"{source.path}: is quantized already ({len(names)} tensors: {listed}); dequantize it "
            "first"
        )


def _refuse_collisions(source: Source, plans: list[TensorPlan]) -> None:
    owners: dict[str, str] = {}
    for plan in plans:
        for spec in plan.outputs:
            other = owners.setdefault(spec.name, plan.tensor.name)
            if other != plan.tensor.name:
                raise FileFormatError(
                    f"{source.path}: tensors {other!r} and {plan.tensor.name!r} would both be "
                    f"written as {spec.name!r}; exclude one of them from quantizing"
                )


def plan_tensors(source: Source, options: QuantizeOptions) -> list[TensorPlan]:
    """Decides about every tensor of a source from its header.

    Raises:
        OptionError: for unknown options, or an include pattern that matches nothing.
        FileFormatError: if names would collide, or the source is quantized already.
    """
    include, exclude = Patterns(options.include, "include"), Patterns(options.exclude, "exclude")
    block = get_format(options.format).block_size
    _plan_for((1, block), options)
    _refuse_quantized(source)
    unused = include.unused(list(source.tensors))
    if unused:
        raise OptionError(f"{source.path}: no tensor matches include={unused[0]!r}")
    plans = []
    for tensor in source.tensors.values():
        if not tensor.readable:
            plans.append(TensorPlan(tensor, "skip", tensor.note))
            continue
        reason = _reason_to_keep(tensor, include, exclude, block)
        if reason:
            plans.append(TensorPlan(tensor, "keep", reason))
            continue
        shape = tensor.spec.shape
        entry = QuantizedEntry(tensor.name, shape, tensor.dtype, _plan_for(shape, options))
        plans.append(TensorPlan(tensor, "quantize", entry=entry))
    _refuse_collisions(source, plans)
    return plans


def _steps(works: list[TensorPlan]) -> Iterator[Step]:
    """Every slab of work in order.

    A tensor that is cut gets a pass for its amax first, if its format needs one.
    """
    for work in works:
        entry = work.entry
        if work.action == "skip":
            continue
        if entry is None:
            for first, last in byte_ranges(work.tensor):
                yield Step(work, first, last)
            continue
        ranges = list(row_ranges(entry.plan.rows, work.tensor.row_bytes, row_step(entry.plan)))
        apart = len(ranges) > 1 and entry.plan.has_second_level
        if apart:
            for first, last in ranges:
                yield Step(work, first, last, scan=True)
        for first, last in ranges:
            yield Step(work, first, last, scan=not apart, quantize=True)


def _slab(source: Source, step: Step) -> Slab[Step]:
    unit = step.work.tensor.row_bytes if step.work.entry is not None else 1
    name = step.work.tensor.name
    return Slab(step, (Part(source, name, step.first * unit, step.last * unit),))


def _raise_nonfinite(source: Source, work: TensorPlan, engine: Engine) -> None:
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


def _quantize_step(
    source: Source, step: Step, data: Bytes, engine: Engine, behind: WriteBehind
) -> tuple[Bytes, Bytes] | None:
    """One slab through the device: codes and scales, or None after a pass for the amax only."""
    work, entry = step.work, step.work.entry
    assert entry is not None
    plan = slab_plan(entry.plan, step.last - step.first)
    x = engine.put(rows_view(data, entry.dtype, plan.rows, plan.cols))
    if step.scan:
        amax, finite = engine.scan(x, entry.dtype)
        if not finite:
            _raise_nonfinite(source, work, engine)
        work.amax = max(work.amax, amax)
    if not step.quantize:
        return None
    if plan.has_second_level and work.second is None:
        work.second = engine.second_level(work.amax, entry.plan, entry.dtype)
    packed = behind.buffer("packed", plan.packed_shape[0] * plan.packed_shape[1])
    scale = behind.buffer("scale", plan.scale_shape[0] * plan.scale_shape[1])
    work.sums += engine.quantize(plan, x, entry.dtype, work.second, packed, scale)
    return packed, scale


def _quantize_on_host(
    source: Source,
    works: list[TensorPlan],
    engine: Engine | None,
    writer: SafetensorsWriter,
    tally: Tally,
) -> None:
    """Streams every tensor through the CPU; without an engine all are copied."""
    with WriteBehind() as behind:
        slabs = (_slab(source, step) for step in _steps(works))
        for step, (data,) in read_ahead(slabs):
            entry = step.work.entry
            if entry is None:
                writer.write(step.work.tensor.name, step.first, data)
            else:
                assert engine is not None
                result = _quantize_step(source, step, data, engine, behind)
                if result is not None:
                    behind.submit(partial(_write_codes, writer, entry, step.first, *result))
            # Each of two passes over a tensor counts half.
            tally.add(len(data) if step.scan == step.quantize else len(data) / 2)
        behind.wait()


def _write_codes(
    writer: SafetensorsWriter, entry: QuantizedEntry, first: int, packed: Bytes, scale: Bytes
) -> None:
    """Writes codes and scales of the rows from `first` on to their places in the output."""
    writer.write(entry.names.packed, first * entry.plan.packed_shape[1], packed)
    writer.write(entry.names.scale, first * scale_row_bytes(entry.plan), scale)


def _finish_tensor(writer: SafetensorsWriter, work: TensorPlan) -> None:
    """Writes the second level of a tensor that is complete."""
    if work.entry is not None:
        work.entry = with_changes(work.entry, second=work.second)
        if work.entry.names.global_scale is not None:
            value = work.entry.encode_scale().astype("<f4")
            writer.write(work.entry.names.global_scale, 0, value.tobytes())


def _metadata(source: Source, works: list[TensorPlan]) -> dict[str, str]:
    """The output's metadata: all of the source's, `format` (readers insist on it), and ours."""
    entries = [work.entry for work in works if work.entry is not None]
    return {"format": "pt", **source.metadata, METADATA_KEY: describe(entries)}


def _report(
    source: Source,
    target: Path | None,
    works: list[TensorPlan],
    options: dict[str, Any],
    started: float,
) -> FileReport:
    tensors = [work.report(measured=target is not None) for work in works]
    return FileReport(
        source=str(source.path),
        target=None if target is None else str(target),
        tensors=tensors,
        options=options,
        seconds=time.perf_counter() - started,
    )


def plan_quantize_file(source: Path, options: QuantizeOptions) -> FileReport:
    """What :func:`quantize_file` would do, from the file's headers alone; nothing is written.

    Args:
        source: .safetensors, .npy or .npz file.
        options: how it would be quantized.

    Raises:
        OptionError: for unknown or contradictory options.
        FileFormatError: if the file is malformed, quantized already, or names would collide.
    """
    started = time.perf_counter()
    with open_source(source, options.void_dtype) as opened:
        works = plan_tensors(opened, options)
        return _report(opened, None, works, asdict(options), started)


def quantize_file(
    source: Path, target: Path, options: QuantizeOptions, progress: Progress | None = None
) -> FileReport:
    """Quantizes the float tensors of a file with two or more dimensions along their last axis.

    All other tensors are carried through unchanged, byte for byte, and listed with the reason. The
    output describes itself: :func:`fp4kit.io.dequantize_file.dequantize_file` needs no options.

    Args:
        source: .safetensors, .npy or .npz file.
        target: .safetensors file to write, atomically.
        options: how to quantize.
        progress: called with (bytes done, bytes in all) of the source.

    Returns:
        One entry per tensor of the source, with error statistics of those quantized.

    Raises:
        OptionError: for unknown options, an existing output without `force`, output == input.
        FileFormatError: if the source is malformed or quantized already.
        NonFiniteError: if a tensor holds NaN or infinity.
        BackendUnavailableError: if the device cannot be used.
        OutputError: if the output cannot be written.
    """
    started = time.perf_counter()
    output_suffix(target, (".safetensors",))
    with open_source(source, options.void_dtype) as opened:
        works = plan_tensors(opened, options)
        plans = [work.entry.plan for work in works if work.entry is not None]
        engine = None
        if plans:
            dtypes = {work.tensor.dtype for work in works if work.entry is not None}
            engine = Engine(options.device, dtypes, "quantize", plans[:1])
        outputs = [spec for work in works for spec in work.outputs]
        check_output(
            source, target, force=options.force, nbytes=sum(spec.nbytes for spec in outputs)
        )
        tally = Tally(progress, sum(work.tensor.stored for work in works if work.outputs))
        with SafetensorsWriter(target, outputs, _metadata(opened, works)) as writer:
            if engine is not None and engine.on_gpu:
                bad = quantize_tensors(
                    engine, opened, works, tally, partial(_write_codes, writer), writer.write
                )
                if bad is not None:
                    _raise_nonfinite(opened, bad, engine)
            else:
                _quantize_on_host(opened, works, engine, writer, tally)
            for work in works:
                _finish_tensor(writer, work)
            writer.finish(_metadata(opened, works))
        return _report(opened, target, works, asdict(options), started)
