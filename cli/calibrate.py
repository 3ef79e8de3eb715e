# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit calibrate`."""

from __future__ import annotations

from pathlib import Path

import click

from fp4kit.files.calibrate import LENGTH, calibrate
from fp4kit.io.read.open import check_source

from .given import Given
from .options import FILE, output, source, takes
from .output import say
from .progress import progress_bar
from .text import example


@click.command(
    epilog=example(
        "fp4kit calibrate Llama-3-8B --text texts.txt -o moments.safetensors",
        "fp4kit survey Llama-3-8B --moments moments.safetensors --budget 4.8",
        "fp4kit quantize Llama-3-8B -o out --activations moments.safetensors",
    )
)
@takes(
    source(),
    output("File to write, .safetensors.  [default: IN with -moments added]"),
    click.option(
        "--text",
        metavar="FILE",
        type=FILE,
        required=True,
        help="Texts to run the model on, one on each line: like those it will be used for.",
    ),
    click.option(
        "--length",
        type=click.IntRange(1),
        default=LENGTH,
        show_default=True,
        help="Tokens of a text at most; longer ones are cut into pieces.",
    ),
    click.option(
        "--no-effects",
        "effects",
        flag_value=False,
        default=True,
        help="Only what the layers are given, and not what their errors do to the model's output: "
        "a third of the work, and budgets choose worse.",
    ),
    "force",
)
def command(given: Given) -> None:
    """Run a model on text, and keep what its layers were given.

    IN is a model directory with its tokenizer. transformers runs it on the CPU (pip install
    'fp4kit[calibrate]'), one layer in memory at a time. The file holds the second moments of each
    layer's input and what an error of its output does to that of the model, for --moments, and the
    largest magnitudes, for --activations.
    """
    check_source(given.source)
    real = given.source.resolve()
    target = given.target or real.with_name(f"{real.name}-moments.safetensors")
    with progress_bar(f"Calibrating {given.source.name}") as progress:
        report = calibrate(
            given.source,
            given.text or Path(),
            target,
            length=given.length,
            effects=given.effects,
            force=given.force,
            progress=progress,
        )
    for warning in report.warnings:
        say(f"Warning: {warning}")
    say(
        f"Wrote {report.target}: {len(report.modules)} modules, from {report.tokens} tokens of "
        f"{report.texts} texts"
    )
