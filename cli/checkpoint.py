# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the commands do with model directories; imported by them only, not a command itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fp4kit.checkpoint.options import UNCALIBRATED
from fp4kit.checkpoint.read.directory import STATE_DIR, listed
from fp4kit.checkpoint.report import CheckpointReport
from fp4kit.files.choices import CheckpointChoices
from fp4kit.files.convert import convert_checkpoint, dequantize_checkpoint
from fp4kit.files.quantize import default_target, quantize_checkpoint
from fp4kit.io.report import named

from .output import say
from .progress import progress_bar
from .report_file import ReportFile, check_report
from .reports import say_advice, say_written, show
from .text import size


def quantize(
    source: Path,
    target: Path | None,
    given: dict[str, Any],
    *,
    device: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """`fp4kit quantize` of a checkpoint.

    Args:
        source: model directory, or a file for layout comfy.
        target: what to write; None for the source's name with the format added.
        given: the command's other options by name.
        device: as given.
        dry_run: only plan.
        as_json: print JSON instead of tables.
    """
    if given["weights_only"] and given["activations"] is not None:
        raise click.UsageError("--weights-only and --activations exclude each other")
    if target is None:
        target = default_target(source, given["format"])
    inputs = [source]
    if given["activations"] not in (None, UNCALIBRATED):
        inputs.append(Path(given["activations"]))
    force = given["force"]
    report_file = check_report(given["report_file"], inputs, target, force=force, dry_run=dry_run)
    choices = {name: given[name] for name in CheckpointChoices.__optional_keys__}
    label = f"Quantizing {source.name}"
    with resumable(target), progress_bar(label, idle=dry_run) as progress:
        report = quantize_checkpoint(
            source,
            target,
            given["format"],
            layout=given["layout"] or "compressed-tensors",
            device=device,
            resume=given["resume"],
            force=force,
            dry_run=dry_run,
            progress=progress,
            **choices,
        )
    finish(
        report,
        target,
        as_json=as_json,
        dry_run=dry_run,
        every=given["every"],
        report_file=report_file,
    )
    if not as_json:
        say_advice(report, padding=False)


def dequantize(
    source: Path, target: Path, *, dtype: Any, every: bool, as_json: bool, **given: Any
) -> None:
    """`fp4kit dequantize` of a checkpoint; the arguments are those of the command."""
    with resumable(target), progress_bar(f"Dequantizing {source.name}") as progress:
        report = dequantize_checkpoint(
            source, target, dtype or "bfloat16", progress=progress, **given
        )
    finish(report, target, as_json=as_json, every=every, with_stats=False)


def convert(
    source: Path, target: Path, *, dry_run: bool, every: bool, as_json: bool, **given: Any
) -> None:
    """`fp4kit convert`; the arguments are those of the command."""
    label = f"Converting {source.name}"
    with resumable(target), progress_bar(label, idle=dry_run) as progress:
        report = convert_checkpoint(source, target, dry_run=dry_run, progress=progress, **given)
    finish(report, target, as_json=as_json, dry_run=dry_run, every=every, with_stats=False)


@contextmanager
def resumable(target: Path) -> Iterator[None]:
    """Says what to do next where a run is stopped with its work half done."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        # Of a diffusers pipeline the folders are converted one by one.
        if (target / STATE_DIR).is_dir() or any(target.glob(f"*/{STATE_DIR}")):
            say(
                f"Stopped: {target} is unfinished. The same command with --resume finishes it, "
                "with --force it starts over"
            )
        raise


def finish(
    report: CheckpointReport,
    target: Path,
    *,
    as_json: bool,
    every: bool,
    dry_run: bool = False,
    report_file: ReportFile | None = None,
    with_stats: bool = True,
) -> None:
    """Writes and prints a report, what the user should know, and the last line."""
    if report_file is not None:  # first: whoever reads stdout may stop reading
        report_file.write(report, **report.extra())
    show(
        report,
        as_json=as_json,
        with_stats=with_stats and not dry_run,
        every=every,
        dry_run=dry_run,
        **report.extra(),
    )
    if report.left_out:
        say(f"Not copied: {named(report.left_out)} (belongs to another form of the weights)")
    reasons: dict[str, list[str]] = {}
    for name, why in report.dropped.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        say(f"Dropped: {listed(names)} ({why})")
    if as_json:
        return
    if dry_run:
        shards, others = len(report.shards), len(report.copied)
        needs = " (exists: replaced only with --force)" if target.exists() else ""
        say(
            f"Dry run: nothing was written; would write {target}{needs}: {shards} weight "
            f"file{'s' if shards > 1 else ''} and {others} other file{'' if others == 1 else 's'}, "
            f"{size(report.disk_needed)} on disk"
        )
    else:
        say_written(report, as_json=as_json)
