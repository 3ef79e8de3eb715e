# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit compare`."""

from __future__ import annotations

from pathlib import Path

import click

from fp4kit.io.convert import compare_files
from fp4kit.io.report import FileReport

from .options import device_option, json_option, resolve_device, source_argument
from .output import say
from .progress import progress_bar
from .reports import show
from .text import decibels, example, printable

#: Tensors named in a message; the table has them all.
MAX_NAMED = 5


@click.command(
    epilog=example(
        "fp4kit compare model.safetensors model-nvfp4.safetensors",
        "fp4kit compare model.safetensors back.safetensors --min-sqnr 18",
    )
)
@source_argument("original", "A")
@source_argument("other", "B")
@click.option(
    "--min-sqnr",
    metavar="DB",
    type=float,
    help="Fail (exit 1) if the signal to noise ratio of any tensor, or of all together, is lower.",
)
@device_option
@json_option
def command(
    original: Path, other: Path, min_sqnr: float | None, device: str, as_json: bool
) -> None:
    """Measure how far one file's tensors are from another's.

    A is the original, B a quantized or dequantized version of it with the same tensor names.
    """
    resolved = resolve_device(device)
    with progress_bar(f"Comparing {original.name}") as progress:
        report = compare_files(original, other, device=resolved, progress=progress)
    failures = [] if min_sqnr is None else below(report, min_sqnr)
    limit = (
        {} if min_sqnr is None else {"min_sqnr": min_sqnr, "below": [name for name, _ in failures]}
    )
    show(report, as_json=as_json, with_stats=True, rest="Only tested for equality", **limit)
    unequal = [tensor.name for tensor in report.tensors if tensor.reason not in ("", "equal")]
    if unequal:
        say(f"Warning: not measured, but different: {named(unequal)}")
    if failures:
        listed = named([f"{name} ({decibels(sqnr)})" for name, sqnr in failures])
        raise click.ClickException(f"SQNR below {min_sqnr:g} dB: {listed}")


def named(names: list[str]) -> str:
    """The first few of a list of names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return printable(", ".join(names[:MAX_NAMED])) + more


def below(report: FileReport, limit: float) -> list[tuple[str, float]]:
    """Names and SQNR of the tensors, and of the `total`, that do not reach a limit."""
    measured = [(tensor.name, tensor.stats) for tensor in report.tensors]
    measured.append(("total", report.total_stats))
    # Written so that a NaN, which no comparison holds for, is a failure.
    return [(name, stats.sqnr) for name, stats in measured if stats and not stats.sqnr >= limit]
