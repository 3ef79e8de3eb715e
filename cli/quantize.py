# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fp4kit.formats import ALL_FORMATS
from fp4kit.io.convert import plan_quantize_file, quantize_file
from fp4kit.io.report import FileReport, QuantizeOptions

from .options import (
    device_option,
    force_option,
    format_options,
    json_option,
    output_option,
    resolve_device,
    source_argument,
)
from .output import say
from .progress import progress_bar
from .reports import say_written, show
from .text import example


@click.command(
    epilog=example(
        "fp4kit quantize model.safetensors",
        "fp4kit quantize model.safetensors -o small.safetensors --format mxfp8",
        "fp4kit quantize model.safetensors --exclude '*embed*' --exclude 're:lm_head' --dry-run",
    )
)
@source_argument()
@output_option("File to write, .safetensors.  [default: <stem of IN>-<format>.safetensors]")
@format_options
@device_option
@click.option(
    "--include",
    metavar="PATTERN",
    multiple=True,
    help="Quantize only tensors whose name matches: a glob, or re: and a regular expression that "
    "matches from the start. Repeatable.",
)
@click.option(
    "--exclude",
    metavar="PATTERN",
    multiple=True,
    help="Carry matching tensors through unchanged; wins over --include. Repeatable.",
)
@click.option(
    "--void-dtype",
    type=click.Choice(["bfloat16"]),
    help="What 2-byte void data in .npy and .npz files is: NumPy saves bfloat16 that way.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan from the headers; write nothing.")
@force_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: Path,
    target: Path | None,
    device: str,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Quantize the tensors of a file.

    IN is a .safetensors, .npy or .npz file of float32, float16 or bfloat16 tensors; OUT is a
    self-describing .safetensors file. 1-D and integer tensors, and those whose last axis is not a
    multiple of the block, are carried through unchanged and listed.
    """
    _check_combination(ctx, given["format"])
    given["e4m3_max"] = int(given["e4m3_max"])
    _check_search(ctx, given)
    if target is None:
        target = source.with_name(f"{source.stem}-{given['format']}.safetensors")
    # A dry run computes nothing, so it needs no device, unless one was asked for by name.
    resolved = "cpu" if dry_run and device == "auto" else resolve_device(device)
    options = QuantizeOptions(device=resolved, **given)
    if dry_run:
        report = plan_quantize_file(source, options)
    else:
        with progress_bar(f"Quantizing {source.name}") as progress:
            report = quantize_file(source, target, options, progress)
    show(report, as_json=as_json, with_stats=not dry_run, dry_run=dry_run)
    _warn(report)
    if dry_run:
        if not as_json:
            needs = " (exists: needs --force)" if target.exists() and not options.force else ""
            say(f"Dry run: nothing was written; would write {target}{needs}")
    else:
        say_written(report, as_json=as_json)


def _check_combination(ctx: click.Context, format: str) -> None:
    """Refuses flags of the other kind of format, in the terms of the command line."""
    flag, other = "recipe", "scale_rule"
    if ALL_FORMATS[format].has_second_level:
        flag, other = other, flag
    if ctx.get_parameter_source(flag) is ParameterSource.COMMANDLINE:
        wrong, right = (f"--{name.replace('_', '-')}" for name in (flag, other))
        raise click.UsageError(f"{wrong} is not for {format}; choose a {right} instead", ctx)


def _check_search(ctx: click.Context, given: dict[str, Any]) -> None:
    """Refuses flags of a search without one, and a search under another recipe."""
    if given["scale_search"] is not None:
        if given["format"] != "nvfp4" or given["recipe"] != "te":
            what = given["format"] if given["format"] != "nvfp4" else f"recipe {given['recipe']}"
            raise click.UsageError(f"--scale-search is for nvfp4 with recipe te, not {what}", ctx)
        return
    for name in ("error", "e4m3_max"):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} belongs to --scale-search; name one", ctx)


def _warn(report: FileReport) -> None:
    """Success of the command is not yet what the user wanted."""
    if all(tensor.action == "keep" for tensor in report.tensors):
        say("Warning: no tensor is quantized; all are kept unchanged")
