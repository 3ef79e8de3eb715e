# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit demo`."""

from __future__ import annotations

import click

from fp4kit.demo import write_demo

from .given import Given
from .options import output, takes
from .output import say
from .text import example, size


@click.command(
    epilog=example(
        "fp4kit demo",
        "fp4kit quantize demo.safetensors",
    )
)
@takes(output("File to write.", default="demo.safetensors", show_default=True), "force")
def command(given: Given) -> None:
    """Write a small model-like file to try the other commands on.

    It is shaped like a Llama model of about 20 million parameters in bfloat16, with heavy-tailed
    random weights and a few outlier channels; every run writes the same bytes.
    """
    write_demo(given.output, force=given.force)
    say(f"Wrote {given.output}: {size(given.output.stat().st_size)}")
