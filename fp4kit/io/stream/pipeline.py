# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks of a file through a device: read ahead, computed, written behind.

An operation is written once, against :class:`Pipeline`, which is the CPU's; that of a GPU is in
:mod:`fp4kit.io.stream.gpu_pipeline`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fp4kit.backend.interface import Backend

from . import chunks
from .chunks import Bytes, Chunk, Key, aligned


@dataclass
class Staged:
    """A chunk in host memory.

    Attributes:
        host: the bytes of its parts, each at an aligned position.
        spans: position and length of each part.
        reads: what fills it.
        release: waits until its memory may be used again.
    """

    host: Bytes
    spans: list[tuple[int, int]]
    reads: list[Future[None]] = field(default_factory=list)
    release: Callable[[], object] | None = None

    @property
    def parts(self) -> list[Bytes]:
        """The bytes of each part."""
        return [self.host[at : at + count] for at, count in self.spans]

    @property
    def count(self) -> int:
        """Bytes of all parts."""
        return sum(count for _, count in self.spans)


@dataclass(frozen=True)
class Resident:
    """A chunk on the device: its parts, and the buffer that they lie in."""

    parts: list[Any]
    buffer: Any = None


def spans(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Position and length of parts that lie in one buffer, each at an aligned position."""
    found, at = [], 0
    for count in counts:
        found.append((at, count))
        at += aligned(count)
    return found


def end(positions: Sequence[tuple[int, int]]) -> int:
    """Bytes of the buffer that parts lie in."""
    return positions[-1][0] + aligned(positions[-1][1]) if positions else 0


def read_ahead(work: Iterable[Chunk[Key]]) -> Iterator[tuple[Key, Staged]]:
    """Reads chunks in order, the next one in the background while the last one is in use.

    Yields:
        The chunk's key and its bytes, which are valid until the next step.
    """
    buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
    waiting: tuple[Key, Future[Staged]] | None = None
    with ThreadPoolExecutor(1, "fp4kit-read") as pool:
        for number, chunk in enumerate(work):
            positions = spans(part.stop - part.start for part in chunk.parts)
            if len(buffers[number % 2]) < end(positions):
                # The old one goes first, or both would count.
                buffers[number % 2] = np.empty(0, np.uint8)
                buffers[number % 2] = np.empty(end(positions), np.uint8)
            future = pool.submit(_fill, chunk, Staged(buffers[number % 2], positions))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = chunk.key, future
        if waiting is not None:
            yield waiting[0], waiting[1].result()


def _fill(chunk: Chunk[Any], staged: Staged) -> Staged:
    for part, view in zip(chunk.parts, staged.parts, strict=True):
        if len(view):
            part.source.read(part.name, part.start, view.data)
    return staged


class Pipeline:
    """Moves chunks through the CPU: two buffers to read into, and two sets of results.

    The results of one chunk are written in the background while the next one is computed. Use it
    as a context manager inside that of the writer.

    Attributes:
        chunk_bytes: what tensors are cut into; None as :func:`chunks.row_ranges` does.
        pending: chunks whose error sums may be under way.
    """

    chunk_bytes: int | None = None
    pending = 0

    def __init__(self, *, ordered: bool = False) -> None:
        """Starts the threads.

        Args:
            ordered: writes must come in order, as in an archive.
        """
        self._ordered = ordered
        self._writer = ThreadPoolExecutor(1, "fp4kit-write")
        self._buffers: tuple[dict[int, Bytes], dict[int, Bytes]] = ({}, {})
        self._turn = 0
        self._writing: Future[None] | None = None

    def reads_whole(self, nbytes: int) -> bool:
        """Whether tensors of some bytes in all are read as one chunk."""
        return nbytes <= chunks.WHOLE_BYTES

    def holds(self, nbytes: Sequence[int]) -> bool:
        """Whether chunks of some bytes can wait on the device for one another."""
        return False

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """What kernels are launched under."""
        return contextlib.nullcontext()

    def staged(self, work: Iterable[Chunk[Key]]) -> Iterator[tuple[Key, Staged]]:
        """Reads chunks in order and ahead.

        Yields:
            The chunk's key and its bytes, for :meth:`upload` or :meth:`store_host` before the next.
        """
        return read_ahead(work)

    def largest(self, values: Sequence[Any], kernels: Backend) -> Any:
        """The largest of float32 (1,) device arrays."""
        return np.maximum.reduce(values)

    def upload(self, staged: Staged) -> Resident:
        """A chunk on the device, for the kernels that are launched next."""
        return Resident(staged.parts)

    def free(self, chunk: Resident) -> None:
        """Gives a chunk's memory back after the kernels launched so far."""

    def result(self, counts: Sequence[int]) -> tuple[Any, list[Any]]:
        """Device memory for results of some sizes: the buffer, and its parts."""
        buffers = self._buffers[self._turn]
        for use, count in enumerate(counts):
            if use not in buffers or len(buffers[use]) < count:
                # The old one goes first, or both would count.
                buffers.pop(use, None)
                buffers[use] = np.empty(count, np.uint8)
        parts = [buffers[use][:count] for use, count in enumerate(counts)]
        return parts, parts

    def drop(self, buffer: Any) -> None:
        """Gives back results that nobody wants written, once the kernels launched so far ran."""

    def store(
        self, buffer: Any, counts: Sequence[int], write: Callable[[list[Bytes]], None]
    ) -> None:
        """Has results written once the kernels launched so far are done.

        Args:
            buffer: from :meth:`result`.
            counts: sizes, as given there.
            write: called with the parts on the host, by one thread at a time.
        """
        self.submit(partial(write, buffer))

    def submit(self, write: Callable[[], None]) -> None:
        """Starts a write once the last one is done, whose error would be raised here."""
        self.finish()
        self._writing = self._writer.submit(write)
        self._turn = 1 - self._turn

    def store_host(self, staged: Staged, write: Callable[[Bytes], None]) -> None:
        """Has a chunk written that needs no device."""
        if self._ordered:
            self.finish()
        for part in staged.parts:
            write(part)

    def finish(self) -> None:
        """Waits until everything is computed and handed to the writer."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.shutdown()
