# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The reference backend: NumPy, step by step, never optimized. Other backends must equal it."""

from __future__ import annotations

import numpy as np

from fp4kit import codecs, layout, scaling
from fp4kit.formats import E4M3

from .base import Backend, ErrorSums, Plan, RawArray, Request


def blocks_of(values: np.ndarray, plan: Plan) -> np.ndarray:
    """float32 (rows, cols) as (rows, blocks, block_size), rows padded with +0.0."""
    padded = np.zeros((plan.rows, plan.blocks * plan.format.block_size), np.float32)
    padded[:, : plan.cols] = values
    return padded.reshape(plan.rows, plan.blocks, plan.format.block_size)


def finite_or_infinite_max(magnitudes: np.ndarray) -> np.ndarray:
    """Maximum along the last axis with NaN ignored (all NaN gives 0)."""
    result: np.ndarray = np.where(np.isnan(magnitudes), np.float32(0), magnitudes).max(axis=-1)
    return result


def per_block(second: np.ndarray | None, plan: Plan) -> np.ndarray | None:
    """Second-level scale as a float32 (rows, 1) column, to broadcast over blocks."""
    if second is None:
        return None
    return np.repeat(second, plan.rows_per_scale)[:, None]


class ReferenceBackend(Backend):
    """NumPy, one readable step after the other."""

    name = "reference"

    def unavailable_reason(self) -> str | None:
        return None

    def refusal(self, request: Request) -> str | None:
        if request.device_kind != "cpu":
            return (
                f"works on host arrays, not on {request.device}; copy the array to the host first "
                "or leave backend=None"
            )
        return None

    def details(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def amax(self, x: RawArray, dtype: str, groups: int) -> RawArray:
        magnitudes = np.abs(codecs.to_float32(x, dtype)).reshape(groups, -1)
        if magnitudes.size == 0:
            return np.zeros(groups, np.float32)
        return finite_or_infinite_max(magnitudes)

    def scan(self, x: RawArray, dtype: str) -> tuple[RawArray, bool]:
        return self.amax(x, dtype, 1), bool(np.isfinite(codecs.to_float32(x, dtype)).all())

    def count_nonfinite(self, x: RawArray, dtype: str) -> tuple[int, int, int]:
        values = codecs.to_float32(x, dtype).ravel()
        bad = np.flatnonzero(~np.isfinite(values))
        nans = int(np.isnan(values).sum())
        return nans, len(bad) - nans, int(bad[0]) if len(bad) else -1

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        assert plan.recipe is not None
        with scaling.quiet():
            return scaling.second_level_from_amax(amax, plan.recipe, dtype)

    def convert_second_level(self, value: RawArray, source: str, target: str) -> RawArray:
        with scaling.quiet():
            return scaling.convert_second_level(value, source, target)

    def _block_scales(
        self, plan: Plan, values: np.ndarray, dtype: str, second: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scale bytes and element factors, both (rows, blocks), of (rows, blocks, block_size)."""
        amax = finite_or_infinite_max(np.abs(values))
        if plan.recipe is None:
            assert plan.scale_rule is not None
            byte = scaling.mx_block_scale(amax, plan.format.element, plan.scale_rule)
            return byte, scaling.mx_element_factor(byte)
        column = per_block(second, plan)
        byte = scaling.nvfp4_block_scale(amax, plan.recipe, column, dtype)
        return byte, scaling.nvfp4_element_factor(byte, plan.recipe, column)

    def quantize(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        second: RawArray | None,
        packed: RawArray,
        block_scale: RawArray,
    ) -> None:
        with scaling.quiet():
            values = blocks_of(codecs.to_float32(x, dtype), plan)
            byte, factor = self._block_scales(plan, values, dtype, second)
            factor = factor[:, :, None]
            if plan.recipe is not None and plan.recipe.divides:
                scaled = np.where(factor == 0, np.float32(0), values / factor)
            else:
                scaled = values * factor
            codes = codecs.encode(scaled, plan.format.element)
            if plan.recipe is not None and not plan.recipe.keeps_negative_zero:
                codes = np.where(values == 0, np.uint8(0), codes)
        codes = codes.reshape(plan.rows, -1)
        if plan.format.codes_per_byte == 2:
            codes = codecs.pack_nibbles(codes, plan.nibble_order)
        packed[...] = codes
        self.swizzle(byte, plan.scale_layout, block_scale)

    def dequantize(
        self,
        plan: Plan,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
        out: RawArray,
        dtype: str,
    ) -> None:
        byte = np.empty((plan.rows, plan.blocks), np.uint8)
        self.unswizzle(block_scale, plan.scale_layout, byte)
        codes = packed
        if plan.format.codes_per_byte == 2:
            codes = codecs.unpack_nibbles(packed, plan.nibble_order)
        value = codecs.decode(codes, plan.format.element)
        value = value.reshape(plan.rows, plan.blocks, plan.format.block_size)
        with scaling.quiet():
            if plan.recipe is None:
                factor = codecs.decode_e8m0(byte)
                result = value * factor[:, :, None]
            else:
                if not plan.recipe.decodes_negative_zero:
                    value = np.where(value == 0, np.float32(0), value)
                column = per_block(second, plan)
                first, last = scaling.nvfp4_decode_factors(byte, plan.recipe, column, dtype)
                result = (value * first[:, :, None]) * last[:, :, None]
                # A zero code stays zero, also under a factor that overflowed to infinity.
                known = ~(np.isnan(first) | np.isnan(last))[:, :, None]
                result = np.where(known & (value == 0), value, result)
            out[...] = codecs.from_float32(result.reshape(plan.rows, -1)[:, : plan.cols], dtype)

    def quantize_dequantize(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        second: RawArray | None,
        out: RawArray,
        out_dtype: str,
    ) -> None:
        packed = np.empty(plan.packed_shape, np.uint8)
        block_scale = np.empty(plan.scale_shape, np.uint8)
        self.quantize(plan, x, dtype, second, packed, block_scale)
        self.dequantize(plan, packed, block_scale, second, out, out_dtype)

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

    def quantized_error_sums(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
    ) -> ErrorSums:
        decoded = np.empty((plan.rows, plan.cols), np.float32)
        self.dequantize(plan, packed, block_scale, second, decoded, "float32")
        sums = self.error_sums(x, dtype, decoded, "float32")
        element = plan.format.element
        codes = packed
        if plan.format.codes_per_byte == 2:
            codes = codecs.unpack_nibbles(packed, plan.nibble_order)
        magnitude = codes[:, : plan.cols] & np.uint8((1 << (element.bits - 1)) - 1)
        byte = np.empty((plan.rows, plan.blocks), np.uint8)
        self.unswizzle(block_scale, plan.scale_layout, byte)
        block_amax = finite_or_infinite_max(np.abs(blocks_of(codecs.to_float32(x, dtype), plan)))
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
