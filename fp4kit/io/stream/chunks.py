# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors in pieces: how they are cut, read ahead, and handed to a backend.

Peak memory is two input buffers and one set of outputs, whatever the size of the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace as with_changes
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp4kit import arrays
from fp4kit.api.backends import select
from fp4kit.arrays.frameworks import Origin
from fp4kit.backend.interface import Backend, ErrorSums, Plan, Request
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.layout import TILE
from fp4kit.variant import Variant

#: A tensor up to this size is read once and processed whole.
WHOLE_BYTES = 128 << 20


#: A larger one is cut into chunks of rows of about this size.
CHUNK_BYTES = 64 << 20


Bytes = NDArray[np.uint8]


Key = TypeVar("Key")


Progress = Callable[[int, int], None]


#: Writes bytes of an output tensor: its name, the offset in it, the bytes.
Write = Callable[[str, int, Bytes], None]


def row_ranges(
    rows: int, row_bytes: int, step: int = 1, limit: int | None = None
) -> Iterator[tuple[int, int]]:
    """Cuts rows into ranges; every range but the last is a multiple of `step` rows.

    Args:
        rows: number of rows.
        row_bytes: bytes per row of whatever decides memory.
        step: 128 or 8 where swizzled scales must come out as one piece.
        limit: bytes of a range; None keeps tensors whole up to WHOLE_BYTES and cuts at CHUNK_BYTES.
    """
    if rows * row_bytes <= (WHOLE_BYTES if limit is None else limit):
        yield 0, rows
        return
    count = max((limit or CHUNK_BYTES) // (row_bytes * step), 1) * step
    for first in range(0, rows, count):
        yield first, min(first + count, rows)


def byte_ranges(tensor: SourceTensor, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Cuts the bytes of a tensor that is only copied, at rows where it has some."""
    nbytes = tensor.spec.nbytes
    # Without whole-byte rows of a bounded size any cut will do that keeps elements whole.
    row = tensor.row_bytes if len(tensor.spec.shape) > 1 else 0
    unit = row if 0 < row <= (limit or CHUNK_BYTES) else 64
    for first, last in row_ranges(-(-nbytes // unit), unit, limit=limit):
        yield first * unit, min(last * unit, nbytes)


def chunk_plan(plan: Plan, rows: int) -> Plan:
    """The plan for some rows of a tensor; the second level stays that of the whole."""
    return with_changes(plan, rows=rows, rows_per_scale=rows)


def scale_row_bytes(plan: Plan) -> int:
    """Bytes of block scales per row, layout padding of columns included."""
    return plan.blocks if plan.scale_layout == "linear" else plan.scale_shape[1]


def row_step(plan: Plan) -> int:
    """Rows that must stay together so that their scales are one piece."""
    return TILE[plan.scale_layout][0]


@dataclass(frozen=True)
class ByteRange:
    """A range of bytes of one tensor of a file."""

    source: Source
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk(Generic[Key]):
    """Parts that are read together, and what they are for."""

    key: Key
    parts: tuple[ByteRange, ...]


def aligned(count: int) -> int:
    """Bytes a part takes in a buffer, so that the next one begins at a whole vector."""
    return -(-count // 64) * 64


def _fill(chunk: Chunk[Any], buffer: Bytes) -> list[Bytes]:
    """Reads every part of a chunk into a buffer, each at an aligned position."""
    views, at = [], 0
    for part in chunk.parts:
        view = buffer[at : at + part.stop - part.start]
        if len(view):
            part.source.read(part.name, part.start, view.data)
        views.append(view)
        at += aligned(len(view))
    return views


def read_ahead(chunks: Iterable[Chunk[Key]]) -> Iterator[tuple[Key, list[Bytes]]]:
    """Reads chunks in order, the next one in the background while the last one is in use.

    Yields:
        The chunk's key, and the bytes of each of its parts; they are valid until the next step.
    """
    buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
    waiting: tuple[Key, Future[list[Bytes]]] | None = None
    with ThreadPoolExecutor(1, "fp4kit-read") as pool:
        for number, chunk in enumerate(chunks):
            size = sum(aligned(part.stop - part.start) for part in chunk.parts)
            if len(buffers[number % 2]) < size:
                # The old one goes first, or both would count.
                buffers[number % 2] = np.empty(0, np.uint8)
                buffers[number % 2] = np.empty(size, np.uint8)
            future = pool.submit(_fill, chunk, buffers[number % 2])
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = chunk.key, future
        if waiting is not None:
            yield waiting[0], waiting[1].result()


class WriteBehind:
    """Writes the results of one chunk in the background while the next one is computed.

    At most one write is under way, so that two sets of output buffers are enough: :meth:`buffer`
    hands them out in turn. Use it as a context manager inside that of the writer.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "fp4kit-write")
        self._buffers: tuple[dict[str, Bytes], dict[str, Bytes]] = ({}, {})
        self._turn = 0
        self._waiting: Future[None] | None = None

    def buffer(self, use: str, count: int) -> Bytes:
        """A buffer of `count` bytes, valid until what is submitted next is written."""
        buffers = self._buffers[self._turn]
        if use not in buffers or len(buffers[use]) < count:
            # The old one goes first, or both would count.
            buffers.pop(use, None)
            buffers[use] = np.empty(count, np.uint8)
        return buffers[use][:count]

    def submit(self, write: Callable[[], None]) -> None:
        """Starts a write once the last one is done, whose error would be raised here."""
        self.wait()
        self._waiting = self._pool.submit(write)
        self._turn = 1 - self._turn

    def wait(self) -> None:
        """Waits for the last write."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def rows_view(data: Bytes, dtype: str, rows: int, cols: int) -> Any:
    """Bytes of a float tensor as the raw (rows, cols) array that backends take."""
    return data.view(arrays.RAW_DTYPES[dtype]).reshape(rows, cols)


class DeviceBackend:
    """A backend on a device, fed with host chunks: the one place that copies to a GPU and back."""

    def __init__(
        self, device: str, dtypes: Iterable[str], operation: str, plans: Iterable[Plan]
    ) -> None:
        """Asks the backend about everything that will occur.

        Raises:
            BackendUnavailableError: with the reason, before any work.
        """
        number = "cuda:0" if device == "cuda" else device
        kinds: set[tuple[str | None, str | None, Variant | None]] = {
            (plan.format.name, plan.recipe.name if plan.recipe else None, plan.variant)
            for plan in plans
        }
        # What is quantized is measured as well.
        operations = ("error_stats", operation) if operation == "quantize" else (operation,)
        for dtype in set(dtypes) or {"float32"}:
            for kind in kinds or {(None, None, None)}:
                for asked in operations:
                    self.backend: Backend = select(Request(asked, number, dtype, *kind), None)
        framework = "numpy" if device == "cpu" else "cupy"
        self.origin = Origin(framework, number)
        self.xp = arrays.array_module(self.origin)
        self.on_gpu = self.origin.device_kind == "cuda"

    def put(self, host: Any) -> Any:
        """A host array on the device; itself on the CPU."""
        with arrays.device_scope(self.origin):
            return self.xp.asarray(host)

    def get(self, array: Any, host: Bytes) -> None:
        """Copies a device array into flat host bytes; nothing to do on the CPU."""
        if self.xp is not np:
            array.get(out=host.view(array.dtype).reshape(array.shape))

    def empty(self, host: Bytes, shape: tuple[int, ...], dtype: Any) -> Any:
        """A device array to fill; on the CPU it is the host buffer itself."""
        if self.xp is np:
            return host.view(dtype).reshape(shape)
        return self.xp.empty(shape, dtype)

    def scan(self, x: Any, dtype: str) -> tuple[np.float32, bool]:
        """Amax of a chunk on the device, and whether all of it is finite."""
        with arrays.device_scope(self.origin):
            amax, finite = self.backend.scan(x, dtype)
            return np.float32(float(amax[0])), finite

    def count_nonfinite(self, x: Any, dtype: str) -> tuple[int, int, int]:
        """NaN count, infinity count and flat index of the first of either in a chunk, or -1."""
        with arrays.device_scope(self.origin):
            return self.backend.count_nonfinite(x, dtype)

    def second_level(self, amax: np.float32, plan: Plan, dtype: str) -> NDArray[np.float32]:
        """The tensor's second-level scale, on the host, in the recipe's direction."""
        with arrays.device_scope(self.origin):
            value = self.backend.second_level(self.put(np.array([amax])), plan, dtype)
            return np.array([float(value[0])], np.float32)

    def quantize(
        self,
        plan: Plan,
        x: Any,
        dtype: str,
        second: NDArray[np.float32] | None,
        packed: Bytes,
        scale: Bytes,
    ) -> ErrorSums:
        """Quantizes rows on the device into host buffers; returns the sums of their errors."""
        with arrays.device_scope(self.origin):
            level = None if second is None else self.put(second)
            codes = self.empty(packed, plan.packed_shape, np.uint8)
            scales = self.empty(scale, plan.scale_shape, np.uint8)
            sums = self.backend.quantize_and_measure(plan, x, dtype, level, codes, scales)
            self.get(codes, packed)
            self.get(scales, scale)
            return sums

    def dequantize(
        self,
        plan: Plan,
        packed: Bytes,
        scale: Bytes,
        second: NDArray[np.float32] | None,
        out: Bytes,
        dtype: str,
    ) -> None:
        """Decodes codes and scales on the host into a host buffer of element type `dtype`."""
        with arrays.device_scope(self.origin):
            level = None if second is None else self.put(second)
            codes = self.put(packed.reshape(plan.packed_shape))
            scales = self.put(scale.reshape(plan.scale_shape))
            result = self.empty(out, (plan.rows, plan.cols), arrays.RAW_DTYPES[dtype])
            self.backend.dequantize(plan, codes, scales, level, result, dtype)
            self.get(result, out)

    def sums(self, x: Bytes, x_dtype: str, y: Bytes, y_dtype: str) -> ErrorSums:
        """Error sums of two runs of floats on the host."""
        with arrays.device_scope(self.origin):
            first, second = (
                self.put(rows_view(data, dtype, 1, -1))
                for data, dtype in ((x, x_dtype), (y, y_dtype))
            )
            return self.backend.error_sums(first, x_dtype, second, y_dtype)

    def quantized_sums(
        self,
        plan: Plan,
        x: Bytes,
        dtype: str,
        packed: Bytes,
        scale: Bytes,
        second: NDArray[np.float32] | None,
    ) -> ErrorSums:
        """Error sums of rows on the host and their codes."""
        with arrays.device_scope(self.origin):
            return self.backend.quantized_error_sums(
                plan,
                self.put(rows_view(x, dtype, plan.rows, plan.cols)),
                dtype,
                self.put(packed.reshape(plan.packed_shape)),
                self.put(scale.reshape(plan.scale_shape)),
                None if second is None else self.put(second),
            )


def rows_of(shape: tuple[int, ...]) -> int:
    """Product of the leading dimensions."""
    return prod(shape[:-1])


class Tally:
    """Counts bytes for a progress callback; several threads may."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0.0
        self._lock = threading.Lock()

    def add(self, count: float) -> None:
        """Reports more bytes as done."""
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(min(round(self._done), self._total), self._total)

    def scaled(self, factor: float) -> Tally:
        """One that counts in other units: `add(1)` of it is `add(factor)` of this one."""
        return _Scaled(self, factor)


class _Scaled(Tally):
    """ByteRange of the work of another tally, counted in other units."""

    def __init__(self, whole: Tally, factor: float) -> None:
        super().__init__(None, 0)
        self._whole = whole
        self._factor = factor

    def add(self, count: float) -> None:
        """Reports more bytes as done."""
        self._whole.add(count * self._factor)
