# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share: the same flag means the same thing everywhere."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Protocol

import click

from fp4kit.checkpoint.models.expert_types import EXPERTS_LAYOUTS, RESTORED_LAYOUTS
from fp4kit.cpu.threads import THREADS_VARIABLE, most_threads
from fp4kit.formats import (
    ALL_FORMATS,
    ALL_RECIPES,
    DTYPES,
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
)
from fp4kit.variant import E4M3_MAXIMA, ERRORS, SCALE_SEARCHES


class Decorator(Protocol):
    """What click.option returns: it leaves the type of the function alone."""

    def __call__(self, function: Any, /) -> Any:
        """Adds the option."""


#: Whether a file exists is for the library to say (exit 1): the command line itself is right.
FILE = click.Path(path_type=Path)


def source_argument(name: str = "source", metavar: str = "IN") -> Decorator:
    """A file to read."""
    return click.argument(name, metavar=metavar, type=FILE)


def output_option(help: str, **settings: Any) -> Decorator:
    """`-o/--output`: the file to write."""
    return click.option("-o", "--output", "target", metavar="OUT", type=FILE, help=help, **settings)


class Device(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """`auto`, `cpu`, `cuda` or the number of a GPU, `cuda:1`."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the form; whether it can be used is for the library to say."""
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", str(value)):
            self.fail(f"{value!r} is not a device; choose auto, cpu, cuda, or cuda:N", param, ctx)
        return str(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """How the help shows it."""
        return "[auto|cpu|cuda|cuda:N]"


device_option: Decorator = click.option(
    "--device",
    type=Device(),
    default="auto",
    show_default=True,
    help="Where to compute; the bytes are the same. auto: cuda if it can run here, else cpu. For a "
    "model directory, cuda is all GPUs of the machine.",
)


def _set_threads(_ctx: click.Context, _param: click.Parameter, value: int | None) -> None:
    if value is not None:
        os.environ[THREADS_VARIABLE] = str(value)


threads_option: Decorator = click.option(
    "--threads",
    type=click.IntRange(1, most_threads()),
    callback=_set_threads,
    expose_value=False,
    help=f"CPU threads to use.  [default: {THREADS_VARIABLE}, or all cores; at most "
    f"{most_threads()} here]",
)
unscaled_fp8_option: Decorator = click.option(
    "--unscaled-fp8",
    is_flag=True,
    help="FP8 tensors without a scale were only cast: take their values as they are. Otherwise a "
    "missing scale is an error.",
)
max_shard_size_option: Decorator = click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Model directories: largest size of a weight file, like 5GB or 512MiB.  [default: 5GB]",
)
experts_layout_option: Decorator = click.option(
    "--experts-layout",
    type=click.Choice(EXPERTS_LAYOUTS),
    help="Model directories: how fused 3-D experts are stored, where that is not clear.",
)
restored_layout_option: Decorator = click.option(
    "--experts-layout",
    type=click.Choice(RESTORED_LAYOUTS),
    help="Model directories: how single experts are put together where neither the file nor the "
    "model type tells; single leaves them.",
)
resume_option: Decorator = click.option(
    "--resume",
    is_flag=True,
    help="Model directories: finish what an interrupted run of the same command began.",
)
follow_links_option: Decorator = click.option(
    "--follow-links",
    is_flag=True,
    help="Model directories: copy also what links out of IN point to. Without it they are refused, "
    "except those into the cache of the Hugging Face hub.",
)
report_option: Decorator = click.option(
    "--report",
    "report_file",
    metavar="FILE",
    type=FILE,
    help="Write the JSON that --json prints to a file as well. It may not lie in IN or OUT, and an "
    "older one needs --force.",
)
force_option: Decorator = click.option(
    "--force",
    is_flag=True,
    help="Replace the output if it exists; in a directory only what fp4kit wrote, others stay.",
)
all_option: Decorator = click.option(
    "--all",
    "every",
    is_flag=True,
    help="Print every tensor, in the order of the file, and not only the ten worst (or largest).",
)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the numbers as JSON instead of tables."
)
dtype_option: Decorator = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Element type of the dequantized tensors.  [default: float32 for a file of fp4kit's own, "
    "bfloat16 for a model directory or a file in a layout]",
)


def format_options(function: Any) -> Any:
    """Everything that decides the bytes of a quantized tensor."""
    options = [
        click.option(
            "--format",
            type=click.Choice(list(ALL_FORMATS), case_sensitive=False),
            default="nvfp4",
            show_default=True,
            help="Block format to write.",
        ),
        click.option(
            "--recipe",
            type=click.Choice(list(ALL_RECIPES)),
            default="te",
            show_default=True,
            help="nvfp4 only: whose order of operations to follow, byte for byte.",
        ),
        click.option(
            "--scale-rule",
            type=click.Choice(SCALE_RULES),
            help="mxfp4 and mxfp8 only: how a block's power of two is chosen.  "
            f"[default: {_default_rules()}]",
        ),
        click.option(
            "--scale-layout",
            type=click.Choice(SCALE_LAYOUTS),
            default="linear",
            show_default=True,
            help="Order of the block scales in the file.",
        ),
        click.option(
            "--nibble-order",
            type=click.Choice(NIBBLE_ORDERS),
            default="low_first",
            show_default=True,
            help="Half of a byte that the even element of a pair takes.",
        ),
        click.option(
            "--scale-search",
            type=click.Choice(SCALE_SEARCHES),
            help="nvfp4 with recipe te: choose each block's scale by the error it leaves. "
            "four_over_six compares two, sweep ten.",
        ),
        click.option(
            "--error",
            type=click.Choice(ERRORS),
            help="What --scale-search makes small; _scaled: before the second-level scale.  "
            "[default: mse]",
        ),
        click.option(
            "--e4m3-max",
            type=click.Choice([str(number) for number in E4M3_MAXIMA]),
            default=str(E4M3_MAXIMA[0]),
            show_default=True,
            help="Largest block scale of --scale-search; 256 leaves the largest blocks room.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _default_rules() -> str:
    rules = {spec.name: spec.default_scale_rule for spec in ALL_FORMATS.values()}
    return ", ".join(f"{name} {rule}" for name, rule in rules.items() if rule)
