# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantizing a file: plan from headers alone, then stream every tensor through a backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as with_changes
from pathlib import Path

from fp4kit.errors import FileFormatError
from fp4kit.float_mode import by_ieee
from fp4kit.formats import DTYPES
from fp4kit.io.candidates import Candidate, candidate
from fp4kit.io.containers import GGUF
from fp4kit.io.metadata import METADATA_KEY, describe, find_quantized, orphan_codes
from fp4kit.io.quantize_gguf import quantize_gguf
from fp4kit.io.quantize_plan import TensorPlan, refuse_collisions, refuse_nothing
from fp4kit.io.quantize_tensors import quantize_tensors
from fp4kit.io.read.cast import check_cast, with_cast
from fp4kit.io.read.gguf import GgufSource
from fp4kit.io.read.open import open_source
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.report import FileReport, QuantizeOptions, overflow_warnings
from fp4kit.io.storage import QuantizedEntry
from fp4kit.io.stream.chunks import Progress, Tally
from fp4kit.io.stream.device import DeviceBackend
from fp4kit.io.survey_tensors import SurveyWork, survey_work
from fp4kit.io.tensor_names import Patterns, refuse_adapter
from fp4kit.io.write.files import check_output, output_suffix
from fp4kit.io.write.safetensors import SafetensorsWriter
from fp4kit.plan import plan_of
from fp4kit.scheme import Scheme

Decode = Callable[[Source], Source]
#: A scheme that takes rows of any length.
ANY_ROWS = Scheme("fp8")


def _reason_to_keep(tensor: SourceTensor, include: Patterns, exclude: Patterns, block: int) -> str:
    """Why a tensor is not quantized; "" if it is. Without padding `block` must divide its rows."""
    shape = tensor.spec.shape
    if tensor.note and tensor.dtype not in DTYPES:
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


def plan_tensors(source: Source, options: QuantizeOptions) -> list[TensorPlan]:
    """Decides about every tensor of a source from its header.

    Raises:
        OptionError: for unknown options, a pattern that matches nothing, or if nothing is quantized
            and that is not allowed.
        FileFormatError: if names would collide, or the source is quantized already.
    """
    include, exclude = Patterns(options.include, "include"), Patterns(options.exclude, "exclude")
    scheme = options.scheme if options.choices is None else ANY_ROWS
    block = 1 if scheme.pad else scheme.spec.block_size
    plan_of((1, scheme.spec.block_size), scheme.parts[0])
    _refuse_quantized(source)
    refuse_adapter(source.path, source.tensors)
    for patterns in (include, exclude):
        patterns.check_used(source.tensors, f"{source.path}: ")
    plans = []
    for tensor in source.tensors.values():
        if not tensor.readable:
            plans.append(TensorPlan(tensor, "skip", tensor.note))
            continue
        reason = _reason_to_keep(tensor, include, exclude, block)
        if reason:
            plans.append(TensorPlan(tensor, "keep", reason))
            continue
        shape, wanted = tensor.spec.shape, scheme
        if options.choices is not None:
            chosen = candidate(options.choices[tensor.name]).scheme
            if chosen is None:
                plans.append(TensorPlan(tensor, "keep", "kept by the plan"))
                continue
            wanted = chosen
        made = plan_of(shape, wanted.parts[0], pad=wanted.pad)
        entry = QuantizedEntry(tensor.name, shape, tensor.dtype, made)
        plans.append(TensorPlan(tensor, "quantize", entry=entry))
    refuse_collisions(source.path, plans)
    if not options.allow_nothing:
        refuse_nothing(source.path, plans, _idle(plans, options), padding=True)
    return plans


