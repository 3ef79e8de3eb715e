# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit convert`."""

from __future__ import annotations

import click

from fp4kit.files.choices import GGUF_LAYOUT
from fp4kit.files.convert import convert_checkpoint

from .given import Given
from .options import FILE, check_shared, layout, output, refuse, source, takes
from .progress import progress_bar
from .reports import finish, resumable
from .text import example


@click.command(
    epilog=example(
        "fp4kit convert Llama-3-8B-NVFP4 -o Llama-3-8B-modelopt --layout modelopt",
        "fp4kit convert DeepSeek-V3 -o out --layout compressed-tensors",
        "fp4kit convert flux-comfy.safetensors -o flux --layout modelopt --dry-run",
        "fp4kit convert Llama-3-8B-NVFP4 -o Llama-3-8B-NVFP4.gguf --layout gguf "
        "--template Llama-3-8B-BF16.gguf",
    )
)
@takes(
    source(),
    output("Directory to create, or file if IN is one.", required=True),
    layout(
        "Layout of the result; gguf for a file that llama.cpp runs.",
        required=True,
        more=(GGUF_LAYOUT,),
    ),
    click.option(
        "--template",
        metavar="GGUF",
        type=FILE,
        help="gguf: the same model in F32, F16, BF16 or Q8_0 (of one in shards, the first file), "
        "which has the names, the metadata and all that IN does not quantize.",
    ),
    *("lossless", "max_shard_size", "dry_run", "resume", "scheduler", "part"),
    *("follow_links", "all", "force", "json"),
)
def command(given: Given) -> None:
    """Store a quantized checkpoint in another layout, codes verbatim.

    IN is a model directory (or a file for ComfyUI) from any tool, in a block format or in FP8.
    Codes and scales keep their values; the second-level scale changes its direction. Converting
    back gives every tensor with the same bytes; their order in the files may be another.

    Only nvfp4 with a second level is quantized again for layout mlx, which has none; the report
    says so, and --lossless refuses it.

    A file that `fp4kit quantize FILE` wrote is in no engine's layout and cannot be converted:
    quantize its source with --layout.

    With --layout gguf and a --template, codes and scales take the places of the template's tensors;
    everything else is the template's. Model types: llama, mistral, mixtral, qwen2, qwen3,
    qwen3_moe, gemma2, gemma3.
    """
    if given.layout != GGUF_LAYOUT:
        refuse(("template",), "for --layout gguf")
    else:
        refuse(
            ("lossless", "resume", "max_shard_size", "scheduler", "part"), "not for --layout gguf"
        )
    check_shared(given)
    options = given.pick("template", "lossless", "max_shard_size", "dry_run", "resume")
    options |= given.pick("follow_links", "force")
    label = f"Converting {given.source.name}"
    with resumable(given), progress_bar(label, idle=given.dry_run) as progress:
        report = convert_checkpoint(
            given.where,
            given.whither or given.output,
            given.layout,
            workers=given.workers,
            progress=progress,
            **options,
        )
    finish(report, given)
