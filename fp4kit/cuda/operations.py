# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and column sums of the CUDA backend."""

from __future__ import annotations

import numpy as np

from fp4kit.backend.jobs import Job, Prologue, RawArray
from fp4kit.backend.operations import Operations

from . import activations as cuda_activations
from . import ready as cuda_ready
from .launch import quantizes_flat, rows_are_vectors
from .run import address_of, addresses_of, current_device, is_aligned, scratch


def sources_of(prologue: Prologue, width: int) -> tuple[int, int]:
    """Addresses of gate and factor of a result of so many columns."""
    pointer, other = prologue.x.data.ptr, address_of(prologue.other)
    return cuda_activations.sources(prologue.activation, pointer, other, width, prologue.dtype)


def _sums_of(rows: int, sums: RawArray) -> RawArray:
    """Where one launch puts the sums of so many rows: `sums` itself, or float32 rows of them."""
    left = cuda_activations.partial_rows(rows)
    return sums if left == 1 else scratch((left, sums.size), np.float32)


class CudaOperations(Operations):
    """The part of the CUDA backend that serves activations and column sums.

    Private methods take the address that the amax of their result goes to, 0 for none.
    """

    def activate(self, prologue: Prologue, out: RawArray) -> None:
        self._activate(prologue, out, 0)

    def _activate(self, prologue: Prologue, out: RawArray, measured: int) -> None:
        gate, factor = sources_of(prologue, out.shape[1])
        target = out.data.ptr
        aligned = is_aligned(gate | factor | target)
        name, dtype = prologue.activation, prologue.dtype
        assert name is not None
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
            pointer, (rows, cols) = values.data.ptr, values.shape
            vector = rows_are_vectors(cols, dtype) and is_aligned(pointer)
            target = _sums_of(rows, out)
            ready = cuda_ready.column_sums(device, None, dtype, rows, cols, vector)
            ready.launch(pointer, 0, 0, target.data.ptr, measured)
            values = target
            # What follows are sums.
            dtype, measured = "float32", 0

    def activate_with_sums(self, prologue: Prologue, out: RawArray) -> None:
        self._activate_with_sums(prologue, out, 0)

    def _activate_with_sums(self, prologue: Prologue, out: RawArray, measured: int) -> None:
        name, dtype, sums = prologue.activation, prologue.dtype, prologue.sums
        gate, factor = sources_of(prologue, out.shape[1])
        addresses = gate, factor, out.data.ptr
        aligned = is_aligned(gate | factor | addresses[2])
        if not (rows_are_vectors(out.shape[1], dtype) and aligned):
            self._activate(prologue, out, measured)
            self.column_sums(out, dtype, sums)
            return
        target = _sums_of(out.shape[0], sums)
        ready = cuda_ready.column_sums(current_device(), name, dtype, *out.shape, True)
        ready.launch(*addresses, target.data.ptr, measured)
        if target is not sums:
            self.column_sums(target, "float32", sums)

    def activate_measured(self, prologue: Prologue, out: RawArray, wants: bool) -> RawArray | None:
        scan = scratch(2, np.uint32, clear=True) if wants else None
        measured = address_of(scan)
        if prologue.activation is None:
            self._column_sums(prologue.x, prologue.dtype, prologue.sums, measured)
        elif prologue.sums is None:
            self._activate(prologue, out, measured)
        else:
            self._activate_with_sums(prologue, out, measured)
        return scan

    def quantize_activated_rows(
        self, prologue: Prologue, sources: tuple[int, int], job: Job
    ) -> bool:
        """`quantize_activated` of plain, whole rows, if they can be.

        Args:
            prologue: the function, or none; the sums, or none.
            sources: addresses of gate and factor.
            job: of the rows.
        """
        plan, name, dtype, sums = job.plan, prologue.activation, prologue.dtype, prologue.sums
        results = addresses_of(job)
        gate, factor = sources
        vector = is_aligned(gate | factor | results[1]) and rows_are_vectors(plan.cols, dtype)
        if not plan.is_plain or not quantizes_flat(plan, plan.scales, vector):
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
