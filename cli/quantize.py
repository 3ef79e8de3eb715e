# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit quantize`."""

from __future__ import annotations

from pathlib import Path

import click

from fp4kit.checkpoint.options import DYNAMIC, UNCALIBRATED
from fp4kit.files.choices import CheckpointChoices, FileChoices
from fp4kit.files.quantize import MIXED, default_target, quantize_checkpoint, quantize_file
from fp4kit.files.survey_plan import plan_content
from fp4kit.files.survey_report import SurveyReport
from fp4kit.formats import ALL_FORMATS
from fp4kit.io.containers import GGUF
from fp4kit.io.read.open import check_source
from fp4kit.io.report import FileReport
from fp4kit.io.storage import FILE_FIELDS
from fp4kit.scheme import Scheme

from .choice_options import BUDGET, FORMATS, MOMENTS, PINS, PLAN, SAVE_PLAN
from .given import Given
from .html_report import check_html
from .options import check_shared, flag_of, is_given, layout, output, refuse, source, takes
from .output import print_lines, say
from .progress import progress_bar
from .report_file import check_report, check_side_file
from .reports import finish, resumable
from .survey import PLAN_FILE, run_survey
from .survey_tables import print_frontier
from .tables import GLOSSARY
from .text import example

#: Options that only mean something for a checkpoint layout, and those that only do without one.
CHECKPOINT_ONLY = (
    "weights_only",
    "activations",
    "experts_layout",
    "lossless",
    "max_shard_size",
    "resume",
    "scheduler",
    "part",
    "follow_links",
    "moments",
)
#: Those of several formats.
PLANNING = ("plan", "budget", "pins", "formats", "plan_file")
FILE_ONLY = ("scale_layout", "nibble_order", "void_dtype")
#: What a GGUF model has no use for.
NOT_FOR_GGUF = (*FILE_ONLY, "cast", "pad", "unscaled_fp8")
#: What the library takes beside a Scheme.
FILE_CHOICES = FileChoices.__optional_keys__ - set(FILE_FIELDS) - {"plan"}
CHECKPOINT_CHOICES = CheckpointChoices.__optional_keys__ - set(FILE_FIELDS) - {"plan"}
#: Options of one format for all tensors.
ONE_FORMAT = (
    *("format", "recipe", "scale_rule", "granularity", "scale_search", "search_error", "e4m3_max"),
)


