# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Text for people: safe names, errors in one line, numbers in few digits."""

from __future__ import annotations

import math
import re

from fp4kit.errors import shortened
from fp4kit.report.words import size as size  # the same words everywhere

#: A cell without a value.
UNKNOWN = "-"
#: A cell whose number is infinite or NaN: a value that decodes to no finite number.
OVERFLOW = "overflow"
#: Longest piece of a message: names, shapes and values come from files that anyone may have
#: written.
MAX_PIECE = 240
#: What a message quotes: a name, a list, or anything without a space. Short ones count too, so that
#: a quote ends where it does; that in "fp4kit's" begins none.
PIECES = re.compile(rf"(?<!\w)'[^']*'|\[[^]]*\]|\S{{{MAX_PIECE},}}")


def one_line(text: str) -> str:
    """Joins the lines of a message and escapes what a terminal might obey or cannot show."""
    joined = " | ".join(line.strip() for line in text.splitlines() if line.strip())
    return printable(cut_pieces(joined))


def cut_pieces(text: str) -> str:
    """Cuts long pieces of a message in the middle."""
    return PIECES.sub(lambda found: shortened(found.group(), MAX_PIECE), text)


def printable(text: str) -> str:
    """Replaces control characters: names come from files that anyone may have written."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def describe_os_error(error: OSError) -> str:
    """`name: reason`, without the error number that str() puts in front."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return one_line(reason)
    name = error.filename
    return one_line(
        f"{name.decode(errors='replace') if isinstance(name, bytes) else name}: {reason}"
    )


def shape_text(shape: tuple[int, ...]) -> str:
    """`4096x14336`; `scalar` for no dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def decibels(value: float) -> str:
    """A signal to noise ratio; `exact` without any noise, `overflow` if that is not finite."""
    if value == math.inf:
        return "exact"
    return f"{value:.2f}" if math.isfinite(value) else OVERFLOW


def number(value: float, digits: str) -> str:
    """A statistic in a format like `.3f`, `overflow` if it is no finite number."""
    return format(value, digits) if math.isfinite(value) else OVERFLOW


def percent(share: float | None) -> str:
    """A share in percent; a few in a million must not read as none."""
    if share is None:
        return UNKNOWN
    return "<0.001" if 0 < share < 5e-6 else f"{100 * share:.3f}"


def example(*lines: str) -> str:
    """The Example section of a command's help; the mark keeps click from refilling the lines."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)
