# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit inspect`."""

from __future__ import annotations

from pathlib import Path

import click

from fp4kit.io.convert import inspect_file

from .options import json_option, source_argument
from .output import print_json
from .reports import report_json
from .tables import print_listing
from .text import example


@click.command(
    epilog=example(
        "fp4kit inspect model-nvfp4.safetensors",
        "fp4kit inspect model.npz --json",
    )
)
@source_argument()
@json_option
def command(source: Path, as_json: bool) -> None:
    """List the tensors of a file and how they are stored.

    Reads headers only.
    """
    report = inspect_file(source)
    if as_json:
        print_json(report_json(report))
    else:
        print_listing(report)
