# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Largest magnitudes: of an array, or of each row or column of it."""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit.backend.interface import Plan
from fp4kit.reference import codecs

from .buffers import read_only
from .elements import index
from .jit import jit
from .threads import run


class Bits(NamedTuple):
    """Bit patterns of an element type, in unsigned integers of its width.

    Attributes:
        magnitude: mask of all but the sign.
        infinity: sign-cleared infinity; NaN lies above.
    """

    magnitude: np.unsignedinteger
    infinity: np.unsignedinteger


BITS = {
    "float32": Bits(np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)),
    "float16": Bits(np.uint16(0x7FFF), np.uint16(0x7C00)),
    "bfloat16": Bits(np.uint16(0x7FFF), np.uint16(0x7F80)),
}


@jit
def largest_magnitude(data, begin, end, magnitude_mask):
    """Largest sign-cleared bit pattern of uint16 (bfloat16, float16) or uint32 (float32) data.

    The mask has the type of the data: at their own width LLVM compares 16 of the former at once.
    """
    largest = data.dtype.type(0)
    for i in range(index(begin), index(end)):
        largest = data.dtype.type(max(largest, data.dtype.type(data[i] & magnitude_mask)))
    return largest


@jit
def largest_number(data, begin, end, bits):
    """The same with NaN (patterns above infinity) left out."""
    largest = data.dtype.type(0)
    for i in range(index(begin), index(end)):
        magnitude = data.dtype.type(data[i] & bits.magnitude)
        if magnitude <= bits.infinity:
            largest = data.dtype.type(max(largest, magnitude))
    return largest


@jit
def row_magnitudes(data, begin, end, cols, bits, out):
    """Largest sign-cleared bit pattern of each of rows begin..end, NaN left out."""
    for row in range(index(begin), index(end)):
        first, last = row * index(cols), (row + index(1)) * index(cols)
        largest = largest_magnitude(data, first, last, bits.magnitude)
        if largest > bits.infinity:
            largest = largest_number(data, first, last, bits)
        out[row] = largest


@jit
def column_magnitudes(data, begin, end, cols, bits, out):
    """The same of each of columns begin..end; `out` starts as zeros."""
    zero = data.dtype.type(0)
    for start in range(index(0), index(data.size), index(cols)):
        for col in range(index(begin), index(end)):
            magnitude = data.dtype.type(data[start + col] & bits.magnitude)
            known = magnitude if magnitude <= bits.infinity else zero
            out[col] = max(out[col], known)


def _patterns(x: np.ndarray, dtype: str) -> np.ndarray:
    """Flat bit patterns of a raw array."""
    return read_only(x.reshape(-1).view(np.uint32 if dtype == "float32" else np.uint16))


def _values(patterns: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of bit patterns."""
    return codecs.to_float32(patterns if dtype == "bfloat16" else patterns.view(dtype), dtype)


def scan(x: np.ndarray, dtype: str) -> tuple[np.ndarray, bool]:
    """(float32 (1,) amax with NaN ignored, whether everything is finite) in one pass."""
    data, bits = _patterns(x, dtype), BITS[dtype]
    parts = run(lambda b, e: largest_magnitude(data, b, e, bits.magnitude), data.size, 1)
    largest = max(parts, default=0)
    finite = largest < bits.infinity
    if largest > bits.infinity:
        largest = max(run(lambda b, e: largest_number(data, b, e, bits), data.size, 1))
    return _values(np.array([largest], data.dtype), dtype), bool(finite)


def count_nonfinite(x: np.ndarray, dtype: str) -> tuple[int, int, int]:
    """`Backend.count_nonfinite`."""
    flat = x.reshape(-1)

    def count(begin: int, end: int) -> tuple[int, int, int]:
        values = codecs.to_float32(flat[begin:end], dtype)
        bad = np.flatnonzero(~np.isfinite(values))
        nans = int(np.isnan(values).sum())
        return nans, len(bad) - nans, begin + int(bad[0]) if len(bad) else -1

    parts = run(count, flat.size, 1)
    first = next((part[2] for part in parts if part[2] >= 0), -1)
    return sum(part[0] for part in parts), sum(part[1] for part in parts), first


def plan_amax(plan: Plan, x: np.ndarray, dtype: str) -> np.ndarray:
    """`Backend.plan_amax` of a plan that does not rotate."""
    if plan.has_plain_amax or not x.size:
        return np.resize(scan(x, dtype)[0], plan.scales)
    largest: np.ndarray = vector_amaxes(plan, x, dtype).reshape(plan.scales, -1).max(axis=1)
    return largest


def vector_amaxes(plan: Plan, x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 amax of each row or column, NaN ignored, from the bits of the elements."""
    data, bits, (rows, cols) = _patterns(x, dtype), BITS[dtype], x.shape
    out = np.zeros(plan.vectors, data.dtype)
    kernel = column_magnitudes if plan.is_columnwise else row_magnitudes
    length = rows if plan.is_columnwise else cols
    run(lambda begin, end: kernel(data, begin, end, cols, bits, out), plan.vectors, length)
    return _values(out, dtype)
