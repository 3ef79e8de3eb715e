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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from fp4kit.arrays.frameworks import Origin
from fp4kit.backend.interface import Backend
from fp4kit.cpu.threads import thread_count
from fp4kit.io.read.source import Source

from . import chunks
from .chunks import Bytes, Chunk, Key
from .device import DeviceBackend
from .gpu_memory import Cuda, Slots, slot_size
from .pipeline import Pipeline, Resident, Staged, end, spans

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


class GpuPipeline(Pipeline):
    """Moves chunks through the device."""

    pending = 16  # each holds 72 KiB

    def __init__(self, origin: Origin, source: Source, *, ordered: bool) -> None:
        """Starts the threads.

        Args:
            origin: the GPU.
            source: what is read; an archive by one thread, as its streams have a position.
            ordered: writes must come in order.
        """
        self._cuda = Cuda(origin)
        self.chunk_bytes = min(GPU_CHUNK_BYTES, chunks.CHUNK_BYTES)
        threads = thread_count()
        readers = max(min(MAX_READERS, threads // 2), 2) if source.concurrent else 1
        self._readers = ThreadPoolExecutor(readers, "fp4kit-read")
        self._writers = ThreadPoolExecutor(1 if ordered else MAX_WRITERS, "fp4kit-write")
        # Writers count bytes, and the kernel locks a file while it is written anyway.
        self._one_write = threading.Lock()
        self._stores: deque[Future[None]] = deque()
        self._local = threading.local()
        with self._cuda.scope():
            self._upload = self._cuda.stream()
            self._compute = self._cuda.stream()
            quarter = self._cuda.free_bytes() // 4
        self._resident_bytes = min(RESIDENT_BYTES, quarter)
        self._inputs = Slots(self._cuda, self._resident_bytes + 4 * GPU_CHUNK_BYTES)
        self._results = Slots(self._cuda, min(RESULT_BYTES, quarter))

    def reads_whole(self, nbytes: int) -> bool:
        return False

    def holds(self, nbytes: Sequence[int]) -> bool:
        return len(nbytes) * slot_size(max(nbytes)) <= self._resident_bytes

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return self._cuda.scope(self._compute)

    def largest(self, values: Sequence[Any], kernels: Backend) -> Any:
        if len(values) == 1:
            return values[0]
        return kernels.amax(self._cuda.gather(values).reshape(1, -1), "float32", 1)

    # ---------------------------------------------------------------------------------------------
    # In
    # ---------------------------------------------------------------------------------------------

    def staged(self, work: Iterable[Chunk[Key]]) -> Iterator[tuple[Key, Staged]]:
        listed = list(work)
        if not listed:
            return
        largest = max(end(_spans(chunk)) for chunk in listed)
        ring: list[Future[Bytes] | Staged] = [
            self._readers.submit(self._cuda.pinned, max(largest, 1))
            for _ in range(min(RING, len(listed)))
        ]
        # Two are left out: the one being launched, and the one before it, still being uploaded.
        depth = max(len(ring) - 2, 0)
        ahead: deque[tuple[Key, Staged]] = deque()
        for number, chunk in enumerate(listed):
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
        staged = Staged(buffer, _spans(chunk))
        for part, view in zip(chunk.parts, staged.parts, strict=True):
            piece = PIECE_BYTES if part.source.divisible(part.name) else max(len(view), 1)
            for begin in range(0, len(view), piece):
                into = view[begin : begin + piece].data
                read = self._readers.submit(part.source.read, part.name, part.start + begin, into)
                staged.reads.append(read)
        return staged

    def upload(self, staged: Staged) -> Resident:
        size = sum(staged.spans[-1])
        buffer, free = self._inputs.take(max(size, 1), self._check)
        with self._cuda.scope():
            if free is not None:
                self._upload.wait_event(free)
            self._cuda.upload(staged.host[:size], buffer[:size], self._upload)
            done = self._cuda.record(self._upload)
            self._compute.wait_event(done)
        staged.release = done.synchronize
        return Resident([buffer[at : at + count] for at, count in staged.spans], buffer)

    def free(self, chunk: Resident) -> None:
        with self._cuda.scope():
            self._inputs.give(chunk.buffer, self._cuda.record(self._compute))

    # ---------------------------------------------------------------------------------------------
    # Out
    # ---------------------------------------------------------------------------------------------

    def result(self, counts: Sequence[int]) -> tuple[Any, list[Any]]:
        positions = spans(counts)
        # The host has seen its last use end.
        buffer, _ = self._results.take(end(positions), self._check)
        return buffer, [buffer[at : at + count] for at, count in positions]

    def drop(self, buffer: Any) -> None:
        # What uses it next comes after them on the same stream.
        self._results.give(buffer, None)

    def store(
        self, buffer: Any, counts: Sequence[int], write: Callable[[list[Bytes]], None]
    ) -> None:
        with self._cuda.scope():
            done = self._cuda.record(self._compute)
        self._stores.append(self._writers.submit(self._fetch, buffer, spans(counts), done, write))

    def _fetch(
        self,
        buffer: Any,
        positions: list[tuple[int, int]],
        done: Any,
        write: Callable[[list[Bytes]], None],
    ) -> None:
        size = end(positions)
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
        views = [local.host[at : at + count] for at, count in positions]
        with self._one_write:
            write(views)

    def store_host(self, staged: Staged, write: Callable[[Bytes], None]) -> None:

        def task() -> None:
            with self._one_write:
                for view in staged.parts:
                    write(view)

        future = self._writers.submit(task)
        self._stores.append(future)
        staged.release = future.result

    def _check(self) -> None:
        """Raises what went wrong in a writer thread."""
        while self._stores and self._stores[0].done():
            self._stores.popleft().result()

    def finish(self) -> None:
        while self._stores:
            self._stores.popleft().result()
        self._compute.synchronize()

    def __enter__(self) -> GpuPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=kind is not None)
        # Memory goes back when this object does: nothing may be under way by then.
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
            self._upload.synchronize()
            self._compute.synchronize()


def _spans(chunk: Chunk[Any]) -> list[tuple[int, int]]:
    return spans(part.stop - part.start for part in chunk.parts)


def open_pipeline(
    backend: DeviceBackend | None, source: Source, *, ordered: bool = False
) -> Pipeline:
    """What moves chunks of a source through a device.

    Args:
        backend: on the device; None if all is copied.
        source: what is read.
        ordered: writes must come in order, as in an archive.
    """
    if backend is not None and backend.on_gpu:
        return GpuPipeline(backend.origin, source, ordered=ordered)
    return Pipeline(ordered=ordered)
