# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the commands do with model directories; imported by them only, not a command itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    plan_convert_checkpoint,
    plan_quantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import (
    DEFAULT_SHARD_SIZE,
    CheckpointOptions,
    ConvertOptions,
    DequantizeOptions,
    parse_size,
)
from fp4kit.checkpoint.read.directory import STATE_DIR, listed
from fp4kit.checkpoint.report import CheckpointReport
from fp4kit.io.report import named

from .options import resolve_devices
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
        suffix = "" if source.is_dir() else ".safetensors"
        name = source.resolve().name if source.is_dir() else source.stem
        target = source.resolve().with_name(f"{name}-{given['format']}{suffix}")
    options = CheckpointOptions(
        format=given["format"],
        layout=given["layout"] or "compressed-tensors",
        recipe=given["recipe"],
        scale_rule=given["scale_rule"],
        scale_search=given["scale_search"],
        error=given["error"],
        e4m3_max=given["e4m3_max"],
        include=given["include"],
        exclude=given["exclude"],
        activations=given["activations"],
        experts_layout=given["experts_layout"],
        unscaled_fp8=given["unscaled_fp8"],
        max_shard_size=parse_size(given["max_shard_size"] or DEFAULT_SHARD_SIZE),
        follow_links=given["follow_links"],
        cast=given["cast"],
        allow_nothing=given["allow_nothing"],
    )
    report_file = check_report(
        given["report_file"],
        [source, *options.files],
        target,
        force=given["force"],
        dry_run=dry_run,
    )
    if dry_run:
        report = plan_quantize_checkpoint(source, options)
    else:
        devices = resolve_devices(device)
        with resumable(target), progress_bar(f"Quantizing {source.name}") as progress:
            report = quantize_checkpoint(
                source,
                target,
                options,
                devices=devices,
                resume=given["resume"],
                force=given["force"],
                progress=progress,
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
    source: Path,
    target: Path,
    dtype: str,
    *,
    device: str,
    experts_layout: str | None,
    unscaled_fp8: bool,
    max_shard_size: str | None,
    resume: bool,
    follow_links: bool,
    force: bool,
    every: bool,
    as_json: bool,
) -> None:
    """`fp4kit dequantize` of a checkpoint; the arguments are those of the command."""
    limit = parse_size(max_shard_size or DEFAULT_SHARD_SIZE)
    options = DequantizeOptions(
        dtype, limit, experts_layout, follow_links=follow_links, unscaled_fp8=unscaled_fp8
    )
    devices = resolve_devices(device)
    with resumable(target), progress_bar(f"Dequantizing {source.name}") as progress:
        report = dequantize_checkpoint(
            source,
            target,
            options,
            devices=devices,
            resume=resume,
            force=force,
            progress=progress,
        )
    finish(report, target, as_json=as_json, every=every, with_stats=False)


def convert(
    source: Path,
    target: Path,
    layout: str,
    *,
    max_shard_size: str | None,
    resume: bool,
    follow_links: bool,
    force: bool,
    dry_run: bool,
    every: bool,
    as_json: bool,
) -> None:
    """`fp4kit convert`; the arguments are those of the command."""
    limit = parse_size(max_shard_size or DEFAULT_SHARD_SIZE)
    options = ConvertOptions(layout, limit, follow_links=follow_links)
    if dry_run:
        report = plan_convert_checkpoint(source, options)
    else:
        with resumable(target), progress_bar(f"Converting {source.name}") as progress:
            report = convert_checkpoint(
                source, target, options, resume=resume, force=force, progress=progress
            )
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
