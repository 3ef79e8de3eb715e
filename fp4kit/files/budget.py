# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Choosing a candidate for each group of tensors within a budget, by marginal error per byte.

Each group starts with its smallest candidate. Then the change that removes most error for a byte
more is made, and the next, as long as the budget lasts: along the lower convex hull of each group's
candidates this is the best for every budget that a step ends at.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp4kit.checkpoint.options import size_of
from fp4kit.errors import OptionError
from fp4kit.io.candidates import KEPT, candidate
from fp4kit.io.tensor_names import Patterns

from .survey_report import ChoiceGroup, Point, SurveyedTensor

WEIGHT = ".weight"
#: The cost where values are lost: more than any other, and finite.
LOST = 1e30
#: How many points of a frontier are kept.
SHOWN_POINTS = 60


@dataclass(frozen=True)
class Budget:
    """How much the surveyed tensors may take.

    Attributes:
        text: as it was given.
        bits: bits a weight at most, None for a budget of bytes.
        nbytes: bytes of the whole result at most, None for a budget of bits.
    """

    text: str
    bits: float | None = None
    nbytes: int | None = None

    @classmethod
    def of(cls, given: float | str) -> Budget:
        """A number of bits (`4.8`), or a size (`20GB`).

        Raises:
            OptionError: for anything else.
        """
        text = str(given).strip()
        if re.fullmatch(r"\d+(\.\d+)?", text) and float(text) > 0:
            return cls(text, bits=float(text))
        nbytes = size_of(text)
        if not nbytes:
            raise OptionError(
                f"budget={text!r} is neither bits a weight, like 4.8, nor a size, like 20GB"
            )
        return cls(text, nbytes=nbytes)

    def room(self, elements: int, kept: int) -> int:
        """Bytes that surveyed tensors may take.

        Args:
            elements: their elements.
            kept: bytes of all other tensors.
        """
        if self.bits is not None:
            return math.floor(self.bits * elements / 8)
        assert self.nbytes is not None
        return self.nbytes - kept


@dataclass(frozen=True)
class Pin:
    """A candidate that some tensors are to have whatever the budget.

    Attributes:
        pattern: a glob, or `re:` and a regular expression, of names of weights or modules.
        candidate: the candidate's name.
    """

    pattern: str
    candidate: str

    @classmethod
    def of(cls, text: str) -> Pin:
        """A pin as it is written: `PATTERN=CANDIDATE`.

        Raises:
            OptionError: for anything else.
        """
        pattern, _, name = text.rpartition("=")
        if not pattern:
            raise OptionError(f"pin={text!r} is no pin; give PATTERN=FORMAT, like '*down_proj=fp8'")
        return cls(pattern, candidate(name, f"pin={text!r}: ").name)


def pinned(groups: Mapping[str, Sequence[str]], pins: Iterable[Pin]) -> dict[str, Pin]:
    """The pin of each group that has one.

    Raises:
        OptionError: for a pattern that matches nothing, and where two pins want different things of
            a tensor, or of tensors that are fused.
    """
    found: dict[str, Pin] = {}
    names = [name for members in groups.values() for name in members]
    for pin in pins:
        patterns = Patterns([pin.pattern], "pin")
        patterns.check_used(names + [name.removesuffix(WEIGHT) for name in names])
        for key, members in groups.items():
            if not any(
                patterns.match(name) or patterns.match(name.removesuffix(WEIGHT))
                for name in members
            ):
                continue
            other = found.setdefault(key, pin)
            if other.candidate != pin.candidate:
                raise OptionError(
                    f"pins {other.pattern!r} and {pin.pattern!r} overlap: {key} cannot be both "
                    f"{other.candidate} and {pin.candidate}; make their patterns narrower"
                )
    return found


@dataclass(frozen=True)
class _Offer:
    """What one candidate makes of a group.

    Attributes:
        name: the candidate.
        nbytes: bytes of all its tensors.
        cost: what a budget makes small, over all its tensors.
    """

    name: str
    nbytes: int
    cost: float


