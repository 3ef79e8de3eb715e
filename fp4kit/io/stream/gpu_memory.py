# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Pinned and device memory for :mod:`fp4kit.io.stream.gpu_pipeline`, and the calls that move it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fp4kit import arrays
from fp4kit.arrays.frameworks import Origin
from fp4kit.io.stream.chunks import Bytes


class Cuda:
    """The calls of CUDA that the pipeline makes, through CuPy."""

    def __init__(self, origin: Origin) -> None:
        import cupy

        self._cupy = cupy
        self._origin = origin

    @contextlib.contextmanager
    def scope(self, stream: Any = None) -> Iterator[None]:
        """Makes the device, and a stream, current in this thread."""
        with arrays.device_scope(self._origin), stream or contextlib.nullcontext():
            yield

    def stream(self) -> Any:
        """A stream that does not wait for the default one."""
        return self._cupy.cuda.Stream(non_blocking=True)

    def record(self, stream: Any) -> Any:
        """An event after everything on a stream so far; waiting for it leaves the core free."""
        event = self._cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        return event

    def pinned(self, count: int) -> Bytes:
        """Page-locked host bytes, which the device copies from and to by itself."""
        with self.scope():
            # Not from CuPy's pool, which would keep the pages locked until the process ends.
            memory = self._cupy.cuda.PinnedMemory(count)
            pointer = self._cupy.cuda.PinnedMemoryPointer(memory, 0)
        return np.ndarray((count,), np.uint8, pointer)

    def memory(self, count: int) -> Any:
        """Device bytes that are the driver's again when they are dropped."""
        # CuPy's pool would hand them out again in the order of one stream; here several use them.
        pointer = self._cupy.cuda.MemoryPointer(self._cupy.cuda.Memory(count), 0)
        return self._cupy.ndarray((count,), np.uint8, memptr=pointer)

    def free_bytes(self) -> int:
        """Device memory that nobody uses."""
        return int(self._cupy.cuda.runtime.memGetInfo()[0])

    def gather(self, values: Sequence[Any]) -> Any:
        """Device arrays of one element as one array, on the current stream."""
        result = self._cupy.empty(len(values), values[0].dtype)
        for index, value in enumerate(values):
            result[index : index + 1].data.copy_from_device_async(value.data, value.nbytes)
        return result

    def upload(self, host: Bytes, device: Any, stream: Any) -> None:
        """Starts a copy of pinned bytes to the device."""
        device.data.copy_from_host_async(host.ctypes.data, len(host), stream)

    def download(self, device: Any, host: Bytes, stream: Any) -> None:
        """Starts a copy of device bytes to pinned ones."""
        device.data.copy_to_host_async(host.ctypes.data, len(host), stream)


def slot_size(count: int) -> int:
    """Buffers have few different sizes, so that one that is free mostly fits."""
    return 1 << max(count - 1, (1 << 20) - 1).bit_length()


class Slots:
    """Device buffers of bounded size in all, each with the event after its last use."""

    def __init__(self, cuda: Cuda, budget: int) -> None:
        self._cuda = cuda
        self._budget = budget
        self._total = 0
        self._taken = 0
        self._free: list[tuple[Any, Any]] = []
        self._changed = threading.Condition()

    def take(self, count: int, check: Callable[[], None]) -> tuple[Any, Any]:
        """A buffer of at least `count` bytes, and the event that comes before its next use.

        Args:
            count: bytes.
            check: called while waiting; raises if nothing will ever be given back.
        """
        with self._changed:
            while True:
                fitting = [pair for pair in self._free if len(pair[0]) >= count]
                if fitting:
                    pair = min(fitting, key=lambda pair: len(pair[0]))
                    self._free = [other for other in self._free if other is not pair]
                    self._taken += 1
                    return pair
                size = slot_size(count)
                if self._total + size > self._budget:
                    self._drop()
                # One too large for the budget is alone.
                if self._total + size <= self._budget or not self._taken:
                    buffer = self._cuda.memory(size)
                    self._total += size
                    self._taken += 1
                    return buffer, None
                self._changed.wait(0.2)
                check()

    def _drop(self) -> None:
        """Frees what is too small for what is needed now."""
        while self._free:
            buffer, event = self._free.pop()
            if event is not None:
                event.synchronize()
            self._total -= len(buffer)
            del buffer

    def give(self, buffer: Any, event: Any) -> None:
        """Gives a buffer back; whoever takes it next has to wait for the event."""
        with self._changed:
            self._free.append((buffer, event))
            self._taken -= 1
            self._changed.notify()
