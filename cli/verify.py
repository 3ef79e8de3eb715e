# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit verify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from fp4kit.files.verify import verify

from .options import (
    FILE,
    device_option,
    experts_layout_option,
    json_option,
    source_argument,
)
from .output import print_json, say
from .progress import progress_bar
from .text import example, one_line


@click.command(
    epilog=example(
        "fp4kit verify Llama-3-8B-NVFP4",
        "fp4kit verify Llama-3-8B-NVFP4 --against Llama-3-8B",
        "fp4kit verify model-nvfp4.safetensors --against model.safetensors",
    )
)
@source_argument()
@click.option(
    "--against",
    metavar="SOURCE",
    type=FILE,
    help="The file or checkpoint that IN was made from: also compare the values.",
)
@experts_layout_option
@device_option
@json_option
def command(source: Path, against: Path | None, as_json: bool, **given: Any) -> None:
    """Check a quantized checkpoint or file from any tool.

    Exits with 1 and lists the faults if there are any. Looks for every tensor that an engine
    expects, element types and shapes, the ignore list, second-level scales that fused weights must
    share, NaN scales, index, sizes and metadata. Notes name readers that are known to fail on a
    file without a fault.
    """
    with progress_bar(f"Comparing {source.name}", idle=against is None) as progress:
        report = verify(source, against, progress=progress, **given)
    faults = report.faults
    if as_json:
        print_json(asdict(report))
    else:
        for note in report.notes:
            say(f"note: {note}")
        for fault in faults:
            click.echo(one_line(fault))
    if faults:
        raise click.ClickException(
            f"{source}: {len(faults)} fault{'s' if len(faults) > 1 else ''} found"
        )
    if not as_json:
        say(f"{source}: no fault found")
