# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The reference backend: NumPy, step by step, never optimized. Other backends must equal it."""

from __future__ import annotations

import numpy as np

from fp4kit import layout
from fp4kit.backend.interface import NO_SEED, Backend, ErrorSums, Plan, RawArray, Request, Seed
from fp4kit.backend.operations import Operations
from fp4kit.float_mode import computes_by_ieee
from fp4kit.formats import E4M3
from fp4kit.reference import rotation

from . import codecs, scaling, variants
from .operations import ReferenceOperations


def per_block(second: np.ndarray | None, plan: Plan) -> np.ndarray | None:
    """Second-level scale as a float32 (vectors, 1) column, to broadcast over blocks."""
    if second is None:
        return None
    return np.repeat(second, plan.rows_per_scale)[:, None]


@computes_by_ieee(Operations)
class ReferenceBackend(ReferenceOperations, Backend):
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
        return variants.largest(magnitudes)

    def scan(self, x: RawArray, dtype: str) -> tuple[RawArray, bool]:
        return self.amax(x, dtype, 1), bool(np.isfinite(codecs.to_float32(x, dtype)).all())

    def count_nonfinite(self, x: RawArray, dtype: str) -> tuple[int, int, int]:
        values = codecs.to_float32(x, dtype).ravel()
        bad = np.flatnonzero(~np.isfinite(values))
        nans = int(np.isnan(values).sum())
        return nans, len(bad) - nans, int(bad[0]) if len(bad) else -1

    def plan_amax(self, plan: Plan, x: RawArray, dtype: str) -> RawArray:
        return variants.plan_amax(plan, codecs.to_float32(x, dtype))

    def rotate(
        self,
        x: RawArray,
        dtype: str,
        axis: str,
        mask: int,
        rounding: str,
        inverse: bool,
        out: RawArray,
        out_dtype: str,
    ) -> None:
        values = codecs.to_float32(x, dtype)
        vectors = np.ascontiguousarray(values if axis == "row" else values.T)
        with scaling.quiet():
            result = rotation.rotate(vectors, mask, rounding, inverse=inverse)
            out[...] = codecs.from_float32(result if axis == "row" else result.T, out_dtype)

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
        amax = variants.largest(np.abs(values))
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
        seed: Seed = NO_SEED,
    ) -> None:
        if plan.variant is not None:
            result = variants.quantize_blocks(plan, x, dtype, second, seed)
            byte = variants.store(plan, result, packed)
            self.swizzle(byte, plan.scale_layout, block_scale)
            return
        with scaling.quiet():
            values = variants.in_blocks(plan, codecs.to_float32(x, dtype))
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
        byte = self._scale_bytes(plan, block_scale)
        codes = variants.load(plan, packed, byte).codes
        value = codecs.decode(codes, plan.format.element)
        value = value.reshape(plan.vectors, plan.blocks, plan.format.block_size)
        with scaling.quiet():
            if plan.recipe is None:
                factor = codecs.decode_e8m0(byte)
                result = value * factor[:, :, None]
            else:
                if not plan.recipe.decodes_negative_zero:
                    value = np.where(value == 0, np.float32(0), value)
                column = per_block(second, plan)
                e4m3_max = plan.variant.e4m3_max if plan.variant is not None else 448
                first, last = scaling.nvfp4_decode_factors(
                    byte, plan.recipe, column, dtype, e4m3_max
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

    def quantized_error_sums(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
    ) -> ErrorSums:
        plan = plan.decoding
        decoded = np.empty((plan.rows, plan.cols), np.float32)
        self.dequantize(plan, packed, block_scale, second, decoded, "float32")
        sums = self.error_sums(x, dtype, decoded, "float32")
        element = plan.format.element
        byte = self._scale_bytes(plan, block_scale)
        codes = variants.load(plan, packed, byte).codes
        magnitude = codes[:, : plan.length] & np.uint8((1 << (element.bits - 1)) - 1)
        values = codecs.to_float32(x, dtype)
        vectors = values.T if plan.is_columnwise else values
        block_amax = variants.largest(np.abs(variants.in_blocks(plan, vectors)))
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
