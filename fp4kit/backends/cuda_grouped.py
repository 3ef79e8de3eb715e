# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups on CUDA: every operation is one launch, however many members there are.

A call sends its table of members ahead of the kernel, from pinned memory and without waiting.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

import numpy as np

from fp4kit.arrays import is_capturing, keep_if_captured

from . import cuda_members, cuda_ready
from .base import NO_SEED, RawArray, Seed
from .cuda_launch import VECTOR
from .cuda_members import MemberLaunch, MemberTable, Sides, sides_of
from .grouped import GroupedPlan

#: Tables that are on their way, with the events that tell of their arrival: the cache of tables may
#: forget one before the device has read it.
_on_their_way: deque[tuple[Any, MemberTable]] = deque()
_lock = Lock()


def _send(table: MemberTable) -> tuple[int, int, int]:
    """Arguments of kernels: addresses on the device of a table's two parts, and its members."""
    import cupy

    from .cuda import _scratch

    target = _scratch(table.words.size, table.words.dtype)
    stream = cupy.cuda.get_current_stream()
    # CuPy's own copy refuses to be captured, as it cannot know that the source stays alive.
    runtime = cupy.cuda.runtime
    source, size = table.pinned.ctypes.data, table.words.nbytes
    runtime.memcpyAsync(target.data.ptr, source, size, runtime.memcpyHostToDevice, stream.ptr)
    if is_capturing():
        keep_if_captured(table)
    else:
        arrival = cupy.cuda.Event(disable_timing=True)
        arrival.record(stream)
        with _lock:
            _on_their_way.append((arrival, table))
            while _on_their_way and _on_their_way[0][0].done:
                _on_their_way.popleft()
    # The array is freed in the order of this stream, so that its memory is good for the kernel.
    address = target.data.ptr
    return address, address + table.records * table.words.itemsize, table.count


def _address(array: RawArray | None) -> int:
    return 0 if array is None else array.data.ptr


def _aligned(*arrays: RawArray) -> bool:
    return all(array.data.ptr % VECTOR == 0 for array in arrays)


def _run(launch: MemberLaunch, before: tuple[int, ...], after: tuple[int, ...] = ()) -> None:
    from .cuda import _launch

    arguments = (*before, *_send(launch.table), *after, *launch.scalars)
    _launch(launch.instance, launch.table.grid, arguments)


class CudaGrouped:
    """The part of the CUDA backend that takes groups."""

    def grouped_amax(self, plan: GroupedPlan, x: RawArray, dtype: str, out: RawArray) -> None:
        if not out.size:
            return
        out.data.memset_async(0, out.nbytes)
        if cuda_members.has_elements(plan):
            vector = cuda_members.takes_vectors(plan, dtype) and _aligned(x)
            launch = cuda_members.amax_launch(plan, dtype, vector)
            _run(launch, (x.data.ptr,), (out.data.ptr,))

    def quantize_grouped(
        self,
        plans: tuple[GroupedPlan, ...],
        x: RawArray,
        dtype: str,
        seconds: tuple[RawArray | None, ...],
        packeds: tuple[RawArray, ...],
        block_scales: tuple[RawArray, ...],
        seed: Seed = NO_SEED,
    ) -> None:
        from .cuda import _current_device, _launch

        if not plans[0].members or not cuda_members.has_elements(plans[0]):
            return
        sides = sides_of(plans)
        vector = cuda_members.takes_vectors(plans[0], dtype) and _aligned(x, *packeds)
        flat = cuda_members.quantize_flat_launch(sides, dtype) if vector else None
        if flat is not None:
            arrays = (x.data.ptr, _address(seconds[0]), packeds[0].data.ptr)
            _run(flat, (*arrays, block_scales[0].data.ptr))
            return
        for plan, block_scale in zip(plans, block_scales, strict=True):
            if cuda_members.any_padded(plan):
                block_scale.data.memset_async(0, block_scale.nbytes)
        addresses = dict.fromkeys(Sides._fields, (0, 0, 0))
        for plan, second, packed, block_scale in zip(
            plans, seconds, packeds, block_scales, strict=True
        ):
            name = "column" if plan is sides.column else "row"
            addresses[name] = (_address(second), packed.data.ptr, block_scale.data.ptr)
        kernel, table = cuda_members.quantize_launch(sides, dtype, vector)
        arguments = cuda_members.quantize_arguments(
            sides,
            x.data.ptr,
            _send(table),
            table.pieces,
            addresses["row"],
            addresses["column"],
            seed,
        )
        resident = cuda_ready.resident_blocks(_current_device(), kernel)
        _launch(kernel, (min(*table.grid, resident),), arguments)

    def dequantize_grouped(
        self,
        plan: GroupedPlan,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
        out: RawArray,
        dtype: str,
    ) -> None:
        if plan.members and cuda_members.has_elements(plan):
            vector = cuda_members.takes_vectors(plan, dtype) and _aligned(packed, out)
            launch = cuda_members.dequantize_launch(plan, dtype, vector)
            arrays = (packed.data.ptr, block_scale.data.ptr, _address(second), out.data.ptr)
            _run(launch, arrays)

    def grouped_column_sums(
        self,
        dims: tuple[tuple[int, int], ...],
        starts: tuple[int, ...],
        x: RawArray,
        dtype: str,
        out: RawArray,
    ) -> None:
        """A launch for every 1024-fold of rows of the tallest member."""
        from .cuda import _launch, _scratch

        if not out.size:
            return
        out.data.memset_async(0, out.nbytes)  # members without rows
        levels = cuda_members.sum_levels(dims, starts, dtype)
        values = x
        for level in levels:
            sums = out if level is levels[-1] else _scratch(level.size, np.float32)
            kernel = cuda_members.column_sums_kernel(dtype, level.vector and _aligned(values))
            arguments = (values.data.ptr, *_send(level.table), sums.data.ptr)
            _launch(kernel, level.table.grid, arguments)
            values, dtype = sums, "float32"
