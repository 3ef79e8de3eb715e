# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Moments for the tensors of a model, whichever file says them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp4kit.checkpoint.layouts import module_of
from fp4kit.checkpoint.models.gguf_names import known_kind, stacks_experts, stored_names
from fp4kit.checkpoint.read.directory import listed
from fp4kit.checkpoint.survey import Surveyed
from fp4kit.errors import FileFormatError, OptionError, brief
from fp4kit.io.imatrix import SUFFIXES, Importance, read_imatrix
from fp4kit.io.moments import PRIOR_ROWS, Floats, InputMoments, read_moments
from fp4kit.io.read.open import check_source
from fp4kit.io.survey_tensors import SurveyWork


@dataclass(frozen=True)
class GivenMoments:
    """What a file of moments says, before it is known of which model.

    Attributes:
        path: the file.
        ours: moments by modules, of a file that `fp4kit calibrate` wrote.
        imatrix: those by names of GGUF, of llama.cpp's importance matrix.
    """

    path: Path
    ours: InputMoments | None = None
    imatrix: Mapping[str, Importance] | None = None


def open_moments(path: Path) -> GivenMoments:
    """Reads a file of moments.

    Raises:
        FileFormatError: if it is none, or malformed.
    """
    if path.suffix.lower() not in SUFFIXES:
        check_source(path)
        return GivenMoments(path, ours=read_moments(path))
    if not path.exists():
        raise FileFormatError(f"{path}: no such file or directory")
    return GivenMoments(path, imatrix=read_imatrix(path))


def take_moments(found: Surveyed, given: GivenMoments) -> list[str]:
    """Gives each tensor its moments; says which have none.

    Raises:
        OptionError: for moments of another model.
    """
    shapes = {module_of(w.tensor.name): _matrix(w) for w in found.works}
    moments, warnings = given.ours, []
    if moments is None:
        moments, warnings = _renamed(found, given, shapes)
    modules = {module_of(work.tensor.name) for work in (*found.works, *found.kept)}
    missing = moments.check(modules, shapes)
    for work in found.works:
        module = module_of(work.tensor.name)
        work.moments, work.effects = moments.columns(module), moments.effects(module)
        work.rows = moments.rows.get(module, 0.0)
    if missing:
        warnings.append(
            f"{moments.path} has no moments for {len(missing)} of {len(shapes)} modules: "
            f"{listed(missing)}; for these the error is that of the weight"
        )
    return warnings


def _matrix(work: SurveyWork) -> tuple[int, int]:
    """Rows and columns of a weight."""
    *lead, width = work.tensor.spec.shape
    return int(np.prod(lead, dtype=np.int64)), width


def _renamed(
    found: Surveyed, given: GivenMoments, shapes: Mapping[str, tuple[int, int]]
) -> tuple[InputMoments, list[str]]:
    """An importance matrix by the names of the model, and what of it is left out."""
    assert given.imatrix is not None
    known = {work.tensor.name for work in (*found.works, *found.kept)}
    second: dict[str, Floats] = {}
    rows: dict[str, float] = {}
    foreign, unknown = [], []
    for name, stacked in given.imatrix.items():
        names, each = _named(name, stacked, known, shapes)
        if not names:
            (foreign if known_kind(name) else unknown).append(name)
        for number, module in enumerate(map(module_of, names)):
            count = None if each.counts is None else float(each.counts[number])
            if count != 0:
                second[module] = each.second[number]
            if count:
                rows[module] = count
    if foreign or not second:
        raise OptionError(
            f"{given.path}: holds moments of another model, or of one whose names are not known "
            f"here: {brief((foreign or unknown)[0])} is no weight of it; make moments with "
            "`fp4kit calibrate`"
        )
    warnings = [f"{given.path}: left out, as not known: {listed(unknown)}"] if unknown else []
    return InputMoments(given.path, second, rows=rows), warnings


def _named(
    name: str, stacked: Importance, known: Collection[str], shapes: Mapping[str, tuple[int, int]]
) -> tuple[list[str], Importance]:
    """The weights that an entry is of, and the entry with a row for each; none if there are not."""
    if name in known:
        return [name], stacked
    if not stacks_experts(name):
        return stored_names(name, 0, known), stacked
    first = stored_names(name, 1, known)
    width = shapes.get(module_of(first[0]), (0, 0))[1] if first else 0
    split = stacked.split(width)
    names = stored_names(name, len(split.second), known)
    return [] if any(each not in known for each in names) else names, split


def sensitivities(works: Sequence[SurveyWork]) -> dict[str, float]:
    """What the output's error of each tensor counts, once all are measured.

    With effects it is the share of the model's output that hangs on the tensor, 1 on average, and
    few rows are shrunk towards 1, as moments are. With moments alone nothing is known of the way
    from the layer's output to the model's, and outputs that a few large channels make look more
    exact than they are: then the geometric mean of the output's error and the weight's counts.
    """
    known = [work.signal for work in works if work.effects is not None]
    mean = sum(known) / len(known) if known else 0.0
    found = {}
    for work in works:
        if work.effects is not None and mean > 0:
            seen = work.signal / mean
            found[work.tensor.name] = (work.rows * seen + PRIOR_ROWS) / (work.rows + PRIOR_ROWS)
        else:
            found[work.tensor.name] = _hedge(work)
    return found


def _hedge(work: SurveyWork) -> float:
    """What makes the output's error of the first candidate its geometric mean with the weight's."""
    name = next(iter(work.tries))
    sums, output = work.tries[name].sums, work.output_noise(name)
    if output is None or not output or not sums.sum_d2 or not math.isfinite(sums.sum_d2 * output):
        return 1.0
    return math.sqrt(sums.sum_d2 / sums.sum_x2 / output)
