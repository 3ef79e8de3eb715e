# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit finish`."""

from __future__ import annotations

from pathlib import Path

import click

from fp4kit.files.shared import finish_checkpoint

from .given import Given
from .options import FileOrUrl, takes
from .output import print_json, say
from .progress import progress_bar
from .report_file import check_report
from .reports import finish
from .text import example


@click.command(
    epilog=example(
        "fp4kit finish out",
        "fp4kit finish s3://bucket/out --source s3://bucket/DeepSeek-V3",
    )
)
@takes(
    click.argument("target", metavar="OUT", type=FileOrUrl(path_type=Path)),
    click.option(
        "--source",
        "source",
        metavar="IN",
        type=FileOrUrl(path_type=Path),
        help="Where IN is from here, if it is elsewhere than for the first part.",
    ),
    *("all", "report", "json"),
)
def command(given: Given) -> None:
    """Complete a result whose parts are all written.

    OUT is what the commands with --part had. Every shard is checked against its receipt, index and
    JSON files are written, and the whole is verified. Any machine that sees IN and OUT may do it,
    once or twice; what is missing is named.
    """
    assert given.whither is not None
    report_file = check_report(given, [])
    with progress_bar(f"Checking {given.output.name}") as progress:
        report = finish_checkpoint(given.whither, given.from_where, progress=progress)
    if report is None:
        if given.as_json:
            print_json({"target": given.whither, "finished": True})
        say(f"{given.whither}: is finished already, and no fault was found")
        return
    finish(report, given, quantized=True, report_file=report_file)
