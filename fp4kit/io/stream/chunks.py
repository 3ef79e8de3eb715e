# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors in chunks: how they are cut, and progress over them.

Peak memory is two input buffers and one set of outputs, whatever the size of the file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as with_changes
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp4kit import arrays
from fp4kit.backend.interface import Plan
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.layout import TILE

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


def plan_ranges(plan: Plan, row_bytes: int, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Cuts the rows of a plan as :func:`row_ranges` does; those of a range share a second level."""
    rows = plan.rows_per_scale if plan.groups_rows else plan.rows
    for start in range(0, plan.rows, rows) if rows else ():
        for first, last in row_ranges(rows, row_bytes, row_step(plan), limit):
            yield start + first, start + last


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
    return with_changes(plan, rows=rows, rows_per_scale=1 if plan.grid else rows)


def scale_range(plan: Plan, first: int, last: int) -> tuple[int, int]:
    """The bytes of the scales of some rows, `first` being a multiple of `row_step`."""
    rows, cols = plan.scale_shape
    if plan.has_one_scale:
        return 0, plan.format.scales.bytes
    row, step = cols * plan.format.scales.bytes, 1 if plan.grid is None else row_step(plan)
    # The last chunk takes the layout's padding rows with it.
    stop = rows if last == plan.rows else last // step
    return first // step * row, stop * row


def scale_bytes(plan: Plan) -> int:
    """Bytes of all scales."""
    return prod(plan.scale_shape) * plan.format.scales.bytes


def scales_view(data: Any, plan: Plan) -> Any:
    """Bytes of scales as the array that backends take."""
    return data.view(plan.format.scales.dtype).reshape(plan.scale_shape)


def row_step(plan: Plan) -> int:
    """Rows that must stay together so that their scales are one piece."""
    if plan.grid is not None:
        return 1 if plan.has_one_scale else plan.grid[0]
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


def rows_view(data: Bytes, dtype: str, rows: int, cols: int) -> Any:
    """Bytes of a float tensor as the raw (rows, cols) array that backends take."""
    return data.view(arrays.RAW_DTYPES[dtype]).reshape(rows, cols)


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
