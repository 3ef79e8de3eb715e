# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: each operation and the file it stands in.

A file is imported when its operation is first called, because that imports numba.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from functools import cache
from types import ModuleType

import numpy as np

from fp4kit.backend.grid import GridBackend
from fp4kit.backend.interface import ErrorSums, Plan
from fp4kit.backend.jobs import Job, Prologue, RawArray, Rotation
from fp4kit.backend.matmul import MatmulJob
from fp4kit.backend.operations import Operations
from fp4kit.float_mode import computes_by_ieee
from fp4kit.reference.grid import scales_of
from fp4kit.reference.host_backend import HostBackend

from . import kernel_cache
from .threads import thread_count


@cache
def _room(name: str) -> ModuleType:
    return importlib.import_module(f"fp4kit.cpu.{name}")


@computes_by_ieee(Operations)
class CpuBackend(HostBackend):
    """numba kernels over all cores, vectorized by LLVM."""

    name = "cpu"

    def unavailable_reason(self) -> str | None:
        if importlib.util.find_spec("numba") is None:
            return 'numba is not installed: pip install numba, or pass backend="reference"'
        # LLVM ends the process at such a list as soon as numba is imported.
        features = os.environ.get("NUMBA_CPU_FEATURES", "").split(",")
        wrong = [feature for feature in features if feature[:1] not in ("", "+", "-")]
        if wrong:
            return f"NUMBA_CPU_FEATURES holds {wrong[0]!r}: every feature starts with + or -"
        if importlib.import_module("numba").config.DISABLE_JIT:
            return 'NUMBA_DISABLE_JIT=1 turns numba off: unset it, or pass backend="reference"'
        kernel_cache.kernel_folder()  # says what is wrong with FP4KIT_CACHE_DIR before any work
        return None

    def details(self) -> dict[str, str]:
        folder = kernel_cache.kernel_folder()
        return {
            "numba": importlib.metadata.version("numba"),
            "threads": str(thread_count()),
            "kernel cache": str(folder.path or f"none ({folder.reason}; set FP4KIT_CACHE_DIR)"),
        }

    # -- amax and checks --------------------------------------------------------------------------

    def amax(self, x: RawArray, dtype: str, groups: int) -> RawArray:
        return np.concatenate([self.scan(part, dtype)[0] for part in x.reshape(groups, -1)])

    def scan(self, x: RawArray, dtype: str) -> tuple[RawArray, bool]:
        amax, finite = _room("amax").scan(x, dtype)
        return amax, finite

    def count_nonfinite(self, x: RawArray, dtype: str) -> tuple[int, int, int]:
        nans, infinities, first = _room("amax").count_nonfinite(x, dtype)
        return nans, infinities, first

    def plan_amax(self, plan: Plan, x: RawArray, dtype: str) -> RawArray:
        if plan.scheme.rht is not None and x.size:
            return _room("quantize_panels").rotated_amaxes(plan, x, dtype)
        return _room("amax").plan_amax(plan, x, dtype)

    # -- quantize and dequantize ------------------------------------------------------------------

    def quantize(self, job: Job) -> None:
        _room("quantize" if job.plan.is_plain else "quantize_panels").quantize(job)

    def quantize_both(self, rowwise: Job, columnwise: Job) -> None:
        _room("quantize_panels").quantize(rowwise, columnwise)

    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        room = "dequantize_columnwise" if job.plan.is_columnwise else "dequantize"
        _room(room).dequantize(job, out, dtype)

    def quantize_dequantize(self, job: Job, out: RawArray, out_dtype: str) -> None:
        if job.plan.is_plain:
            _room("dequantize").quantize_dequantize(job, out, out_dtype)
        else:
            super().quantize_dequantize(job, out, out_dtype)

    def rotate(
        self, x: RawArray, dtype: str, rotation: Rotation, out: RawArray, out_dtype: str
    ) -> None:
        _room("rotation").rotate_array(x, dtype, rotation, out, out_dtype)

    def swizzle(self, scales: RawArray, layout: str, out: RawArray) -> None:
        _room("swizzle").swizzle(scales, layout, out)

    def unswizzle(self, swizzled: RawArray, layout: str, out: RawArray) -> None:
        _room("swizzle").unswizzle(swizzled, layout, out)

    # -- statistics -------------------------------------------------------------------------------

    def error_sums(self, x: RawArray, x_dtype: str, y: RawArray, y_dtype: str) -> ErrorSums:
        sums: ErrorSums = _room("error_sums").error_sums(x, x_dtype, y, y_dtype)
        return sums

    def quantized_error_sums(self, job: Job) -> ErrorSums:
        sums: ErrorSums = _room("error_sums").quantized_error_sums(job)
        return sums

    def quantize_and_measure(self, job: Job) -> ErrorSums:
        plan = job.plan
        if not plan.is_plain or plan.blocks * plan.format.block_size != plan.cols:
            return super().quantize_and_measure(job)
        sums: ErrorSums = _room("error_sums").quantize_and_measure(job)
        return sums

    # -- activations and residual channels --------------------------------------------------------

    def activate(self, prologue: Prologue, out: RawArray) -> None:
        _room("activations").activate(prologue, out)

    def column_sums(self, x: RawArray, dtype: str, out: RawArray) -> None:
        _room("activations").column_sums(x, dtype, out)

    def quantize_residual(self, job: Job, order: RawArray | None) -> None:
        _room("residual").quantize(job, order)

    def dequantize_residual(
        self, job: Job, order: RawArray | None, out: RawArray, dtype: str
    ) -> None:
        _room("residual").dequantize(job, order, out, dtype)

    # -- products ---------------------------------------------------------------------------------

    def matmul(self, job: MatmulJob) -> None:
        _room("matmul").matmul(job)

    def matmul_grouped(self, jobs: tuple[MatmulJob, ...]) -> None:
        _room("matmul").matmul_grouped(jobs)


@computes_by_ieee(Operations)
class CpuGridBackend(GridBackend, CpuBackend):
    """The same for formats with float32 scales."""

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        return scales_of(amax, plan.grid_recipe, plan.format.element, dtype)

    def _fill(self, job: Job) -> None:
        _room("grid").quantize(job)

    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        _room("grid").dequantize(job, out, dtype)
