# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fp4kit.checkpoint.layouts import ALL_LAYOUTS

from . import checkpoint
from .options import (
    all_option,
    follow_links_option,
    force_option,
    json_option,
    max_shard_size_option,
    output_option,
    resume_option,
    source_argument,
)
from .text import example


@click.command(
    epilog=example(
        "fp4kit convert Llama-3-8B-NVFP4 -o Llama-3-8B-modelopt --layout modelopt",
        "fp4kit convert flux-comfy.safetensors -o flux --layout modelopt --dry-run",
    )
)
@source_argument()
@output_option("Directory to create, or file if IN is one.", required=True)
@click.option(
    "--layout",
    type=click.Choice(list(ALL_LAYOUTS)),
    required=True,
    help="Layout of the result.",
)
@max_shard_size_option
@click.option("--dry-run", is_flag=True, help="Print the plan from the headers; write nothing.")
@resume_option
@follow_links_option
@all_option
@force_option
@json_option
def command(source: Path, target: Path, **given: Any) -> None:
    """Store a quantized checkpoint in another layout, codes verbatim.

    IN is a model directory (or a file for ComfyUI) from any tool. Codes and block scales keep
    their values; the second-level scale changes its direction. Converting back gives every tensor
    with the same bytes; their order in the files may be another.

    A file that `fp4kit quantize FILE` wrote is in no engine's layout and cannot be converted:
    quantize its source with --layout.
    """
    checkpoint.convert(source, target, **given)
