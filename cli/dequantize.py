# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit dequantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fp4kit.checkpoint.compare import is_checkpoint
from fp4kit.files.convert import dequantize_file
from fp4kit.io.read.open import check_source

from . import checkpoint
from .options import (
    all_option,
    device_option,
    dtype_option,
    follow_links_option,
    force_option,
    json_option,
    max_shard_size_option,
    output_option,
    restored_layout_option,
    resume_option,
    source_argument,
    threads_option,
    unscaled_fp8_option,
)
from .progress import progress_bar
from .reports import say_written, show
from .text import example

#: Options that only mean something for a checkpoint.
CHECKPOINT_ONLY = ("resume", "max_shard_size", "experts_layout", "follow_links")


@click.command(
    epilog=example(
        "fp4kit dequantize model-nvfp4.safetensors -o back.safetensors",
        "fp4kit dequantize model-nvfp4.safetensors -o back.npz --dtype float16",
        "fp4kit dequantize Llama-3-8B-NVFP4 -o Llama-3-8B-back --dtype bfloat16",
    )
)
@source_argument()
@output_option(
    "File to write: .safetensors, .npz, or .npy for a single tensor; or directory to create.",
    required=True,
)
@dtype_option
@device_option
@threads_option
@restored_layout_option
@unscaled_fp8_option
@max_shard_size_option
@resume_option
@follow_links_option
@all_option
@force_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, source: Path, target: Path, every: bool, as_json: bool, **given: Any
) -> None:
    """Turn a quantized file or model directory back into plain numbers.

    IN says itself how it was quantized: a file of fp4kit's, or a model directory (or single file)
    in the layout of compressed-tensors, ModelOpt or ComfyUI, or with FP8 weights, from any tool.
    Scales of AWQ are folded into the weights, and experts that the model has in one tensor are put
    together again. Tensors that are not quantized are carried through unchanged, whatever --dtype
    says.
    """
    check_source(source)
    if is_checkpoint(source):
        checkpoint.dequantize(source, target, every=every, as_json=as_json, **given)
        return
    for name in CHECKPOINT_ONLY:
        if given[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} is for model directories", ctx)
    kept = {name: given[name] for name in ("dtype", "device", "force")}
    with progress_bar(f"Dequantizing {source.name}") as progress:
        report = dequantize_file(source, target, progress=progress, **kept)
    show(report, as_json=as_json, with_stats=False, every=every)
    say_written(report, as_json=as_json)
