# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups on CUDA: every operation is one launch, however many members there are.

A table of few members is a parameter of the kernel. A longer one is sent ahead of it, from pinned
memory and without waiting: between two kernels such a copy takes 10 to 12 us.
"""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4kit.arrays.capture import is_capturing, keep_if_captured
from fp4kit.backend.groups import GroupedPlan
from fp4kit.backend.interface import Backend, Job, Prologue, RawArray
from fp4kit.group_shapes import GroupShapes

from . import (
    member_tables as cuda_member_tables,
)
from . import (
    members as cuda_members,
)
from . import (
    ready as cuda_ready,
)
from . import (
    run as cuda_run,
)
from .member_tables import MemberTable, Sides, sides_of
from .members import MemberLaunch
from .operations import sources_of
from .run import address_of, addresses_of, are_aligned, current_device, is_aligned, scratch

#: Tables that are on their way, with the events that tell of their arrival: the cache of tables may
#: forget one before the device has read it.
_on_their_way: deque[tuple[Any, MemberTable]] = deque()
_lock = Lock()


class TableArgument(NamedTuple):
    """A table as a kernel takes it.

    Attributes:
        value: one element of the table's kind: CuPy passes such an array by value.
        memory: what `value` points into, if it does. Hold it until the kernel is launched: before,
            other memory could be had in its place.
    """

    value: NDArray[np.void]
    memory: RawArray | None


def _argument(table: MemberTable) -> TableArgument:
    return _sent(table) if table.few is None else TableArgument(table.few, None)


def _sent(table: MemberTable) -> TableArgument:
    """ManyMembers (members.cuh): where the parts of the table are on the device, and its count."""
    import cupy

    target = scratch(table.words.size, table.words.dtype)
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
    address = target.data.ptr
    members = address + table.records * table.words.itemsize
    image = np.array([address, members, table.count], np.int64)
    return TableArgument(image.view(np.dtype((np.void, image.nbytes))), target)


def _run(launch: MemberLaunch, before: tuple[int, ...], after: tuple[int, ...] = ()) -> None:
    table = _argument(launch.table)
    arguments = (*before, table.value, *after, *launch.scalars)
    cuda_run.launch(launch.instance, launch.grid, arguments)


class CudaGrouped(Backend):
    """The part of the CUDA backend that takes groups."""

    def grouped_amax(self, plan: GroupedPlan, x: RawArray, dtype: str, out: RawArray) -> None:
        if not out.size:
            return
        out.data.memset_async(0, out.nbytes)
        if cuda_member_tables.has_elements(plan):
            vector = cuda_member_tables.takes_vectors(plan, dtype) and are_aligned(x)
            launch = cuda_members.amax_launch(plan, dtype, vector)
            _run(launch, (x.data.ptr,), (out.data.ptr,))

    def quantize_grouped(self, jobs: tuple[Job, ...]) -> None:
        plan, x, dtype = jobs[0].plan, jobs[0].x, jobs[0].dtype
        if not plan.members or not cuda_member_tables.has_elements(plan):
            return
        aligned = are_aligned(x, *(job.packed for job in jobs))
        vector = cuda_member_tables.takes_vectors(plan, dtype) and aligned
        self._quantize(None, (x.data.ptr, 0), dtype, jobs, vector)

    def quantize_grouped_activated(
        self, prologue: Prologue, starts: tuple[int, ...], jobs: tuple[Job, ...]
    ) -> bool:
        plan, name, dtype = jobs[0].plan, prologue.activation, prologue.dtype
        if not plan.members or not cuda_member_tables.has_elements(plan):
            return True
        if name == "swiglu" and not cuda_member_tables.is_halved(plan, starts):
            return False
        inputs = (prologue.x,) if prologue.other is None else (prologue.x, prologue.other)
        aligned = are_aligned(*inputs, *(job.packed for job in jobs))
        if not (cuda_member_tables.takes_vectors(plan, dtype) and aligned):
            return False
        # Kernels find the factors of swiglu themselves: members have widths of their own.
        return self._quantize(name, sources_of(prologue, 0), dtype, jobs, True)

    def _quantize(
        self,
        name: str | None,
        sources: tuple[int, int],
        dtype: str,
        jobs: tuple[Job, ...],
        vector: bool,
    ) -> bool:
        """All members, perhaps activated; False if there is no kernel for that.

        Args:
            name: the function, or None: then there always is a kernel.
            sources: addresses of gate and factor.
            dtype: element type.
            jobs: of one direction, or of the rows and the columns; some member is not empty.
            vector: whether everything but the scales allows 16-byte accesses.
        """
        sides = sides_of(tuple(job.plan for job in jobs))
        if vector and self._quantize_flat(sides, sources, dtype, addresses_of(jobs[0]), name):
            return True
        shared = cuda_members.wide_shared(sides, dtype, vector)
        wide = cuda_ready.has_shared_memory(current_device(), shared)
        if name is not None and not wide:
            return False
        addresses = dict.fromkeys(Sides._fields, (0, 0, 0))
        for job in jobs:
            if cuda_member_tables.any_padded(job.plan):
                job.block_scale.data.memset_async(0, job.block_scale.nbytes)
            addresses["column" if job.plan is sides.column else "row"] = addresses_of(job)
        kernel, table = cuda_members.quantize_launch(sides, dtype, vector, wide, name)
        asked = shared if wide else 0
        grid, taken = cuda_run.grid_of_tiles(kernel, table.grid, asked)
        sent = _argument(table)
        arguments = cuda_members.quantize_arguments(
            sides,
            sources,
            sent.value,
            table.pieces,
            addresses["row"],
            addresses["column"],
            jobs[0].seed,
        )
        cuda_run.launch(kernel, grid, (address_of(taken), *arguments), asked)
        return True

    def _quantize_flat(
        self,
        sides: Sides,
        sources: tuple[int, int],
        dtype: str,
        results: tuple[int, int, int],
        name: str | None,
    ) -> bool:
        """The fast path of rows, perhaps of an activation; whether there is one."""
        processors = cuda_ready.multiprocessors(current_device())
        launch = cuda_members.quantize_flat_launch(sides, dtype, processors, name)
        if launch is None:
            return False
        linear = cuda_member_tables.first_plan(sides.any).scale_layout == "linear"
        _run(launch, (*(sources if linear else sources[:1]), *results))
        return True

    def dequantize_grouped(self, job: Job, out: RawArray, dtype: str) -> None:
        plan = job.plan
        if plan.members and cuda_member_tables.has_elements(plan):
            aligned = are_aligned(job.packed, out)
            vector = cuda_member_tables.takes_vectors(plan, dtype) and aligned
            launch = cuda_members.dequantize_launch(plan, dtype, vector)
            second, packed, block_scale = addresses_of(job)
            _run(launch, (packed, block_scale, second, out.data.ptr))

    def activate_grouped(
        self,
        prologue: Prologue,
        source: GroupShapes,
        group: GroupShapes,
        out: RawArray,
        wants: bool,
    ) -> RawArray | None:
        """One launch, and with sums one more for every 1024-fold of rows of the tallest member."""
        name, dtype, sums = prologue.activation, prologue.dtype, prologue.sums
        if sums is None and not wants:
            super().activate_grouped(prologue, source, group, out, wants)
            return None
        levels = cuda_member_tables.sum_levels(source, group, dtype)
        gate, factor = sources_of(prologue, 0)
        aligned = is_aligned(gate | factor | out.data.ptr)
        if name is not None and levels and not (aligned and levels[0].vector):
            super().activate_grouped(prologue._replace(sums=None), source, group, out, False)
            if sums is None:
                return None  # an amax alone has a faster pass
            return self.activate_grouped(
                Prologue(None, out, dtype, None, sums), group, group, out, wants
            )
        scan = scratch(len(group.dims) + 1, np.uint32, clear=True) if wants else None
        amaxes, nonfinite = address_of(scan), 0 if scan is None else address_of(scan[-1:])
        if sums is None:
            levels = levels[:1]
        elif sums.size and sum(level.table.count for level in levels[:1]) < len(group.dims):
            sums.data.memset_async(0, sums.nbytes)  # some members have no rows
        arrays = gate, factor, out.data.ptr
        kept = []  # until what reads them is launched: its table could take their memory
        for level in levels:
            between = sums is not None and level is not levels[-1]
            target = scratch(level.size, np.float32) if between else sums
            kept.append(target)
            vector, table = level.vector and is_aligned(arrays[0]), level.table
            kernel = cuda_members.column_sums_kernel(name, dtype, vector, table.kind)
            gate, factor, result = arrays
            sent = _argument(table)
            arguments = (gate, factor, sent.value, result, address_of(target))
            cuda_run.launch(kernel, table.grid, (*arguments, amaxes, nonfinite))
            # What follows are sums.
            name, dtype, arrays = None, "float32", (address_of(target), 0, 0)
            amaxes = nonfinite = 0
        return scan
