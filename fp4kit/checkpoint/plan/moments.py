# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Moments for the weights of a model, whichever file says them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp4kit.checkpoint.layouts import module_of
from fp4kit.checkpoint.models.gguf_names import known_kind, stacks_experts, stored_names
from fp4kit.checkpoint.read.directory import listed
from fp4kit.errors import FileFormatError, OptionError, brief
from fp4kit.io.imatrix import SUFFIXES, Importance, read_imatrix
from fp4kit.io.moments import Floats, InputMoments, read_moments
from fp4kit.io.read.open import check_source
from fp4kit.io.read.source import SourceTensor


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


def moments_of(
    given: GivenMoments, known: Collection[str], weights: Collection[SourceTensor]
) -> tuple[InputMoments, list[str]]:
    """Moments by modules of a model, and what the user should know of them.

    Args:
        given: what a file says.
        known: all tensors of the model.
        weights: those that moments are wanted for.

    Raises:
        OptionError: for moments of another model.
    """
    shapes = {module_of(tensor.name): _matrix(tensor.spec.shape) for tensor in weights}
    moments = given.ours
    warnings: list[str] = []
    if moments is None:
        moments, warnings = _renamed(given, known, shapes)
    missing = moments.check(map(module_of, known), shapes)
    if missing:
        warnings.append(
            f"{moments.path} has no moments for {len(missing)} of {len(shapes)} modules: "
            f"{listed(missing)}; for these the error is that of the weight"
        )
    return moments, warnings


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a weight."""
    return math.prod(shape[:-1]), shape[-1]


def _renamed(
    given: GivenMoments, known: Collection[str], shapes: Mapping[str, tuple[int, int]]
) -> tuple[InputMoments, list[str]]:
    """An importance matrix by the names of the model, and what of it is left out."""
    assert given.imatrix is not None
    second: dict[str, Floats] = {}
    rows: dict[str, float] = {}
    foreign: list[str] = []
    unknown: list[str] = []
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
