# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit compare`."""

from __future__ import annotations

import math
from typing import Any

import click

from fp4kit.checkpoint.compare import compare_paths
from fp4kit.files.devices import resolve_device
from fp4kit.io.read.open import check_source
from fp4kit.io.report import FileReport, named

from .given import Given
from .html_report import check_html
from .options import FILE, source, takes
from .progress import progress_bar
from .reports import report_json, show
from .tables import GLOSSARY
from .text import decibels, example, printable


def _finite(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    """Nothing is below NaN, and JSON cannot hold it."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a limit; give a number of dB")
    return value


@click.command(
    epilog=example(
        "fp4kit compare model.safetensors model-nvfp4.safetensors",
        "fp4kit compare model.safetensors back.safetensors --min-sqnr 18",
        "fp4kit compare Llama-3-8B Llama-3-8B-NVFP4",
    )
    + f"\n\n{GLOSSARY}"
)
@takes(
    source(metavar="A"),
    source("other", "B"),
    click.option(
        "--min-sqnr",
        metavar="DB",
        type=float,
        callback=_finite,
        help="Fail (exit 1) if the signal to noise ratio of any tensor, or of all together, is "
        "lower.",
    ),
    click.option(
        "--before",
        metavar="REPORT",
        type=FILE,
        help="Show an earlier run beside this one in the page of --html: a file of quantize's "
        "--report, or what --json printed.",
    ),
    *("experts_layout", "device", "all", "html", "force_html", "json"),
)
def command(given: Given) -> None:
    """Measure how far a file or checkpoint is from its original.

    A is the original, B a quantized or dequantized version of it with the same tensor names. Each
    is a file or a model directory, in any pairing.
    """
    for path in (given.source, given.other):
        check_source(path)
    html = check_html(given, [given.source, given.other])
    options = {"experts_layout": given.experts_layout, "device": resolve_device(given.device)}
    with progress_bar(f"Comparing {given.source.name}") as progress:
        report = compare_paths(given.source, given.other, progress=progress, **options)
    limit, failures = given.min_sqnr, []
    extra: dict[str, Any] = {}
    if limit is not None:
        failures = below(report, limit)
        extra = {"min_sqnr": limit, "below": [name for name, _ in failures]}
    if html is not None:
        html.write(report_json(report, **extra), given.other)
    rest = "Equal, or compared for equality only"
    show(report, given, with_stats=True, rest=rest, **extra)
    if failures:
        listed = printable(named([f"{name} ({decibels(sqnr)})" for name, sqnr in failures]))
        raise click.ClickException(f"SQNR below {limit:g} dB: {listed}")


def below(report: FileReport, limit: float) -> list[tuple[str, float]]:
    """Names and SQNR of the tensors, and of the `total`, that do not reach a limit."""
    measured = [(tensor.name, tensor.stats) for tensor in report.tensors]
    measured.append(("total", report.total_stats))
    # Written so that a NaN, which no comparison holds for, is a failure.
    return [(name, stats.sqnr) for name, stats in measured if stats and not stats.sqnr >= limit]
