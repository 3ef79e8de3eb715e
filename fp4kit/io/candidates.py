# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Candidates: the ways to store a tensor that a survey compares and a plan chooses from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp4kit.errors import OptionError
from fp4kit.formats import ALL_FORMATS
from fp4kit.options import SCALE_SEARCHES
from fp4kit.scheme import Scheme

#: The candidate that leaves a tensor as it is stored.
KEPT = "bf16"
#: What is surveyed unless something else is asked for.
DEFAULT_CANDIDATES = ("nvfp4", "nvfp4+sweep", "mxfp4", "mxfp8", "fp8", KEPT)


@dataclass(frozen=True)
class Candidate:
    """A way to store a tensor.

    Attributes:
        name: `nvfp4`, `nvfp4+sweep` (with a scale search), or `bf16`.
        scheme: what is wanted of the tensor, None to leave it as it is stored.
    """

    name: str
    scheme: Scheme | None


def _known() -> dict[str, Candidate]:
    found = {}
    for spec in ALL_FORMATS.values():
        found[spec.name] = Candidate(spec.name, Scheme(format=spec.name))  # type: ignore[arg-type]
        for search in SCALE_SEARCHES if spec.has_second_level else ():
            name = f"{spec.name}+{search}"
            scheme = Scheme(format=spec.name, scale_search=search)  # type: ignore[arg-type]
            found[name] = Candidate(name, scheme)
    return {**found, KEPT: Candidate(KEPT, None)}


#: Every candidate by name.
CANDIDATES = _known()


def candidate(name: str, where: str = "") -> Candidate:
    """A candidate by name.

    Args:
        name: its name.
        where: what a message begins with.

    Raises:
        OptionError: for another name; the message lists the known ones.
    """
    if name not in CANDIDATES:
        raise OptionError(
            f"{where}{name!r} is no format that can be chosen; choose {', '.join(CANDIDATES)}"
        )
    return CANDIDATES[name]


def candidates(names: Iterable[str]) -> list[Candidate]:
    """Several candidates.

    Raises:
        OptionError: for an unknown name, one that is given twice, or none.
    """
    listed = list(names)
    found = [candidate(name, "formats: ") for name in listed]
    twice = next((name for name in listed if listed.count(name) > 1), None)
    if twice is not None or not found:
        what = "is empty" if twice is None else f"names {twice!r} twice"
        raise OptionError(f"formats {what}; give a list like nvfp4,fp8,{KEPT}")
    return found
