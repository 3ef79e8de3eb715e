# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Error sums: of two arrays, or of an array and its codes, which are decoded tile by tile."""

# ruff: noqa: ANN001, ANN202, ANN201 - numba infers the types

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.interface import ErrorSums, Job, Plan
from fp4kit.reference import codecs

from .blocks import TILE, block_range, next_tile, run_blocks
from .buffers import padded_rows, read_only
from .dequantize import Decode, decode_of, decoding, tile_decoder
from .elements import bits_double, double_bits, f32, high, index, low, words
from .jit import jit, jit_inner_sums, jit_of
from .quantize import encode_of, encoding, quantizer
from .scaling import factors_of, scales_of
from .swizzle import linear_output, linear_scales
from .threads import run

MAGNITUDE_64 = np.int64(0x7FFFFFFFFFFFFFFF)


class Measured(NamedTuple):
    """What the measuring kernels work on.

    Attributes:
        words: original elements of all blocks.
        decode: how a tile of codes is decoded to float32.
        sums: float64 (5,), see `add_errors`.
        counts: int64 (2,): blocks with scale byte 0 and a non-zero element, blocks with scale
            bytes 1..7; both whatever the scale type.
    """

    words: np.ndarray
    decode: Decode
    sums: np.ndarray
    counts: np.ndarray


class Part(NamedTuple):
    """What one range of blocks contributes.

    Attributes:
        sums: float64 (5,): x^2, y^2, xy, (x - y)^2, largest |x - y|.
        scales: int64 (2,): see `Measured.counts`.
        codes: codes of the largest finite magnitude, codes of magnitude 0.
    """

    sums: np.ndarray
    scales: np.ndarray
    codes: tuple[int, int]


@jit_inner_sums
def add_errors(words, others, begin, other_begin, count, sums):
    """Adds x^2, y^2, xy, (x-y)^2 over `count` words to sums[0:4]; sums[4] keeps max |x-y|.

    The maximum is taken over bit patterns, where it vectorizes and NaN wins.
    """
    x2, y2, xy, d2 = 0.0, 0.0, 0.0, 0.0
    largest = np.int64(0)
    begin, other_begin = index(begin), index(other_begin)
    for i in range(index(count)):
        word, other = words[begin + i], others[other_begin + i]
        x, y = np.float64(low(word)), np.float64(low(other))
        d = x - y
        x2 += x * x
        y2 += y * y
        xy += x * y
        d2 += d * d
        largest = max(largest, double_bits(d) & MAGNITUDE_64)
        x, y = np.float64(high(word)), np.float64(high(other))
        d = x - y
        x2 += x * x
        y2 += y * y
        xy += x * y
        d2 += d * d
        largest = max(largest, double_bits(d) & MAGNITUDE_64)
    sums[0] += x2
    sums[1] += y2
    sums[2] += xy
    sums[3] += d2
    sums[4] = bits_double(max(double_bits(sums[4]), largest))


@jit
def error_range(words, others, begin, end, sums):
    """`add_errors` over words begin..end of two arrays, in pieces of fixed size."""
    for start in range(begin, end, 4096):
        add_errors(words, others, start, start, min(4096, end - start), sums)


@jit
def count_codes(packed, begin, end, max_code, sign_mask):
    """(codes of the largest finite magnitude, codes of magnitude 0) of one-byte codes."""
    at_max, zero = 0, 0
    for i in range(index(begin), index(end)):
        magnitude = packed[i] & sign_mask
        at_max += magnitude == max_code
        zero += magnitude == 0
    return at_max, zero


@jit
def count_nibbles(packed, begin, end):
    """(codes of magnitude 6, codes of magnitude 0) of bytes of two E2M1 codes."""
    at_max, zero = 0, 0
    for i in range(index(begin), index(end)):
        byte = packed[i]
        at_max += np.int64((byte & 0x07) == 0x07) + np.int64((byte & 0x70) == 0x70)
        zero += np.int64((byte & 0x07) == 0) + np.int64((byte & 0x70) == 0)
    return at_max, zero


@cache
def measurer(factors: Any, decode: Any) -> Any:
    """A kernel that measures a range of blocks against their codes; its data is Measured."""
    dequantize_tile = tile_decoder(factors, decode, keeps=False)

    @jit_of(factors, decode)
    def quantized_error_range(data, begin, end, second, blocks_per_second, scratch):
        words, byte, counts = data.words, data.decode.byte, data.counts
        size = data.decode.block_words
        while begin < end:
            tile = next_tile(begin, end, second, blocks_per_second)
            dequantize_tile(data.decode, tile, scratch)
            add_errors(words, data.decode.out, begin * size, 0, tile.blocks * size, data.sums)
            for i in range(begin, begin + tile.blocks):
                if byte[i] == 0:
                    nonzero = False
                    for j in range(i * size, (i + 1) * size):
                        # NaN counts as zero, as it does in the block's amax.
                        nonzero |= abs(low(words[j])) > f32(0) or abs(high(words[j])) > f32(0)
                    counts[0] += nonzero
                elif byte[i] < 8:
                    counts[1] += 1
            begin += tile.blocks

    return quantized_error_range


