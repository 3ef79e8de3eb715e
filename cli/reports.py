# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a command says about a file when it is done: tables or JSON, and the last line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp4kit.io.files import AtomicFile
from fp4kit.io.report import FileReport, TensorReport

from .output import print_json, say
from .tables import print_changed, print_kept
from .text import size


def show(
    report: FileReport,
    *,
    as_json: bool,
    with_stats: bool,
    rest: str = "Kept unchanged",
    **extra: Any,
) -> None:
    """Prints a report to stdout.

    Args:
        report: what to print.
        as_json: as one JSON document instead of tables.
        with_stats: whether the table has error columns.
        rest: what to call the tensors that nothing was done with.
        extra: further members of the JSON document.
    """
    if as_json:
        print_json(report_json(report, **extra))
        return
    print_changed(report, with_stats=with_stats)
    print_kept(report, rest)


def write_report(report: FileReport, path: Path | None, **extra: Any) -> None:
    """Writes the JSON form of a report to a file, atomically; nothing without a path."""
    if path is None:
        return
    text = json.dumps(report_json(report, **extra), indent=2, allow_nan=False) + "\n"
    with AtomicFile(path) as file:
        file.write_at(0, text.encode())
        file.commit()


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

    `sqnr` is null where there is no error at all; `saturated`, `scale_underflow` and the like are
    shares of 1, null where no codes were seen; `relative_rms` is in percent.
    """
    changed = [tensor for tensor in report.tensors if tensor.action != "keep"]
    kept = [tensor for tensor in report.tensors if tensor.action == "keep"]
    stats = report.total_stats
    return {
        "source": report.source,
        "target": report.target,
        **extra,
        "options": report.options,
        "seconds": report.seconds,
        "tensors": [_tensor_json(tensor) for tensor in report.tensors],
        "total": {
            "tensors": len(changed),
            "bytes_before": sum(tensor.bytes_before for tensor in changed),
            "bytes_after": sum(tensor.bytes_after for tensor in changed),
            "stats": stats.to_dict() if stats else None,
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
        "stats": tensor.stats.to_dict() if tensor.stats else None,
        "facts": tensor.facts,
    }
