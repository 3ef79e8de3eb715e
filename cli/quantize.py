# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fp4kit.checkpoint.layouts import ALL_LAYOUTS
from fp4kit.files.choices import FileChoices
from fp4kit.files.quantize import default_target, quantize_file
from fp4kit.formats import ALL_FORMATS
from fp4kit.io.read.cast import CASTS
from fp4kit.io.read.open import check_source

from . import checkpoint
from .options import (
    all_option,
    device_option,
    experts_layout_option,
    follow_links_option,
    force_option,
    format_options,
    json_option,
    max_shard_size_option,
    output_option,
    report_option,
    resume_option,
    source_argument,
    threads_option,
    unscaled_fp8_option,
)
from .output import say
from .progress import progress_bar
from .report_file import check_report
from .reports import say_advice, say_written, show
from .tables import GLOSSARY
from .text import example

#: Options that only mean something for a checkpoint layout, and those that only do without one.
CHECKPOINT_ONLY = (
    "weights_only",
    "activations",
    "experts_layout",
    "max_shard_size",
    "resume",
    "follow_links",
)
FILE_ONLY = ("scale_layout", "nibble_order", "void_dtype")


@click.command(
    epilog=example(
        "fp4kit quantize model.safetensors",
        "fp4kit quantize model.safetensors -o small.safetensors --format mxfp8",
        "fp4kit quantize Llama-3-8B -o Llama-3-8B-NVFP4",
        "fp4kit quantize Llama-3-8B -o out --layout modelopt --exclude '*down_proj*' --dry-run",
    )
    + f"\n\n{GLOSSARY}"
)
@source_argument()
@output_option(
    "File to write, .safetensors, or directory to create.  [default: IN with -<format> added]"
)
@format_options
@device_option
@threads_option
@click.option(
    "--include",
    metavar="PATTERN",
    multiple=True,
    help="Quantize only tensors whose name matches: a glob, or re: and a regular expression that "
    "matches from the start; one that matches nothing is an error. In a model directory: quantize "
    "them as well, although a default rule leaves them alone (embeddings, norms and what is not "
    "2-D never are). Repeatable.",
)
@click.option(
    "--exclude",
    metavar="PATTERN",
    multiple=True,
    help="Carry matching tensors through unchanged; wins over --include. Repeatable.",
)
@click.option(
    "--layout",
    type=click.Choice(list(ALL_LAYOUTS)),
    help="Model directories: for which engines to store the result. comfy also takes a single "
    "file.  [default: compressed-tensors]",
)
@click.option(
    "--weights-only", is_flag=True, help="Model directories: no activation scales. The default."
)
@click.option(
    "--activations",
    metavar="uncalibrated|FILE",
    help="Model directories: W4A4, with activation scales of 1.0, or from a JSON file that maps "
    "each module to the amax of its input.",
)
@experts_layout_option
@unscaled_fp8_option
@max_shard_size_option
@resume_option
@follow_links_option
@click.option(
    "--void-dtype",
    type=click.Choice(["bfloat16"]),
    help="What 2-byte void data in .npy and .npz files is: NumPy saves bfloat16 that way.",
)
@click.option(
    "--cast",
    type=click.Choice(CASTS),
    help="Take float64 tensors, NumPy's default, as if IN held them as float32.  [default: float64 "
    "is carried through unquantized]",
)
@click.option(
    "--pad",
    is_flag=True,
    help="Files: also quantize tensors whose last axis is not a multiple of the block, filled up "
    "with zeros; dequantize gives the true shape back.",
)
@click.option(
    "--allow-nothing",
    is_flag=True,
    help="Exit with 0 and write the output even if no tensor is quantized; otherwise that is an "
    "error.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan from the headers; write nothing.")
@all_option
@report_option
@force_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: Path,
    target: Path | None,
    device: str,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Quantize the tensors of a file, or a whole checkpoint.

    IN is a .safetensors, .npy or .npz file of float32, float16 or bfloat16 tensors, or a model
    directory: of the Hugging Face kind, of Mistral's own, or a diffusers pipeline. A file becomes
    a self-describing .safetensors file: 1-D and integer tensors, and those whose last axis is not
    a multiple of the block, are carried through unchanged and listed. A directory becomes one that
    inference engines load; of a pipeline, the transformer or U-Net is quantized.

    Exits with 1 and writes nothing if no tensor would be quantized.
    """
    _check_combination(ctx, given["format"])
    given["e4m3_max"] = int(given["e4m3_max"])
    _check_search(ctx, given)
    check_source(source)
    if source.is_dir() or given["layout"] is not None:
        _refuse(ctx, FILE_ONLY, "for plain files; the layout decides it here")
        _refuse(ctx, ("pad",), "for plain files; engines do not read padded rows")
        checkpoint.quantize(source, target, given, device=device, dry_run=dry_run, as_json=as_json)
        return
    _refuse(ctx, CHECKPOINT_ONLY, "for model directories, or a file with --layout comfy")
    if target is None:
        target = default_target(source, given["format"])
    force = given["force"]
    report_file = check_report(given["report_file"], [source], target, force=force, dry_run=dry_run)
    choices = {name: given[name] for name in FileChoices.__optional_keys__}
    with progress_bar(f"Quantizing {source.name}", idle=dry_run) as progress:
        report = quantize_file(
            source,
            target,
            given["format"],
            device=device,
            force=force,
            dry_run=dry_run,
            progress=progress,
            **choices,
        )
    if report_file is not None:  # first: whoever reads stdout may stop reading
        report_file.write(report)
    every = given["every"]
    show(report, as_json=as_json, with_stats=not dry_run, every=every, dry_run=dry_run)
    if as_json:
        return
    say_advice(report, padding=True)
    if dry_run:
        needs = " (exists: needs --force)" if target.exists() and not force else ""
        say(f"Dry run: nothing was written; would write {target}{needs}")
    else:
        say_written(report, as_json=as_json)


def _check_combination(ctx: click.Context, format: str) -> None:
    """Refuses flags of the other kind of format, in the terms of the command line."""
    flag, other = "recipe", "scale_rule"
    if ALL_FORMATS[format].has_second_level:
        flag, other = other, flag
    if ctx.get_parameter_source(flag) is ParameterSource.COMMANDLINE:
        wrong, right = (f"--{name.replace('_', '-')}" for name in (flag, other))
        raise click.UsageError(f"{wrong} is not for {format}; choose a {right} instead", ctx)


def _check_search(ctx: click.Context, given: dict[str, Any]) -> None:
    """Refuses flags of a search without one, and a search under another recipe."""
    if given["scale_search"] is not None:
        if given["format"] != "nvfp4" or given["recipe"] != "te":
            what = given["format"] if given["format"] != "nvfp4" else f"recipe {given['recipe']}"
            raise click.UsageError(f"--scale-search is for nvfp4 with recipe te, not {what}", ctx)
        return
    for name in ("error", "e4m3_max"):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} belongs to --scale-search; name one", ctx)


def _refuse(ctx: click.Context, names: tuple[str, ...], why: str) -> None:
    """Refuses options that would do nothing for this kind of input."""
    for name in names:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} is {why}", ctx)
