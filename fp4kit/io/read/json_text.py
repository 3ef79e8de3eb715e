# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""JSON from files that anyone may have written: strict, and bounded before memory is spent.

Python's parser takes up to thirty times the text's size (one empty list is two bytes of text), so
the text is scanned first: how many values there are, and how deep they are nested.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np

from fp4kit.errors import FileFormatError, brief

Parsed = TypeVar("Parsed")

#: Values (with keys) of a document: the index of a million tensors has as many.
MAX_VALUES = 2_000_000
#: As deep as the official reader of safetensors goes.
MAX_DEPTH = 128
_CHUNK = 1 << 17
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_OPENING, _CLOSING, _SEPARATORS = b"[{", b"]}", b"[{,:"


def _table(members: bytes) -> Any:
    """For each byte, whether it is one of `members`."""
    return np.isin(np.arange(256), list(members))


_STEP = _table(_OPENING).astype(np.int8) - _table(_CLOSING).astype(np.int8)
_SEPARATES = _table(_SEPARATORS)


def _measure(data: bytes) -> tuple[int, int]:
    """(separators and opening brackets, deepest nesting) outside of strings, of valid JSON."""
    # Without escapes, every quote begins or ends a string.
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    count = depth = deepest = 0
    in_string = np.uint8(0)
    for start in range(0, len(data), _CHUNK):
        piece = np.frombuffer(data, np.uint8, min(_CHUNK, len(data) - start), start)
        quotes = (piece == ord('"')).view(np.uint8)
        quotes[0] ^= in_string
        inside = np.bitwise_xor.accumulate(quotes)
        in_string = inside[-1]
        outside = piece[inside == 0]
        if outside.size:
            count += int(np.count_nonzero(_SEPARATES[outside]))
            levels = np.cumsum(_STEP[outside], dtype=np.int32)
            deepest = max(deepest, depth + int(levels.max()))
            depth += int(levels[-1])
    return count, deepest


def _check_size(data: bytes, max_values: int, max_depth: int) -> None:
    """Refuses text with more values, or deeper ones, than are worth parsing.

    Raises:
        ValueError: with the counts.
    """
    opened = sum(data.count(char) for char in (b"[", b"{"))
    # An upper bound, as strings may hold these too: enough for most documents.
    if opened <= max_depth and opened + data.count(b",") + data.count(b":") <= max_values:
        return
    count, depth = _measure(data)
    if count > max_values:
        raise ValueError(f"holds {count} values; at most {max_values} are read")
    if depth > max_depth:
        raise ValueError(f"nested too deeply: {depth} levels, at most {max_depth} are read")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object from its pairs.

    Raises:
        ValueError: for a key that appears twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {brief(key)} appears twice")
            seen.add(key)
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def strict_json(
    text: str | bytes,
    *,
    constants: bool = False,
    max_values: int = MAX_VALUES,
    max_depth: int = MAX_DEPTH,
    make_object: Callable[[list[tuple[str, Any]]], Any] = unique,
) -> Any:
    """Parses JSON, refusing duplicate keys, NaN, unpaired surrogates, and what is too large.

    Args:
        text: the text, or its bytes in UTF-8.
        constants: accept `NaN`, `Infinity` and `-Infinity`, which Python's own writer produces.
        max_values: largest number of values and keys.
        max_depth: deepest nesting of lists and objects.
        make_object: what becomes of an object's pairs of key and value.

    Raises:
        ValueError: with the reason.
    """
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    _check_size(data, max_values, max_depth)
    text = data.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(
            text,
            object_pairs_hook=make_object,
            parse_constant=None if constants else _no_constant,
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def parse_metadata(
    metadata: Mapping[str, str], key: str, where: object, read: Callable[[Any], Parsed]
) -> Parsed | None:
    """What header metadata says in JSON under a key, None without it.

    Args:
        metadata: the header metadata.
        key: the key.
        where: the file, for the message.
        read: takes the content apart; raises ValueError, KeyError, TypeError or AttributeError for
            one of another form.

    Raises:
        FileFormatError: if it is damaged.
    """
    if key not in metadata:
        return None
    try:
        return read(strict_json(metadata[key]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{where}: metadata {key!r}: damaged: {error!s}") from None