class Allocation:
    """The choices for a number of groups."""

    def __init__(
        self, tensors: Iterable[SurveyedTensor], groups: Sequence[ChoiceGroup], kept: int
    ) -> None:
        """Adds up what each candidate makes of each group.

        Args:
            tensors: what was surveyed.
            groups: all of it; a choice that is set stays.
            kept: bytes of all other tensors.
        """
        by_name = {tensor.name: tensor for tensor in tensors}
        self._kept, self._count = kept, len(by_name)
        self._fixed = [group.choice for group in groups]
        self._elements = [sum(by_name[name].elements for name in each.members) for each in groups]
        self._offers: list[dict[str, _Offer]] = []
        for group in groups:
            members = [by_name[name] for name in group.members]
            shared = [
                name for name in members[0].errors if all(name in each.errors for each in members)
            ]
            self._offers.append(
                {
                    name: _Offer(
                        name,
                        sum(each.errors[name].nbytes for each in members),
                        min(sum(each.harm(name) for each in members), LOST),
                    )
                    for name in shared
                }
            )

    @property
    def elements(self) -> int:
        """Elements of all groups."""
        return sum(self._elements)

    def point(self, choices: Sequence[str], label: str = "") -> Point | None:
        """The point of some choices, None where a group does not have one."""
        if any(choice not in each for each, choice in zip(self._offers, choices, strict=True)):
            return None
        picked = [each[choice] for each, choice in zip(self._offers, choices, strict=True)]
        nbytes = sum(offer.nbytes for offer in picked)
        weights: dict[str, float] = {}
        for choice, count in zip(choices, self._elements, strict=True):
            weights[choice] = weights.get(choice, 0.0) + count / self.elements
        return Point(
            nbytes=nbytes,
            total_nbytes=nbytes + self._kept,
            bits=8 * nbytes / self.elements,
            error=100 * math.sqrt(sum(offer.cost for offer in picked) / self._count),
            weights=weights,
            label=label,
        )

    def uniform(self, name: str) -> Point | None:
        """The point of one candidate for all groups that can hold it, pins aside."""
        return self.point([name] * len(self._offers), name)

    def smallest(self, names: Sequence[str]) -> list[str]:
        """The choices that take fewest bytes."""
        return [hull[0].name for hull in self._hulls(names)]

    def _hulls(self, names: Sequence[str]) -> list[list[_Offer]]:
        """The offers of each group that are worth their bytes, the smallest first."""
        hulls = []
        for fixed, offers in zip(self._fixed, self._offers, strict=True):
            allowed = [each for name, each in offers.items() if fixed in (name, None)]
            free = [each for each in allowed if each.name in names or each.name == fixed]
            # A tensor that none of them can hold stays as it is.
            hulls.append(_hull(free or [offers[KEPT]]))
        return hulls

    def run(self, names: Sequence[str], room: float) -> tuple[list[str], list[Point]] | None:
        """Chooses among some candidates.

        Args:
            names: the candidates.
            room: bytes that the tensors may take.

        Returns:
            Each group's choice, and the frontier; None if not even the smallest fit.
        """
        hulls = self._hulls(names)
        choices = [hull[0].name for hull in hulls]
        best, taken = list(choices), sum(hull[0].nbytes for hull in hulls)
        if taken > room:
            return None
        steps = sorted(
            (-(low.cost - high.cost) / (high.nbytes - low.nbytes), number, at)
            for number, hull in enumerate(hulls)
            for at, (low, high) in enumerate(itertools.pairwise(hull))
        )
        every = max(len(steps) // SHOWN_POINTS, 1)
        frontier = [self.point(choices)]
        for count, (_, number, at) in enumerate(steps, 1):
            low, high = hulls[number][at : at + 2]
            choices[number] = high.name
            if count % every == 0 or count == len(steps):
                frontier.append(self.point(choices))
            more = high.nbytes - low.nbytes
            # A step that does not fit is left out, smaller ones may follow.
            if best[number] == low.name and taken + more <= room:
                best[number], taken = high.name, taken + more
        return best, [point for point in frontier if point is not None]


def _hull(offers: Sequence[_Offer]) -> list[_Offer]:
    """The lower convex hull of size against cost, from the smallest on."""
    found: list[_Offer] = []
    for offer in sorted(offers, key=lambda each: (each.nbytes, each.cost)):
        if found and offer.cost >= found[-1].cost:
            continue
        while len(found) > 1 and _slope(found[-2], offer) <= _slope(found[-2], found[-1]):
            found.pop()
        found.append(offer)
    return found


def _slope(low: _Offer, high: _Offer) -> float:
    return (high.cost - low.cost) / (high.nbytes - low.nbytes)


def allocate(
    allocation: Allocation, names: Sequence[str], budget: Budget, kept: int
) -> tuple[list[str], list[Point]]:
    """Chooses a candidate for each group within a budget.

    Of formats with codes of four bits only one is used: engines choose their kernels by it.

    Args:
        allocation: what each candidate makes of each group.
        names: the candidates that may be chosen.
        budget: how much all may take.
        kept: bytes of all other tensors.

    Returns:
        Each group's choice, and the frontier.

    Raises:
        OptionError: if nothing fits.
    """
    room = budget.room(allocation.elements, kept)
    small = dict.fromkeys(format_of(name) for name in names if _is_small(name))
    found: list[tuple[float, int, tuple[list[str], list[Point]]]] = []
    least = None
    for kind in small or [None]:
        allowed = [name for name in names if not _is_small(name) or format_of(name) == kind]
        point = allocation.point(allocation.smallest(allowed))
        assert point is not None
        least = point if least is None or point.nbytes < least.nbytes else least
        result = allocation.run(allowed, room)
        if result is not None:
            chosen = allocation.point(result[0])
            assert chosen is not None
            found.append((chosen.error, len(found), result))
    if found:
        return min(found)[2]
    assert least is not None
    size = (
        f"{least.total_nbytes} bytes with all tensors"
        if budget.bits is None
        else (f"{least.bits:.3f} bits a weight")
    )
    raise OptionError(
        f"budget={budget.text!r} is too small: the least that {', '.join(names)} and the pins "
        f"allow is {size}; raise it, or name smaller formats"
    )


def format_of(name: str) -> str:
    """The format of a candidate, without its search."""
    scheme = candidate(name).scheme
    return name if scheme is None else scheme.format


def _is_small(name: str) -> bool:
    scheme = candidate(name).scheme
    return scheme is not None and scheme.spec.codes_per_byte > 1
