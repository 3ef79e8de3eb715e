# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""File reports as tables: the one place that decides what of a report a person sees."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace as with_changes

from fp4kit import ErrorStats
from fp4kit.io.report import FileReport, TensorReport, kind_of
from fp4kit.report.words import NORMAL, normal_sqnr

from .output import Column, print_lines, print_table
from .text import UNKNOWN, decibels, number, percent, shape_text, size

#: Rows of a table unless all were asked for: what is worth a look, and the total in sight.
SHOWN = 10

#: Ranks say what a narrow terminal can spare: the share of largest codes first, shapes last.
BASE_COLUMNS = [
    Column("tensor", number=False, name=True),
    Column("shape", rank=1),
    Column("dtype", number=False, rank=3),
    Column("format", number=False, rank=4),
    Column("before", rank=2),
    Column("after", rank=5),
]
STAT_COLUMNS = [
    Column("SQNR\ndB"),
    Column("RMS\nerr %", rank=6),
    Column("max\nerror", rank=7),
    Column("at max\ncode %", rank=9),
    Column("under-\nflowed %", rank=8),
]
#: What the columns of the tables mean, for the help of the commands.
GLOSSARY = """\
\b
Columns:
  before, after  bytes in the input and in the output
  SQNR dB        signal to quantization noise: 10 log10(sum x^2 / sum (x-y)^2);
                 higher is better, exact: no error, overflow: not finite.
                 Normal weights: nvfp4 20.4 (sweep 21.8), mxfp4 18.9, mxfp8 31.5
  RMS err %      root mean square of the error, in percent of that of the input
  max error      largest absolute error
  at max code %  codes at the format's largest value. That is where the largest
                 element of a block belongs: such values are not clipped. 5 to
                 15 % are normal for nvfp4, and 100 % for a tensor of ones
  underflowed %  blocks whose scale became zero, and so all of their values
  total          tensors that are quantized or differ; SQNR and errors are those
                 of all values that changed, as one tensor. Kept and equal
                 tensors do not count, in quantize and compare alike"""


def stat_cells(stats: ErrorStats | None) -> list[str]:
    """Cells for STAT_COLUMNS."""
    if stats is None:
        return [UNKNOWN] * len(STAT_COLUMNS)
    return [
        decibels(stats.sqnr),
        number(stats.relative_rms, ".3f"),
        number(stats.max_abs_error, ".3g"),
        percent(stats.saturated),
        percent(stats.scale_underflow),
    ]


def print_report(report: FileReport, *, with_stats: bool, every: bool, rest: str) -> None:
    """What was (or would be) done with the tensors of a file, the total last.

    Args:
        report: what to print.
        with_stats: whether there are error columns.
        every: print every tensor; otherwise the worst (or largest) few, and kept ones by reason.
        rest: what to call the tensors that nothing was done with.
    """
    changed = [tensor for tensor in report.tensors if tensor.action != "keep"]
    kept = [tensor for tensor in report.tensors if tensor.action == "keep"]
    if report.counted:  # plain tensors that are equal in both files are no worst ones
        equal = (tensor for tensor in changed if tensor.format is None and not tensor.differs)
        kept += [with_changes(tensor, reason="equal") for tensor in equal]
        changed = report.counted
    shown = changed if every else _most_telling(changed, with_stats)
    lines = _normal(changed) if with_stats else []
    if with_stats and changed and not report.counted:
        lines.append("All measured tensors are equal.")
    if len(shown) < len(changed):
        which = "worst" if with_stats else "largest"
        lines.append(f"The {len(shown)} {which} of {len(changed)} tensors; --all lists every one.")
    if changed and lines:
        print_lines(" ".join(lines))
    if kept:
        _print_kept(report, kept, every=every, title=rest)
    if changed:
        if lines or kept:
            print_lines("")
        _print_changed(report, shown, with_stats=with_stats)


def _most_telling(tensors: list[TensorReport], with_stats: bool) -> list[TensorReport]:
    """The few tensors to look at: the worst first, or the largest where nothing was measured."""
    if with_stats:
        ordered = sorted(tensors, key=_quality)
    else:
        ordered = sorted(tensors, key=lambda tensor: -tensor.bytes_before)
    return ordered[:SHOWN]


def _quality(tensor: TensorReport) -> float:
    """For sorting: lower is worse; what is not finite is the worst."""
    if tensor.stats is None:
        return math.inf
    return -math.inf if math.isnan(tensor.stats.sqnr) else tensor.stats.sqnr


def _normal(tensors: Iterable[TensorReport]) -> list[str]:
    """What is normal for the formats at hand, in a sentence."""
    known = {}
    for tensor in tensors:
        if tensor.format in NORMAL:
            search = tensor.facts.get("scale_search")
            name = f"{tensor.format} ({search})" if search else tensor.format
            known[name] = normal_sqnr(tensor.format, search)
    if not known:
        return []
    values = ", ".join(f"{value:.1f} dB for {name}" for name, value in known.items())
    return [
        f"An SQNR of about {values} is normal for weights. Values at max code are not clipped. "
        "The total covers the tensors that are quantized or differ."
    ]


