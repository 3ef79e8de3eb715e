# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files through a GPU: reading, both copies, kernels and writing at the same time.

    reader threads    preadv pieces of the next chunks straight into a ring of pinned buffers
    upload stream     pinned -> device, as soon as a chunk is read
    compute stream    kernels; the calling thread launches them and never waits for one
    writer threads    each its own stream and pinned buffer: device -> pinned, then the file

Order between them is kept by CUDA events on the device. The host waits in three places only: for
a chunk that is not read yet, for a pinned buffer whose upload is not done, and for device memory
that the writers have not emptied yet.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from fp4kit.cpu.threads import thread_count
from fp4kit.io.read.source import Source
from fp4kit.io.stream import chunks
from fp4kit.io.stream.chunks import Bytes, Chunk, DeviceBackend
from fp4kit.io.stream.gpu_memory import Cuda, Slots, slot_size

#: A chunk: long enough that its launches take less host time than its transfer.
GPU_CHUNK_BYTES = 32 << 20


#: Pinned buffers that are read ahead: pinning costs time, so no more than hide the latencies.
RING = 6


#: What one reader thread reads at a time; a chunk is read by several.
PIECE_BYTES = 4 << 20


MAX_READERS = 8


#: One writes while the others fetch from the device.
MAX_WRITERS = 3


#: Device memory for tensors that wait for their amax: up to this size they are read only once.
RESIDENT_BYTES = 1 << 30


#: Device memory for results that are not written yet.
RESULT_BYTES = 512 << 20


Key = TypeVar("Key")


