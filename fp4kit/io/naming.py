# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How one quantized tensor is stored in a file: names, element types and shapes of its parts.

Codes, block scales and the second level of a tensor `X` are tensors of their own. What they are
called and how they are laid out is the :class:`Storage`; :data:`PLAIN` is that of fp4kit's own
files (`X_packed`, `X_scale`, `X_global_scale`), and each checkpoint layout has one.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp4kit.errors import OptionError
from fp4kit.formats import FormatSpec

#: safetensors' element type of codes stored one per byte; two codes per byte are U8.
ELEMENT_DTYPES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "e2m1": "U8"}
#: safetensors' element type of block scales: engines expect E8M0 bytes as U8.
SCALE_DTYPES = {"e4m3": "F8_E4M3", "e8m0": "U8"}


@dataclass(frozen=True, slots=True)
class PartNames:
    """Names of the tensors that one quantized tensor is stored as.

    Attributes:
        packed: codes.
        scale: block scales.
        second: second-level scale, None without one; its direction is that of the storage.
    """

    packed: str
    scale: str
    second: str | None

    def all(self) -> tuple[str, ...]:
        """Every name that exists."""
        names = (self.packed, self.scale, self.second)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True)
class Storage:
    """How the parts of a quantized tensor `X` are named, ordered and shaped.

    Attributes:
        name: what it is called.
        packed_suffix: what the name of 4-bit codes adds to `X`; codes of whole bytes are `X`.
        second_suffix: what the name of the second level adds to `X`.
        second_shape: shape of the second level.
        direction: direction of the second level: `encode` (2688/amax) or `decode` (amax/2688).
        scale_layout: order of the block scales, None for whatever was asked for.
        nibble_order: nibble that the even element takes, None for whatever was asked for.
        row_multiple: codes have rows up to a multiple of this; those added are 0.
    """

    name: str
    packed_suffix: str = "_packed"
    second_suffix: str = "_global_scale"
    second_shape: tuple[int, ...] = (1,)
    direction: str = "encode"
    scale_layout: str | None = None
    nibble_order: str | None = None
    row_multiple: int = 1

    def part_names(self, name: str, spec: FormatSpec) -> PartNames:
        """The names that the parts of tensor `name` have in a format."""
        return PartNames(
            packed=name if spec.codes_per_byte == 1 else f"{name}{self.packed_suffix}",
            scale=f"{name}_scale",
            second=f"{name}{self.second_suffix}" if spec.has_second_level else None,
        )

    def code_rows(self, rows: int) -> int:
        """Rows of codes that are stored for a tensor of `rows` rows."""
        return -(-rows // self.row_multiple) * self.row_multiple


#: fp4kit's own files; the names are those of compressed-tensors.
PLAIN = Storage("plain")


class Patterns:
    """Name patterns: globs on the full name, or `re:` and a regular expression.

    A regular expression must match from the start of the name on (not to its end), as in
    compressed-tensors' ignore lists.
    """

    def __init__(self, patterns: Sequence[str], option: str) -> None:
        self._option = option
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        for pattern in patterns:
            text = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
            try:
                self._patterns.append((pattern, re.compile(text)))
            except re.error as error:
                raise OptionError(
                    f"{option}={pattern!r}: bad regular expression: {error}"
                ) from None

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def match(self, name: str) -> str | None:
        """The first pattern that matches a name, or None."""
        return next((pattern for pattern, regex in self._patterns if regex.match(name)), None)

    def check_used(self, names: Iterable[str], where: str = "") -> None:
        """Refuses patterns that match nothing: most likely they are misspelt.

        Args:
            names: everything that a pattern may match.
            where: what a message begins with, a file and a colon.

        Raises:
            OptionError: naming the pattern, and one that would match.
        """
        known = list(names)
        for pattern, regex in self._patterns:
            if any(regex.match(name) for name in known):
                continue
            meant = _meant(pattern, known)
            advice = f"; did you mean {meant!r}?" if meant else ""
            raise OptionError(
                f"{where}no tensor matches {self._option}={pattern!r}{advice or RULES_OF_PATTERNS}"
            )

    def idle(self, reasons: Mapping[str, str], suffix: str = "") -> list[str]:
        """What to say of patterns that were to quantize something and match only what is kept.

        Args:
            reasons: name of every tensor to the reason why it is kept, "" if it is not.
            suffix: what a name may end in; patterns may also match the name without it.
        """
        said = []
        for pattern, regex in self._patterns:
            found = [
                reason
                for name, reason in reasons.items()
                if regex.match(name) or regex.match(name.removesuffix(suffix))
            ]
            if found and all(found):
                said.append(
                    f"--{self._option} {pattern!r} has no effect, what it matches is never "
                    f"quantized: {grouped(found)}"
                )
        return said


#: What to know where no other pattern can be proposed.
RULES_OF_PATTERNS = "; a glob must match the whole name, re: from its start"


def _meant(pattern: str, names: Sequence[str]) -> str | None:
    """A glob that matches something and may be what a pattern was meant to be, or None."""
    word = pattern.removeprefix("re:").strip("*.^$")
    if not word:
        return None
    around = f"*{word}*"
    if any(fnmatch.fnmatchcase(name, around) for name in names):
        return around
    folded = next((name for name in names if word.lower() in name.lower()), None)
    if folded is not None:
        at = folded.lower().index(word.lower())
        return f"*{folded[at : at + len(word)]}*"
    parts = {part: None for name in names[:100_000] for part in name.split(".")}
    near = difflib.get_close_matches(word, list(parts)[:1000], 1, 0.7)
    return f"*{near[0]}*" if near else None


def kind_of(reason: str) -> str:
    """A reason without the numbers that differ from tensor to tensor."""
    return re.sub(r"^last axis \d+", "last axis", reason)


def grouped(reasons: Iterable[str]) -> str:
    """Reasons with the number of tensors that have each, the most frequent first."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[kind_of(reason)] = counts.get(kind_of(reason), 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = [
        f"{reason} ({count} tensor{'' if count == 1 else 's'})"
        for reason, count in ordered[:SHOWN_REASONS]
    ]
    if len(ordered) > SHOWN_REASONS:
        shown.append(f"{sum(count for _, count in ordered[SHOWN_REASONS:])} for other reasons")
    return ", ".join(shown)


#: Reasons that a message lists.
SHOWN_REASONS = 8