def _print_changed(report: FileReport, shown: list[TensorReport], *, with_stats: bool) -> None:
    """The table of some converted tensors, with the total of all in the last row."""
    counted = report.counted
    total = [
        f"total ({len(counted)})",
        "",
        "",
        "",
        size(sum(tensor.bytes_before for tensor in counted)),
        size(sum(tensor.bytes_after for tensor in counted)),
    ]
    rows = [_base_cells(tensor) for tensor in shown]
    columns = BASE_COLUMNS
    if with_stats:
        columns = columns + STAT_COLUMNS
        total += stat_cells(report.total_stats)
        rows = [row + stat_cells(tensor.stats) for row, tensor in zip(rows, shown, strict=True)]
    print_table(columns, rows, total=total)


def _base_cells(tensor: TensorReport) -> list[str]:
    return [
        tensor.name,
        shape_text(tensor.shape),
        tensor.dtype,
        tensor.format or UNKNOWN,
        size(tensor.bytes_before),
        size(tensor.bytes_after),
    ]


def _print_kept(report: FileReport, kept: list[TensorReport], *, every: bool, title: str) -> None:
    """The table of all other tensors: one row for each, or for each reason."""
    nbytes = size(sum(tensor.bytes_after for tensor in kept))
    title = f"{title}: {len(kept)} of {len(report.tensors)} tensors, {nbytes}"
    if every:
        columns = [
            Column("tensor", number=False, name=True),
            Column("shape", rank=2),
            Column("dtype", number=False, rank=2),
            Column("bytes", rank=1),
            Column("reason", number=False),
        ]
        rows = [
            [
                tensor.name,
                shape_text(tensor.shape),
                tensor.dtype,
                size(tensor.bytes_after),
                tensor.reason,
            ]
            for tensor in kept
        ]
        print_table(columns, rows, title=title)
        return
    columns = [
        Column("tensor", number=False, name=True),
        Column("tensors"),
        Column("bytes", rank=1),
        Column("reason", number=False),
    ]
    print_table(columns, _by_reason(kept), title=title)


def _by_reason(kept: list[TensorReport]) -> list[list[str]]:
    """A row for each reason: the first tensor that has it, how many have, bytes, the reason."""
    groups: dict[str, list[TensorReport]] = {}
    for tensor in kept:
        groups.setdefault(kind_of(tensor.reason), []).append(tensor)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = []
    for kind, members in ordered[:SHOWN]:
        reasons = {tensor.reason for tensor in members}
        rows.append(
            [
                members[0].name if len(members) == 1 else f"{members[0].name}, ...",
                str(len(members)),
                size(sum(tensor.bytes_after for tensor in members)),
                reasons.pop() if len(reasons) == 1 else kind,
            ]
        )
    left = [tensor for _, members in ordered[SHOWN:] for tensor in members]
    if left:
        nbytes = size(sum(tensor.bytes_after for tensor in left))
        rows.append(["...", str(len(left)), nbytes, "for other reasons; --all lists them"])
    return rows


def print_listing(report: FileReport) -> None:
    """The table of all tensors of a file, in file order, and what they take in all."""
    rows = [
        [
            tensor.name,
            shape_text(tensor.shape),
            tensor.dtype,
            tensor.format or "plain",
            size(tensor.bytes_after),
            encoding(tensor) if tensor.facts else tensor.reason,
        ]
        for tensor in report.tensors
    ]
    nbytes = size(sum(tensor.bytes_after for tensor in report.tensors))
    print_table(
        [
            Column("tensor", number=False, name=True),
            Column("shape", rank=1),
            Column("dtype", number=False, rank=3),
            Column("stored as", number=False),
            Column("bytes", rank=2),
            Column("note", number=False, rank=4),
        ],
        rows,
        total=[f"total ({len(rows)})", "", "", "", nbytes, ""],
    )
    print_lines("", *densities(report))


def densities(report: FileReport) -> list[str]:
    """How densely a file is stored: a line for each format, and one for the whole."""
    groups: dict[str, list[TensorReport]] = {}
    for tensor in report.tensors:
        groups.setdefault(tensor.format or "plain", []).append(tensor)
    formats = [name for name in groups if name != "plain"]
    lines = [_density(name, groups[name]) for name in formats]
    if not formats:
        coded = any(tensor.dtype.startswith("float8") for tensor in report.tensors)
        return [_density("plain" if coded else "not quantized", report.tensors)]
    if "plain" in groups:
        lines += [_density("plain", groups["plain"]), _density("whole", report.tensors)]
    return lines


def _density(name: str, tensors: list[TensorReport]) -> str:
    elements = sum(math.prod(tensor.shape) for tensor in tensors)
    nbytes = sum(tensor.bytes_after for tensor in tensors)
    text = f"{name}: {len(tensors)} tensor{'' if len(tensors) == 1 else 's'}"
    if not elements or not nbytes:
        return text
    bits = 8 * nbytes / elements
    return f"{text}, {bits:.2f} bits per weight, ratio to 16-bit {16 / bits:.2f}"


def encoding(tensor: TensorReport) -> str:
    """How a quantized tensor is encoded, as far as it decides how its bytes are read."""
    facts = tensor.facts
    rule = facts.get("recipe") or facts.get("scale_rule")
    words = [rule, facts["scale_layout"], facts["nibble_order"]]
    if "granularity" in facts:
        # The recipe of a checkpoint's is not recorded.
        words = [*filter(None, [rule]), f"scale per {facts['granularity']}"]
    if "scale_search" in facts:
        words.append(f"{facts['scale_search']} ({facts['search_error']}, {facts['e4m3_max']})")
    return ", ".join(map(str, words))
