# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a command says about a file when it is done: tables or JSON, and the last line."""

from __future__ import annotations

import math
from typing import Any

from fp4kit import ErrorStats
from fp4kit.io.report import FileReport, TensorReport, advice

from .output import print_json, say
from .tables import print_report
from .text import size


def show(
    report: FileReport,
    *,
    as_json: bool,
    with_stats: bool,
    every: bool = False,
    rest: str = "Kept unchanged",
    **extra: Any,
) -> None:
    """Prints a report to stdout, and what the user should know to stderr.

    Args:
        report: what to print.
        as_json: as one JSON document instead of tables.
        with_stats: whether the table has error columns.
        every: whether the table has every tensor, and not only the worst.
        rest: what to call the tensors that nothing was done with.
        extra: further members of the JSON document.
    """
    if as_json:
        print_json(report_json(report, **extra))
    else:
        print_report(report, with_stats=with_stats, every=every, rest=rest)
    for warning in report.warnings:
        say(f"Warning: {warning}")


def say_advice(report: FileReport, *, padding: bool) -> None:
    """Options by which more of a file would be quantized, if there are some.

    Args:
        report: what was (or would be) done.
        padding: whether rows may be padded.
    """
    help = advice((tensor.reason for tensor in report.tensors), padding=padding)
    if help:
        say(f"Hint: some tensors are kept that need not be: {help}")


def say_written(report: FileReport, *, as_json: bool) -> None:
    """The last line of a command that wrote a file; JSON holds it as `target`."""
    if as_json:
        return
    before, after = (
        size(sum(getattr(tensor, name) for tensor in report.tensors))
        for name in ("bytes_before", "bytes_after")
    )
    say(f"Wrote {report.target}: {before} -> {after} in {report.seconds:.1f} s")


def report_json(report: FileReport, **extra: Any) -> dict[str, Any]:
    """A report as plain data; `total` is the table's total row, `kept` is beside it.

    `sqnr` is null where there is no error at all (then `exact` is true) and where the error is no
    finite number (`overflow`); `saturated` (the table's "at max code", and `at_max_code` beside
    `stats`), `scale_underflow` and the like are shares of 1, null where no codes were seen;
    `relative_rms` is in percent.
    """
    changed = report.counted
    kept = [tensor for tensor in report.tensors if tensor.action == "keep"]
    return {
        "source": report.source,
        "target": report.target,
        **extra,
        "options": report.options,
        "seconds": report.seconds,
        "warnings": report.warnings,
        "tensors": [_tensor_json(tensor) for tensor in report.tensors],
        "total": {
            "tensors": len(changed),
            "bytes_before": sum(tensor.bytes_before for tensor in changed),
            "bytes_after": sum(tensor.bytes_after for tensor in changed),
            **_stats_json(report.total_stats),
        },
        "kept": {
            "tensors": len(kept),
            "bytes": sum(tensor.bytes_after for tensor in kept),
        },
    }


def _tensor_json(tensor: TensorReport) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "action": tensor.action,
        "reason": tensor.reason,
        "format": tensor.format,
        "bytes_before": tensor.bytes_before,
        "bytes_after": tensor.bytes_after,
        **_stats_json(tensor.stats),
        "facts": tensor.facts,
    }


def _stats_json(stats: ErrorStats | None) -> dict[str, Any]:
    """Statistics as strict JSON holds them, and what of them it cannot hold."""
    if stats is None:
        return {"stats": None}
    return {
        "stats": stats.to_dict(),
        "exact": stats.sqnr == math.inf,
        "overflow": not math.isfinite(stats.mse),
        "at_max_code": stats.saturated,
    }
