# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Where output goes: data to stdout as tables or JSON, talk to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .text import printable

#: Cells that the first column is never folded below on a narrow terminal.
MIN_NAME_WIDTH = 16
#: Without a terminal nothing is folded or cut: whoever reads the pipe wants whole names.
UNLIMITED_WIDTH = 100_000
#: Cells between columns: one of padding, one of the box.
GAP = 2
#: No frame; a rule under the heading and above the total. In ASCII too, so that it looks the same
#: on every console.
RULES = "    \n    \n {0}{0} \n    \n {0}{0} \n    \n    \n    \n"


@dataclass(frozen=True)
class Column:
    """A table column.

    Attributes:
        title: heading; set on several lines on a terminal, where width is scarce.
        number: set to the right and never folded.
        rank: on a terminal that is too narrow, columns of the highest rank are left out first;
            those of rank 0 always stay.
    """

    title: str
    number: bool = True
    rank: int = 0


def print_json(data: object) -> None:
    """Writes one JSON document to stdout, in ASCII: it survives every console."""
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def say(message: str) -> None:
    """Tells the user something that is not data."""
    click.echo(printable(message), err=True)


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    total: Sequence[str] | None = None,
    title: str = "",
) -> None:
    """Writes a table to stdout; on a narrow terminal it leaves columns out and says so.

    Args:
        columns: headings.
        rows: one cell per column each.
        total: a last row, ruled off.
        title: line above the table, set off from what was printed before.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    titles = [column.title for column in columns]
    if not sys.stdout.isatty():
        console.width = UNLIMITED_WIDTH
        titles = [title.replace("\n", " ") for title in titles]
    lines = [[printable(cell) for cell in row] for row in ([*rows, total] if total else rows)]
    kept = _fitting(columns, [titles, *lines], console.width)
    ascii_only = console.options.ascii_only
    style = box.Box(RULES.format("-" if ascii_only else "\u2500"), ascii=ascii_only)
    table = Table(
        box=style, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for index in kept:
        column = columns[index]
        table.add_column(
            Text(titles[index]),
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
        )
    for number, line in enumerate(lines):
        is_total = total is not None and number == len(lines) - 1
        table.add_row(
            *(Text(line[index]) for index in kept),
            end_section=total is not None and number == len(lines) - 2,
            style="bold" if is_total else None,
        )
    if title:
        console.print()
        console.print(Text(printable(title)))
    console.print(table)
    if len(kept) < len(columns):
        left_out = ", ".join(
            title.replace("\n", " ") for index, title in enumerate(titles) if index not in kept
        )
        say(f"(terminal too narrow for: {left_out}; widen it, pipe the output, or use --json)")


def _fitting(columns: Sequence[Column], lines: list[list[str]], width: int) -> list[int]:
    """Indices of the columns that fit side by side."""
    needs = []
    for index in range(len(columns)):
        cells = (part for line in lines for part in line[index].split("\n"))
        widest = max(cell_len(part) for part in cells)
        needs.append(GAP + (min(widest, MIN_NAME_WIDTH) if index == 0 else widest))
    kept = list(range(len(columns)))
    while sum(needs[index] for index in kept) > width:
        victim = max(kept, key=lambda index: (columns[index].rank, index))
        if columns[victim].rank == 0:
            break
        kept.remove(victim)
    return kept
