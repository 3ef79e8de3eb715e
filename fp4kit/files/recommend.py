# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a survey comes to, in three lines."""

from __future__ import annotations

from collections.abc import Iterable

from .survey_report import Point, SurveyReport

#: Tensors whose error is this many times the typical one are worth more bits.
OUTLIER = 1.25
#: How many of them are named.
NAMED = 3


def recommendation(report: SurveyReport) -> list[str]:
    """Three lines: the best of the smallest, what to widen, and how to go on."""
    small = _best_small(report.uniform)
    if small is None:
        return ["No candidate can hold every tensor; see the table."]
    return [_smallest(report, small), _widen(report, small.label), _next(report, small)]


def _best_small(points: Iterable[Point]) -> Point | None:
    """The least error among candidates of nearly the fewest bits."""
    listed = list(points)
    if not listed:
        return None
    least = min(point.bits for point in listed)
    return min((p for p in listed if p.bits < 1.1 * least), key=lambda point: point.error)


def _smallest(report: SurveyReport, small: Point) -> str:
    what = "of the layers' outputs" if report.moments else "of the weights"
    others = ", ".join(
        f"{point.label} {point.error:.2f} %"
        for point in report.uniform
        if point is not small and point.error > 0
    )
    rest = f" ({others})" if others else ""
    return (
        f"{small.label} for all: {small.bits:.2f} bits a weight, error {what} {small.error:.2f} %"
        f"{rest}."
    )


def _widen(report: SurveyReport, name: str) -> str:
    errors = sorted(tensor.harm(name) for tensor in report.tensors if name in tensor.errors)
    typical = errors[len(errors) // 2]
    worst = [t for t in report.worst(name) if t.harm(name) > OUTLIER**2 * typical]
    if not worst:
        return f"No tensor stands out: the worst under {name} is {report.worst(name, 1)[0].name}."
    more = f" and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
    return f"Worth more bits: {', '.join(tensor.name for tensor in worst[:NAMED])}{more}."


def _next(report: SurveyReport, small: Point) -> str:
    chosen = report.chosen
    if chosen is None:
        return (
            f"--budget {small.bits + 0.5:.1f} chooses a format for each tensor; --moments weighs "
            "errors by what the layers are given."
        )
    shares = ", ".join(
        f"{100 * share:.0f} % {name}"
        for name, share in sorted(chosen.weights.items(), key=lambda item: -item[1])
    )
    return (
        f"Within {report.options['budget']}: {chosen.bits:.2f} bits a weight, error "
        f"{chosen.error:.2f} %, {chosen.total_nbytes} bytes in all; weights: {shares}."
    )
