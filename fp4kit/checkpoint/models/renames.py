# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How transformers renames stored tensors on loading: its transforms, without their arithmetic.

A transform is a regular expression and what its match is replaced by. All renames are applied in
order, then the first converter that matches; one that cuts a tensor gives several names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

CONVERT = "convert"
GROUP = "group"
PAIRS = "pairs"
OFFSET = "offset "
#: Experts of one layer are renamed alike, so that one stands for all.
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


def _matched_group(match: re.Match[str]) -> tuple[int, int]:
    """(number of the alternative that matched, index of its group)."""
    name = next(key for key, value in match.groupdict().items() if value is not None)
    return int(name[1:]), match.re.groupindex[name]


@dataclass(frozen=True)
class Transform:
    """One transform of a part of a model.

    Attributes:
        kind: `rename`; `convert`; `group`, whose first alternative has to match some name;
            `offset N`, which adds N to a number; `pairs`, which joins layers in pairs.
        source: what is replaced, alternatives as groups g0, g1 and so on.
        targets: what it is replaced by; several where a tensor is cut.
        scope: path of the part below `prefix`, None for the whole model.
        prefix: name of the base model, which may stand before the path or not.
    """

    kind: str
    source: re.Pattern[str]
    targets: tuple[str, ...]
    scope: str | None = None
    prefix: str = ""

    def _inside(self, name: str) -> str | None:
        """What stands before the part of a name that is matched; None if it is of another part."""
        if self.scope is None:
            return ""
        scope = f"{self.scope}." if self.scope else ""
        longest = f"{self.prefix}.{scope}" if self.prefix else scope
        return next((before for before in (longest, scope) if name.startswith(before)), None)

    def match(self, name: str) -> tuple[str, str, re.Match[str]] | None:
        """(what stands before, the rest, match in the rest) of a name, None without a match."""
        before = self._inside(name)
        if before is None:
            return None
        rest = name.removeprefix(before)
        found = self.source.search(rest)
        return None if found is None else (before, rest, found)

    def apply(self, name: str) -> list[str] | None:
        """The names that a name becomes, None if it is not concerned."""
        matched = self.match(name)
        if matched is None:
            return None
        before, rest, found = matched
        if self.kind == PAIRS:
            return [before + rest[: found.start()] + _paired(found) + rest[found.end() :]]
        alternative, group = _matched_group(found)
        targets = [self.targets[alternative]] if self.kind == GROUP else self.targets
        filled = [self._filled(target, found, group) for target in targets]
        return [before + rest.replace(found.group(0), target, 1) for target in filled]

    def _filled(self, target: str, found: re.Match[str], group: int) -> str:
        """A target with the groups of the match put in."""

        def value(reference: re.Match[str]) -> str:
            number = int(reference.group(1))
            text = found.group(group + number) if group + number <= found.re.groups else None
            if self.kind.startswith(OFFSET) and text is not None:
                return str(int(text) + int(self.kind.removeprefix(OFFSET)))
            return text or ""

        return re.sub(r"\\(\d)", value, target)


def _paired(found: re.Match[str]) -> str:
    """Dory stores attention and MLP of a layer as two layers."""
    index, name = int(found[1]), found[2]
    named = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}
    return f"layers.{index // 2}.{named.get(name, ('self_attn', 'mlp')[index % 2])}"


def transforms(
    rows: Iterable[Sequence[Any]], scope: str | None = None, prefix: str = ""
) -> list[Transform]:
    """Transforms from rows [kind, source, targets] of the table."""
    return [
        Transform(kind, re.compile(source), tuple(targets), scope, prefix)
        for kind, source, targets in rows
    ]


class Renames:
    """All transforms of a model."""

    def __init__(self, given: Iterable[Transform], names: Iterable[str]) -> None:
        """Takes the transforms."""
        listed = dict.fromkeys(_EXPERT.sub("0", name) for name in names)
        used = [rule for rule in given if rule.kind != GROUP or _opens(rule, listed)]
        self._renames = [rule for rule in used if rule.kind != CONVERT]
        self._converters = [rule for rule in used if rule.kind == CONVERT]
        self._known: dict[str, list[str]] = {}

    def built(self, name: str) -> list[str]:
        """What a stored tensor is called in the model; itself if nothing concerns it."""
        key = _EXPERT.sub("0", name)
        if key not in self._known:
            self._known[key] = self._renamed(key)
        found = self._known[key]
        expert = _EXPERT.search(name)
        return found if expert is None else [_EXPERT.sub(expert.group(0), text) for text in found]

    def _renamed(self, name: str) -> list[str]:
        for rule in self._renames:
            name = (rule.apply(name) or [name])[0]
        for rule in self._converters:
            found = rule.apply(name)
            if found is not None:
                return found
        return [name]


def _opens(rule: Transform, names: Iterable[str]) -> bool:
    """Whether the first alternative of a group matches one of the names."""
    matches = (rule.match(name) for name in names)
    return any(found is not None and _matched_group(found[2])[0] == 0 for found in matches)
