# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A survey as tables and a small chart."""

from __future__ import annotations

from fp4kit.files.survey_report import Point, SurveyedTensor, SurveyReport, mean_error
from fp4kit.io.candidates import KEPT

from .output import Column, print_chart, print_lines, print_table
from .text import UNKNOWN, number, shape_text, size

#: Layers that a chart shows; of more, neighbours share a bar.
BARS = 32
#: Points of a frontier that are shown.
POINTS = 12


def print_survey(report: SurveyReport, *, every: bool) -> None:
    """The candidates, the error by layer, the worst tensors, the frontier, and what to do.

    Args:
        report: what was found.
        every: show every tensor in stored order, and not the ten worst.
    """
    if report.uniform:
        _print_points(report.uniform, f"Candidates for {len(report.tensors)} tensors", report)
    name = _shown_candidate(report)
    _print_layers(report, name)
    tensors = report.tensors if every else report.worst(name)
    title = f"All {len(tensors)} tensors" if every else f"The {len(tensors)} worst under {name}"
    _print_tensors(report, tensors, title)
    if report.frontier:
        print_frontier(report)
    print_lines("", *report.recommendation)


def print_frontier(report: SurveyReport) -> None:
    """The mixtures that a budget chose from, and the one that it chose."""
    step = max(-(-len(report.frontier) // POINTS), 1)
    points = report.frontier[::step]
    if report.chosen is not None:
        points = sorted([*points, report.chosen], key=lambda point: point.nbytes)
    _print_points(points, f"Frontier; * is within {report.options['budget']}", report)


def _shown_candidate(report: SurveyReport) -> str:
    """The one whose error is drawn: the most exact of nearly the fewest bits."""
    if not report.uniform:
        return report.candidates[0]
    least = min(point.bits for point in report.uniform)
    near = [point for point in report.uniform if point.bits < 1.1 * least]
    return min(near, key=lambda point: point.error).label


def _print_points(points: list[Point], title: str, report: SurveyReport) -> None:
    columns = [
        Column("formats", number=False, name=True),
        Column("bits a\nweight"),
        Column("tensors", rank=2),
        Column("whole", rank=1),
        Column("output\nerr %" if report.moments else "RMS\nerr %"),
    ]
    rows = [
        [
            f"{'* ' if point is report.chosen else ''}{_mixture(point)}",
            f"{point.bits:.3f}",
            size(point.nbytes),
            size(point.total_nbytes),
            number(point.error, ".3f"),
        ]
        for point in points
    ]
    print_table(columns, rows, title=title)


def _mixture(point: Point) -> str:
    shares = sorted(point.weights.items(), key=lambda item: -item[1])
    return point.label or ", ".join(f"{100 * share:.0f}% {name}" for name, share in shares)


def _print_layers(report: SurveyReport, name: str) -> None:
    """A bar for the error of each layer."""
    layers = [entry for entry in report.by_layer() if name in entry.errors]
    if len(layers) < 2:
        return
    step = -(-len(layers) // BARS)
    bars = []
    for first in range(0, len(layers), step):
        part = layers[first : first + step]
        label = str(part[0].layer) if len(part) == 1 else f"{part[0].layer}-{part[-1].layer}"
        bars.append((label, max(entry.errors[name] for entry in part)))
    print_lines("", f"Error by layer under {name}, %")
    print_chart(bars)


def _print_tensors(report: SurveyReport, tensors: list[SurveyedTensor], title: str) -> None:
    plan = report.plan
    names = [name for name in report.candidates if name != KEPT]
    columns = [
        Column("tensor", number=False, name=True),
        Column("shape", rank=1),
        *(Column(f"{name}\nerr %".replace("+", "\n+")) for name in names),
        *([Column("choice", number=False)] if plan else []),
    ]
    rows = [
        [
            tensor.name.removesuffix(".weight"),
            shape_text(tensor.shape),
            *(_cell(tensor, name) for name in names),
            *([plan[tensor.group]] if plan else []),
        ]
        for tensor in tensors
    ]
    print_table(columns, rows, title=title)


def _cell(tensor: SurveyedTensor, name: str) -> str:
    error = tensor.errors.get(name)
    return UNKNOWN if error is None else number(mean_error([error]), ".2f")
