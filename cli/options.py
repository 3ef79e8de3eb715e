# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Options of the commands: each is written once, so that a flag means the same everywhere."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any, Protocol

import click
from click.core import ParameterSource

from fp4kit.checkpoint.layouts import ALL_LAYOUTS
from fp4kit.checkpoint.models.expert_types import EXPERTS_LAYOUTS, RESTORED_LAYOUTS
from fp4kit.cpu.threads import THREADS_VARIABLE, most_threads
from fp4kit.fleet.urls import is_url
from fp4kit.formats import (
    ALL_FORMATS,
    ALL_RECIPES,
    DTYPES,
    GRANULARITIES,
    GRID_RECIPES,
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
)
from fp4kit.io.read.cast import CASTS
from fp4kit.options import E4M3_MAXIMA, SCALE_SEARCHES, SEARCH_ERRORS

from .given import Given


class Decorator(Protocol):
    """What click.option returns: it leaves the type of the function alone."""

    def __call__(self, function: Any, /) -> Any:
        """Adds the option."""


#: Whether a file exists is for the library to say (exit 1): the command line itself is right.
FILE = click.Path(path_type=Path)


class FileOrUrl(click.Path):
    """A path, or a URL as it stands: :class:`Given` takes them apart."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or the URL."""
        if isinstance(value, str) and is_url(value):
            return value
        return super().convert(value, param, ctx)


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