@dataclass
class Staged:
    """A chunk in pinned memory.

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

    def views(self) -> list[Bytes]:
        """The parts."""
        return [self.host[at : at + count] for at, count in self.spans]

    @property
    def count(self) -> int:
        """Bytes of all parts."""
        return sum(count for _, count in self.spans)


@dataclass(frozen=True)
class Resident(Generic[Key]):
    """A chunk on the device, for the compute stream."""

    key: Key
    parts: list[Any]
    buffer: Any


class GpuPipeline:
    """Moves chunks through the device. Use it as a context manager inside that of the writer."""

    def __init__(self, engine: DeviceBackend, sources: Sequence[Source], *, writers: int) -> None:
        """Starts the threads.

        Args:
            engine: on a GPU.
            sources: what is read; archives by one thread, as their streams have a position.
            writers: 1 where writes must stay in order.
        """
        self._cuda = Cuda(engine.origin)
        threads = thread_count()
        parallel = all(source.concurrent for source in sources)
        readers = max(min(MAX_READERS, threads // 2), 2) if parallel else 1
        self._readers = ThreadPoolExecutor(readers, "fp4kit-read")
        self._writers = ThreadPoolExecutor(min(writers, MAX_WRITERS), "fp4kit-write")
        # Writers count bytes, and the kernel locks a file while it is written anyway.
        self._one_write = threading.Lock()
        self._stores: deque[Future[None]] = deque()
        self._local = threading.local()
        with self._cuda.scope():
            self._upload = self._cuda.stream()
            self.compute = self._cuda.stream()
            quarter = self._cuda.free_bytes() // 4
        self.resident_bytes = min(RESIDENT_BYTES, quarter)
        self._inputs = Slots(self._cuda, self.resident_bytes + 4 * GPU_CHUNK_BYTES)
        self._results = Slots(self._cuda, min(RESULT_BYTES, quarter))

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Makes the compute stream current: for kernels and for what they allocate."""
        return self._cuda.scope(self.compute)

    def gather(self, values: Sequence[Any]) -> Any:
        """Device arrays of one element as one array."""
        return self._cuda.gather(values)

    # ---------------------------------------------------------------------------------------------
    # In
    # ---------------------------------------------------------------------------------------------

    def staged(self, work: Sequence[Chunk[Key]]) -> Iterator[tuple[Key, Staged]]:
        """Reads chunks in order and ahead.

        Yields:
            The chunk's key and its bytes, for :meth:`upload` or :meth:`store_host` before the next.
        """
        if not work:
            return
        largest = max(_size(chunk) for chunk in work)
        ring: list[Future[Bytes] | Staged] = [
            self._readers.submit(self._cuda.pinned, max(largest, 1))
            for _ in range(min(RING, len(work)))
        ]
        # Two are left out: the one being launched, and the one before it, still being uploaded.
        depth = max(len(ring) - 2, 0)
        ahead: deque[tuple[Key, Staged]] = deque()
        for number, chunk in enumerate(work):
            last = ring[number % len(ring)]
            if isinstance(last, Staged):
                if last.release is not None:
                    last.release()
                staged = self._read(chunk, last.host)
            else:
                staged = self._read(chunk, last.result())
            ring[number % len(ring)] = staged
            ahead.append((chunk.key, staged))
            if len(ahead) > depth:
                yield self._ready(*ahead.popleft())
        while ahead:
            yield self._ready(*ahead.popleft())

    def _ready(self, key: Key, staged: Staged) -> tuple[Key, Staged]:
        for read in staged.reads:
            read.result()
        self._check()
        return key, staged

    def _read(self, chunk: Chunk[Any], buffer: Bytes) -> Staged:
        staged = Staged(buffer, [])
        at = 0
        for part in chunk.parts:
            count = part.stop - part.start
            staged.spans.append((at, count))
            piece = PIECE_BYTES if part.source.divisible(part.name) else max(count, 1)
            for begin in range(0, count, piece):
                end = min(begin + piece, count)
                view = buffer[at + begin : at + end].data
                read = self._readers.submit(part.source.read, part.name, part.start + begin, view)
                staged.reads.append(read)
            at += chunks.aligned(count)
        return staged

    def upload(self, key: Key, staged: Staged) -> Resident[Key]:
        """Starts the copy of a chunk to the device; the compute stream waits for it."""
        at, count = staged.spans[-1]
        size = at + count
        buffer, free = self._inputs.take(max(size, 1), self._check)
        with self._cuda.scope():
            if free is not None:
                self._upload.wait_event(free)
            self._cuda.upload(staged.host[:size], buffer[:size], self._upload)
            done = self._cuda.record(self._upload)
            self.compute.wait_event(done)
        staged.release = done.synchronize
        return Resident(key, [buffer[at : at + count] for at, count in staged.spans], buffer)

    def free(self, chunk: Resident[Any]) -> None:
        """Gives a chunk's memory back after the kernels launched so far."""
        with self._cuda.scope():
            self._inputs.give(chunk.buffer, self._cuda.record(self.compute))

    # ---------------------------------------------------------------------------------------------
    # Out
    # ---------------------------------------------------------------------------------------------

    def result(self, counts: Sequence[int]) -> tuple[Any, list[Any]]:
        """Device memory for results of some sizes: the buffer, and its parts."""
        ends = np.cumsum([chunks.aligned(count) for count in counts]).tolist()
        # The host has seen its last use end.
        buffer, _ = self._results.take(ends[-1], self._check)
        starts = [0, *ends[:-1]]
        parts = [buffer[at : at + n] for at, n in zip(starts, counts, strict=True)]
        return buffer, parts

    def store(
        self, buffer: Any, counts: Sequence[int], write: Callable[[list[Bytes]], None]
    ) -> None:
        """Has a writer thread fetch results once the kernels launched so far are done, and write.

        Args:
            buffer: from :meth:`result`.
            counts: sizes, as given there.
            write: called with the parts on the host, by one thread at a time.
        """
        with self._cuda.scope():
            done = self._cuda.record(self.compute)
        self._stores.append(self._writers.submit(self._fetch, buffer, tuple(counts), done, write))

    def _fetch(
        self,
        buffer: Any,
        counts: tuple[int, ...],
        done: Any,
        write: Callable[[list[Bytes]], None],
    ) -> None:
        ends = np.cumsum([chunks.aligned(count) for count in counts]).tolist()
        size = ends[-1]
        try:
            with self._cuda.scope():
                local = self._local
                if not hasattr(local, "stream"):
                    local.stream, local.host = self._cuda.stream(), np.empty(0, np.uint8)
                if len(local.host) < size:
                    local.host = np.empty(0, np.uint8)
                    local.host = self._cuda.pinned(slot_size(size))
                local.stream.wait_event(done)
                self._cuda.download(buffer[:size], local.host[:size], local.stream)
                self._cuda.record(local.stream).synchronize()
        finally:
            self._results.give(buffer, None)
        starts = [0, *ends[:-1]]
        views = [local.host[at : at + n] for at, n in zip(starts, counts, strict=True)]
        with self._one_write:
            write(views)

    def store_host(self, staged: Staged, write: Callable[[Bytes], None]) -> None:
        """Has a writer thread write a chunk that needs no device."""

        def task() -> None:
            with self._one_write:
                for view in staged.views():
                    write(view)

        future = self._writers.submit(task)
        self._stores.append(future)
        staged.release = future.result

    def _check(self) -> None:
        """Raises what went wrong in a writer thread."""
        while self._stores and self._stores[0].done():
            self._stores.popleft().result()

    def finish(self) -> None:
        """Waits until everything is computed and handed to the writer."""
        while self._stores:
            self._stores.popleft().result()
        self.compute.synchronize()

    def __enter__(self) -> GpuPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=kind is not None)
        # Memory goes back when this object does: nothing may be under way by then.
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self._upload.synchronize()
            self.compute.synchronize()


def _size(chunk: Chunk[Any]) -> int:
    return sum(chunks.aligned(part.stop - part.start) for part in chunk.parts)
