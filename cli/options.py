# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share: the same flag means the same thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import click

from fp4kit import BackendUnavailableError, backend_status
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


device_option: Decorator = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to compute; the bytes are the same. auto: cuda if it can run here, else cpu.",
)
force_option: Decorator = click.option(
    "--force", is_flag=True, help="Overwrite the output if it exists."
)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the numbers as JSON instead of tables."
)
dtype_option: Decorator = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Element type of the dequantized tensors.",
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


def resolve_device(device: str) -> str:
    """`cpu` or `cuda` for `--device`.

    Raises:
        BackendUnavailableError: if cuda was asked for by name and cannot run here.
    """
    if device == "cpu":
        return device
    cuda = next(status for status in backend_status() if status.name == "cuda")
    if cuda.available:
        return "cuda"
    if device == "cuda":
        raise BackendUnavailableError("serve --device cuda", {"cuda": cuda.reason or "no reason"})
    return "cpu"
