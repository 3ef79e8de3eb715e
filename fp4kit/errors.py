# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every exception fp4kit raises on purpose.

A message says what was given, what is allowed and what to do. Each class also derives from the
built-in exception that callers would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Longest message: names and values come from files that anyone may have written.
MAX_MESSAGE = 4000


def shortened(text: str, limit: int) -> str:
    """A text of at most `limit` characters; what is too much is cut out of the middle."""
    if len(text) <= limit:
        return text
    head = (limit - 3) * 2 // 3
    return f"{text[:head]}...{text[len(text) - (limit - 3 - head) :]}"


def brief(value: object, limit: int = 100) -> str:
    """`repr` of a value from a caller or a file, on one line and short enough for a message."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and not isinstance(value, type):
        # The repr of an array takes lines, and may fetch it from a device.
        return f"<{type(value).__name__} of shape {shape}>"
    ends: Any = value
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > 2 * limit:
        # The repr of all of it would take several times its memory; what is left is cut anyway.
        ends = ends[:limit] + ends[-limit:]
    return shortened(re.sub(r"\s*\n\s*", " ", repr(ends)), limit)


class Fp4kitError(Exception):
    """Base class: catch this to catch everything fp4kit raises on purpose."""

    def __str__(self) -> str:
        return shortened(super().__str__(), MAX_MESSAGE)


class OptionError(Fp4kitError, ValueError):
    """An option has an unknown value, or two options exclude each other."""


class ShapeError(Fp4kitError, ValueError):
    """A shape that the format, layout or output buffer cannot take."""


class DtypeError(Fp4kitError, TypeError):
    """An element type, or a kind of array, that cannot be taken."""


class NonFiniteError(Fp4kitError, ValueError):
    """The input holds NaN or infinity and `nonfinite="raise"` is in force."""


class BackendUnavailableError(Fp4kitError, RuntimeError):
    """No backend can serve the request.

    Attributes:
        reasons: why, for each backend that was asked.
    """

    def __init__(self, what: str, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        details = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        super().__init__(f"no backend can {what}: {details}")


class KernelCompileError(Fp4kitError, RuntimeError):
    """NVRTC refused a kernel; the message holds the kernel, the options and the first log lines."""


class FileFormatError(Fp4kitError, ValueError):
    """A file is malformed or of a kind that cannot be read; the message starts with its name."""
