# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""All that a page shows, as plain data: a JSON report and what only a page needs."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit import __version__

from .histograms import count_codes
from .names import places
from .words import quality, sentences

#: Tensors whose codes and scales are counted.
WORST = 10
#: What a page shows of the survey that chose the formats.
CHOICE = ("uniform", "frontier", "chosen", "moments")
#: What each command's page is called.
TITLES = {
    "quantize": "Quantization",
    "compare": "Comparison",
    "verify": "Verification",
    "survey": "Survey",
}


@dataclass(frozen=True)
class Run:
    """A run of a command.

    Attributes:
        kind: the command: `quantize`, `compare`, `verify` or `survey`.
        command: how it was called.
        coded: what holds the codes that it measured; None if nothing does.
        before: an earlier run to compare with, as :func:`fp4kit.report.before.read_before` gives
            it; None without one.
        survey: JSON of the survey that chose the formats, None without one.
        versions: of what else took part.
    """

    kind: str
    command: str
    coded: Path | None = None
    before: Mapping[str, Any] | None = None
    survey: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def page_data(report: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """The data of a page.

    Args:
        report: what the command gives as JSON; it stands in the data as it is.
        run: the run that it is of.

    Returns:
        Strict JSON; the scripts of the page say which member is for what.
    """
    tensors = report["tensors"]
    kept = report["kept"] if run.kind == "survey" else []  # in other reports they are tensors, too
    worst = [] if run.kind == "survey" else _worst(tensors)
    counted = count_codes(run.coded, worst) if run.coded is not None and worst else {}
    names = [tensor["name"] for tensor in (*tensors, *kept)]
    found = places(names)
    types = {place.type: None for place in found}
    numbers = {type: number for number, type in enumerate(types)}
    return {
        "kind": run.kind,
        "title": f"{TITLES[run.kind]} of {Path(report['source']).name or report['source']}",
        "command": run.command,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "fp4kit": __version__,
            "Python": platform.python_version(),
            "NumPy": np.__version__,
            **run.versions,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "summary": sentences(run.kind, report),
        "types": list(types),
        "places": [[place.layer, numbers[place.type]] for place in found],
        "worst": [{"name": name, **counted[name]} for name in worst if name in counted],
        "before": None if run.before is None else _aligned(run.before, names),
        "choice": None if run.survey is None else {name: run.survey[name] for name in CHOICE},
        "report": report,
    }


def _worst(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tensors to look at: the worst, or the largest where nothing was measured."""
    coded = [tensor for tensor in tensors if tensor["format"] is not None]
    ordered = sorted(coded, key=lambda tensor: (quality(tensor), -tensor["bytes_after"]))
    return [tensor["name"] for tensor in ordered[:WORST]]


def _aligned(before: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """An earlier run with its tensors in the order of this one's; null for those it has not."""
    return {**before, "tensors": [before["tensors"].get(name) for name in names]}
