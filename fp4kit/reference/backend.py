# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The reference backend: NumPy, step by step, never optimized. Other backends must equal it."""

from __future__ import annotations

import numpy as np

from fp4kit import layout
from fp4kit.backend.interface import (
    ErrorSums,
    Job,
    Plan,
    RawArray,
    Rotation,
)
from fp4kit.backend.operations import Operations
from fp4kit.float_mode import computes_by_ieee
from fp4kit.formats import E4M3

from . import blocks, codecs, scaling
from .host_backend import HostBackend
from .operations import ReferenceOperations
from .rotation import rotate


def per_block(second: np.ndarray | None, plan: Plan) -> np.ndarray | None:
    """Second-level scale as a float32 (vectors, 1) column, to broadcast over blocks."""
    if second is None:
        return None
    return np.repeat(second, plan.rows_per_scale)[:, None]


@computes_by_ieee(Operations)
class ReferenceBackend(ReferenceOperations, HostBackend):
    """NumPy, one readable step after the other."""

    name = "reference"

    def unavailable_reason(self) -> str | None:
        return None

    def details(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def amax(self, x: RawArray, dtype: str, groups: int) -> RawArray:
        magnitudes = np.abs(codecs.to_float32(x, dtype)).reshape(groups, -1)
        if magnitudes.size == 0:
            return np.zeros(groups, np.float32)
        return blocks.largest(magnitudes)

    def scan(self, x: RawArray, dtype: str) -> tuple[RawArray, bool]:
        return self.amax(x, dtype, 1), bool(np.isfinite(codecs.to_float32(x, dtype)).all())

    def count_nonfinite(self, x: RawArray, dtype: str) -> tuple[int, int, int]:
        values = codecs.to_float32(x, dtype).ravel()
        bad = np.flatnonzero(~np.isfinite(values))
        nans = int(np.isnan(values).sum())
        return nans, len(bad) - nans, int(bad[0]) if len(bad) else -1

    def plan_amax(self, plan: Plan, x: RawArray, dtype: str) -> RawArray:
        return blocks.plan_amax(plan, codecs.to_float32(x, dtype))

    def rotate(
        self, x: RawArray, dtype: str, rotation: Rotation, out: RawArray, out_dtype: str
    ) -> None:
        values, rows = codecs.to_float32(x, dtype), rotation.direction == "rowwise"
        vectors = np.ascontiguousarray(values if rows else values.T)
        with scaling.quiet():
            result = rotate(vectors, rotation.mask, rotation.rounding, inverse=rotation.inverse)
            out[...] = codecs.from_float32(result if rows else result.T, out_dtype)

    def quantize(self, job: Job) -> None:
        result = blocks.quantize_blocks(job)
        byte = blocks.store(job.plan, result, job.packed)
        self.swizzle(byte, job.plan.scale_layout, job.block_scale)

    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        plan = job.plan
        byte = self._scale_bytes(plan, job.block_scale)
        codes = blocks.load(plan, job.packed, byte).codes
        value = codecs.decode(codes, plan.format.element)
        value = value.reshape(plan.vectors, plan.blocks, plan.format.block_size)
        with scaling.quiet():
            if plan.recipe is None:
                factor = codecs.decode_e8m0(byte)
                result = value * factor[:, :, None]
            else:
                if not plan.recipe.decodes_negative_zero:
                    value = np.where(value == 0, np.float32(0), value)
                column = per_block(job.second, plan)
                first, last = scaling.nvfp4_decode_factors(
                    byte, plan.recipe, column, dtype, plan.scheme.e4m3_max
                )
                result = (value * first[:, :, None]) * last[:, :, None]
                # A zero code stays zero, also under a factor that overflowed to infinity.
                known = ~(np.isnan(first) | np.isnan(last))[:, :, None]
                result = np.where(known & (value == 0), value, result)
            vectors = result.reshape(plan.vectors, -1)[:, : plan.length]
            out[...] = codecs.from_float32(vectors.T if plan.is_columnwise else vectors, dtype)

    def _scale_bytes(self, plan: Plan, block_scale: np.ndarray) -> np.ndarray:
        """Scale bytes in the order of the vectors, (vectors, blocks)."""
        if plan.scale_layout == "linear":
            return block_scale.T if plan.is_columnwise and not plan.transposes else block_scale
        byte = np.empty((plan.vectors, plan.blocks), np.uint8)
        self.unswizzle(block_scale, plan.scale_layout, byte)
        return byte

    def swizzle(self, scales: RawArray, layout_name: str, out: RawArray) -> None:
        flat = np.zeros(out.size, np.uint8)
        rows, blocks = scales.shape
        flat[layout.scale_offsets(rows, blocks, layout_name)] = scales
        out[...] = flat.reshape(out.shape)

    def unswizzle(self, swizzled: RawArray, layout_name: str, out: RawArray) -> None:
        rows, blocks = out.shape
        out[...] = swizzled.ravel()[layout.scale_offsets(rows, blocks, layout_name)]

    def error_sums(self, x: RawArray, x_dtype: str, y: RawArray, y_dtype: str) -> ErrorSums:
        original = codecs.to_float32(x, x_dtype).astype(np.float64)
        result = codecs.to_float32(y, y_dtype).astype(np.float64)
        difference = original - result
        return ErrorSums(
            elements=original.size,
            sum_x2=float(np.sum(original * original)),
            sum_y2=float(np.sum(result * result)),
            sum_xy=float(np.sum(original * result)),
            sum_d2=float(np.sum(difference * difference)),
            max_abs_error=float(np.max(np.abs(difference), initial=0.0)),
        )

    def quantized_error_sums(self, job: Job) -> ErrorSums:
        plan = job.plan.decoding
        decoded = np.empty((plan.rows, plan.cols), np.float32)
        self.dequantize(job._replace(plan=plan), decoded, "float32")
        sums = self.error_sums(job.x, job.dtype, decoded, "float32")
        element = plan.format.element
        byte = self._scale_bytes(plan, job.block_scale)
        codes = blocks.load(plan, job.packed, byte).codes
        magnitude = codes[:, : plan.length] & np.uint8((1 << (element.bits - 1)) - 1)
        values = codecs.to_float32(job.x, job.dtype)
        vectors = values.T if plan.is_columnwise else values
        block_amax = blocks.largest(np.abs(blocks.in_blocks(plan, vectors)))
        sums.saturated = int((magnitude == element.max_code).sum())
        sums.zero_codes = int((magnitude == 0).sum())
        sums.blocks = byte.size
        if plan.format.scale_type == "e4m3":
            sums.scale_underflow = int(((byte == 0) & (block_amax > 0)).sum())
            smallest_normal = 1 << E4M3.mantissa_bits
            sums.scale_subnormal = int(((byte > 0) & (byte < smallest_normal)).sum())
        else:
            sums.scale_subnormal = int(((byte == 0) & (block_amax > 0)).sum())
        return sums
