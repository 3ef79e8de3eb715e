# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A JSON report in a few sentences: what was decided, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

#: Reasons to keep a tensor that a sentence names.
REASONS = 3
Json = Mapping[str, Any]
#: Signal to noise ratio in dB that normally distributed values come out with.
NORMAL = {"nvfp4": 20.4, "mxfp4": 18.9, "mxfp8": 31.5, "mxfp8_e5m2": 25.5}
NORMAL_SEARCHED = {"sweep": 21.8, "four_over_six": 21.2}


def normal_sqnr(format: str, search: str | None) -> float:
    """What is normal for one of :data:`NORMAL`, perhaps with its scales searched."""
    return NORMAL_SEARCHED[search] if search else NORMAL[format]


def size(nbytes: int) -> str:
    """A byte count in the largest binary unit that leaves a whole part."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007 the last unit is kept on purpose
        value /= 1024
        if value < 1024:
            break
    return f"{value:.1f} {unit}"


def count(number: int, what: str) -> str:
    """`1 tensor`, `2 tensors`, `1,000 tensors`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def sentences(kind: str, report: Json) -> list[str]:
    """What a report says, in words.

    Args:
        kind: the command: `quantize`, `compare`, `verify` or `survey`.
        report: what the command gives as JSON.
    """
    if kind == "survey":
        return list(report["recommendation"]) or [
            f"{count(len(report['tensors']), 'tensor')} would be quantized; "
            f"{len(report['kept']):,} would be kept."
        ]
    said = {"quantize": _quantized, "compare": _compared, "verify": _verified}[kind](report)
    return [*said, *_errors(report)]


def _quantized(report: Json) -> list[str]:
    done = [tensor for tensor in report["tensors"] if tensor["action"] != "keep"]
    kept = [tensor for tensor in report["tensors"] if tensor["action"] == "keep"]
    formats = " and ".join(sorted({str(tensor["format"]) for tensor in done}))
    verb = "would be" if report["dry_run"] else ("is" if len(done) == 1 else "are")
    said = [
        f"{len(done):,} of {count(len(report['tensors']), 'tensor')} {verb} quantized"
        f"{f' to {formats}' if formats else ''}."
    ]
    if done:
        said.append(_sizes(report["tensors"], done, dry_run=report["dry_run"]))
    if kept:
        said.append(f"{count(len(kept), 'tensor')} {verb_of(kept)} kept: {_reasons(kept)}.")
    return said


def verb_of(things: Sequence[object]) -> str:
    """`is` or `are`."""
    return "is" if len(things) == 1 else "are"


def _sizes(tensors: Sequence[Json], done: Sequence[Json], *, dry_run: bool) -> str:
    before, after = (sum(tensor[name] for tensor in tensors) for name in BYTES)
    elements = sum(prod(tensor["shape"]) for tensor in done)
    nbytes = sum(tensor["bytes_after"] for tensor in done)
    bits = f", {8 * nbytes / elements:.2f} bits a quantized weight" if elements else ""
    verb = "would take" if dry_run else "take"
    return f"All tensors together {verb} {size(after)} instead of {size(before)}{bits}."


#: Members of a tensor's entry: bytes in the source, and in the result.
BYTES = ("bytes_before", "bytes_after")


def _reasons(kept: Iterable[Json]) -> str:
    counts: dict[str, int] = {}
    for tensor in kept:
        # Without the number that differs from tensor to tensor.
        reason = (
            "last axis not a multiple of the block"
            if tensor["reason"].startswith("last axis ")
            else tensor["reason"]
        )
        counts[reason] = counts.get(reason, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{reason} ({number:,})" for reason, number in ordered[:REASONS]]
    rest = sum(number for _, number in ordered[REASONS:])
    return ", ".join([*shown, *([f"other reasons ({rest:,})"] if rest else [])])


def _compared(report: Json) -> list[str]:
    tensors = report["tensors"]
    changed = [tensor for tensor in tensors if tensor["stats"] and not tensor["exact"]]
    said = [
        f"{len(changed):,} of {count(len(tensors), 'tensor')} {verb_of(changed)} not exactly as "
        "in the original."
    ]
    if "min_sqnr" in report:
        below = report["below"]
        limit = f"the limit of {report['min_sqnr']:g} dB"
        said.append(f"{len(below):,} below {limit}." if below else f"None is below {limit}.")
    return said


def _verified(report: Json) -> list[str]:
    faults = report["faults"]
    return [f"{count(len(faults), 'fault')} found." if faults else "No fault found."]


def _errors(report: Json) -> list[str]:
    """The error of all together, and of the worst."""
    total = report["total"]
    if total["stats"] is None:
        return []
    measured = [tensor for tensor in report["tensors"] if tensor["stats"]]
    worst = min(measured, key=quality)
    if total["exact"]:
        return ["All measured values are exact."]
    said = f"The SQNR of all changed values together is {sqnr_text(total)}"
    if len(measured) > 1 and not worst["exact"]:
        said += f"; the worst tensor, {worst['name']}, has {sqnr_text(worst)}"
    return [f"{said}.", *_normal(measured)]


def _normal(tensors: Iterable[Json]) -> list[str]:
    """What is normal for the formats at hand."""
    known = {}
    for tensor in tensors:
        search = tensor["facts"].get("scale_search")
        if tensor["format"] in NORMAL:
            name = f"{tensor['format']} ({search})" if search else tensor["format"]
            known[name] = normal_sqnr(tensor["format"], search)
    values = ", ".join(f"{value:.1f} dB for {name}" for name, value in known.items())
    return [f"About {values} is normal for weights."] if known else []


def quality(tensor: Json) -> float:
    """For sorting: lower is worse. What is not finite is worst, what is exact or unmeasured best.

    Args:
        tensor: its entry in a report.
    """
    if tensor["stats"] is None or tensor["exact"]:
        return float("inf")
    sqnr = tensor["stats"]["sqnr"]
    return float("-inf") if sqnr is None else float(sqnr)


def sqnr_text(entry: Json) -> str:
    """The signal to noise ratio of an entry with statistics."""
    sqnr = entry["stats"]["sqnr"]
    return "not finite" if sqnr is None else f"{sqnr:.2f} dB"
