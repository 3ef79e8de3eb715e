# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: which kernel, which arguments. Kernels are in `kernels_cu/`.

Everything is launched on CuPy's current stream and device (the caller enters those of the array).
Nothing waits for the device, except `scan`, `count_nonfinite` and the error sums, whose results
the host needs.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import numpy as np

from fp4kit.arrays import keep_if_captured
from fp4kit.tensor import SECOND_LEVEL_DIRECTIONS

from . import cuda_launch, cuda_module, cuda_ready
from .base import Backend, ErrorSums, PendingSums, Plan, RawArray, Request

MIN_CUPY = (14, 2)
MIN_CAPABILITY = (7, 5)
PIP_ADVICE = "pip install 'fp4kit[cuda13]' (drivers for CUDA 13) or 'fp4kit[cuda12]'"
THREADS = (cuda_module.THREADS,)


def _number(version: str) -> tuple[int, ...]:
    """The leading integers of a version, `14.2.0rc1` giving (14, 2)."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _reason() -> str | None:
    """Why no CUDA device can be used here, with the fix."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            return f"CuPy cannot be imported ({error}); reinstall it: {PIP_ADVICE}"
        return f"CuPy is not installed; {PIP_ADVICE}"
    except Exception as error:  # a broken installation raises anything
        return f"CuPy cannot be imported ({error}); reinstall it: {PIP_ADVICE}"
    if _number(cupy.__version__)[:2] < MIN_CUPY:
        wanted = ".".join(map(str, MIN_CUPY))
        return f"CuPy {cupy.__version__} is too old, {wanted} is needed; {PIP_ADVICE}"
    runtime = cupy.cuda.runtime
    try:
        if runtime.driverGetVersion() == 0:
            return "no NVIDIA driver is installed (libcuda is missing)"
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"no CUDA device can be used: {error}"
    if count == 0:
        return "no CUDA device is visible (see CUDA_VISIBLE_DEVICES)"
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # the loader's error type depends on how the library is missing
        return f"NVRTC, which compiles the kernels, cannot be loaded ({error}); {PIP_ADVICE}"
    if all(_capability(number) < MIN_CAPABILITY for number in range(count)):
        return _too_old(0)
    return None


@cache
def _capability(device: int) -> tuple[int, int]:
    import cupy

    text = cupy.cuda.Device(device).compute_capability
    return int(text[:-1]), int(text[-1])


def _too_old(device: int) -> str:
    major, minor = _capability(device)
    wanted = ".".join(map(str, MIN_CAPABILITY))
    return f"device {device} has compute capability {major}.{minor}, {wanted} or newer is needed"


def _aligned(addresses: int) -> bool:
    """Whether vectors may be moved at all of some addresses, joined by `|`."""
    return addresses % cuda_launch.VECTOR == 0


def _current_device() -> int:
    import cupy

    number: int = cupy.cuda.runtime.getDevice()
    return number


def _launch(
    instance: cuda_module.Instance, grid: tuple[int, ...], arguments: tuple[Any, ...]
) -> None:
    function = cuda_module.function(_current_device(), instance)
    function(grid, THREADS, arguments)


def _scratch(shape: int | tuple[int, ...], dtype: Any, *, clear: bool = False) -> RawArray:
    """A device array, kept alive for good if a graph is being captured."""
    import cupy

    array = keep_if_captured(cupy.empty(shape, dtype))
    if clear and array.nbytes:
        array.data.memset_async(0, array.nbytes)
    return array


def _count(second: RawArray | None) -> int:
    return 1 if second is None else int(second.size)


def _address(second: RawArray | None) -> int:
    return 0 if second is None else second.data.ptr


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


