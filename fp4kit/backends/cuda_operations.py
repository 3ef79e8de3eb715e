# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and column sums of the CUDA backend."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from . import cuda_activations
from .cuda_launch import rows_are_vectors
from .cuda_ready import Ready
from .cuda_run import is_aligned, scratch
from .operations import Operations, RawArray


@lru_cache(maxsize=1024)
def _activate(device: int, name: str, dtype: str, rows: int, width: int, aligned: bool) -> Ready:
    """For (gate, factor, out)."""
    vector = aligned and cuda_activations.can_vector(name, width, dtype)
    launch = cuda_activations.activate_launch(name, dtype, rows, width, vector)
    return Ready(device, launch, addresses=3)


@lru_cache(maxsize=1024)
def _column_sums(
    device: int, name: str | None, dtype: str, rows: int, cols: int, vector: bool
) -> Ready:
    """For (gate, factor, out, sums)."""
    launch = cuda_activations.column_sums_launch(name, dtype, rows, cols, vector)
    return Ready(device, launch, addresses=4)


def _sources(
    name: str, x: RawArray, dtype: str, other: RawArray | None, out: RawArray
) -> tuple[int, int]:
    second = 0 if other is None else other.data.ptr
    return cuda_activations.sources(name, x.data.ptr, second, out.shape[1], dtype)


def _partial_sums(
    device: int,
    name: str | None,
    dtype: str,
    addresses: tuple[int, int, int],
    shape: tuple[int, int],
    vector: bool,
    sums: RawArray,
) -> RawArray:
    """One launch for (gate, factor, out); `sums` itself if it leaves one row, else float32 rows."""
    rows, cols = shape
    left = cuda_activations.partial_rows(rows)
    target = sums
    if left > 1:
        target = scratch((left, cols), np.float32)
    _column_sums(device, name, dtype, rows, cols, vector).launch(*addresses, target.data.ptr)
    return target


class CudaOperations(Operations):
    """The part of the CUDA backend that serves activations and column sums."""

    def activate(
        self, name: str, x: RawArray, dtype: str, other: RawArray | None, out: RawArray
    ) -> None:
        gate, factor = _sources(name, x, dtype, other, out)
        target = out.data.ptr
        aligned = is_aligned(gate | factor | target)
        ready = _activate(x.device.id, name, dtype, *out.shape, aligned)
        ready.launch(gate, factor, target)

    def column_sums(self, x: RawArray, dtype: str, out: RawArray) -> None:
        if not x.size:
            out.data.memset_async(0, out.nbytes)
            return
        device, values = x.device.id, x
        while values is not out:
            source = values.data.ptr
            vector = rows_are_vectors(values.shape[1], dtype) and is_aligned(source)
            values = _partial_sums(device, None, dtype, (source, 0, 0), values.shape, vector, out)
            dtype = "float32"

    def activate_with_sums(
        self,
        name: str,
        x: RawArray,
        dtype: str,
        other: RawArray | None,
        out: RawArray,
        sums: RawArray,
    ) -> None:
        gate, factor = _sources(name, x, dtype, other, out)
        target = out.data.ptr
        if not (rows_are_vectors(out.shape[1], dtype) and is_aligned(gate | factor | target)):
            super().activate_with_sums(name, x, dtype, other, out, sums)
            return
        addresses = gate, factor, target
        partial = _partial_sums(x.device.id, name, dtype, addresses, out.shape, True, sums)
        if partial is not sums:
            self.column_sums(partial, "float32", sums)