def measuring(job: Job, source: np.ndarray, byte: np.ndarray) -> Callable[[int, int], Part]:
    """A function that measures a range of whole blocks.

    Args:
        job: rowwise; how the codes were made.
        source: original elements, padded to whole blocks, in words.
        byte: linear scale bytes.
    """
    plan: Plan = job.plan
    element, block, flat = (
        plan.format.element,
        plan.format.block_size,
        read_only(job.packed.reshape(-1)),
    )
    kernel = measurer(factors_of(plan), decode_of(plan))
    source = read_only(source)
    shared = decoding(plan, job.packed, byte, np.empty(0, np.uint64), "float32")

    def data() -> Measured:
        decode = shared._replace(out=np.empty(TILE * block // 2, np.uint64))
        return Measured(source, decode, np.zeros(5), np.zeros(2, np.int64))

    measure = block_range(plan, kernel, job.second, data)
    block_bytes = plan.format.packed_cols(block)

    def part(begin: int, end: int) -> Part:
        measured = measure(begin, end)
        first, last = begin * block_bytes, end * block_bytes
        if plan.format.codes_per_byte == 2:
            codes = count_nibbles(flat, first, last)
        else:
            codes = count_codes(flat, first, last, element.max_code, 0x7F)
        return Part(measured.sums, measured.counts, codes)

    return part


def collect(sums: Iterable[np.ndarray], elements: int) -> ErrorSums:
    """Adds up the `sums` of parts, in order."""
    result = ErrorSums(elements=elements)
    for x2, y2, xy, d2, largest in sums:
        result += ErrorSums(0, float(x2), float(y2), float(xy), float(d2), float(largest))
    return result


def total(plan: Plan, parts: Sequence[Part]) -> ErrorSums:
    """The sums of all parts of a tensor."""
    result = collect([part.sums for part in parts], plan.rows * plan.cols)
    result.blocks = plan.rows * plan.blocks
    result.saturated = int(sum(part.codes[0] for part in parts))
    padding = plan.rows * (plan.blocks * plan.format.block_size - plan.cols)
    result.zero_codes = int(sum(part.codes[1] for part in parts)) - padding
    zero, small = (int(n) for n in np.sum([part.scales for part in parts], axis=0))
    if plan.format.scale_type == "e4m3":
        result.scale_underflow, result.scale_subnormal = zero, small
    else:
        result.scale_subnormal = zero
    return result


def without_padding(plan: Plan, packed: np.ndarray) -> np.ndarray:
    """A copy of the codes with zeros in the padding of each row."""
    codes = packed
    if plan.format.codes_per_byte == 2:
        codes = codecs.unpack_nibbles(packed, plan.nibble_order)
    codes = codes.copy()
    codes[:, plan.cols :] = 0
    if plan.format.codes_per_byte == 2:
        return codecs.pack_nibbles(codes, plan.nibble_order)
    return codes


def as_rows(job: Job) -> Job:
    """A columnwise job as the rowwise one of the transpose."""
    plan: Plan = job.plan
    scheme = plan.scheme.replace(direction="rowwise", scale_layout="linear")
    rowwise = replace(plan, rows=plan.cols, cols=plan.rows, scheme=scheme)
    byte = linear_scales(job.block_scale, plan.scale_layout, (plan.vectors, plan.blocks))
    if plan.scale_layout == "linear" and not plan.transposes:
        byte = byte.T
    return job._replace(
        plan=rowwise.decoding,
        x=np.ascontiguousarray(job.x.T),
        packed=job.packed if plan.transposes else np.ascontiguousarray(job.packed.T),
        block_scale=np.ascontiguousarray(byte),
    )


def error_sums(x: np.ndarray, x_dtype: str, y: np.ndarray, y_dtype: str) -> ErrorSums:
    """`Backend.error_sums`."""
    even = x.size + x.size % 2
    pairs, others = (
        read_only(words(padded_rows(array.reshape(1, -1), even), dtype))
        for array, dtype in ((x, x_dtype), (y, y_dtype))
    )

    def work(begin: int, end: int) -> np.ndarray:
        sums = np.zeros(5)
        error_range(pairs, others, begin, end, sums)
        return sums

    return collect(run(work, pairs.size, 2, sums=True), x.size)


def quantized_error_sums(job: Job) -> ErrorSums:
    """`Backend.quantized_error_sums`."""
    job = job._replace(plan=job.plan.decoding)
    if job.plan.is_columnwise:
        job = as_rows(job)
    plan: Plan = job.plan
    cols = plan.blocks * plan.format.block_size
    if cols != plan.cols:
        # Whatever codes stand in the padding must not count: treat them as zeros.
        job = job._replace(packed=without_padding(plan, job.packed))
    byte = linear_scales(job.block_scale, plan.scale_layout, (plan.rows, plan.blocks))
    measure = measuring(job, words(padded_rows(job.x, cols), job.dtype), byte)
    return total(plan, run_blocks(plan, measure, sums=True))


def quantize_and_measure(job: Job) -> ErrorSums:
    """`Backend.quantize_and_measure` of a plain plan of whole blocks.

    Chunk by chunk, so that the elements are measured while they are still in the cache.
    """
    plan: Plan = job.plan
    kernel = quantizer(scales_of(plan), encode_of(plan))
    with linear_output(job.block_scale, plan.scale_layout, (plan.rows, plan.blocks)) as byte:
        data = encoding(job, job.packed, byte)
        quantize = block_range(plan, kernel, job.second, lambda: data)
        measure = measuring(job, data.words, byte)

        def work(begin: int, end: int) -> Part:
            quantize(begin, end)
            return measure(begin, end)

        parts = run_blocks(plan, work, sums=True)
    return total(plan, parts)
