# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: which kernel, which arguments. Kernels are in `kernels_cu/`.

Everything is launched on CuPy's current stream and device (the caller enters those of the array).
Nothing waits for the device, except `scan`, `count_nonfinite` and the error sums, whose results
the host needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from fp4kit.arrays import device_copy
from fp4kit.backend.interface import (
    ErrorSums,
    Job,
    PendingSums,
    Plan,
    Prologue,
    RawArray,
    Request,
)
from fp4kit.formats import SECOND_LEVEL_SCALES

from . import (
    compile as cuda_module,
)
from . import (
    device as cuda_device,
)
from . import (
    launch as cuda_launch,
)
from . import (
    ready as cuda_ready,
)
from . import (
    run as cuda_run,
)
from . import (
    variants as cuda_variants,
)
from .geometry import THREADS
from .grouped import CudaGrouped
from .matmul import CudaMatmul
from .measured import MeasuredRows
from .operations import CudaOperations, sources_of
from .residual import CudaResidual
from .run import address_of, addresses_of, current_device, is_aligned, scratch
from .tiles import CudaTiles


def _count(second: RawArray | None) -> int:
    return 1 if second is None else int(second.size)


def _sums(partials: RawArray, elements: int, blocks: int = 0) -> ErrorSums:
    """Adds the rows of partial sums up, on the host and always in the same order."""
    rows = partials if isinstance(partials, np.ndarray) else partials.get()
    with np.errstate(all="ignore"):  # infinities and NaN of the data are part of the result
        totals = dict(zip(cuda_launch.ERROR_FIELDS, rows.sum(axis=0), strict=True))
        max_error = float(rows[:, -1].max())
    return ErrorSums(
        elements=elements,
        sum_x2=float(totals["sum_x2"]),
        sum_y2=float(totals["sum_y2"]),
        sum_xy=float(totals["sum_xy"]),
        sum_d2=float(totals["sum_d2"]),
        max_abs_error=max_error,
        saturated=int(totals["saturated"]),
        zero_codes=int(totals["zero_codes"]),
        blocks=blocks,
        scale_underflow=int(totals["scale_underflow"]),
        scale_subnormal=int(totals["scale_subnormal"]),
    )


