# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit verify`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fp4kit.checkpoint.verify.paths import path_tensors
from fp4kit.files.verify import verify
from fp4kit.io.report import FileReport

from .given import Given
from .html_report import check_html
from .options import FileOrUrl, refuse, source, takes
from .output import print_json, say
from .progress import progress_bar
from .reports import report_json
from .text import example, one_line


@click.command(
    epilog=example(
        "fp4kit verify Llama-3-8B-NVFP4",
        "fp4kit verify Llama-3-8B-NVFP4 --against Llama-3-8B",
        "fp4kit verify model-nvfp4.safetensors --against model.safetensors",
    )
)
@takes(
    source(),
    click.option(
        "--against",
        metavar="SOURCE",
        type=FileOrUrl(path_type=Path),
        help="The file or checkpoint that IN was made from: also compare the values.",
    ),
    *("scheduler", "experts_layout", "device", "html", "force_html", "json"),
)
def command(given: Given) -> None:
    """Check a quantized checkpoint or file from any tool.

    Exits with 1 and lists the faults if there are any. Looks for every tensor that an engine
    expects, element types and shapes, the ignore list, second-level scales that fused weights must
    share, NaN scales, index, sizes and metadata. Notes name readers that are known to fail on a
    file without a fault.
    """
    options = given.pick("experts_layout", "device")
    inputs = [given.source, *([] if given.against is None else [Path(given.against)])]
    if given.source_url:
        refuse(("html",), "not for a URL")
    html, started = check_html(given, inputs), time.perf_counter()
    idle = given.against is None
    if idle:
        refuse(("scheduler",), "for --against, whose values workers compare")
    with progress_bar(f"Comparing {given.source.name}", idle=idle) as progress:
        report = verify(
            given.where, given.against, workers=given.scheduler, progress=progress, **options
        )
    faults = report.faults
    found = {"source": report.source, "faults": faults, "notes": report.notes}
    if html is not None:
        tensors = FileReport(
            source=report.source,
            target=None,
            tensors=report.tensors or path_tensors(given.source),
            options={
                **given.pick("experts_layout", "device"),
                "against": None if given.against is None else str(given.against),
            },
            seconds=time.perf_counter() - started,
        )
        # What has faults that are seen without values may not even open.
        opens = bool(report.tensors) or not faults
        html.write(report_json(tensors, **found), given.source if opens else None)
    if given.as_json:
        print_json(found)
    else:
        for note in report.notes:
            say(f"note: {note}")
        for fault in faults:
            click.echo(one_line(fault))
    if faults:
        raise click.ClickException(
            f"{given.where}: {len(faults)} fault{'s' if len(faults) > 1 else ''} found"
        )
    if not given.as_json:
        say(f"{given.where}: no fault found")
