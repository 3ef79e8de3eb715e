# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint operations, in one place for callers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fp4kit.io.slabs import Progress

from .convert_plan import plan_convert
from .dequantize_plan import plan_dequantize
from .directory import Checkpoint
from .options import CheckpointOptions, ConvertOptions, DequantizeOptions
from .output import carry_out
from .quantize_plan import plan_checkpoint
from .report import CheckpointReport, make_report


def plan_quantize_checkpoint(source: Path, options: CheckpointOptions) -> CheckpointReport:
    """What :func:`quantize_checkpoint` would do, from headers and JSON alone.

    Args:
        source: model directory, or for layout `comfy` also a .safetensors file.
        options: how it would be quantized.

    Raises:
        OptionError: for unknown or contradictory options.
        FileFormatError: if the checkpoint is malformed or quantized already.
    """
    started = time.perf_counter()
    with Checkpoint(source, follow_links=options.follow_links) as checkpoint:
        plan = plan_checkpoint(checkpoint, options)
        return make_report(plan, None, checkpoint.others.nbytes, time.perf_counter() - started)


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

    Peak memory is bounded by slabs of the largest fusion group, whatever the size of the model.

    Args:
        source: model directory, or for layout `comfy` also a .safetensors file.
        target: directory to create (or a .safetensors file, for one).
        options: how to quantize.
        devices: `cpu`, or CUDA devices that take the next shard in turn.
        resume: finish what an earlier, interrupted run began.
        force: start an unfinished conversion over; replace an existing output file.
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
    with Checkpoint(source, follow_links=options.follow_links) as checkpoint:
        plan = plan_checkpoint(checkpoint, options)
        return carry_out(
            plan, target, devices=devices, resume=resume, force=force, progress=progress
        )


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
        force: start an unfinished conversion over.
        progress: called with (bytes done, bytes in all).

    Raises:
        OptionError: for unknown options, or an output that is not empty or is the input.
        FileFormatError: if nothing is quantized, or in a way that is not known.
        BackendUnavailableError: if a device cannot be used.
        OutputError: if the output cannot be written.
    """
    with Checkpoint(source, follow_links=options.follow_links) as checkpoint:
        plan = plan_dequantize(checkpoint, options)
        return carry_out(
            plan, target, devices=devices, resume=resume, force=force, progress=progress
        )


def plan_convert_checkpoint(source: Path, options: ConvertOptions) -> CheckpointReport:
    """What :func:`convert_checkpoint` would do; nothing is written.

    Raises:
        OptionError: as there.
        FileFormatError: as there.
    """
    started = time.perf_counter()
    with Checkpoint(source, follow_links=options.follow_links) as checkpoint:
        plan = plan_convert(checkpoint, options)
        return make_report(plan, None, checkpoint.others.nbytes, time.perf_counter() - started)


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
        force: start an unfinished conversion over.
        progress: called with (bytes done, bytes in all).

    Raises:
        OptionError: for an unknown layout, the one that it has, or one that lacks its format.
        FileFormatError: if nothing is quantized, or in a way that is not known.
        OutputError: if the output cannot be written.
    """
    with Checkpoint(source, follow_links=options.follow_links) as checkpoint:
        plan = plan_convert(checkpoint, options)
        return carry_out(plan, target, resume=resume, force=force, progress=progress)
