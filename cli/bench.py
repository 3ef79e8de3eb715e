# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit bench`."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

import click

from fp4kit import backend_status, bench
from fp4kit.files.devices import resolve_device
from fp4kit.formats import DTYPES

from .options import OPTIONS
from .output import Column, print_json, print_table
from .text import example

#: Sizes if none are given: far above the caches, and done in a minute.
DEFAULT_SIZES = {"cpu": (24,), "cuda": (26, 28)}
SIZE: Any = click.IntRange(10, 34)


def _parse_sizes(
    ctx: click.Context, param: click.Parameter, words: tuple[str, ...]
) -> tuple[int, ...]:
    """`24` or `24,26`, each word any number of them."""
    parts = [part for word in words for part in word.split(",")]
    return tuple(int(SIZE.convert(part, param, ctx)) for part in parts)


@click.command(
    epilog=example(
        "fp4kit bench",
        "fp4kit bench --device all --sizes 24,26 --dtype bfloat16 --dtype float32",
        "fp4kit bench --json > speed.json",
    )
)
@click.option(
    "--sizes",
    metavar="N,...",
    callback=_parse_sizes,
    multiple=True,
    help="Elements of the tensors, as powers of two. Repeatable.  [default: 24 on the CPU, 26,28 "
    "on a GPU]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "all"]),
    default="auto",
    show_default=True,
    help="What to measure. auto: cuda if it can run here, else cpu; all: both if they can.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    default=["bfloat16"],
    show_default=True,
    help="Element type of the float tensors. Repeatable.",
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Measurements of each operation; the median counts.",
)
@OPTIONS["json"]
def command(
    sizes: tuple[int, ...],
    device: str,
    dtypes: tuple[str, ...],
    repeat: int,
    as_json: bool,
) -> None:
    """Measure how fast every operation is on this machine.

    Rates count the bytes that must move; the share is that of the fastest plain copy of a bfloat16
    tensor of as many elements, measured in the same run.
    """
    results = [
        bench.run(name, sizes or DEFAULT_SIZES[name], dtypes, repeat) for name in _devices(device)
    ]
    if as_json:
        print_json({"repeat": repeat, "devices": [asdict(result) for result in results]})
        return
    for result in results:
        _print(result)


def _devices(device: str) -> list[str]:
    if device != "all":
        return [resolve_device(device)]
    usable = {status.name for status in backend_status() if status.available}
    return [name for name in ("cpu", "cuda") if name in usable]


def _print(result: bench.DeviceResult) -> None:
    """A table for every size, and one for the small calls of a GPU."""
    columns = [
        Column("operation", number=False),
        Column("dtype", number=False, rank=1),
        Column("elements", rank=2),
        Column("us"),
        Column("GB/s"),
        Column("of copy"),
    ]
    # Every size begins with its copies.
    tables: list[list[bench.Timing]] = []
    for is_copy, group in groupby(result.timings, lambda timing: timing.name.startswith("copy")):
        if is_copy:
            tables.append([])
        tables[-1].extend(group)
    for number, timings in enumerate(tables):
        print_table(
            columns,
            [
                [
                    timing.name,
                    timing.dtype,
                    str(timing.elements),
                    f"{timing.microseconds:.1f}",
                    f"{timing.gigabytes_per_second:.1f}",
                    f"{timing.share_of_copy:.3f}",
                ]
                for timing in timings
            ],
            title=f"{result.device}: {result.hardware}" if number == 0 else "",
        )
        click.echo()
    if result.small_calls:
        print_table(
            [Column("small call", number=False), Column("host us"), Column("graph replay us")],
            [
                [call.name, f"{call.host_microseconds:.1f}", f"{call.graph_microseconds:.1f}"]
                for call in result.small_calls
            ],
        )
