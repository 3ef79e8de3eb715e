# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Input files: bounded reads by position, and a pool that holds only so many open at once.

What only stands in for a file that lies elsewhere (:mod:`.ranges`) is read from there.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path

from fp4kit.errors import FileFormatError

from .ranges import ranges_of


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is written to or replaced."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


class InputFile:
    """A regular file read by position: no mapping, so that memory stays what the caller gives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise FileFormatError(
                    f"{path}: is {kind}; give one .safetensors, .npy, .npz or .gguf"
                )
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            facts = os.fstat(self._fd)
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None
        self._ranges = ranges_of(path)
        self.size = facts.st_size if self._ranges is None else self._ranges.size
        self._identity = _identity(facts)

    def check_unchanged(self) -> None:
        """Refuses a result of a file that was written to, or replaced, since it was opened.

        Raises:
            FileFormatError: naming the file.
        """
        if self._ranges is not None:
            self._ranges.check_unchanged()
        self._check_identity()

    def _check_identity(self) -> None:
        """As :meth:`check_unchanged`, of what lies on this disk."""
        try:
            now = _identity(self.path.stat())
        except OSError:
            now = None
        if now != self._identity:
            raise self._changed()

    def _changed(self) -> FileFormatError:
        return FileFormatError(
            f"{self.path}: has changed while it was read, so that the result was given up; run "
            "it again once nothing writes to the file"
        )

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes at `offset`.

        Raises:
            FileFormatError: if the file ends before that, or the disk fails.
        """
        if self._ranges is not None:
            self._ranges.read_into(offset, out)
            return
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done:]], offset + done)
            except OSError as error:
                raise FileFormatError(f"{self.path}: cannot be read: {error.strerror}") from None
            if count == 0:
                if offset + len(out) <= self.size:  # it was longer when it was opened
                    raise self._changed()
                raise FileFormatError(
                    f"{self.path}: truncated: ends at byte {offset + done}, {len(out) - done} more "
                    "were expected"
                )
            done += count

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes at `offset`, fewer at the end of the file."""
        data = bytearray(max(min(count, self.size - offset), 0))
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: Files of a pool that are open at once; the usual limit of a process is 1024.
OPEN_FILES = 128


class FilePool:
    """Input files of which only the ones read last are open."""

    def __init__(self, limit: int = OPEN_FILES) -> None:
        """Begins an empty pool.

        Args:
            limit: files that stay open while nobody reads them.
        """
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[PooledFile, None] = OrderedDict()

    def open(self, path: Path) -> PooledFile:
        """A file of this pool.

        Raises:
            FileFormatError: if it cannot be read.
        """
        file = PooledFile(path, self)
        self.give_back(file)
        return file

    def take(self, file: PooledFile) -> None:
        """Has a file open until it is given back; any number of threads may take it."""
        with self._lock:
            self._idle.pop(file, None)
            if not file.is_open:
                file.reopen()
            file.users += 1

    def give_back(self, file: PooledFile) -> None:
        """Ends a use of a file, and closes the ones that have not been read for longest."""
        with self._lock:
            file.users = max(file.users - 1, 0)
            if not file.users and file.is_open:
                self._idle[file] = None
            while len(self._idle) > self._limit:
                oldest, _ = self._idle.popitem(last=False)
                oldest.shut()

    def forget(self, file: PooledFile) -> None:
        """Closes a file for good."""
        with self._lock:
            self._idle.pop(file, None)
            file.shut()


class PooledFile(InputFile):
    """A regular file that is opened again for each read if it has to be.

    Attributes:
        users: threads that read from it at the moment.
    """

    def __init__(self, path: Path, pool: FilePool) -> None:
        super().__init__(path)
        self._pool = pool
        self.is_open = True
        self.users = 0

    def reopen(self) -> None:
        """Opens it again.

        Raises:
            FileFormatError: if it has changed.
        """
        self._check_identity()
        super().__init__(self.path)
        self.is_open = True

    def shut(self) -> None:
        """Closes it for now."""
        if self.is_open:
            super().close()
            self.is_open = False

    def read_into(self, offset: int, out: memoryview) -> None:
        self._pool.take(self)
        try:
            super().read_into(offset, out)
        finally:
            self._pool.give_back(self)

    def close(self) -> None:
        self._pool.forget(self)
