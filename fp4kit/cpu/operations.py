# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations, column sums and residual channels on the CPU: arguments and threads."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from fp4kit.backend.jobs import Job, Prologue, RawArray
from fp4kit.backend.operations import ResidualPlan
from fp4kit.reference import activations, codecs, scaling
from fp4kit.scheme import ACTIVATIONS

from .load import read_only
from .threads import run
from .variants import VariantOperations, elements

#: Columns per task of a column sum that has few rows left.
COLUMN_CHUNK = 4096


@cache
def _kernels(name: str) -> ModuleType:
    """A kernel module; importing it imports numba."""
    return importlib.import_module(f"fp4kit.cpu.{name}")


def _aligned(out: np.ndarray) -> np.ndarray:
    """`out` itself if kernels can write its elements, else a new array to copy back from."""
    return out if out.ctypes.data % out.itemsize == 0 else np.empty(out.shape, out.dtype)


class CpuOperations(VariantOperations):
    """What the CPU backend offers beside quantization itself."""

    def activate(self, prologue: Prologue, out: RawArray) -> None:
        dtype, other = prologue.dtype, prologue.other
        kernel, whole = _kernels("activations").activate_range, _aligned(out)
        flat, result = read_only(elements(prologue.x, dtype)), elements(whole, dtype)
        z = flat if other is None else read_only(elements(other, dtype))
        number, (rows, cols) = ACTIVATIONS.index(prologue.activation), out.shape
        run(lambda begin, end: kernel(number, flat, z, begin, end, cols, result), rows, cols)
        if whole is not out:
            out[...] = whole

    def column_sums(self, x: RawArray, dtype: str, out: RawArray) -> None:
        kernel, (rows, cols) = _kernels("activations").sum_groups, x.shape
        values = elements(x, dtype)
        while True:
            groups = -(-rows // activations.SUM_ROWS)
            sums = np.empty((groups, cols), np.float32)
            self._sum_level(kernel, read_only(values), rows, cols, groups, sums)
            values, rows = sums.reshape(-1), groups
            if rows == 1:
                break
        out[...] = codecs.from_float32(values, "float32")

    @staticmethod
    def _sum_level(
        kernel: Any, values: np.ndarray, rows: int, cols: int, groups: int, sums: np.ndarray
    ) -> None:
        result = sums.reshape(-1)
        run(
            lambda begin, end: kernel(values, rows, cols, begin, end, result),
            groups,
            activations.SUM_ROWS * cols,
        )

    def quantize_residual(self, job: Job, order: RawArray | None) -> None:
        plan = job.plan
        kernel, flat = _kernels("residual").quantize_rows, read_only(elements(job.x, job.dtype))
        linear = plan.scale_layout == "linear"
        byte = job.block_scale if linear else np.empty((plan.rows, plan.blocks), np.uint8)
        arguments = (*_places(plan), plan.mode == "weight", plan.rounds)
        rest = (plan.nibble_order == "low_first", _usable(job.second), _order(order))
        codes, scales = job.packed.reshape(-1), byte.reshape(-1)
        run(
            lambda begin, end: kernel(flat, begin, end, *arguments, *rest, codes, scales),
            plan.rows,
            plan.cols,
        )
        if not linear:
            self.swizzle(byte, plan.scale_layout, job.block_scale)

    def dequantize_residual(
        self, job: Job, order: RawArray | None, out: RawArray, dtype: str
    ) -> None:
        plan = job.plan
        kernel, whole = _kernels("residual").dequantize_rows, _aligned(out)
        byte = job.block_scale
        if plan.scale_layout != "linear":
            byte = np.empty((plan.rows, plan.blocks), np.uint8)
            self.unswizzle(job.block_scale, plan.scale_layout, byte)
        arguments = (*_places(plan), plan.mode == "weight", plan.nibble_order == "low_first")
        rest = (_usable(job.second), _order(order), elements(whole, dtype))
        codes, scales = read_only(job.packed.reshape(-1)), read_only(byte.reshape(-1))
        run(
            lambda begin, end: kernel(codes, scales, begin, end, *arguments, *rest),
            plan.rows,
            plan.cols,
        )
        if whole is not out:
            out[...] = whole


def _places(plan: ResidualPlan) -> tuple[int, int, np.ndarray, np.ndarray, int]:
    """(channels, first block with a residual, places of main and residual blocks, blocks)."""
    main = np.array([plan.main_place(block) for block in range(plan.main_blocks)], np.int64)
    residual = np.array([plan.residual_place(block) for block in range(plan.main_blocks)], np.int64)
    return plan.cols, plan.first, main, residual, plan.blocks


def _usable(scale: np.ndarray) -> np.float32:
    value: np.float32 = scaling.usable(scale)[0]
    return value


def _order(order: np.ndarray | None) -> np.ndarray:
    return read_only(np.empty(0, np.int64) if order is None else order)
