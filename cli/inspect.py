# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit inspect`."""

from __future__ import annotations

import click

from fp4kit.checkpoint.compare import is_checkpoint
from fp4kit.checkpoint.inspect import inspect_checkpoint
from fp4kit.io.inspect import inspect_file
from fp4kit.io.read.open import check_source

from .given import Given
from .options import source, takes
from .output import print_json
from .reports import report_json
from .tables import print_listing
from .text import example


@click.command(
    epilog=example(
        "fp4kit inspect model-nvfp4.safetensors",
        "fp4kit inspect model.npz --json",
        "fp4kit inspect Llama-3-8B-NVFP4",
    )
)
@takes(source(), "json")
def command(given: Given) -> None:
    """List the tensors of a file or checkpoint, and how it is stored.

    Reads headers only. The last lines say for each format how many bits a weight takes, scales
    included, and how many times less that is than in 16 bits.
    """
    check_source(given.source)
    inspect = inspect_checkpoint if is_checkpoint(given.source) else inspect_file
    report = inspect(given.source)
    if given.as_json:
        print_json(report_json(report))
    else:
        print_listing(report)