class CudaBackend(CudaOperations, CudaGrouped, CudaMatmul, CudaResidual, CudaTiles, MeasuredRows):
    """CUDA kernels through CuPy, for arrays that already are on a device."""

    name = "cuda"

    @cached_property
    def _unavailable(self) -> str | None:
        return cuda_device.reason()

    def unavailable_reason(self) -> str | None:
        return self._unavailable

    def refusal(self, request: Request) -> str | None:
        if request.device_kind != "cuda":
            return (
                f"works on device arrays, not on {request.device}; copy it to the device first: "
                "cupy.asarray(x)"
            )
        device = int(request.device.split(":")[1])
        if cuda_device.capability(device) < cuda_device.MIN_CAPABILITY:
            return cuda_device.too_old(device)
        return None

    def devices(self) -> list[str]:
        return cuda_device.usable_devices()

    def details(self) -> dict[str, str]:
        return cuda_device.details()

    def scratch(self, shape: tuple[int, ...], dtype: Any) -> RawArray:
        return scratch(shape, dtype)

    # --------------------------------------------------------------------------------------------
    # The second level
    # --------------------------------------------------------------------------------------------

    def amax(self, x: RawArray, dtype: str, groups: int) -> RawArray:
        result = scratch(groups, np.float32, clear=True)
        if x.size:
            ready = cuda_ready.amax(current_device(), dtype, x.size, groups, x.itemsize)
            ready.launch(x.data.ptr, result.data.ptr, 0)
        return result

    def scan(self, x: RawArray, dtype: str) -> tuple[RawArray, bool]:
        result = scratch(2, np.uint32, clear=True)
        if x.size:
            ready = cuda_ready.amax(current_device(), dtype, x.size, 1, x.itemsize)
            pointer = result.data.ptr
            ready.launch(x.data.ptr, pointer, pointer + result.itemsize)
        return result[:1].view(np.float32), not int(result[1].get())

    def count_nonfinite(self, x: RawArray, dtype: str) -> tuple[int, int, int]:
        counts = scratch(3, np.uint64, clear=True)
        if x.size:
            grid = (min(-(-x.size // THREADS), cuda_launch.ERROR_BLOCKS),)
            cuda_run.launch(cuda_module.count_nonfinite_kernel(dtype), grid, (x, x.size, counts))
        nans, infinities, from_end = (int(value) for value in counts.get())
        return nans, infinities, x.size - from_end if from_end else -1

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        assert plan.recipe is not None
        if plan.recipe.keeps == "amax":
            return amax
        result = scratch(amax.size, np.float32)
        instance = cuda_module.second_level_kernel(dtype)
        arguments = (amax, result, amax.size, plan.recipe.index)
        cuda_run.launch(instance, cuda_launch.grid_for(amax.size), arguments)
        return result

    def convert_second_level(self, value: RawArray, source: str, target: str) -> RawArray:
        if source == target or not value.size:
            return value
        result = scratch(value.shape, np.float32)
        numbers = [SECOND_LEVEL_SCALES.index(name) for name in (source, target)]
        instance = cuda_module.convert_second_level_kernel()
        arguments = (value, result, value.size, *numbers)
        cuda_run.launch(instance, cuda_launch.grid_for(value.size), arguments)
        return result

    # --------------------------------------------------------------------------------------------
    # Quantize and dequantize
    # --------------------------------------------------------------------------------------------

    def quantize(self, job: Job) -> None:
        self._ready((job,))(job.x.data.ptr)

    def quantize_both(self, rowwise: Job, columnwise: Job) -> None:
        self._ready((rowwise, columnwise))(rowwise.x.data.ptr)

    def ready(self, jobs: tuple[Job, ...], *, measured: bool) -> Callable[[int], None] | None:
        return self.ready_measured(jobs[0]) if measured else self._ready(jobs)

    def _ready(self, jobs: tuple[Job, ...]) -> Callable[[int], None]:
        """The kernel for jobs of one array, ready for its address and for others aligned alike."""
        job = jobs[0]
        plan, source, codes = job.plan, job.x.data.ptr, job.packed.data.ptr
        aligned = is_aligned(source | codes)
        vector = aligned and cuda_launch.rows_are_vectors(plan.cols, job.dtype)
        flat = plan.is_plain or cuda_launch.quantizes_flat(plan, plan.scales, vector)
        if len(jobs) > 1 or not flat:
            return self.ready_deviating(jobs, vector)
        random = cuda_launch.seed_arguments(plan, job.seed)
        scales = _count(job.second)
        launch = cuda_ready.quantize(current_device(), plan, job.dtype, scales, aligned).launch
        rest = (*addresses_of(job), *random)
        return lambda address: launch(address, *rest)

    def quantize_activated(self, prologue: Prologue, jobs: tuple[Job, ...]) -> bool:
        sources = sources_of(prologue, jobs[0].plan.cols)
        if len(jobs) == 1 and self.quantize_activated_rows(prologue, sources, jobs[0]):
            return True
        if prologue.activation is None or prologue.sums is not None:
            return False
        return self.quantize_activated_tiles(prologue, sources, jobs)

    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        plan, second = job.plan, job.second
        if plan.is_columnwise:
            launch = cuda_variants.dequantize_launch(plan, dtype)
            arrays = (job.packed, job.block_scale, 0 if second is None else second, out)
            cuda_run.launch(launch.instance, launch.grid, (*arrays, *launch.scalars))
            return
        codes, target = job.packed.data.ptr, out.data.ptr
        aligned = is_aligned(codes | target)
        ready = cuda_ready.dequantize(current_device(), plan, dtype, _count(second), aligned)
        ready.launch(codes, job.block_scale.data.ptr, address_of(second), target)

    def quantize_dequantize(self, job: Job, out: RawArray, out_dtype: str) -> None:
        plan, dtype = job.plan, job.dtype
        fused = plan.is_plain and dtype == out_dtype
        fused = fused and cuda_launch.rows_are_vectors(plan.cols, dtype)
        if fused and is_aligned(job.x.data.ptr | out.data.ptr):
            ready = cuda_ready.fused(current_device(), plan, dtype, _count(job.second))
            ready.launch(job.x.data.ptr, address_of(job.second), out.data.ptr)
            return
        # Rare: not worth two more kernels for each pair of types.
        super().quantize_dequantize(job, out, out_dtype)

    # --------------------------------------------------------------------------------------------
    # Scale layouts
    # --------------------------------------------------------------------------------------------

    def swizzle(self, scales: RawArray, layout: str, out: RawArray) -> None:
        if layout == "linear":
            out.data.copy_from_device_async(scales.data, scales.nbytes)
            return
        rows, cols = scales.shape
        words = cols % 4 == 0 and scales.data.ptr % 4 == 0 and is_aligned(out.data.ptr)
        grid, tiles = cuda_launch.swizzle_geometry(rows, cols, layout)
        cuda_run.launch(
            cuda_module.swizzle_kernel(layout, words), grid, (scales, out, rows, cols, *tiles)
        )

    def unswizzle(self, swizzled: RawArray, layout: str, out: RawArray) -> None:
        if layout == "linear":
            out.data.copy_from_device_async(swizzled.data, swizzled.nbytes)
            return
        rows, cols = out.shape
        words = cols % 4 == 0 and out.data.ptr % 4 == 0 and is_aligned(swizzled.data.ptr)
        grid, tiles = cuda_launch.swizzle_geometry(rows, cols, layout)
        cuda_run.launch(
            cuda_module.unswizzle_kernel(layout, words), grid, (swizzled, out, rows, cols, *tiles)
        )

    # --------------------------------------------------------------------------------------------
    # Error sums
    # --------------------------------------------------------------------------------------------

    def error_sums(self, x: RawArray, x_dtype: str, y: RawArray, y_dtype: str) -> ErrorSums:
        partials = scratch((cuda_launch.ERROR_BLOCKS, len(cuda_launch.ERROR_FIELDS)), np.float64)
        # A ragged end would cross the array's: those few sizes take the single accesses.
        vectors = [
            int(cuda_launch.rows_are_vectors(array.size, name) and is_aligned(array.data.ptr))
            for array, name in ((x, x_dtype), (y, y_dtype))
        ]
        cuda_run.launch(
            cuda_module.error_sums_kernel(x_dtype, y_dtype),
            (cuda_launch.ERROR_BLOCKS,),
            (x, y, x.size, *vectors, partials),
        )
        return _sums(partials, x.size)

    def quantized_error_sums(self, job: Job) -> ErrorSums:
        return self.quantized_error_sums_async(job).result()

    def quantized_error_sums_async(self, job: Job) -> PendingSums:
        import cupy

        plan, x, dtype, second = job.plan.decoding, job.x, job.dtype, job.second
        packed, block_scale = job.packed, job.block_scale
        if plan.is_columnwise:
            # Counted as the rows of the transpose are; a copy is what that takes.
            x = device_copy(x.T)
            if not plan.transposes:
                packed = device_copy(packed.T)
                if plan.scale_layout == "linear":
                    block_scale = device_copy(block_scale.T)
            scheme = plan.scheme.replace(direction="rowwise")
            plan = replace(plan, rows=plan.cols, cols=plan.rows, scheme=scheme)
        partials = scratch((cuda_launch.ERROR_BLOCKS, len(cuda_launch.ERROR_FIELDS)), np.float64)
        vector = cuda_launch.rows_are_vectors(plan.cols, dtype) and is_aligned(x.data.ptr)
        launch = cuda_launch.quantized_error_launch(plan, dtype, _count(second), vector)
        pointer = 0 if second is None else second
        arguments = (x, packed, block_scale, pointer, *launch.scalars, partials)
        cuda_run.launch(launch.instance, launch.grid, arguments)
        # Only a copy to pinned memory does not wait.
        memory = cupy.cuda.alloc_pinned_memory(partials.nbytes)
        rows = np.ndarray(partials.shape, partials.dtype, memory)
        stream = cupy.cuda.get_current_stream()
        partials.data.copy_to_host_async(rows.ctypes.data, rows.nbytes, stream)
        done = cupy.cuda.Event(block=True, disable_timing=True)
        done.record(stream)

        def result() -> ErrorSums:
            done.synchronize()
            return _sums(rows, plan.rows * plan.cols, plan.rows * plan.blocks)

        return PendingSums(result)
