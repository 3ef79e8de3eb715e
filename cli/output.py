# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Where output goes: data to stdout as tables or JSON, talk to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import click
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .text import cut_pieces, printable
from .text import number as number_text

#: Cells that a column of names needs at least; columns of a higher rank go before it gets fewer.
MIN_NAME_WIDTH = 24
#: Cells that a column of words needs at least; they are folded between words.
MIN_TEXT_WIDTH = 24
#: Without a terminal nothing is folded or cut: whoever reads the pipe wants whole names.
UNLIMITED_WIDTH = 100_000
#: Cells between columns: one of padding, one of the box.
GAP = 2
#: Cells that a chart takes at most.
CHART_WIDTH = 72
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
        name: its cells are names, cut in the middle where they do not fit; the first column only.
    """

    title: str
    number: bool = True
    rank: int = 0
    name: bool = False


def print_json(data: object) -> None:
    """Writes one JSON document to stdout, in ASCII: it survives every console."""
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def say(message: str) -> None:
    """Tells the user something that is not data."""
    click.echo(printable(cut_pieces(message)), err=True)


def on_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; one that was closed before the start is None."""
    return stream is not None and stream.isatty()


def print_lines(*lines: str) -> None:
    """Writes lines to stdout, folded between words on a terminal."""
    console = _console()
    for line in lines:
        console.print(Text(printable(line)))


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not on_terminal(sys.stdout):
        console.width = UNLIMITED_WIDTH
    return console


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
    console = _console()
    titles = [column.title for column in columns]
    if not on_terminal(sys.stdout):
        titles = [_in_one_line(title) for title in titles]
    lines = [[printable(cell) for cell in row] for row in ([*rows, total] if total else rows)]
    widths = _widths([titles, *lines])
    kept = _fitting(columns, widths, console.width)
    ascii_only = console.options.ascii_only
    if columns[0].name:
        others = sum(GAP + _least(columns[index], widths[index]) for index in kept[1:])
        room = max(console.width - others - GAP, 1)
        for line in lines:
            line[0] = cut_middle(line[0], room, "..." if ascii_only else "\u2026")
    rule = "-" if ascii_only else "\u2500"
    if title:
        print_lines("", title)
    shown = [[line[index] for index in kept] for line in [titles, *lines]]
    chosen = [columns[index] for index in kept]
    if on_terminal(sys.stdout):
        _print_folded(console, chosen, shown, rule, has_total=total is not None)
    else:
        _print_plain(chosen, shown, rule, has_total=total is not None)
    if len(kept) < len(columns):
        left_out = ", ".join(
            _in_one_line(title) for index, title in enumerate(titles) if index not in kept
        )
        say(f"(terminal too narrow for: {left_out}; widen it, pipe the output, or use --json)")


def print_chart(bars: Sequence[tuple[str, float]]) -> None:
    """Draws a bar for each label to stdout, with its number; the longest fills the line.

    Args:
        bars: labels and numbers of at least 0, of which not all need be finite.
    """
    console = _console()
    finite = [value for _, value in bars if math.isfinite(value)]
    largest = max(finite, default=0.0) or 1.0
    wide = max(cell_len(label) for label, _ in bars)
    room = max(min(console.width, CHART_WIDTH) - wide - 10, 10)
    mark = "#" if console.options.ascii_only else "\u2588"
    for label, value in bars:
        share = min(value / largest, 1.0) if math.isfinite(value) else 1.0
        bar = mark * max(round(share * room), 1 if value else 0)
        print_lines(f"{label:>{wide}}  {bar} {number_text(value, '.2f')}")


def _print_folded(
    console: Console,
    columns: Sequence[Column],
    lines: list[list[str]],
    rule: str,
    *,
    has_total: bool,
) -> None:
    """Writes a table whose columns of words are folded where they must be."""
    style = box.Box(RULES.format(rule), ascii=rule == "-")
    table = Table(
        box=style, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for column, title in zip(columns, lines[0], strict=True):
        table.add_column(
            Text(title),
            justify="right" if column.number else "left",
            no_wrap=column.number or column.name,
            overflow="fold",
        )
    for number, line in enumerate(lines[1:], 1):
        table.add_row(
            *map(Text, line),
            end_section=has_total and number == len(lines) - 2,
            style="bold" if has_total and number == len(lines) - 1 else None,
        )
    console.print(table)


def _print_plain(
    columns: Sequence[Column], lines: list[list[str]], rule: str, *, has_total: bool
) -> None:
    """Writes a table as wide as it is; there may be hundreds of thousands of rows."""
    widths = _widths(lines)
    across = rule * (sum(widths) + GAP * (len(widths) - 1))
    for number, line in enumerate(lines):
        if number == 1 or (has_total and number == len(lines) - 1):
            print(across)
        cells = []
        for column, width, cell in zip(columns, widths, line, strict=True):
            fill = " " * (width - cell_len(cell))
            cells.append(f"{fill}{cell}" if column.number else f"{cell}{fill}")
        # Not click.echo, which writes UTF-8 to a console of ASCII.
        print((" " * GAP).join(cells).rstrip())


def cut_middle(text: str, width: int, mark: str = "\u2026") -> str:
    """A name in at most `width` cells: what is too much goes from its middle."""
    # No character takes less than no cell or more than two, and a name may be very long.
    if len(text) <= 2 * width and cell_len(text) <= width:
        return text
    if width <= len(mark):
        return mark[:width]
    tail = max((width - len(mark)) // 2, 1)
    head = width - len(mark) - tail
    end = text[-tail:]
    while cell_len(end) > tail:
        end = end[1:]
    return f"{set_cell_size(text[:head], head)}{mark}{end}" if head else f"{mark}{end}"


def _in_one_line(title: str) -> str:
    """A heading of several lines in one, hyphens undone."""
    return title.replace("-\n", "").replace("\n", " ")


def _widths(lines: list[list[str]]) -> list[int]:
    """Cells that each column takes."""
    return [
        max(cell_len(part) for cell in cells for part in cell.split("\n"))
        for cells in zip(*lines, strict=True)
    ]


def _least(column: Column, width: int) -> int:
    """Cells that a column needs at least."""
    if column.name:
        return min(width, MIN_NAME_WIDTH)
    return width if column.number else min(width, MIN_TEXT_WIDTH)


def _fitting(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Indices of the columns that fit side by side."""
    needs = [GAP + _least(column, own) for column, own in zip(columns, widths, strict=True)]
    kept = list(range(len(columns)))
    while sum(needs[index] for index in kept) > width:
        victim = max(kept, key=lambda index: (columns[index].rank, index))
        if columns[victim].rank == 0:
            break
        kept.remove(victim)
    return kept
