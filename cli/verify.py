# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit verify`."""

from __future__ import annotations

from pathlib import Path

import click

from fp4kit.checkpoint.verify.paths import path_faults, path_value_faults, reader_notes
from fp4kit.io.read.open import check_source

from .options import (
    FILE,
    device_option,
    experts_layout_option,
    json_option,
    resolve_device,
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
def command(
    source: Path, against: Path | None, experts_layout: str | None, device: str, as_json: bool
) -> None:
    """Check a quantized checkpoint or file from any tool.

    Exits with 1 and lists the faults if there are any. Looks for every tensor that an engine
    expects, element types and shapes, the ignore list, second-level scales that fused weights must
    share, NaN scales, index, sizes and metadata. Notes name readers that are known to fail on a
    file without a fault.
    """
    for path in filter(None, (source, against)):
        check_source(path)
    resolved = resolve_device(device) if against is not None else "cpu"
    faults = path_faults(source)
    if against is not None and not faults:
        with progress_bar(f"Comparing {source.name}") as progress:
            faults = path_value_faults(
                source,
                against,
                experts_layout=experts_layout,
                device=resolved,
                progress=progress,
            )
    notes = reader_notes(source)
    if as_json:
        print_json({"source": str(source), "faults": faults, "notes": notes})
    else:
        for note in notes:
            say(f"note: {note}")
        for fault in faults:
            click.echo(one_line(fault))
    if faults:
        raise click.ClickException(
            f"{source}: {len(faults)} fault{'s' if len(faults) > 1 else ''} found"
        )
    if not as_json:
        say(f"{source}: no fault found")
