# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and column sums of the CUDA backend."""

from __future__ import annotations

import numpy as np

from fp4kit.backend.interface import Plan
from fp4kit.backend.operations import Operations, RawArray

from . import activations as cuda_activations
from . import ready as cuda_ready
from .launch import quantizes_flat, rows_are_vectors
from .run import address_of, current_device, is_aligned, scratch


def sources_of(
    name: str | None, x: RawArray, dtype: str, other: RawArray | None, width: int
) -> tuple[int, int]:
    """Addresses of gate and factor of a result of so many columns."""
    return cuda_activations.sources(name, x.data.ptr, address_of(other), width, dtype)


def _sums_of(rows: int, sums: RawArray) -> RawArray:
    """Where one launch puts the sums of so many rows: `sums` itself, or float32 rows of them."""
    left = cuda_activations.partial_rows(rows)
    return sums if left == 1 else scratch((left, sums.size), np.float32)


def _partial_sums(
    device: int,
    name: str | None,
    dtype: str,
    addresses: tuple[int, int, int],
    shape: tuple[int, int],
    vector: bool,
    sums: RawArray,
    measured: int,
) -> RawArray:
    """One launch for (gate, factor, out); `sums` itself if it leaves one row, else float32 rows."""
    rows, cols = shape
    target = _sums_of(rows, sums)
    ready = cuda_ready.column_sums(device, name, dtype, rows, cols, vector)
    ready.launch(*addresses, target.data.ptr, measured)
    return target


class CudaOperations(Operations):
    """The part of the CUDA backend that serves activations and column sums.

    Private methods take the address that the amax of their result goes to, 0 for none.
    """

    def activate(
        self, name: str, x: RawArray, dtype: str, other: RawArray | None, out: RawArray
    ) -> None:
        self._activate(name, x, dtype, other, out, 0)

    def _activate(
        self,
        name: str,
        x: RawArray,
        dtype: str,
        other: RawArray | None,
        out: RawArray,
        measured: int,
    ) -> None:
        gate, factor = sources_of(name, x, dtype, other, out.shape[1])
        target = out.data.ptr
        aligned = is_aligned(gate | factor | target)
        ready = cuda_ready.activate(current_device(), name, dtype, *out.shape, aligned)
        ready.launch(gate, factor, target, measured)

    def column_sums(self, x: RawArray, dtype: str, out: RawArray) -> None:
        self._column_sums(x, dtype, out, 0)

    def _column_sums(self, x: RawArray, dtype: str, out: RawArray, measured: int) -> None:
        if not x.size:
            out.data.memset_async(0, out.nbytes)
            return
        device, values = current_device(), x
        while values is not out:
            addresses = values.data.ptr, 0, 0
            vector = rows_are_vectors(values.shape[1], dtype) and is_aligned(addresses[0])
            shape = values.shape
            values = _partial_sums(device, None, dtype, addresses, shape, vector, out, measured)
            # What follows are sums.
            dtype, measured = "float32", 0

    def activate_with_sums(
        self,
        name: str,
        x: RawArray,
        dtype: str,
        other: RawArray | None,
        out: RawArray,
        sums: RawArray,
    ) -> None:
        self._activate_with_sums(name, x, dtype, other, out, sums, 0)

    def _activate_with_sums(
        self,
        name: str,
        x: RawArray,
        dtype: str,
        other: RawArray | None,
        out: RawArray,
        sums: RawArray,
        measured: int,
    ) -> None:
        gate, factor = sources_of(name, x, dtype, other, out.shape[1])
        addresses = gate, factor, out.data.ptr
        aligned = is_aligned(gate | factor | addresses[2])
        if not (rows_are_vectors(out.shape[1], dtype) and aligned):
            self._activate(name, x, dtype, other, out, measured)
            self.column_sums(out, dtype, sums)
            return
        device = current_device()
        partial = _partial_sums(device, name, dtype, addresses, out.shape, True, sums, measured)
        if partial is not sums:
            self.column_sums(partial, "float32", sums)

    def activate_measured(
        self,
        name: str | None,
        x: RawArray,
        dtype: str,
        other: RawArray | None,
        out: RawArray,
        sums: RawArray | None,
        wants: bool,
    ) -> RawArray | None:
        scan = scratch(2, np.uint32, clear=True) if wants else None
        measured = address_of(scan)
        if name is None:
            self._column_sums(x, dtype, sums, measured)
        elif sums is None:
            self._activate(name, x, dtype, other, out, measured)
        else:
            self._activate_with_sums(name, x, dtype, other, out, sums, measured)
        return scan

    def quantize_activated_rows(
        self,
        name: str | None,
        plan: Plan,
        sources: tuple[int, int],
        dtype: str,
        results: tuple[int, int, int],
        sums: RawArray | None,
    ) -> bool:
        """`quantize_activated` of plain, whole rows, if they can be.

        Args:
            name: the function, or None.
            plan: of the rows.
            sources: addresses of gate and factor.
            dtype: element type.
            results: addresses of (second, packed, block_scale).
            sums: float32 (cols,), or None.
        """
        gate, factor = sources
        vector = is_aligned(gate | factor | results[1]) and rows_are_vectors(plan.cols, dtype)
        if plan.variant is not None or not quantizes_flat(plan, plan.scales, vector):
            return False
        device = current_device()
        if sums is None:
            assert name is not None
            ready = cuda_ready.quantize_activated(device, plan, dtype, name)
            ready.launch(*sources, *results)
            return True
        with_sums = cuda_ready.quantize_sums(device, plan, dtype, name)
        if with_sums is None:
            return False
        partial = _sums_of(plan.rows, sums)
        with_sums.launch(*sources, *results, partial.data.ptr)
        if partial is not sums:
            self.column_sums(partial, "float32", sums)
        return True
