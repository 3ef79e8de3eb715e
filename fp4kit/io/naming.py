# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Names: what a quantized tensor's parts are called, and which tensors a pattern means.

A 4-bit tensor `X` becomes `X_packed` and `X_scale`, and for nvfp4 `X_global_scale`: so `a.weight`
becomes `a.weight_packed`, `a.weight_scale`, `a.weight_global_scale`, as compressed-tensors has it.
FP8 elements are whole bytes and keep the name `X`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fp4kit.errors import OptionError
from fp4kit.formats import FormatSpec

#: safetensors' element type of codes stored one per byte; two codes per byte are U8.
ELEMENT_DTYPES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "e2m1": "U8"}
#: safetensors' element type of block scales: engines expect E8M0 bytes as U8.
SCALE_DTYPES = {"e4m3": "F8_E4M3", "e8m0": "U8"}


@dataclass(frozen=True)
class PartNames:
    """Names of the tensors that one quantized tensor is stored as.

    Attributes:
        packed: codes.
        scale: block scales.
        global_scale: second-level scale in encode direction (2688/amax), None without one.
    """

    packed: str
    scale: str
    global_scale: str | None

    @classmethod
    def of(cls, name: str, spec: FormatSpec) -> PartNames:
        """The names that tensor `name` gets in a format."""
        return cls(
            packed=name if spec.codes_per_byte == 1 else f"{name}_packed",
            scale=f"{name}_scale",
            global_scale=f"{name}_global_scale" if spec.has_second_level else None,
        )

    def all(self) -> tuple[str, ...]:
        """Every name that exists."""
        names = (self.packed, self.scale, self.global_scale)
        return tuple(name for name in names if name is not None)


class Patterns:
    """Name patterns: globs on the full name, or `re:` and a regular expression.

    A regular expression must match from the start of the name on (not to its end), as in
    compressed-tensors' ignore lists.
    """

    def __init__(self, patterns: Sequence[str], option: str) -> None:
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

    def unused(self, names: Sequence[str]) -> list[str]:
        """The patterns that match none of the names."""
        return [
            pattern
            for pattern, regex in self._patterns
            if not any(regex.match(name) for name in names)
        ]
