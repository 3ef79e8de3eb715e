# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays as kernels take them: read-only, aligned, in whole blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, get_type_hints

import numpy as np

from fp4kit.backend.interface import Plan


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written.

    Kernels are compiled for such inputs alone, whether or not the caller's arrays can be written.
    """
    view = array.view()
    view.flags.writeable = False
    return view


def records(*numbers: Any) -> np.ndarray:
    """NamedTuples of numbers as an array of records, which is one argument to a kernel."""
    return read_only(np.array(list(numbers), _record_type(numbers[0].__class__)))


# numba knows a type of records by identity at once, and else by comparing its fields.
@cache
def _record_type(kind: type) -> np.dtype[Any]:
    fields = get_type_hints(kind).items()
    return np.dtype(
        [(n, _record_type(t) if issubclass(t, tuple) else t) for n, t in fields], align=True
    )


def padded_rows(data: np.ndarray, cols: int) -> np.ndarray:
    """Rows zero-padded to `cols`: a copy, or the data itself if there is nothing to pad."""
    if data.shape[1] == cols:
        return data
    result = np.zeros((data.shape[0], cols), data.dtype)
    result[:, : data.shape[1]] = data
    return result


@contextmanager
def aligned_output(out: np.ndarray, cols: int | None = None) -> Iterator[np.ndarray]:
    """Rows of `cols` aligned elements to fill: `out` itself, or a buffer that is copied to it."""
    width = out.shape[1] if cols is None else cols
    if out.shape[1] == width and out.flags.aligned:
        yield out
        return
    whole = np.empty((out.shape[0], width), out.dtype)
    yield whole
    out[...] = whole[:, : out.shape[1]]


def flat_or_empty(values: np.ndarray | None) -> np.ndarray:
    """Second-level scales, or weights of columns, as they lie; empty if there are none."""
    return read_only(np.empty(0, np.float32) if values is None else np.ascontiguousarray(values))


def code_words(packed: np.ndarray, plan: Plan) -> np.ndarray:
    """Packed codes as flat words of two elements: bytes of 4-bit codes, 16-bit words of others."""
    flat = packed.reshape(-1)
    return flat if plan.format.codes_per_byte == 2 else flat.view(np.uint16)
