# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON files of a checkpoint: only regular files are read, and no more than makes sense."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4kit.errors import FileFormatError
from fp4kit.io.read.json_text import strict_json
from fp4kit.io.read.ranges import ranges_of, size_of

SHOWN = 3
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True)
class JsonLimits:
    """How large a JSON file may be.

    Attributes:
        nbytes: of the file.
        values: values and keys in it.
    """

    nbytes: int
    values: int


#: Files of settings, which people write.
SETTINGS = JsonLimits(16 << 20, 1_000_000)
#: Files with an entry for each tensor, which programs write.
ENTRIES = JsonLimits(512 << 20, 8_000_000)


def listed(names: list[str]) -> str:
    """The first few of many names, for a message."""
    text = ", ".join(repr(name) for name in names[:SHOWN])
    return text if len(names) <= SHOWN else f"{text} and {len(names) - SHOWN} more"


def file_type(path: Path) -> int:
    """What kind of thing a path leads to, as in `stat.S_IFREG`; 0 if that cannot be told."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except OSError:
        return 0


def check_regular(path: Path) -> os.stat_result:
    """The facts of a file that is to be read or copied, links followed."""
    try:
        facts = path.stat()
    except OSError as error:
        if path.is_symlink() and not isinstance(error, PermissionError):
            raise FileFormatError(
                f"{path}: is a link to nothing; remove it, or download what is missing"
            ) from None
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(facts.st_mode):
        kind = KINDS.get(stat.S_IFMT(facts.st_mode), "something else")
        raise FileFormatError(
            f"{path}: is {kind}; only regular files are read, no pipe, device, folder or link to "
            "nothing: remove it, or put the file there"
        )
    return facts


def _read(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    check_regular(path)
    ranges, size = ranges_of(path), size_of(path)
    if size <= limit and ranges is not None:
        data = ranges.read(0, size)
    elif size <= limit:
        try:
            # Not blocking, should it have become a pipe meanwhile.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                # As much as is asked for is allocated, whatever there is.
                data = file.read(size + 1)
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None
        if len(data) > size:
            raise FileFormatError(f"{path}: grows while it is read; wait for what writes it")
    if size > limit:
        raise FileFormatError(
            f"{path}: is {size} bytes long; at most {limit} are read of such a file"
        )
    return data


def read_json(
    path: Path, limits: JsonLimits = ENTRIES, *, constants: bool = True
) -> dict[str, Any]:
    """A JSON object from a file."""
    data = _read(path, limits.nbytes)
    try:
        value = strict_json(data, constants=constants, max_values=limits.values)
    except ValueError as error:
        raise FileFormatError(f"{path}: damaged JSON: {error}") from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{path}: holds no JSON object")
    return value


def read_settings(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file of settings, None if there is nothing of that name."""
    return read_json(path, SETTINGS) if os.path.lexists(path) else None
