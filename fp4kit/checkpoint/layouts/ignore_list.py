# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Ignore lists as engines read them: which modules a quantized checkpoint leaves alone."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator

from fp4kit.checkpoint.layouts import get_layout
from fp4kit.checkpoint.models.fusion import groups

from .expressions import PatternError, compiled

EXPRESSION = "re:"
#: The name of a class of modules, which compressed-tensors matches too.
LINEAR = "Linear"
#: Expressions of one list; each is matched against every module.
MAX_EXPRESSIONS = 1000
#: What makes a name of ModelOpt's list a glob.
GLOB = re.compile(r"[*?\[]")


class IgnoreList:
    """The patterns of a list, sorted by how they match.

    Attributes:
        faults: what is wrong with the list itself; such patterns match nothing.
    """

    def __init__(self, patterns: Iterable[str], layout: str) -> None:
        """Takes the patterns.

        Args:
            patterns: compressed-tensors: names, `re:` and a regular expression that matches from
                the start, or the class name `Linear`; ModelOpt: names of modules or of something
                that holds them, and globs.
            layout: whose rules apply.
        """
        self.faults: list[str] = []
        self._by_parent = get_layout(layout).matches_inside
        self._names: set[str] = set()
        self._tests: list[tuple[str, Callable[[str], object]]] = []
        left = MAX_EXPRESSIONS
        for pattern in patterns:
            if pattern.startswith(EXPRESSION):
                if left > 0:
                    self._add(pattern)
                left -= 1
                continue
            self._names.add(pattern)
            if self._by_parent and GLOB.search(pattern):
                self._add_glob(pattern)

        if left < 0:
            self.faults.append(
                f"the ignore list has {MAX_EXPRESSIONS - left} regular expressions; no more than "
                f"{MAX_EXPRESSIONS} are looked at"
            )

    def _add(self, pattern: str) -> None:
        try:
            self._tests.append((pattern, compiled(pattern.removeprefix(EXPRESSION))))
        except PatternError as error:
            self.faults.append(f"{pattern[:80]!r} in the ignore list is not understood: {error}")

    def _add_glob(self, pattern: str) -> None:
        try:
            self._tests.append((pattern, re.compile(fnmatch.translate(pattern)).match))
        except re.error as error:  # a range such as [z-a], before Python 3.11
            self.faults.append(f"{pattern[:80]!r} in the ignore list is no glob: {error}")

    def matches(self, module: str) -> bool:
        """Whether an engine would leave a module alone, by its full name."""
        if module in self._names:
            return True
        if self._by_parent:
            parts = module.split(".")
            parents = (".".join(parts[:count]) for count in range(1, len(parts)))
            if any(parent in self._names for parent in parents):
                return True
        elif LINEAR in self._names:
            return True
        return any(self._test(pattern, test, module) for pattern, test in self._tests)

    def _test(self, pattern: str, test: Callable[[str], object], module: str) -> bool:
        try:
            return bool(test(module))
        except PatternError as error:
            fault = f"{pattern[:80]!r} in the ignore list is not understood: {error}"
            if fault not in self.faults:
                self.faults.append(fault)
            return False


def check_ignore(
    quantized: Iterable[str], kept: Iterable[str], patterns: Iterable[str], layout: str
) -> Iterator[str]:
    """What is wrong with an ignore list: engines build quantized layers for the rest."""
    listed = IgnoreList(patterns, layout)
    for module in quantized:
        if listed.matches(module):
            yield f"{module} is quantized, but in the ignore list"
    ignored = []
    for module in kept:
        if listed.matches(module):
            ignored.append(module)
        else:
            yield f"{module} is not quantized, but not in the ignore list"
    yield from listed.faults
    both = groups([f"{name}.weight" for name in (*quantized, *ignored)])
    left = {f"{name}.weight" for name in ignored}
    for members in both.values():
        if 0 < len(left.intersection(members)) < len(members):
            yield f"of the fused weights {', '.join(members)} only some are quantized"
