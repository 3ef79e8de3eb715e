# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The quantizing numba kernels: amax and codes of a range of whole blocks.

Data is flat: arrays of words of two elements (see :mod:`fp4kit.cpu.words`), blocks one
after the other. Work goes tile by tile in three loops that LLVM vectorizes one by one: block
amaxes as integer maxima, the scales of all blocks of the tile, then codes. A tile's input stays
in the L1 cache between the loops.
"""

# ruff: noqa: ANN001, ANN202, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from .jit import jit, jit_of, jit_part
from .scalars import F32, I32, U8, U32, U64, least, most, scalar, where
from .scales import encode_float8, index
from .words import (
    ABS,
    INF_BITS,
    bits_float,
    f32,
    float_bits,
    high,
    high_magnitude,
    infinity_of,
    low,
    low_magnitude,
    u32,
    widen_magnitude,
)

#: Blocks per tile: 2048 or 4096 elements.
TILE = 128
#: Words that share a factor in the inner loops: a constant, so that LLVM makes vector code of them
#: (an MX block is two groups).
GROUP = np.uint64(8)
NO_RECIPE = -1

# Adding about 2^23 rounds to integers, ties to even; the sums differ in where codes step.
ROUND_HALVES = f32(8388608.0)
ROUND_ONES = f32(8388610.0)
ROUND_TWOS = f32(8388612.0)
LARGEST_SUM = u32(0x4B000007)


@scalar(U32(F32))
def encode_finite_e2m1(value):
    """E2M1 code (u32) of a float32 that is not NaN: nearest even, saturating, sign kept.

    The code of y = |value| is the least of round(2y), round(y) + 2 and round(y/2) + 4, capped at
    7; each is the low mantissa bits of a sum with about 2^23, where one ulp is 1.
    """
    bits = float_bits(value)
    y = bits_float(bits & ABS)
    halves = float_bits(y * 2 + ROUND_HALVES)
    ones = float_bits(y + ROUND_ONES)
    twos = float_bits(y * 0.5 + ROUND_TWOS)
    code = least(least(halves, ones), least(twos, LARGEST_SUM)) & 7
    return code | ((bits >> 28) & 8)


@scalar(U32(F32))
def encode_e2m1(value):
    """`encode_finite_e2m1`, and 7 for NaN."""
    is_nan = (float_bits(value) & ABS) > INF_BITS
    return where(is_nan, 7, encode_finite_e2m1(value))


@scalar(U32(F32, F32, U32, U32))
def divided(value, divisor, all_mask, zero_mask):
    """E2M1 code (u32) of a quotient, less what the masks take away."""
    code = encode_e2m1(value / divisor) & all_mask
    return where(value.equals(0), code & zero_mask, code)


@scalar(U32(U32), U32(I32), U32(U64))
def largest_known(word):
    """Sign-cleared bits (u32) of the larger element of a word that is not NaN, or 0."""
    even, odd, infinity = low_magnitude(word), high_magnitude(word), infinity_of(word)
    return most(where(even <= infinity, even, 0), where(odd <= infinity, odd, 0))


@scalar(U8(U32, U32, U32, U32))
def pair(even, odd, even_shift, odd_shift):
    """The byte of two codes of four bits."""
    return ((even << even_shift) | (odd << odd_shift)).cast(U8)


@jit
def largest_magnitude(data, begin, end, magnitude_mask):
    """Largest sign-cleared bit pattern of uint16 (bfloat16, float16) or uint32 (float32) data.

    The mask has the type of the data: at their own width LLVM compares 16 of the former at once.
    """
    largest = data.dtype.type(0)
    for i in range(index(begin), index(end)):
        largest = data.dtype.type(max(largest, data.dtype.type(data[i] & magnitude_mask)))
    return largest


@jit
def largest_number(data, begin, end, magnitude_mask, infinity):
    """The same with NaN (patterns above infinity) left out."""
    largest = data.dtype.type(0)
    for i in range(index(begin), index(end)):
        magnitude = data.dtype.type(data[i] & magnitude_mask)
        if magnitude <= infinity:
            largest = data.dtype.type(max(largest, magnitude))
    return largest


@jit
def row_magnitudes(data, begin, end, cols, magnitude_mask, infinity, out):
    """Largest sign-cleared bit pattern of each of rows begin..end, NaN left out."""
    for row in range(index(begin), index(end)):
        first, last = row * index(cols), (row + index(1)) * index(cols)
        largest = largest_magnitude(data, first, last, magnitude_mask)
        if largest > infinity:
            largest = largest_number(data, first, last, magnitude_mask, infinity)
        out[row] = largest


@jit
def column_magnitudes(data, begin, end, rows, cols, magnitude_mask, infinity, out):
    """The same of each of columns begin..end; `out` starts as zeros."""
    zero = data.dtype.type(0)
    for row in range(index(rows)):
        place = row * index(cols)
        for col in range(index(begin), index(end)):
            magnitude = data.dtype.type(data[place + col] & magnitude_mask)
            known = magnitude if magnitude <= infinity else zero
            out[col] = max(out[col], known)


@jit_part
def block_amaxes(words, first_word, groups_per_block, count, result):
    """Bits of the float32 amax of each of `count` blocks, NaN ignored; returns if all is finite."""
    first_word, groups = index(first_word), index(count * groups_per_block)
    infinity = infinity_of(words[first_word])
    for g in range(groups):
        even, odd = u32(0), u32(0)
        for j in range(GROUP):
            word = words[first_word + g * GROUP + j]
            even = max(even, low_magnitude(word))
            odd = max(odd, high_magnitude(word))
        result[g] = max(even, odd)
    largest = u32(0)
    for g in range(groups):
        largest = max(largest, result[g])
    if largest > infinity:
        for g in range(groups):
            known = u32(0)
            for j in range(GROUP):
                known = max(known, largest_known(words[first_word + g * GROUP + j]))
            result[g] = known
    if groups_per_block == 2:
        for b in range(index(count)):
            result[b] = max(result[index(2) * b], result[index(2) * b + index(1)])
    for b in range(index(count)):
        result[b] = widen_magnitude(result[b], words[first_word])
    return largest < infinity


@jit_part
def spread(factor, groups_per_block, count):
    """Turns one factor per block into one per group, in place."""
    if groups_per_block == 2:
        for b in range(count - 1, -1, -1):
            factor[2 * b + 1] = factor[b]
            factor[2 * b] = factor[b]


@jit_part
def multiply(rules, words, first, groups, factor, finite, low_first, packed, target):
    """E2M1 codes of x * factor; `finite` if every x and every factor is."""
    even_shift = u32(0) if low_first else u32(4)
    odd_shift = u32(4) if low_first else u32(0)
    if finite:
        for g in range(groups):
            f = factor[g]
            for j in range(GROUP):
                word = words[first + g * GROUP + j]
                even = encode_finite_e2m1(low(word) * f)
                odd = encode_finite_e2m1(high(word) * f)
                packed[target + g * GROUP + j] = pair(even, odd, even_shift, odd_shift)
    else:
        for i in range(groups * GROUP):
            word, f = words[first + i], factor[i // GROUP]
            even, odd = encode_e2m1(low(word) * f), encode_e2m1(high(word) * f)
            packed[target + i] = pair(even, odd, even_shift, odd_shift)


@jit_part
def divide_or_multiply(rules, words, first, groups, factor, finite, low_first, packed, target):
    """E2M1 codes of x / factor, or of x * factor.

    A divisor of 0 gives 0, and the sign of zero is dropped if the rules do not keep it.
    """
    if rules.divides:
        even_shift = u32(0) if low_first else u32(4)
        odd_shift = u32(4) if low_first else u32(0)
        zero_mask = u32(15) if rules.keeps_zero else u32(0)
        for g in range(groups):
            divisor = factor[g]
            all_mask = u32(0) if divisor == f32(0) else u32(15)
            for j in range(GROUP):
                word = words[first + g * GROUP + j]
                even = divided(low(word), divisor, all_mask, zero_mask)
                odd = divided(high(word), divisor, all_mask, zero_mask)
                packed[target + g * GROUP + j] = pair(even, odd, even_shift, odd_shift)
    else:
        multiply(rules, words, first, groups, factor, finite, low_first, packed, target)


@jit_part
def multiply_float8(rules, words, first, groups, factor, finite, low_first, packed, target):
    """FP8 codes of x * factor, two per 16-bit word."""
    mantissa_bits, bias, max_value = u32(rules.mantissa_bits), u32(rules.bias), rules.max_value
    for g in range(groups):
        f = factor[g]
        for j in range(GROUP):
            word = words[first + g * GROUP + j]
            even = encode_float8(low(word) * f, mantissa_bits, bias, max_value, u32(0x7F))
            odd = encode_float8(high(word) * f, mantissa_bits, bias, max_value, u32(0x7F))
            packed[target + g * GROUP + j] = np.uint16(even | (odd << u32(8)))


def tile_quantizer(scales, encode):
    """The part of kernels that quantizes up to TILE blocks under one second-level scale.

    Args:
        scales: how block scales are made, of :mod:`fp4kit.cpu.scales`.
        encode: how elements are encoded: `multiply`, `divide_or_multiply` or `multiply_float8`.

    Returns:
        A function of
        words: input words of all blocks.
        first: first block.
        count: number of blocks.
        block_words: words in a block, 8 or 16.
        rules: numbers that `scales` and `encode` take.
        has_second: whether `second` counts.
        second: second-level scale.
        low_first: nibble order.
        packed: output code words (uint8 for E2M1, uint16 for FP8).
        packed_first: block of `packed` that the first block goes to.
        byte: output scale bytes.
        byte_first: place of the first block's scale in `byte`.
        factor: scratch, float32 (2 * TILE,).
        amaxes: scratch, uint32 (2 * TILE,).
    """

    @jit_part
    def quantize_tile(
        words, first, count, block_words, rules, has_second, second, low_first,
        packed, packed_first, byte, byte_first, factor, amaxes,
    ):  # fmt: skip
        per_block = block_words // 8
        finite = block_amaxes(words, first * block_words, per_block, count, amaxes)
        scales(rules, has_second, second, amaxes, count, byte, byte_first, factor)
        for b in range(index(count)):
            finite &= factor[b] == factor[b]
        spread(factor, per_block, count)
        encode(
            rules, words, index(first * block_words), index(count * per_block), factor, finite,
            low_first, packed, index(packed_first * block_words),
        )  # fmt: skip

    return quantize_tile


def quantizer(scales, encode):
    """A kernel that quantizes a range of blocks; see :func:`tile_quantizer`."""
    quantize_tile = tile_quantizer(scales, encode)

    @jit_of(scales, encode)
    def quantize_range(
        words, begin, end, block_words, rules, second, blocks_per_scale, low_first,
        packed, byte, factor, amaxes,
    ):  # fmt: skip
        """Quantizes blocks begin..end; block b uses second[b // blocks_per_scale] (empty: none)."""
        has_second = second.size > 0
        scale = f32(1)
        b = begin
        while b < end:
            stop = min(end, b + TILE)
            if has_second:
                group = b // blocks_per_scale
                stop = min(stop, (group + 1) * blocks_per_scale)
                scale = second[group]
            quantize_tile(
                words, b, stop - b, block_words, rules, has_second, scale, low_first,
                packed, b, byte, b, factor, amaxes,
            )  # fmt: skip
            b = stop

    return quantize_range
