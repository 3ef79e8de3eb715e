# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a command says about a file when it is done: tables or JSON, and the last line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4kit import ErrorStats
from fp4kit.checkpoint.read.directory import STATE_DIR, listed
from fp4kit.checkpoint.report import CheckpointReport
from fp4kit.io.report import FileReport, TensorReport, advice, named

from .given import Given
from .html_report import HtmlReport
from .output import print_json, say
from .report_file import ReportFile
from .tables import print_report
from .text import size


def show(
    report: FileReport,
    given: Given,
    *,
    with_stats: bool,
    rest: str = "Kept unchanged",
    **extra: Any,
) -> None:
    """Prints a report to stdout, and what the user should know to stderr.

    Args:
        report: what to print.
        given: options of the command: as JSON or as tables, all tensors or the worst.
        with_stats: whether the table has error columns.
        rest: what to call the tensors that nothing was done with.
        extra: further members of the JSON document.
    """
    if given.as_json:
        print_json(report_json(report, **extra))
    else:
        print_report(report, with_stats=with_stats, every=given.every, rest=rest)
    for warning in report.warnings:
        say(f"Warning: {warning}")


def finish(
    report: FileReport,
    given: Given,
    *,
    quantized: bool = False,
    report_file: ReportFile | None = None,
    html: HtmlReport | None = None,
) -> None:
    """Writes and prints the report of a command that (perhaps) wrote something.

    Args:
        report: what was or would be done.
        given: options of the command.
        quantized: whether tensors were quantized, and so have errors.
        report_file: where it goes as well.
        html: where its page goes.
    """
    whole = report if isinstance(report, CheckpointReport) else None
    extra = {} if whole is None else whole.extra()
    # First: whoever reads stdout may stop reading.
    if report_file is not None:
        report_file.write(report_json(report, dry_run=given.dry_run, **extra))
    if html is not None:
        coded = None if report.target is None else Path(report.target)
        html.write(report_json(report, dry_run=given.dry_run, **extra), coded)
    show(report, given, with_stats=quantized and not given.dry_run, dry_run=given.dry_run, **extra)
    if whole is not None:
        _say_left_out(whole)
    if given.as_json:
        return
    help = advice((tensor.reason for tensor in report.tensors), padding=whole is None)
    if help and quantized:
        say(f"Hint: some tensors are kept that need not be: {help}")
    target = given.output
    if not given.dry_run:
        before, after = (
            size(sum(getattr(tensor, name) for tensor in report.tensors))
            for name in ("bytes_before", "bytes_after")
        )
        what = "" if given.part is None else f"part {given.part} of "
        say(f"Wrote {what}{report.target}: {before} -> {after} in {report.seconds:.1f} s")
        if given.part is not None:
            say(f"Once all parts are written: fp4kit finish {report.target}")
    elif whole is None:
        needs = " (exists: needs --force)" if target.exists() and not given.force else ""
        say(f"Dry run: nothing was written; would write {target}{needs}")
    else:
        shards, others = len(whole.shards), len(whole.copied)
        needs = " (exists: replaced only with --force)" if target.exists() else ""
        say(
            f"Dry run: nothing was written; would write {target}{needs}: {shards} weight "
            f"file{'s' if shards > 1 else ''} and {others} other file{'' if others == 1 else 's'}, "
            f"{size(whole.disk_needed)} on disk"
        )


def _say_left_out(report: CheckpointReport) -> None:
    """Files and tensors of a checkpoint that its result does not have."""
    if report.left_out:
        say(f"Not copied: {named(report.left_out)} (belongs to another form of the weights)")
    reasons: dict[str, list[str]] = {}
    for name, why in report.dropped.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        say(f"Dropped: {listed(names)} ({why})")


@contextmanager
def resumable(given: Given) -> Iterator[None]:
    """Says what to do next where a run is stopped with its work half done."""
    target = given.output
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if given.is_shared:
            again = "" if given.part is not None else " with --resume"
            say(f"Stopped: {given.whither} may be unfinished. The same command{again} goes on")
            raise
        # Of a diffusers pipeline the folders are converted one by one.
        if (target / STATE_DIR).is_dir() or any(target.glob(f"*/{STATE_DIR}")):
            say(
                f"Stopped: {target} is unfinished. The same command with --resume finishes it, "
                "with --force it starts over"
            )
        raise


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
