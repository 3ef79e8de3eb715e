# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A file in an object store or on a web server, read by ranges.

Exactly what is asked for is fetched, in pieces side by side, as a single connection is slow; each
piece is tried again by itself. What is read a second time, as by a pass for an amax and one for the
codes, comes from a cache of bounded size on the disk.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fp4kit.errors import FileFormatError
from fp4kit.io.read.ranges import Ranges

from .patience import Patience, ShortReadError

#: Bytes of a request at most, and requests of a process that run side by side.
PIECE, CONNECTIONS = 8 << 20, 16
#: First bytes of a weight file, which hold its header, that are fetched in one request.
HEAD = 128 << 10
#: Bytes that a process keeps on its disk at most: two shards of the usual size.
CACHE_BYTES = 10 * 10**9
#: What stores and servers call what changes with the content of a file.
MARKS = ("ETag", "etag", "crc32c", "md5Hash", "blob_id")


def mark_of(facts: dict[str, Any]) -> str:
    """What a store says of the content of a file, "" if nothing."""
    found = next((str(facts[key]) for key in MARKS if facts.get(key)), "")
    return found.removeprefix("W/").strip('"')


class RangeCache:
    """Ranges that were fetched, on the disk; the ones not read for longest go first."""

    def __init__(self, folder: Path, limit: int = CACHE_BYTES) -> None:
        """Begins an empty cache in a directory of its own."""
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int, int], Path] = OrderedDict()
        self._count = 0
        self.nbytes = 0

    def read_into(self, name: str, offset: int, out: memoryview) -> bool:
        """Fills `out` with a range if it is here."""
        key = (name, offset, len(out))
        with self._lock:
            path = self._held.get(key)
            if path is None:
                return False
            self._held.move_to_end(key)
            file = path.open("rb", buffering=0)  # what is open may be removed meanwhile
        with file:
            done = 0
            while done < len(out) and (count := file.readinto(out[done:])):
                done += count
        return done == len(out)

    def add(self, name: str, offset: int, data: memoryview) -> None:
        """Keeps a range, if the disk has space for it: a cache may fail."""
        if len(data) > self._limit // 2:
            return
        with self._lock:
            self._count += 1
            path = self._folder / f"{self._count}.range"
        try:
            path.write_bytes(data)
        except OSError:
            path.unlink(missing_ok=True)
            return
        with self._lock:
            self._held[name, offset, len(data)] = path
            self.nbytes += len(data)
            while self.nbytes > self._limit:
                (_, _, size), oldest = self._held.popitem(last=False)
                self.nbytes -= size
                oldest.unlink(missing_ok=True)


class Reader:
    """What the files of one source share: connections, cache, patience."""

    def __init__(self, fs: Any, cache: RangeCache) -> None:
        self.fs = fs
        self.cache = cache
        self.patience = Patience()
        self.pool = ThreadPoolExecutor(CONNECTIONS, "fp4kit-fetch")

    def close(self) -> None:
        """Ends the threads."""
        self.pool.shutdown(cancel_futures=True)


class RemoteFile(Ranges):
    """A file that is fetched by ranges.

    Attributes:
        url: how the user calls it.
    """

    def __init__(self, reader: Reader, url: str, facts: dict[str, Any], *, has_head: bool) -> None:
        """Takes what the listing says.

        Args:
            reader: how it is read.
            url: where it lies.
            facts: its size, and what else the file system tells.
            has_head: it begins with a header, which is fetched in one request.
        """
        self.url = url
        self.size = int(facts["size"])
        self.mark = mark_of(facts)
        self._reader = reader
        self._path = facts["name"]
        self._has_head = has_head
        self._head: bytes | None = None
        self._lock = threading.Lock()
        self._used = False

    @property
    def retries(self) -> int:  # type: ignore[override]
        """How often something of its source had to be fetched again so far."""
        return self._reader.patience.retries

    def fetch_head(self) -> None:
        """Fetches the first bytes, if they are not there yet."""
        with self._lock:
            if self._head is None:
                head = bytearray(min(HEAD, self.size))
                self._fetch(0, memoryview(head))
                self._head = bytes(head)

    def read_into(self, offset: int, out: memoryview) -> None:
        """As for every file; what cannot be read after several tries is an error."""
        end = offset + len(out)
        if end > self.size:
            raise FileFormatError(
                f"{self.url}: truncated: ends at byte {self.size}, {end - self.size} more were "
                "expected"
            )
        if self._has_head and offset < HEAD:
            self.fetch_head()
            assert self._head is not None
            known = self._head[offset : min(end, HEAD)]
            out[: len(known)] = known
            offset, out = offset + len(known), out[len(known) :]
        if len(out):
            self._used = True
            self._read_body(offset, out)

    def _read_body(self, offset: int, out: memoryview) -> None:
        if self._reader.cache.read_into(self.url, offset, out):
            return
        pieces = [(at, out[at : at + PIECE]) for at in range(0, len(out), PIECE)]
        if len(pieces) == 1:
            self._fetch(offset, out)
        else:
            fetches = [
                self._reader.pool.submit(self._fetch, offset + at, piece) for at, piece in pieces
            ]
            for fetch in fetches:
                fetch.result()
        self._reader.cache.add(self.url, offset, out)

    def _fetch(self, offset: int, out: memoryview) -> None:
        """One request, as often as it takes."""

        def fetch() -> None:
            data = self._reader.fs.cat_file(self._path, start=offset, end=offset + len(out))
            if len(data) > len(out):
                raise FileFormatError(
                    f"{self.url}: the server does not answer requests for a range of bytes; "
                    "download the files first"
                )
            if len(data) < len(out):
                raise ShortReadError(f"{len(data)} of {len(out)} bytes came")
            out[:] = data

        if len(out):
            self._reader.patience.with_retries(fetch, self._failure)

    def _failure(self, reason: str) -> FileFormatError:
        return FileFormatError(f"{self.url}: cannot be read: {reason}")

    def check_unchanged(self) -> None:
        """Asks the store again, if anything but the header was read."""
        if not self._used:
            return
        facts = self._reader.patience.with_retries(
            lambda: self._reader.fs.info(self._path), self._failure
        )
        if (int(facts["size"]), mark_of(facts)) != (self.size, self.mark):
            raise FileFormatError(
                f"{self.url}: has changed while it was read, so that the result was given up; run "
                "it again once nothing writes to the file"
            )


@contextlib.contextmanager
def opened_reader(fs: Any, folder: Path, limit: int) -> Iterator[Reader]:
    """A reader whose cache lies in a directory."""
    folder.mkdir()
    reader = Reader(fs, RangeCache(folder, limit))
    try:
        yield reader
    finally:
        reader.close()
