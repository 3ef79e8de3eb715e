# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files that lie elsewhere, as in an object store: a stand-in on the disk, whose bytes are fetched.

Everything that decides about a checkpoint works on paths. A stand-in is an empty file under the
name that the real one has; whoever reads it through :mod:`fp4kit.io.read.files` gets the bytes of
the real one, range by range, and who does not sees an empty file, never wrong bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


class Ranges(ABC):
    """The bytes of a file that lies elsewhere.

    Attributes:
        size: how many there are.
        mark: what changes with the content, as the place that holds it says; "" if it says nothing.
        retries: how often something of its source had to be fetched again so far.
    """

    size: int
    mark: str
    retries: int

    @abstractmethod
    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes at `offset`.

        Raises:
            FileFormatError: if the file ends before that, or cannot be read.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Refuses a result of a file that has changed since it was first looked at.

        Raises:
            FileFormatError: naming the file.
        """

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes at `offset`, fewer at the end of the file."""
        data = bytearray(max(min(count, self.size - offset), 0))
        self.read_into(offset, memoryview(data))
        return bytes(data)


#: Absolute paths of the stand-ins of this process.
_held: dict[Path, Ranges] = {}


def hold(path: Path, ranges: Ranges) -> None:
    """Makes a file the stand-in of one that lies elsewhere."""
    _held[path.absolute()] = ranges


def release(folder: Path) -> None:
    """Forgets every stand-in below a directory."""
    below = folder.absolute()
    for path in [path for path in _held if below in path.parents]:
        del _held[path]


def ranges_of(path: Path) -> Ranges | None:
    """The bytes that a file stands for, None for a file that holds its own."""
    return _held.get(path.absolute()) if _held else None


def size_of(path: Path) -> int:
    """Bytes of a file, wherever they lie."""
    ranges = ranges_of(path)
    return path.stat().st_size if ranges is None else ranges.size
