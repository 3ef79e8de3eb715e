# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files that are opened when they are read: a process may hold only so many open at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from .files import InputFile

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
        self.check_unchanged()
        super().__init__(self.path)
        self.is_open = True

    def shut(self) -> None:
        """Closes it for now."""
        if self.is_open:
            super().close()
            self.is_open = False

    def read_into(self, offset: int, out: memoryview) -> None:  # noqa: D102
        self._pool.take(self)
        try:
            super().read_into(offset, out)
        finally:
            self._pool.give_back(self)

    def close(self) -> None:  # noqa: D102
        self._pool.forget(self)