@contextmanager
def open_file_survey(
    path: Path, options: QuantizeOptions, candidates: Sequence[Candidate]
) -> Iterator[tuple[Source, list[SurveyWork], list[TensorPlan]]]:
    """What a survey of a file has to measure; no data is read.

    Args:
        path: .safetensors, .npy or .npz file.
        options: which tensors; its scheme counts for nothing.
        candidates: what is compared.

    Yields:
        Where tensors are read, those that some candidate quantizes, and all others.
    """
    check_cast(options.cast)
    with with_cast(open_source(path), options.cast) as source:
        works: list[SurveyWork] = []
        kept: list[TensorPlan] = []
        for plan in plan_tensors(source, with_changes(options, scheme=ANY_ROWS)):
            shape = plan.tensor.spec.shape
            entries = {
                each.name: QuantizedEntry(
                    plan.tensor.name, shape, plan.tensor.dtype, plan_of(shape, each.scheme.parts[0])
                )
                for each in candidates
                if each.scheme is not None
                and plan.entry is not None
                and shape[-1] % each.scheme.spec.block_size == 0
            }
            if entries:
                works.append(survey_work(plan.tensor, entries))
            else:
                reason = plan.reason or f"last axis {shape[-1]} is a multiple of no block"
                kept.append(TensorPlan(plan.tensor, "keep", reason))
        yield source, works, kept


def _idle(plans: list[TensorPlan], options: QuantizeOptions) -> list[str]:
    """What to say of patterns that do nothing."""
    reasons = {plan.tensor.name: plan.reason for plan in plans}
    return Patterns(options.include, "include").idle(reasons)


def _metadata(source: Source, plans: list[TensorPlan]) -> dict[str, str]:
    """The output's metadata: all of the source's, `format` (readers insist on it), and ours."""
    entries = [plan.entry for plan in plans if plan.entry is not None]
    return {"format": "pt", **source.metadata, METADATA_KEY: describe(entries)}


@by_ieee
def quantize_file(
    source: Path,
    target: Path | None,
    options: QuantizeOptions,
    progress: Progress | None = None,
    decode: Decode | None = None,
) -> FileReport:
    """Quantizes the float tensors of a file with two or more dimensions along their last axis.

    The work behind :func:`fp4kit.quantize_file`, where options and errors are said.

    Args:
        source: .safetensors, .npy, .npz or .gguf file.
        target: .safetensors file to write, atomically, or .gguf from a .gguf; None to plan from the
            headers alone.
        options: how to quantize.
        progress: called with (bytes done, bytes in all) of the source.
        decode: what makes floats of codes that the file holds.

    Returns:
        One entry per tensor of the source, with error statistics of those quantized.
    """
    started = time.perf_counter()
    if source.suffix.lower() == GGUF:
        with open_source(source) as model:
            assert isinstance(model, GgufSource)
            return quantize_gguf(model, target, options, progress)
    if target is not None:
        output_suffix(target, (".safetensors",))
    check_cast(options.cast)
    opened = with_cast(open_source(source, options.void_dtype), options.cast)
    with opened if decode is None else decode(opened) as opened:
        plans = plan_tensors(opened, options)
        if target is not None:
            _write(opened, target, plans, options, progress)
    tensors = [plan.report(measured=target is not None) for plan in plans]
    nothing = all(plan.entry is None for plan in plans)
    return FileReport(
        source=str(source),
        target=None if target is None else str(target),
        tensors=tensors,
        options=options.to_dict(),
        seconds=time.perf_counter() - started,
        warnings=_idle(plans, options)
        + ["no tensor is quantized; all are kept"] * nothing
        + overflow_warnings(tensors),
    )


def _write(
    source: Source,
    target: Path,
    plans: list[TensorPlan],
    options: QuantizeOptions,
    progress: Progress | None,
) -> None:
    entries = [plan.entry for plan in plans if plan.entry is not None]
    backend = None
    if entries:
        dtypes = {entry.dtype for entry in entries}
        schemes = {entry.plan.scheme: entry.plan for entry in entries}
        backend = DeviceBackend(options.device, dtypes, "quantize", [*schemes.values()])
    outputs = [spec for plan in plans for spec in plan.outputs]
    nbytes = sum(spec.nbytes for spec in outputs)
    output = check_output(source.path, target, force=options.force, nbytes=nbytes)
    tally = Tally(progress, sum(plan.tensor.spec.nbytes for plan in plans if plan.outputs))
    with SafetensorsWriter(output, outputs, _metadata(source, plans)) as writer:
        quantize_tensors(source, plans, backend, writer.write, tally)
        source.check_unchanged()
        writer.finish(_metadata(source, plans))
