# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit dequantize`."""

from __future__ import annotations

from pathlib import Path

import click

from fp4kit.io.convert import dequantize_file

from .options import (
    device_option,
    dtype_option,
    force_option,
    json_option,
    output_option,
    resolve_device,
    source_argument,
)
from .progress import progress_bar
from .reports import say_written, show
from .text import example


@click.command(
    epilog=example(
        "fp4kit dequantize model-nvfp4.safetensors -o back.safetensors",
        "fp4kit dequantize model-nvfp4.safetensors -o back.npz --dtype float16",
    )
)
@source_argument()
@output_option("File to write: .safetensors, .npz, or .npy for a single tensor.", required=True)
@dtype_option
@device_option
@force_option
@json_option
def command(
    source: Path, target: Path, dtype: str, device: str, force: bool, as_json: bool
) -> None:
    """Turn a quantized file back into plain numbers.

    IN says itself how it was quantized. Tensors that are not quantized are carried through
    unchanged, whatever --dtype says.
    """
    resolved = resolve_device(device)
    with progress_bar(f"Dequantizing {source.name}") as progress:
        report = dequantize_file(
            source, target, dtype, device=resolved, force=force, progress=progress
        )
    show(report, as_json=as_json, with_stats=False)
    say_written(report, as_json=as_json)
