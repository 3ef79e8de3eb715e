# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: numba kernels over all cores, each thread on its own range of blocks."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from fp4kit.backend.interface import ErrorSums, Job, Plan, RawArray, Request
from fp4kit.backend.operations import Operations
from fp4kit.float_mode import computes_by_ieee
from fp4kit.reference import codecs, scaling

from . import kernel_cache
from . import stats as cpu_stats
from . import variants as cpu_variants
from .load import aligned, code_words, kernels, padded_rows, read_only, words_of
from .operations import CpuOperations
from .threads import run, thread_count


@computes_by_ieee(Operations)
class CpuBackend(CpuOperations):
    """numba kernels, parallel over all cores and vectorized by LLVM."""

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

    def refusal(self, request: Request) -> str | None:
        if request.device_kind != "cpu":
            return (
                f"works on host arrays, not on {request.device}; copy the array to the host first "
                "or leave backend=None"
            )
        return None

    def details(self) -> dict[str, str]:
        folder = kernel_cache.kernel_folder()
        return {
            "numba": importlib.metadata.version("numba"),
            "threads": str(thread_count()),
            "kernel cache": str(folder.path or f"none ({folder.reason}; set FP4KIT_CACHE_DIR)"),
        }

    # -- amax and checks --------------------------------------------------------------------------

    def _scan(self, x: np.ndarray, dtype: str) -> tuple[np.float32, bool]:
        """(amax with NaN ignored, whether everything is finite) in one pass over the bits."""
        bits = read_only(x.reshape(-1).view(np.uint32 if dtype == "float32" else np.uint16))
        number: Any = bits.dtype.type
        mask, infinity = (number(n) for n in cpu_variants.MAGNITUDE_AND_INFINITY[dtype])
        encode = kernels()[2]
        parts = run(lambda b, e: encode.largest_magnitude(bits, b, e, mask), bits.size, 1)
        largest = max(parts, default=0)
        finite = largest < infinity
        if largest > infinity:
            parts = run(
                lambda b, e: encode.largest_number(bits, b, e, mask, infinity), bits.size, 1
            )
            largest = max(parts)
        raw = np.array([largest], bits.dtype)
        values = codecs.to_float32(raw if dtype == "bfloat16" else raw.view(dtype), dtype)
        return values[0], bool(finite)

    def amax(self, x: RawArray, dtype: str, groups: int) -> RawArray:
        members = x.reshape(groups, -1)
        return np.array([self._scan(member, dtype)[0] for member in members], np.float32)

    def scan(self, x: RawArray, dtype: str) -> tuple[RawArray, bool]:
        amax, finite = self._scan(x, dtype)
        return np.array([amax], np.float32), finite

    def count_nonfinite(self, x: RawArray, dtype: str) -> tuple[int, int, int]:
        flat = x.reshape(-1)

        def count(begin: int, end: int) -> tuple[int, int, int]:
            values = codecs.to_float32(flat[begin:end], dtype)
            bad = np.flatnonzero(~np.isfinite(values))
            nans = int(np.isnan(values).sum())
            return nans, len(bad) - nans, begin + int(bad[0]) if len(bad) else -1

        parts = run(count, flat.size, 1)
        first = next((part[2] for part in parts if part[2] >= 0), -1)
        return sum(part[0] for part in parts), sum(part[1] for part in parts), first

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        assert plan.recipe is not None
        with scaling.quiet():
            return scaling.second_level_from_amax(amax, plan.recipe, dtype)

    def convert_second_level(self, value: RawArray, source: str, target: str) -> RawArray:
        with scaling.quiet():
            return scaling.convert_second_level(value, source, target)

    # -- quantize and dequantize ------------------------------------------------------------------

    @staticmethod
    def _second(second: np.ndarray | None) -> np.ndarray:
        given = np.empty(0, np.float32) if second is None else np.ascontiguousarray(second)
        return read_only(given)

    @staticmethod
    def _table(plan: Plan) -> np.ndarray:
        """Values of all 256 FP8 codes (unused for E2M1)."""
        return plan.format.element.values

    def _quantizer(
        self, job: Job, words: np.ndarray, codes: np.ndarray, byte: np.ndarray
    ) -> Callable[[int, int], None]:
        """A function that quantizes a range of blocks into code words and linear scale bytes."""
        plan = job.plan
        kinds, scale = kernels()[1], self._second(job.second)
        how = kinds.encoding(plan, job.dtype)
        kernel = kinds.quantizer(how.scales, how.encode)
        return lambda begin, end: kernel(
            words, begin, end, plan.format.block_size // 2, how.rules, scale,
            plan.rows_per_scale * plan.blocks, plan.nibble_order == "low_first", codes, byte,
            *kinds.scratch(),
        )  # fmt: skip

    def quantize(self, job: Job) -> None:
        plan = job.plan
        if not plan.is_plain:
            cpu_variants.quantize(self, [job])
            return
        block = plan.format.block_size
        words = read_only(words_of(padded_rows(job.x, plan.blocks * block), job.dtype))
        byte = self._linear_buffer(plan, job.block_scale)
        work = self._quantizer(job, words, code_words(job.packed, plan), byte.reshape(-1))
        run(work, plan.rows * plan.blocks, block)
        if byte is not job.block_scale:
            self.swizzle(byte, plan.scale_layout, job.block_scale)

    def quantize_and_measure(self, job: Job) -> ErrorSums:
        plan = job.plan
        block = plan.format.block_size
        if not plan.is_plain or plan.blocks * block != plan.cols:
            return super().quantize_and_measure(job)
        # Chunk by chunk, so that the elements are measured while they are still in the cache.
        words, codes = read_only(words_of(job.x, job.dtype)), code_words(job.packed, plan)
        byte = self._linear_buffer(plan, job.block_scale)
        quantize = self._quantizer(job, words, codes, byte.reshape(-1))
        scale = self._second(job.second)
        measure = cpu_stats.measurer(plan, words, job.packed, byte.reshape(-1), scale)

        def work(begin: int, end: int) -> cpu_stats.Part:
            quantize(begin, end)
            return measure(begin, end)

        parts = run(work, plan.rows * plan.blocks, block, sums=True)
        if byte is not job.block_scale:
            self.swizzle(byte, plan.scale_layout, job.block_scale)
        return cpu_stats.total(plan, parts)

    @staticmethod
    def _linear_buffer(plan: Plan, block_scale: np.ndarray) -> np.ndarray:
        """Where linear scales go: the output itself, or a buffer that is swizzled afterwards."""
        if plan.scale_layout == "linear":
            return block_scale
        return np.empty((plan.rows, plan.blocks), np.uint8)

    def _linear_scales(self, plan: Plan, block_scale: np.ndarray) -> np.ndarray:
        """Flat scale bytes of a rowwise plan."""
        return self._scales_of_vectors(plan, block_scale).reshape(-1)

    def _scales_of_vectors(self, plan: Plan, block_scale: np.ndarray) -> np.ndarray:
        """Scale bytes as (vectors, blocks)."""
        if plan.scale_layout == "linear":
            return block_scale.T if plan.is_columnwise and not plan.transposes else block_scale
        byte = np.empty((plan.vectors, plan.blocks), np.uint8)
        self.unswizzle(block_scale, plan.scale_layout, byte)
        return byte

    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        plan = job.plan
        if plan.is_columnwise:
            cpu_variants.dequantize(self, job, out, dtype)
            return
        kinds = kernels()[1]
        block = plan.format.block_size
        cols = plan.blocks * block
        whole = aligned(out, plan.rows, cols)
        words = words_of(whole, dtype)
        byte = read_only(self._linear_scales(plan, job.block_scale))
        codes = read_only(code_words(job.packed, plan))
        how = kinds.decoding(plan, dtype)
        kernel = kinds.decoder(how.factors, how.decode)
        keep_sign = plan.recipe.decodes_negative_zero if plan.recipe else True
        scale, table = self._second(job.second), self._table(plan)
        blocks_per_scale = plan.rows_per_scale * plan.blocks
        low_first = plan.nibble_order == "low_first"
        run(
            lambda b, e: kernel(
                codes, byte, b, e, block // 2, how.rules, scale, blocks_per_scale, keep_sign,
                low_first, table, words, kinds.scratch()[0],
            ),
            plan.rows * plan.blocks,
            block,
        )  # fmt: skip
        if whole is not out:
            out[...] = whole[:, : plan.cols]

    def quantize_dequantize(self, job: Job, out: RawArray, out_dtype: str) -> None:
        plan = job.plan
        if not plan.is_plain:
            super().quantize_dequantize(job, out, out_dtype)
            return
        _, kinds, encode, _ = kernels()
        block = plan.format.block_size
        how, back = kinds.encoding(plan, job.dtype), kinds.decoding(plan, out_dtype)
        kernel = kinds.round_tripper(how.scales, how.encode, back.factors, back.decode)
        cols = plan.blocks * block
        words = read_only(words_of(padded_rows(job.x, cols), job.dtype))
        whole = aligned(out, plan.rows, cols)
        result = words_of(whole, out_dtype)
        keep_sign = plan.recipe.decodes_negative_zero if plan.recipe else True
        scale, table = self._second(job.second), self._table(plan)
        blocks_per_scale = plan.rows_per_scale * plan.blocks
        code_type = np.uint8 if plan.format.codes_per_byte == 2 else np.uint16

        def work(begin: int, end: int) -> None:
            codes = np.empty(encode.TILE * block // 2, code_type)
            kernel(
                words, begin, end, block // 2, how.rules, back.rules, scale, blocks_per_scale,
                keep_sign, table, codes, result, *kinds.scratch(), np.empty(encode.TILE, np.uint8),
            )  # fmt: skip

        run(work, plan.rows * plan.blocks, block)
        if whole is not out:
            out[...] = whole[:, : plan.cols]

    # -- scales -----------------------------------------------------------------------------------

    def swizzle(self, scales: RawArray, layout: str, out: RawArray) -> None:
        if layout == "linear":
            out[...] = scales
            return
        rows, blocks = scales.shape
        tile_rows = 128 if layout == "swizzled_128x4" else 8
        source, target = read_only(scales.reshape(-1)), out.reshape(-1)
        decode = kernels()[3]
        run(
            lambda b, e: decode.swizzle_range(source, blocks, tile_rows, b, e, rows, target),
            -(-rows // tile_rows),
            tile_rows * blocks,
        )

    def unswizzle(self, swizzled: RawArray, layout: str, out: RawArray) -> None:
        if layout == "linear":
            out[...] = swizzled.reshape(out.shape)
            return
        rows, blocks = out.shape
        tile_rows = 128 if layout == "swizzled_128x4" else 8
        source, target = read_only(swizzled.reshape(-1)), out.reshape(-1)
        decode = kernels()[3]
        run(
            lambda b, e: decode.unswizzle_range(source, blocks, tile_rows, b, e, target),
            rows,
            blocks,
        )

    # -- statistics -------------------------------------------------------------------------------

    def error_sums(self, x: RawArray, x_dtype: str, y: RawArray, y_dtype: str) -> ErrorSums:
        size = x.size
        flat_x, flat_y = (padded_rows(a.reshape(1, -1), size + size % 2) for a in (x, y))
        words, others = (
            read_only(words_of(flat, dtype))
            for flat, dtype in ((flat_x, x_dtype), (flat_y, y_dtype))
        )
        decode = kernels()[3]

        def work(begin: int, end: int) -> np.ndarray:
            sums = np.zeros(5)
            decode.error_range(words, others, begin, end, sums)
            return sums

        return cpu_stats.collect(run(work, words.size, 2, sums=True), size)

    def quantized_error_sums(self, job: Job) -> ErrorSums:
        plan, x, packed, block_scale = job.plan.decoding, job.x, job.packed, job.block_scale
        if plan.is_columnwise:
            byte = self._scales_of_vectors(plan, block_scale)
            plan, x, packed, block_scale = cpu_variants.as_rows(plan, x, packed, byte)
        block = plan.format.block_size
        if plan.blocks * block != plan.cols:
            # Whatever codes stand in the padding must not count: treat them as zeros.
            packed = cpu_stats.without_padding(plan, packed)
        words = read_only(words_of(padded_rows(x, plan.blocks * block), job.dtype))
        byte = self._linear_scales(plan, block_scale)
        measure = cpu_stats.measurer(plan, words, packed, byte, self._second(job.second))
        parts = run(measure, plan.rows * plan.blocks, block, sums=True)
        return cpu_stats.total(plan, parts)
