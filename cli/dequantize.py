# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit dequantize`."""

from __future__ import annotations

from typing import Any

import click

from fp4kit.checkpoint.compare import is_checkpoint
from fp4kit.files.choices import RestoreChoices
from fp4kit.files.convert import dequantize_checkpoint, dequantize_file
from fp4kit.io.read.open import check_source
from fp4kit.io.report import FileReport

from .given import Given
from .options import check_shared, output, refuse, source, takes
from .progress import progress_bar
from .reports import finish, resumable
from .text import example


@click.command(
    epilog=example(
        "fp4kit dequantize model-nvfp4.safetensors -o back.safetensors",
        "fp4kit dequantize model-nvfp4.safetensors -o back.npz --dtype float16",
        "fp4kit dequantize Llama-3-8B-NVFP4 -o Llama-3-8B-back --dtype bfloat16",
        "fp4kit dequantize Llama-3-8B-NVFP4.gguf -o back.gguf --dtype bfloat16",
    )
)
@takes(
    source(),
    output(
        "File to write: .safetensors, .npz, .npy for a single tensor, or .gguf of a .gguf; or "
        "directory to create.",
        required=True,
    ),
    *("dtype", "device", "threads", "restored_layout", "unscaled_fp8", "max_shard_size", "resume"),
    *("scheduler", "part", "follow_links", "all", "force", "json"),
)
def command(given: Given) -> None:
    """Turn a quantized file or model directory back into plain numbers.

    IN says itself how it was quantized: a file of fp4kit's, or a model directory (or single file)
    in the layout of compressed-tensors, ModelOpt or ComfyUI, or with FP8 weights, from any tool,
    or a .gguf model with weights in NVFP4 or MXFP4.
    Scales of AWQ are folded into the weights, and experts that the model has in one tensor are put
    together again. Tensors that are not quantized are carried through unchanged, whatever --dtype
    says.
    """
    check_shared(given)
    if not given.is_shared:
        check_source(given.source)
    whole = given.is_shared or is_checkpoint(given.source)
    if not whole:
        only = ("resume", "max_shard_size", "experts_layout", "follow_links")
        refuse(only, "for model directories")
    options = given.pick("device", "force")
    if whole:
        options |= given.pick("resume", *RestoreChoices.__optional_keys__)
    label = f"Dequantizing {given.source.name}"
    with resumable(given), progress_bar(label) as progress:
        if whole:
            dtype: Any = given.dtype or "bfloat16"
            report: FileReport = dequantize_checkpoint(
                given.where,
                given.whither or given.output,
                dtype,
                workers=given.workers,
                progress=progress,
                **options,
            )
        else:
            report = dequantize_file(
                given.source, given.output, given.dtype, progress=progress, **options
            )
    finish(report, given)