@click.command(
    epilog=example(
        "fp4kit quantize model.safetensors",
        "fp4kit quantize model.safetensors -o small.safetensors --format mxfp8",
        "fp4kit quantize Llama-3-8B -o Llama-3-8B-NVFP4",
        "fp4kit quantize Llama-3-8B -o out --layout modelopt --exclude '*down_proj*' --dry-run",
        "fp4kit quantize s3://bucket/Llama-3-70B -o s3://bucket/out --scheduler tcp://host:8786",
        "fp4kit quantize Llama-3-8B-BF16.gguf -o Llama-3-8B-NVFP4.gguf --scale-search sweep",
    )
    + f"\n\n{GLOSSARY}"
)
@takes(
    source(),
    output(
        "File to write, .safetensors (.gguf of a .gguf), or directory to create.  [default: IN "
        "with -<format> added]"
    ),
    *("format", "recipe", "granularity", "scale_rule", "scale_layout", "nibble_order"),
    *("scale_search", "search_error", "e4m3_max", "device", "threads", "include", "exclude"),
    layout(
        "Model directories: for which engines to store the result. comfy also takes a single "
        "file.  [default: compressed-tensors]"
    ),
    *(PLAN, BUDGET, PINS, MOMENTS, FORMATS, SAVE_PLAN),
    *("weights_only", "activations", "experts_layout", "unscaled_fp8", "lossless"),
    *(
        "max_shard_size",
        "resume",
        "scheduler",
        "part",
        "follow_links",
        "void_dtype",
        "cast",
        "pad",
        "allow_nothing",
    ),
    *("dry_run", "all", "report", "html", "force", "json"),
)
def command(given: Given) -> None:
    """Quantize the tensors of a file, or a whole checkpoint.

    IN is a .safetensors, .npy or .npz file of float32, float16 or bfloat16 tensors, or a model
    directory: of the Hugging Face kind, of Mistral's own, or a diffusers pipeline. A file becomes
    a self-describing .safetensors file: 1-D and integer tensors, and those whose last axis is not
    a multiple of the block, are carried through unchanged and listed. A directory becomes one that
    inference engines load; of a pipeline, the transformer or U-Net is quantized.

    IN may also be a .gguf model in F32, F16, BF16 or Q8_0 (the first file of one in shards): it
    becomes one that llama.cpp runs, in nvfp4 or mxfp4. Metadata and all tensors that llama.cpp
    itself would not quantize are carried over as they are.

    A model directory may be a URL (s3://, gs://, hf://, https://), and so may OUT. --scheduler and
    --part share the work among machines; the bytes are the same.

    Exits with 1 and writes nothing if no tensor would be quantized.
    """
    _check_format(given)
    _check_search(given)
    check_shared(given)
    if not given.is_shared:
        check_source(given.source)
    whole = given.is_shared or given.source.is_dir() or given.layout is not None
    inputs = [given.source]
    if whole:
        refuse(FILE_ONLY, "for plain files; the layout decides it here")
        refuse(("pad",), "for plain files; engines do not read padded rows")
        if given.weights_only and given.activations is not None:
            raise click.UsageError("--weights-only and --activations exclude each other")
        if given.activations not in (None, UNCALIBRATED, DYNAMIC):
            inputs.append(Path(str(given.activations)))
    else:
        refuse(CHECKPOINT_ONLY, "for model directories, or a file with --layout comfy")
    if given.source.suffix.lower() == GGUF and not given.source.is_dir():
        refuse(("layout",), "for model directories; a .gguf file stays one")
        refuse(NOT_FOR_GGUF, "not for .gguf files, whose blocks are ggml's own")
        refuse(PLANNING, "not for .gguf files, which take one format")
    planned = given.plan is not None or given.budget is not None
    if planned:
        refuse(ONE_FORMAT, "not for a plan, which says the format of each tensor")
        refuse(("pad", *FILE_ONLY[:2]), "for one format, not for a plan")
    inputs += [path for path in (given.plan, given.moments) if path is not None]
    name = MIXED if planned else given.format
    given.target = target = given.target or default_target(given.source, name)
    report_file, html = check_report(given, inputs), check_html(given, inputs)
    plan_file = check_side_file(given, given.plan_file, inputs, PLAN_FILE)
    plan, surveyed = _plan(given)
    options = given.pick("device", "force", "dry_run")
    options |= given.pick(*(CHECKPOINT_CHOICES if whole else FILE_CHOICES))
    scheme = Scheme(**given.pick(*FILE_FIELDS))
    label = f"Quantizing {given.source.name}"
    with resumable(given), progress_bar(label, idle=given.dry_run) as progress:
        if whole:
            report: FileReport = quantize_checkpoint(
                given.where,
                given.whither,
                scheme,
                layout=given.layout or "compressed-tensors",
                resume=given.resume,
                plan=plan,
                workers=given.workers,
                progress=progress,
                **options,
            )
        else:
            report = quantize_file(
                given.source, target, scheme, plan=plan, progress=progress, **options
            )
    if plan_file is not None and isinstance(plan, dict):
        plan_file.write(plan_content(plan))
    if html is not None and surveyed is not None:
        html = html.with_survey(surveyed.to_json())
    finish(report, given, quantized=True, report_file=report_file, html=html)


def _plan(given: Given) -> tuple[Path | dict[str, str] | None, SurveyReport | None]:
    """The format of each group of tensors, None if all get one; and the survey that chose them."""
    if given.budget is None:
        refuse(("pins", "formats", "plan_file"), "for --budget; give one")
        return given.plan, None
    if given.plan is not None:
        raise click.UsageError("--plan and --budget exclude each other")
    report = run_survey(given)
    if not given.as_json:
        print_frontier(report)
        print_lines("", *report.recommendation, "")
    for warning in report.warnings:
        say(f"Warning: {warning}")
    return report.plan, report


def _check_format(given: Given) -> None:
    """Refuses flags of the other kind of format, in the terms of the command line."""
    flag, other, spec = "recipe", "scale_rule", ALL_FORMATS[given.format]
    if spec.has_second_level or spec.has_scale_grid:
        flag, other = other, flag
    if not spec.has_scale_grid:
        refuse(("granularity",), f"for fp8, not {given.format}")
    refuse((flag,), f"not for {given.format}; choose a {flag_of(other)} instead")


def _check_search(given: Given) -> None:
    """Refuses flags of a search without one, and a search under another recipe."""
    if given.scale_search is None:
        for name in filter(is_given, ("search_error", "e4m3_max")):
            raise click.UsageError(f"{flag_of(name)} belongs to --scale-search; name one")
    elif given.format != "nvfp4" or given.recipe not in (None, "te"):
        what = given.format if given.format != "nvfp4" else f"recipe {given.recipe}"
        raise click.UsageError(f"--scale-search is for nvfp4 with recipe te, not {what}")
