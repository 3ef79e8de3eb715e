# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""File reports as tables."""

from __future__ import annotations

from fp4kit import ErrorStats
from fp4kit.io.report import FileReport, TensorReport

from .output import Column, print_table
from .text import UNKNOWN, decibels, percent, shape_text, size

STAT_COLUMNS = [
    Column("SQNR\ndB"),
    Column("RMS\nerr %"),
    Column("max\nerror", rank=2),
    Column("saturated\n%", rank=1),
    Column("underflowed\n%", rank=1),
]


def stat_cells(stats: ErrorStats | None) -> list[str]:
    """Cells for STAT_COLUMNS."""
    if stats is None:
        return [UNKNOWN] * len(STAT_COLUMNS)
    return [
        decibels(stats.sqnr),
        f"{stats.relative_rms:.3f}",
        f"{stats.max_abs_error:.3g}",
        percent(stats.saturated),
        percent(stats.scale_underflow),
    ]


def print_changed(report: FileReport, *, with_stats: bool) -> None:
    """The table of tensors that were (or would be) converted, with a total row."""
    changed = [tensor for tensor in report.tensors if tensor.action != "keep"]
    if not changed:
        return
    columns = [
        Column("tensor", number=False),
        Column("shape", rank=4),
        Column("dtype", number=False, rank=5),
        Column("format", number=False, rank=6),
        Column("before", rank=3),
        Column("after", rank=2),
    ]
    total = [
        f"total ({len(changed)})",
        "",
        "",
        "",
        size(sum(tensor.bytes_before for tensor in changed)),
        size(sum(tensor.bytes_after for tensor in changed)),
    ]
    rows = [_base_cells(tensor) for tensor in changed]
    if with_stats:
        columns += STAT_COLUMNS
        total += stat_cells(report.total_stats)
        rows = [row + stat_cells(tensor.stats) for row, tensor in zip(rows, changed, strict=True)]
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


def print_kept(report: FileReport, title: str) -> None:
    """The table of all other tensors, each with its reason."""
    kept = [tensor for tensor in report.tensors if tensor.action == "keep"]
    if not kept:
        return
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
    nbytes = size(sum(tensor.bytes_after for tensor in kept))
    print_table(
        [
            Column("tensor", number=False),
            Column("shape", rank=2),
            Column("dtype", number=False, rank=2),
            Column("bytes", rank=1),
            Column("note", number=False),
        ],
        rows,
        title=f"{title}: {len(kept)} of {len(report.tensors)} tensors, {nbytes}",
    )


def print_listing(report: FileReport) -> None:
    """The table of all tensors of a file, in file order."""
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
            Column("tensor", number=False),
            Column("shape"),
            Column("dtype", number=False, rank=1),
            Column("stored as", number=False),
            Column("bytes"),
            Column("note", number=False, rank=2),
        ],
        rows,
        total=[f"total ({len(rows)})", "", "", "", nbytes, ""],
    )


def encoding(tensor: TensorReport) -> str:
    """How a quantized tensor is encoded, as far as it decides how its bytes are read."""
    facts = tensor.facts
    rule = facts.get("recipe") or facts.get("scale_rule")
    words = [rule, facts["scale_layout"], facts["nibble_order"]]
    if "scale_search" in facts:
        words.append(f"{facts['scale_search']} ({facts['error']}, {facts['e4m3_max']})")
    return ", ".join(map(str, words))
