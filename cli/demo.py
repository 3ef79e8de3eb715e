# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit demo`."""

from __future__ import annotations

from pathlib import Path

import click

from fp4kit.demo import write_demo

from .options import force_option, output_option
from .output import say
from .text import example, size


@click.command(
    epilog=example(
        "fp4kit demo",
        "fp4kit quantize demo.safetensors",
    )
)
@output_option("File to write.", default="demo.safetensors", show_default=True)
@force_option
def command(target: Path, force: bool) -> None:
    """Write a small model-like file to try the other commands on.

    It is shaped like a Llama model of about 20 million parameters in bfloat16, with heavy-tailed
    random weights and a few outlier channels; every run writes the same bytes.
    """
    write_demo(target, force=force)
    say(f"Wrote {target}: {size(target.stat().st_size)}")