class CudaBackend(Backend):
    """CUDA kernels through CuPy, for arrays that already are on a device."""

    name = "cuda"

    @cached_property
    def _unavailable(self) -> str | None:
        return _reason()

    def unavailable_reason(self) -> str | None:
        return self._unavailable

    def refusal(self, request: Request) -> str | None:
        if request.device_kind != "cuda":
            return (
                f"works on device arrays, not on {request.device}; copy it to the device first: "
                "cupy.asarray(x)"
            )
        device = int(request.device.split(":")[1])
        if _capability(device) < MIN_CAPABILITY:
            return _too_old(device)
        return None

    def devices(self) -> list[str]:
        import cupy

        numbers = range(cupy.cuda.runtime.getDeviceCount())
        return [f"cuda:{number}" for number in numbers if _capability(number) >= MIN_CAPABILITY]

    def details(self) -> dict[str, str]:
        import cupy

        runtime = cupy.cuda.runtime
        result = {
            "cupy": cupy.__version__,
            "cuda runtime": str(runtime.runtimeGetVersion()),
            "cuda driver": str(runtime.driverGetVersion()),
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        }
        for number in range(runtime.getDeviceCount()):
            name = runtime.getDeviceProperties(number)["name"].decode()
            major, minor = _capability(number)
            chosen = cuda_module.architecture_option(major, minor) or f"-arch=sm_{major}{minor}"
            result[f"device {number}"] = f"{name}, compute capability {major}.{minor}, {chosen}"
        return result

    # --------------------------------------------------------------------------------------------
    # The second level
    # --------------------------------------------------------------------------------------------

    def amax(self, x: RawArray, dtype: str, groups: int) -> RawArray:
        result = _scratch(groups, np.float32, clear=True)
        if x.size:
            ready = cuda_ready.amax(_current_device(), dtype, x.size, groups, x.itemsize)
            ready.launch(x.data.ptr, result.data.ptr, 0)
        return result

    def scan(self, x: RawArray, dtype: str) -> tuple[RawArray, bool]:
        result = _scratch(2, np.uint32, clear=True)
        if x.size:
            ready = cuda_ready.amax(_current_device(), dtype, x.size, 1, x.itemsize)
            pointer = result.data.ptr
            ready.launch(x.data.ptr, pointer, pointer + result.itemsize)
        return result[:1].view(np.float32), not int(result[1].get())

    def count_nonfinite(self, x: RawArray, dtype: str) -> tuple[int, int, int]:
        counts = _scratch(3, np.uint64, clear=True)
        if x.size:
            grid = (min(-(-x.size // THREADS[0]), cuda_launch.ERROR_BLOCKS),)
            _launch(cuda_module.count_nonfinite_kernel(dtype), grid, (x, x.size, counts))
        nans, infinities, from_end = (int(value) for value in counts.get())
        return nans, infinities, x.size - from_end if from_end else -1

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        assert plan.recipe is not None
        if plan.recipe.direction == "amax":
            return amax
        result = _scratch(amax.size, np.float32)
        instance = cuda_module.second_level_kernel(dtype)
        arguments = (amax, result, amax.size, plan.recipe.index)
        _launch(instance, cuda_launch.grid_for(amax.size), arguments)
        return result

    def convert_second_level(self, value: RawArray, source: str, target: str) -> RawArray:
        if source == target or not value.size:
            return value
        result = _scratch(value.shape, np.float32)
        directions = [SECOND_LEVEL_DIRECTIONS.index(name) for name in (source, target)]
        instance = cuda_module.convert_second_level_kernel()
        arguments = (value, result, value.size, *directions)
        _launch(instance, cuda_launch.grid_for(value.size), arguments)
        return result

    # --------------------------------------------------------------------------------------------
    # Quantize and dequantize
    # --------------------------------------------------------------------------------------------

    def quantize(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        second: RawArray | None,
        packed: RawArray,
        block_scale: RawArray,
    ) -> None:
        source, codes = x.data.ptr, packed.data.ptr
        aligned = _aligned(source | codes)
        ready = cuda_ready.quantize(_current_device(), plan, dtype, _count(second), aligned)
        ready.launch(source, _address(second), codes, block_scale.data.ptr)

    def dequantize(
        self,
        plan: Plan,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
        out: RawArray,
        dtype: str,
    ) -> None:
        codes, target = packed.data.ptr, out.data.ptr
        aligned = _aligned(codes | target)
        ready = cuda_ready.dequantize(_current_device(), plan, dtype, _count(second), aligned)
        ready.launch(codes, block_scale.data.ptr, _address(second), target)

    def quantize_dequantize(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        second: RawArray | None,
        out: RawArray,
        out_dtype: str,
    ) -> None:
        fused = dtype == out_dtype and cuda_launch.rows_are_vectors(plan.cols, dtype)
        if fused and _aligned(x.data.ptr | out.data.ptr):
            ready = cuda_ready.fused(_current_device(), plan, dtype, _count(second))
            ready.launch(x.data.ptr, _address(second), out.data.ptr)
            return
        # Rare: not worth two more kernels for each pair of types.
        packed = _scratch(plan.packed_shape, np.uint8)
        block_scale = _scratch(plan.scale_shape, np.uint8)
        self.quantize(plan, x, dtype, second, packed, block_scale)
        self.dequantize(plan, packed, block_scale, second, out, out_dtype)

    # --------------------------------------------------------------------------------------------
    # Scale layouts
    # --------------------------------------------------------------------------------------------

    def swizzle(self, scales: RawArray, layout: str, out: RawArray) -> None:
        if layout == "linear":
            out.data.copy_from_device_async(scales.data, scales.nbytes)
            return
        rows, cols = scales.shape
        words = cols % 4 == 0 and scales.data.ptr % 4 == 0 and _aligned(out.data.ptr)
        grid, tiles = cuda_launch.swizzle_geometry(rows, cols, layout)
        _launch(cuda_module.swizzle_kernel(layout, words), grid, (scales, out, rows, cols, *tiles))

    def unswizzle(self, swizzled: RawArray, layout: str, out: RawArray) -> None:
        if layout == "linear":
            out.data.copy_from_device_async(swizzled.data, swizzled.nbytes)
            return
        rows, cols = out.shape
        words = cols % 4 == 0 and out.data.ptr % 4 == 0 and _aligned(swizzled.data.ptr)
        grid, tiles = cuda_launch.swizzle_geometry(rows, cols, layout)
        _launch(
            cuda_module.unswizzle_kernel(layout, words), grid, (swizzled, out, rows, cols, *tiles)
        )

    # --------------------------------------------------------------------------------------------
    # Error sums
    # --------------------------------------------------------------------------------------------

    def error_sums(self, x: RawArray, x_dtype: str, y: RawArray, y_dtype: str) -> ErrorSums:
        partials = _scratch((cuda_launch.ERROR_BLOCKS, len(cuda_launch.ERROR_FIELDS)), np.float64)
        # A ragged end would cross the array's: those few sizes take the single accesses.
        vectors = [
            int(cuda_launch.rows_are_vectors(array.size, name) and _aligned(array.data.ptr))
            for array, name in ((x, x_dtype), (y, y_dtype))
        ]
        _launch(
            cuda_module.error_sums_kernel(x_dtype, y_dtype),
            (cuda_launch.ERROR_BLOCKS,),
            (x, y, x.size, *vectors, partials),
        )
        return _sums(partials, x.size)

    def quantized_error_sums(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
    ) -> ErrorSums:
        pending = self.quantized_error_sums_async(plan, x, dtype, packed, block_scale, second)
        return pending.result()

    def quantized_error_sums_async(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
    ) -> PendingSums:
        import cupy

        partials = _scratch((cuda_launch.ERROR_BLOCKS, len(cuda_launch.ERROR_FIELDS)), np.float64)
        vector = cuda_launch.rows_are_vectors(plan.cols, dtype) and _aligned(x.data.ptr)
        launch = cuda_launch.quantized_error_launch(plan, dtype, _count(second), vector)
        pointer = 0 if second is None else second
        arguments = (x, packed, block_scale, pointer, *launch.scalars, partials)
        _launch(launch.instance, launch.grid, arguments)
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
