# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Options that choose among formats, of `survey` and `quantize`."""

from __future__ import annotations

import click

from fp4kit.io.candidates import CANDIDATES, DEFAULT_CANDIDATES, KEPT

from .options import FILE, Decorator

FORMATS: Decorator = click.option(
    "--formats",
    metavar="LIST",
    default=",".join(DEFAULT_CANDIDATES),
    show_default=True,
    help=f"Candidates, separated by commas: {', '.join(CANDIDATES)}. {KEPT} leaves a tensor as "
    "it is stored.",
)
BUDGET: Decorator = click.option(
    "--budget",
    metavar="BITS|SIZE",
    help="Choose a format for each group of tensors that engines fuse: at most so many bits a "
    "weight over the quantized tensors (4.8), or bytes of the whole result (20GB).",
)
PINS: Decorator = click.option(
    "--pin",
    "pins",
    metavar="PATTERN=FORMAT",
    multiple=True,
    help="What matching tensors get in any case; patterns are those of --exclude. Repeatable.",
)
MOMENTS: Decorator = click.option(
    "--moments",
    metavar="FILE",
    type=FILE,
    help="What the layers are given, from `fp4kit calibrate` or llama.cpp's imatrix.gguf: errors "
    "are then those of the layers' outputs, also those that a sweep of scales compares.",
)
PLAN: Decorator = click.option(
    "--plan",
    metavar="FILE",
    type=FILE,
    help="The format of each group of tensors, as --save-plan wrote it and you may have edited it.",
)
SAVE_PLAN: Decorator = click.option(
    "--save-plan",
    "plan_file",
    metavar="FILE",
    type=FILE,
    help="Write what --budget chose as a JSON file that `quantize --plan` takes. An older one "
    "needs --force.",
)
