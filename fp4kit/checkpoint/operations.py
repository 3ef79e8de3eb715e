# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint operations: plan from headers, carry the plan out, verify the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from fp4kit.float_mode import by_ieee
from fp4kit.io.read.cast import check_cast
from fp4kit.io.stream.chunks import Progress

from .options import CheckpointOptions, CommonOptions, ConvertOptions, DequantizeOptions
from .plan.checkpoint_plan import CheckpointPlan
from .plan.convert import plan_convert
from .plan.dequantize import plan_dequantize
from .plan.quantize import plan_quantize
from .read.components import denoisers, is_pipeline, quantized_components
from .read.directory import Checkpoint
from .report import CheckpointReport, make_report
from .write.output import carry_out
from .write.pipeline import DiffusersPipeline
from .write.transfer import check_lossless

if TYPE_CHECKING:
    from typing_extensions import Unpack

Asked = TypeVar("Asked", bound=CommonOptions)


@dataclass(frozen=True)
class Operation(Generic[Asked]):
    """What is done with a checkpoint.

    Attributes:
        plan: decides about every tensor.
        components: the folders of a diffusers pipeline that it concerns.
    """

    plan: Callable[[Checkpoint, Asked], CheckpointPlan]
    components: Callable[[Path], list[str]]


class RunOptions(TypedDict, total=False):
    """How a plan is carried out.

    Attributes:
        devices: `cpu`, or CUDA devices that take the next shard in turn.
        resume: finish what an earlier, interrupted run began.
        force: start an unfinished conversion over; replace a finished result of fp4kit, or a file.
        progress: called with (bytes done, bytes in all) of the source.
    """

    devices: Sequence[str]
    resume: bool
    force: bool
    progress: Progress | None


QUANTIZE = Operation(plan_quantize, denoisers)
DEQUANTIZE = Operation(plan_dequantize, quantized_components)
CONVERT = Operation(plan_convert, quantized_components)
#: By name, with the options that each takes.
OPERATIONS: dict[str, tuple[Operation[Any], type[CommonOptions]]] = {
    "quantize": (QUANTIZE, CheckpointOptions),
    "dequantize": (DEQUANTIZE, DequantizeOptions),
    "convert": (CONVERT, ConvertOptions),
}


def open_checkpoint(source: Path, options: CommonOptions) -> Checkpoint:
    """The source of an operation."""
    check_cast(options.cast)
    return Checkpoint(source, follow_links=options.follow_links, cast=options.cast)


def planned(operation: Operation[Asked], checkpoint: Checkpoint, options: Asked) -> CheckpointPlan:
    """What an operation will do with every tensor."""
    plan = operation.plan(checkpoint, options)
    if options.lossless:
        check_lossless(plan)
    return plan


def _plan(operation: Operation[Asked], source: Path, options: Asked) -> CheckpointReport:
    """What an operation would do to a checkpoint, or to components of a pipeline."""
    if is_pipeline(source):
        pipeline = DiffusersPipeline(source, operation.components(source), options.follow_links)
        return pipeline.plan(lambda path: _plan(operation, path, options))
    started = time.perf_counter()
    with open_checkpoint(source, options) as checkpoint:
        plan = planned(operation, checkpoint, options)
        return make_report(plan, None, checkpoint.others.nbytes, time.perf_counter() - started)


def _run(
    operation: Operation[Asked], source: Path, target: Path, options: Asked, run: RunOptions
) -> CheckpointReport:
    """What an operation did to a checkpoint, or to components of a pipeline."""
    if is_pipeline(source):

        def convert(name: str, resume: bool, force: bool) -> CheckpointReport:
            again: RunOptions = {**run, "resume": resume, "force": force}
            return _run(operation, source / name, target / name, options, again)

        pipeline = DiffusersPipeline(source, operation.components(source), options.follow_links)
        whole = pipeline.plan(lambda path: _plan(operation, path, options))
        flags = run.get("resume", False), run.get("force", False)
        return pipeline.carry_out(target, whole, convert, *flags)
    with open_checkpoint(source, options) as checkpoint:
        return carry_out(planned(operation, checkpoint, options), target, **run)


def plan_quantize_checkpoint(source: Path, options: CheckpointOptions) -> CheckpointReport:
    """What :func:`quantize_checkpoint` would do, from headers and JSON alone."""
    return _plan(QUANTIZE, source, options)


@by_ieee
def quantize_checkpoint(
    source: Path, target: Path, options: CheckpointOptions, **run: Unpack[RunOptions]
) -> CheckpointReport:
    """Quantizes a checkpoint into one that engines load.

    Peak memory is bounded by chunks of the largest fusion group, whatever the size of the model.

    Args:
        source: model directory or diffusers pipeline, or for layout `comfy` also a .safetensors
            file.
        target: directory to create (or a .safetensors file, for one).
        options: how to quantize.
        run: how to carry it out, see :class:`RunOptions`.

    Returns:
        One entry per logical tensor with error statistics, and the files around them.

    Raises:
        OptionError: for unknown options, or an output that is not empty or is the input.
        FileFormatError: if the checkpoint is malformed or quantized already.
        NonFiniteError: if a weight holds NaN or infinity.
        BackendUnavailableError: if a device cannot be used.
        OutputError: if the output cannot be written.
    """
    return _run(QUANTIZE, source, target, options, run)


@by_ieee
def dequantize_checkpoint(
    source: Path, target: Path, options: DequantizeOptions, **run: Unpack[RunOptions]
) -> CheckpointReport:
    """Turns a quantized checkpoint of any tool into plain numbers.

    Arguments and errors are those of :func:`quantize_checkpoint`; the source is in a known layout,
    or has FP8 weights.
    """
    return _run(DEQUANTIZE, source, target, options, run)


def plan_convert_checkpoint(source: Path, options: ConvertOptions) -> CheckpointReport:
    """What :func:`convert_checkpoint` would do; nothing is written."""
    return _plan(CONVERT, source, options)


@by_ieee
def convert_checkpoint(
    source: Path, target: Path, options: ConvertOptions, **run: Unpack[RunOptions]
) -> CheckpointReport:
    """Stores a quantized checkpoint in another layout, codes and block scales verbatim.

    Arguments and errors are those of :func:`quantize_checkpoint`; no device computes anything.
    """
    return _run(CONVERT, source, target, options, run)