class Number(click.Choice):  # type: ignore[type-arg]
    """One of some numbers."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        return int(super().convert(str(value), param, ctx))


def _set_threads(_ctx: click.Context, _param: click.Parameter, value: int | None) -> None:
    if value is not None:
        os.environ[THREADS_VARIABLE] = str(value)


def source(name: str = "source", metavar: str = "IN") -> Decorator:
    """A file or directory to read."""
    return click.argument(name, metavar=metavar, type=FileOrUrl(path_type=Path))


def output(help: str, **settings: Any) -> Decorator:
    """`-o/--output`: what to write."""
    kind = FileOrUrl(path_type=Path)
    return click.option("-o", "--output", "target", metavar="OUT", type=kind, help=help, **settings)


def layout(help: str, more: tuple[str, ...] = (), **settings: Any) -> Decorator:
    """`--layout`: for which engines a checkpoint is stored; one of ours, or of `more`."""
    choices = click.Choice([*ALL_LAYOUTS, *more])
    return click.option("--layout", type=choices, help=help, **settings)


_default_rules = ", ".join(
    f"{spec.name} {spec.default_scale_rule}"
    for spec in ALL_FORMATS.values()
    if spec.default_scale_rule
)
#: Options by name, for :func:`takes`.
OPTIONS: dict[str, Decorator] = {
    "format": click.option(
        "--format",
        type=click.Choice(list(ALL_FORMATS), case_sensitive=False),
        default="nvfp4",
        show_default=True,
        help="Block format to write.",
    ),
    "recipe": click.option(
        "--recipe",
        type=click.Choice(list({**ALL_RECIPES, **GRID_RECIPES})),
        help="nvfp4: whose order of operations to follow, byte for byte.  [default: te] fp8: "
        f"likewise, of {', '.join(GRID_RECIPES)}; by default it follows from --granularity.",
    ),
    "granularity": click.option(
        "--granularity",
        type=click.Choice(GRANULARITIES),
        help="fp8 only: what shares a float32 scale: the tensor, each row, or blocks of 128 x 128."
        "  [default: tensor, or what --recipe or --layout has]",
    ),
    "scale_rule": click.option(
        "--scale-rule",
        type=click.Choice(SCALE_RULES),
        help="mxfp4 and mxfp8 only: how a block's power of two is chosen.  "
        f"[default: {_default_rules}]",
    ),
    "scale_layout": click.option(
        "--scale-layout",
        type=click.Choice(SCALE_LAYOUTS),
        default="linear",
        show_default=True,
        help="Order of the block scales in the file.",
    ),
    "nibble_order": click.option(
        "--nibble-order",
        type=click.Choice(NIBBLE_ORDERS),
        default="low_first",
        show_default=True,
        help="Half of a byte that the even element of a pair takes.",
    ),
    "scale_search": click.option(
        "--scale-search",
        type=click.Choice(SCALE_SEARCHES),
        help="nvfp4 with recipe te: choose each block's scale by the error it leaves. "
        "four_over_six compares two, sweep ten.",
    ),
    "search_error": click.option(
        "--search-error",
        type=click.Choice(SEARCH_ERRORS),
        help="What --scale-search makes small; _scaled: before the second-level scale.  "
        "[default: mse]",
    ),
    "e4m3_max": click.option(
        "--e4m3-max",
        type=Number([str(number) for number in E4M3_MAXIMA]),
        default=str(E4M3_MAXIMA[0]),
        show_default=True,
        help="Largest block scale of --scale-search; 256 leaves the largest blocks room.",
    ),
    "dtype": click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Element type of the dequantized tensors.  [default: float32 for a file of fp4kit's "
        "own or a .gguf, bfloat16 for a model directory or a file in a layout]",
    ),
    "device": click.option(
        "--device",
        type=Device(),
        default="auto",
        show_default=True,
        help="Where to compute; the bytes are the same. auto: cuda if it can run here, else cpu. "
        "For a model directory, cuda is all GPUs of the machine.",
    ),
    "threads": click.option(
        "--threads",
        type=click.IntRange(1, most_threads()),
        callback=_set_threads,
        expose_value=False,
        help=f"CPU threads to use.  [default: {THREADS_VARIABLE}, or all cores; at most "
        f"{most_threads()} here]",
    ),
    "include": click.option(
        "--include",
        metavar="PATTERN",
        multiple=True,
        help="Quantize only tensors whose name matches: a glob, or re: and a regular expression "
        "that matches from the start; one that matches nothing is an error. In a model directory "
        "or .gguf: quantize them as well, although a default rule leaves them alone (norms, and in "
        "directories embeddings and what is not 2-D, never are). Repeatable.",
    ),
    "exclude": click.option(
        "--exclude",
        metavar="PATTERN",
        multiple=True,
        help="Carry matching tensors through unchanged; wins over --include. Repeatable.",
    ),
    "weights_only": click.option(
        "--weights-only", is_flag=True, help="Model directories: no activation scales. The default."
    ),
    "activations": click.option(
        "--activations",
        metavar="uncalibrated|dynamic|FILE",
        help="Model directories: W4A4, with activation scales of 1.0, or from a JSON file that "
        "maps each module to the amax of its input, or from what `fp4kit calibrate` wrote. For "
        "fp8 (W8A8) also dynamic: engines scale inputs as they come.",
    ),
    "experts_layout": click.option(
        "--experts-layout",
        type=click.Choice(EXPERTS_LAYOUTS),
        help="Model directories: how fused 3-D experts are stored, where that is not clear.",
    ),
    "restored_layout": click.option(
        "--experts-layout",
        type=click.Choice(RESTORED_LAYOUTS),
        help="Model directories: how single experts are put together where neither the file nor "
        "the model type tells; single leaves them.",
    ),
    "unscaled_fp8": click.option(
        "--unscaled-fp8",
        is_flag=True,
        help="FP8 tensors without a scale were only cast: take their values as they are. Otherwise "
        "a missing scale is an error.",
    ),
    "lossless": click.option(
        "--lossless",
        is_flag=True,
        help="Model directories: refuse to change a value. Only codes are taken over then, such as "
        "MXFP4 into NVFP4 or FP8; what would be quantized (again) or rounded is an error, before "
        "anything is written.",
    ),
    "max_shard_size": click.option(
        "--max-shard-size",
        metavar="SIZE",
        help="Model directories: largest size of a weight file, like 5GB or 512MiB.  "
        "[default: 5GB]",
    ),
    "resume": click.option(
        "--resume",
        is_flag=True,
        help="Model directories: finish what an interrupted run of the same command began.",
    ),
    "scheduler": click.option(
        "--scheduler",
        metavar="ADDRESS|local:N",
        help="Model directories: have the workers of a dask scheduler (tcp://HOST:PORT) do the "
        "work, or N workers on this machine. Needs pip install 'fp4kit[fleet]'.",
    ),
    "part": click.option(
        "--part",
        metavar="I/N",
        help="Model directories: do one part of N, as a job of an array does; fp4kit finish OUT "
        "completes the result once all are done.",
    ),
    "follow_links": click.option(
        "--follow-links",
        is_flag=True,
        help="Model directories: copy also what links out of IN point to. Without it they are "
        "refused, except those into the cache of the Hugging Face hub.",
    ),
    "void_dtype": click.option(
        "--void-dtype",
        type=click.Choice(["bfloat16"]),
        help="What 2-byte void data in .npy and .npz files is: NumPy saves bfloat16 that way.",
    ),
    "cast": click.option(
        "--cast",
        type=click.Choice(CASTS),
        help="Take float64 tensors, NumPy's default, as if IN held them as float32.  [default: "
        "float64 is carried through unquantized]",
    ),
    "pad": click.option(
        "--pad",
        is_flag=True,
        help="Files: also quantize tensors whose last axis is not a multiple of the block, filled "
        "up with zeros; dequantize gives the true shape back.",
    ),
    "allow_nothing": click.option(
        "--allow-nothing",
        is_flag=True,
        help="Exit with 0 and write the output even if no tensor is quantized; otherwise that is "
        "an error.",
    ),
    "dry_run": click.option(
        "--dry-run", is_flag=True, help="Print the plan from the headers; write nothing."
    ),
    "all": click.option(
        "--all",
        "every",
        is_flag=True,
        help="Print every tensor, in the order of the file, and not only the ten worst (or "
        "largest).",
    ),
    "report": click.option(
        "--report",
        "report_file",
        metavar="FILE",
        type=FILE,
        help="Write the JSON that --json prints to a file as well. It may not lie in IN or OUT, "
        "and an older one needs --force.",
    ),
    "html": click.option(
        "--html",
        metavar="FILE",
        type=FILE,
        help="Write a page that shows the result in pictures and a table, one file that loads "
        "nothing else. The same rules as for --report; needs pip install 'fp4kit[report]'.",
    ),
    "force": click.option(
        "--force",
        is_flag=True,
        help="Replace the output if it exists; in a directory only what fp4kit wrote, others stay.",
    ),
    "force_html": click.option(
        "--force", is_flag=True, help="Replace an older page of --html if it exists."
    ),
    "json": click.option(
        "--json", "as_json", is_flag=True, help="Print the numbers as JSON instead of tables."
    ),
}


def takes(*options: str | Decorator) -> Decorator:
    """Adds options to a command, which is called with all of them as one :class:`Given`.

    Args:
        options: in the order of its help: names of :data:`OPTIONS`, or what click.option returns.
    """

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def run(**values: Any) -> Any:
            return function(Given(**values))

        for option in reversed(options):
            run = (OPTIONS[option] if isinstance(option, str) else option)(run)
        return run

    return decorate


def flag_of(name: str) -> str:
    """What an option is called on the command line."""
    return f"--{name.replace('_', '-')}"


def check_shared(given: Given) -> None:
    """Refuses what workers and URLs have no use for, in the terms of the command line.

    Raises:
        UsageError: naming the first such option, or what is missing.
    """
    if given.scheduler is not None and given.part is not None:
        raise click.UsageError("--scheduler and --part exclude each other")
    if not given.is_shared:
        return
    if given.target is None:
        raise click.UsageError("--scheduler, --part and URLs need -o OUT")
    refuse(("force",), "not for --scheduler, --part and URLs, which start with an empty place")
    if given.part is not None:
        refuse(("resume",), "not for --part, which always goes on")
        refuse(("report_file", "html"), "not for --part; fp4kit finish has them")
        refuse(("budget",), "not for --part; choose once with fp4kit survey, and give --plan")
    if given.target_url:
        refuse(("html",), "not for a target that is a URL")


def is_given(name: str) -> bool:
    """Whether an option stands on the command line of the command that runs."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def refuse(names: tuple[str, ...], why: str) -> None:
    """Refuses options that would do nothing for this kind of input.

    Raises:
        UsageError: naming the first that stands on the command line.
    """
    for name in names:
        if is_given(name):
            raise click.UsageError(f"{flag_of(name)} is {why}", click.get_current_context())
