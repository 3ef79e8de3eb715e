# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint operations, in one place for callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Generic, TypeVar

from fp4kit.float_mode import by_ieee
from fp4kit.io.read.cast import check_cast
from fp4kit.io.stream.chunks import Progress

from .options import CheckpointOptions, ConvertOptions, DequantizeOptions, Options
from .plan.checkpoint_plan import CheckpointPlan
from .plan.convert import plan_convert
from .plan.dequantize import plan_dequantize
from .plan.quantize import plan_checkpoint
from .read.components import denoisers, is_pipeline, quantized_components
from .read.directory import Checkpoint
from .report import CheckpointReport, make_report
from .write.output import carry_out
from .write.pipeline import Pipeline

Asked = TypeVar("Asked", bound=Options)


@dataclass(frozen=True)
class Operation(Generic[Asked]):
    """What is done with a checkpoint.

    Attributes:
        plan: decides about every tensor.
        components: the folders of a diffusers pipeline that it concerns.
    """

    plan: Callable[[Checkpoint, Asked], CheckpointPlan]
    components: Callable[[Path], list[str]]


@dataclass(frozen=True)
class How:
    """How a plan is carried out; the fields are the arguments of :func:`quantize_checkpoint`."""

    devices: tuple[str, ...]
    resume: bool
    force: bool
    progress: Progress | None


QUANTIZE = Operation(plan_checkpoint, denoisers)
DEQUANTIZE = Operation(plan_dequantize, quantized_components)
CONVERT = Operation(plan_convert, quantized_components)


def _open(source: Path, options: Options) -> Checkpoint:
    check_cast(options.cast)
    return Checkpoint(source, follow_links=options.follow_links, cast=options.cast)


def _planned(operation: Operation[Asked], source: Path, options: Asked) -> CheckpointReport:
    """What an operation would do to a checkpoint, or to components of a pipeline."""
    if is_pipeline(source):
        parts = operation.components(source)
        pipeline = Pipeline(source, parts, follow_links=options.follow_links)
        return pipeline.plan(lambda path: _planned(operation, path, options))
    started = time.perf_counter()
    with _open(source, options) as checkpoint:
        plan = operation.plan(checkpoint, options)
        return make_report(plan, None, checkpoint.others.nbytes, time.perf_counter() - started)


def _carried_out(
    operation: Operation[Asked], source: Path, target: Path, options: Asked, how: How
) -> CheckpointReport:
    """What an operation did to a checkpoint, or to components of a pipeline."""
    if is_pipeline(source):

        def run(name: str, *, resume: bool, force: bool) -> CheckpointReport:
            again = with_changes(how, resume=resume, force=force)
            return _carried_out(operation, source / name, target / name, options, again)

        parts = operation.components(source)
        pipeline = Pipeline(source, parts, follow_links=options.follow_links)
        planned = pipeline.plan(lambda path: _planned(operation, path, options))
        return pipeline.carry_out(target, planned, run, resume=how.resume, force=how.force)
    with _open(source, options) as checkpoint:
        plan = operation.plan(checkpoint, options)
        return carry_out(
            plan,
            target,
            devices=how.devices,
            resume=how.resume,
            force=how.force,
            progress=how.progress,
        )


def plan_quantize_checkpoint(source: Path, options: CheckpointOptions) -> CheckpointReport:
    """What :func:`quantize_checkpoint` would do, from headers and JSON alone.

    Args:
        source: model directory or diffusers pipeline, or for layout `comfy` also a .safetensors
            file.
        options: how it would be quantized.

    Raises:
        OptionError: for unknown or contradictory options.
        FileFormatError: if the checkpoint is malformed or quantized already.
    """
    return _planned(QUANTIZE, source, options)


@by_ieee
def quantize_checkpoint(
    source: Path,
    target: Path,
    options: CheckpointOptions,
    *,
    devices: Sequence[str] = ("cpu",),
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Quantizes a checkpoint into one that engines load.

    Peak memory is bounded by chunks of the largest fusion group, whatever the size of the model.

    Args:
        source: model directory or diffusers pipeline, or for layout `comfy` also a .safetensors
            file.
        target: directory to create (or a .safetensors file, for one).
        options: how to quantize.
        devices: `cpu`, or CUDA devices that take the next shard in turn.
        resume: finish what an earlier, interrupted run began.
        force: start an unfinished conversion over; replace a finished result of fp4kit, or a file.
        progress: called with (bytes done, bytes in all) of the source.

    Returns:
        One entry per logical tensor with error statistics, and the files around them.

    Raises:
        OptionError: for unknown options, or an output that is not empty or is the input.
        FileFormatError: if the checkpoint is malformed or quantized already.
        NonFiniteError: if a weight holds NaN or infinity.
        BackendUnavailableError: if a device cannot be used.
        OutputError: if the output cannot be written.
    """
    how = How(tuple(devices), resume, force, progress)
    return _carried_out(QUANTIZE, source, target, options, how)


@by_ieee
def dequantize_checkpoint(
    source: Path,
    target: Path,
    options: DequantizeOptions,
    *,
    devices: Sequence[str] = ("cpu",),
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Turns a quantized checkpoint of any tool into plain numbers.

    Args:
        source: model directory or .safetensors file in a known layout, or one with FP8 weights.
        target: directory to create (or file).
        options: element type and shard size.
        devices: as for :func:`quantize_checkpoint`, like the rest.
        resume: finish what an earlier run began.
        force: as for :func:`quantize_checkpoint`.
        progress: called with (bytes done, bytes in all).

    Raises:
        OptionError: for unknown options, or an output that is not empty or is the input.
        FileFormatError: if nothing is quantized, or in a way that is not known.
        BackendUnavailableError: if a device cannot be used.
        OutputError: if the output cannot be written.
    """
    how = How(tuple(devices), resume, force, progress)
    return _carried_out(DEQUANTIZE, source, target, options, how)


def plan_convert_checkpoint(source: Path, options: ConvertOptions) -> CheckpointReport:
    """What :func:`convert_checkpoint` would do; nothing is written.

    Raises:
        OptionError: as there.
        FileFormatError: as there.
    """
    return _planned(CONVERT, source, options)


@by_ieee
def convert_checkpoint(
    source: Path,
    target: Path,
    options: ConvertOptions,
    *,
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Stores a quantized checkpoint in another layout, codes and block scales verbatim.

    Args:
        source: model directory or .safetensors file in a known layout.
        target: directory to create (or file).
        options: layout and shard size.
        resume: finish what an earlier run began.
        force: as for :func:`quantize_checkpoint`.
        progress: called with (bytes done, bytes in all).

    Raises:
        OptionError: for an unknown layout, the one that it has, or one that lacks its format.
        FileFormatError: if nothing is quantized, or in a way that is not known.
        OutputError: if the output cannot be written.
    """
    return _carried_out(CONVERT, source, target, options, How(("cpu",), resume, force, progress))
