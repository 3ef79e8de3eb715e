# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Regular expressions that come from files, matched in bounded time.

Python's engine backtracks: `(.*.*)*x` in an ignore list of a config.json would run for ever. A
pattern whose cost is linear whatever the text is left to it. Every other one is matched here, all
positions of the text at once: a set of positions is an integer with a bit for each, and a node of
the pattern maps the positions where it may begin to those where it may end. That takes (nodes of
the pattern) * (length of the text) steps at most. Which of several matches Python would find does
not matter, as only whether there is one is asked.

Backreferences, lookbehinds, and atomic or possessive parts have no such form and are refused.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# The parser of `re` has no public name; it is the same one since Python 2.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

#: Longer patterns, more nodes once counted repeats are written out, or longer texts are refused.
MAX_PATTERN, MAX_NODES, MAX_TEXT = 4096, 4096, 4096
#: Ways through the choices of a pattern that Python's engine may have to try one after another.
MAX_CHOICES = 16


class PatternError(ValueError):
    """A pattern that is no regular expression, or one that cannot be matched in bounded time."""


class _Text:
    """What is matched: the positions of the characters that a node takes, by what it takes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 1 << len(text)
        self._masks: dict[object, int] = {}

    def mask(self, key: object, test: Callable[[int], bool]) -> int:
        """The positions for which `test` holds, computed once for a key."""
        if key not in self._masks:
            self._masks[key] = sum(1 << at for at in range(len(self.text) + 1) if test(at))
        return self._masks[key]


class _Node(ABC):
    """A part of a pattern."""

    @abstractmethod
    def ends(self, text: _Text, starts: int) -> int:
        """Where it may end if it begins at one of some positions."""


class _Character(_Node):
    def __init__(self, key: str, takes: Callable[[str], bool]) -> None:
        self._key, self._takes = key, takes

    def positions(self, text: _Text) -> int:
        """Where a character stands that it takes."""
        return text.mask(self._key, lambda at: at < len(text.text) and self._takes(text.text[at]))

    def ends(self, text: _Text, starts: int) -> int:
        return (starts & self.positions(text)) << 1


class _Assertion(_Node):
    """Takes no character; holds at some positions."""

    def __init__(self, holds: Callable[[str, int], bool]) -> None:
        self._holds = holds

    def ends(self, text: _Text, starts: int) -> int:
        return starts & text.mask(self, lambda at: self._holds(text.text, at))


class _Sequence(_Node):
    def __init__(self, parts: list[_Node]) -> None:
        self._parts = parts

    def ends(self, text: _Text, starts: int) -> int:
        for part in self._parts:
            if not starts:
                break
            starts = part.ends(text, starts)
        return starts


class _Alternatives(_Node):
    def __init__(self, parts: list[_Node]) -> None:
        self._parts = parts

    def ends(self, text: _Text, starts: int) -> int:
        found = 0
        for part in self._parts:
            found |= part.ends(text, starts)
        return found


class _Any(_Node):
    """Any number of repetitions."""

    def __init__(self, part: _Node) -> None:
        self._part = part

    def ends(self, text: _Text, starts: int) -> int:
        if isinstance(self._part, _Character):
            # Every start runs through the run of taken characters it stands in: a carry does.
            taken = self._part.positions(text)
            return (((starts & taken) + taken) ^ taken) | starts
        found, fresh = starts, starts
        while fresh:
            fresh = self._part.ends(text, fresh) & ~found
            found |= fresh
        return found


class _Lookahead(_Node):
    def __init__(self, part: _Node, wanted: bool) -> None:
        self._part, self._wanted = part, wanted

    def ends(self, text: _Text, starts: int) -> int:
        return starts & text.mask(
            self, lambda at: bool(self._part.ends(text, 1 << at)) is self._wanted
        )


def _is_word(text: str, at: int) -> bool:
    return 0 <= at < len(text) and (text[at].isalnum() or text[at] == "_")


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda c: c.isalnum() or c == "_",
}
_PLACES: dict[str, Callable[[str, int], bool]] = {
    "AT_BEGINNING": lambda text, at: at == 0,
    "AT_BEGINNING_STRING": lambda text, at: at == 0,
    "AT_END": lambda text, at: at == len(text) or (at == len(text) - 1 and text[at] == "\n"),
    "AT_END_STRING": lambda text, at: at == len(text),
    "AT_BOUNDARY": lambda text, at: _is_word(text, at - 1) != _is_word(text, at),
    "AT_NON_BOUNDARY": lambda text, at: _is_word(text, at - 1) == _is_word(text, at),
}


def _category(name: str) -> Callable[[str], bool]:
    kind = name.removeprefix("CATEGORY_")
    test = _CATEGORIES[kind.removeprefix("NOT_")]
    return (lambda c: not test(c)) if kind.startswith("NOT_") else test


def _member(op: str, value: Any) -> Callable[[str], bool]:
    """What one item of a character class takes."""
    if op == "LITERAL":
        return lambda c: ord(c) == value
    if op == "NOT_LITERAL":
        return lambda c: ord(c) != value
    if op == "RANGE":
        return lambda c: value[0] <= ord(c) <= value[1]
    if op == "ANY":
        return lambda c: c != "\n"
    return _category(str(value))


class _Compiler:
    """From a parsed pattern to nodes."""

    def __init__(self) -> None:
        self._count = 0

    def sequence(self, parsed: Any) -> _Node:
        """A run of parts."""
        parts = [self._part(str(op), value) for op, value in parsed]
        return parts[0] if len(parts) == 1 else _Sequence(parts)

    def _part(self, op: str, value: Any) -> _Node:
        self._count += 1
        if self._count > MAX_NODES:
            raise PatternError("its counted repeats are too many")
        if op in ("LITERAL", "NOT_LITERAL", "ANY"):
            return _Character(f"{op} {value}", _member(op, value))
        if op == "IN":
            return self._class(value)
        if op == "AT":
            return _Assertion(_PLACES[str(value)])
        if op == "BRANCH":
            return _Alternatives([self.sequence(branch) for branch in value[1]])
        if op == "SUBPATTERN" and not value[1] and not value[2]:
            return self.sequence(value[3])
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(*value)
        if op in ("ASSERT", "ASSERT_NOT") and value[0] > 0:
            return _Lookahead(self.sequence(value[1]), op == "ASSERT")
        raise PatternError(f"it cannot be matched in bounded time ({op.lower()})")

    def _class(self, items: Any) -> _Node:
        tests = [_member(str(op), value) for op, value in items if str(op) != "NEGATE"]
        wanted = str(items[0][0]) != "NEGATE"
        return _Character(f"IN {items}", lambda c: any(test(c) for test in tests) is wanted)

    def _repeat(self, least: int, most: int, parsed: Any) -> _Node:
        if least > MAX_NODES:
            raise PatternError("its counted repeats are too many")
        parts = [self.sequence(parsed) for _ in range(least)]
        if most == _parser.MAXREPEAT:
            return _Sequence([*parts, _Any(self.sequence(parsed))])
        # x{0,3} is (x(x(x)?)?)?.
        optional: _Node = _Sequence([])
        for _ in range(min(most, MAX_NODES + 1) - least):
            optional = _Alternatives([_Sequence([]), _Sequence([self.sequence(parsed), optional])])
        return _Sequence([*parts, optional])


def _choices(parsed: Any) -> int:
    """Ways through a pattern that differ by more than how long its last repeat is; 0 for many."""
    ways, repeats = 1, 0
    for op, value in parsed:
        kind = str(op)
        if kind == "BRANCH":
            inner = [_choices(branch) for branch in value[1]]
            ways *= sum(inner) if all(inner) else 0
        elif kind == "SUBPATTERN":
            ways *= _choices(value[3])
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = value
            simple = all(str(op) in ("LITERAL", "NOT_LITERAL", "ANY", "IN") for op, _ in body)
            if most > MAX_CHOICES and simple:
                repeats += 1
            elif (least, most) == (0, 1):
                taken = _choices(body)
                ways *= 1 + taken if taken else 0
            else:
                ways *= (most - least + 1) if most <= 1 or simple else 0
                ways *= _choices(body)
        elif kind not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            return 0
        if ways > MAX_CHOICES or repeats > 1:
            return 0
    # One less, so that such a part may be left out: `(?:.*\.)?lm_head$`, as our own lists have it.
    return ways if repeats == 0 else ways * (MAX_CHOICES - 1)


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> Callable[[str], bool]:
    """Whether a regular expression matches from the start of a text, as a function of the text."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"it is {len(pattern)} characters long, at most {MAX_PATTERN} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the style of a pattern that is not ours
            parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"it is no regular expression: {str(error)[:80]}") from None
    if 0 < _choices(parsed) <= MAX_CHOICES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            regex = re.compile(pattern)
        return lambda text: regex.match(text) is not None
    if parsed.state.flags & ~re.UNICODE:
        raise PatternError("it cannot be matched in bounded time (it has flags)")
    try:
        node = _Compiler().sequence(parsed)
    except RecursionError:
        raise PatternError("it is nested too deeply") from None
    return lambda text: _matches(node, text)


def _matches(node: _Node, text: str) -> bool:
    if len(text) > MAX_TEXT:
        raise PatternError(f"a name of {len(text)} characters is too long to be matched")
    return bool(node.ends(_Text(text), 1))
