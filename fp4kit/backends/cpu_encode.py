# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The quantizing numba kernels: amax and codes of a range of whole blocks.

Data is flat: arrays of words of two elements (see :mod:`fp4kit.backends.cpu_words`), blocks one
after the other. Work goes tile by tile in three loops that LLVM vectorizes one by one: block
amaxes as integer maxima, the scales of all blocks of the tile, then codes. A tile's input stays
in the L1 cache between the loops.
"""

# ruff: noqa: ANN001, ANN202, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from .cpu_jit import jit
from .cpu_scales import encode_float8, mx_scales, nvfp4_scales
from .cpu_words import (
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
#: Indices are unsigned because numba otherwise tests each one for Python's negative indexing.
index = np.uint64
NO_RECIPE = -1

# Adding about 2^23 rounds to integers, ties to even; the sums differ in where codes step.
ROUND_HALVES = f32(8388608.0)
ROUND_ONES = f32(8388610.0)
ROUND_TWOS = f32(8388612.0)
LARGEST_SUM = u32(0x4B000007)


@jit
def encode_finite_e2m1(value):
    """E2M1 code (u32) of a float32 that is not NaN: nearest even, saturating, sign kept.

    The code of y = |value| is the least of round(2y), round(y) + 2 and round(y/2) + 4, capped at
    7; each is the low mantissa bits of a sum with about 2^23, where one ulp is 1.
    """
    bits = float_bits(value)
    y = bits_float(bits & ABS)
    halves = float_bits(y * f32(2) + ROUND_HALVES)
    ones = float_bits(y + ROUND_ONES)
    twos = float_bits(y * f32(0.5) + ROUND_TWOS)
    code = min(min(halves, ones), min(twos, LARGEST_SUM)) & u32(7)
    return code | ((bits >> u32(28)) & u32(8))


@jit
def encode_e2m1(value):
    """`encode_finite_e2m1`, and 7 for NaN."""
    code = encode_finite_e2m1(value)
    return u32(7) if (float_bits(value) & ABS) > INF_BITS else code


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


@jit
def group_amax(words, first):
    """Bits of the largest magnitude of a group of words, NaN left out."""
    infinity = infinity_of(words[first])
    largest = u32(0)
    for j in range(GROUP):
        even, odd = low_magnitude(words[first + j]), high_magnitude(words[first + j])
        largest = max(largest, even) if even <= infinity else largest
        largest = max(largest, odd) if odd <= infinity else largest
    return largest


@jit
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
            if result[g] > infinity:
                result[g] = group_amax(words, first_word + g * GROUP)
    if groups_per_block == 2:
        for b in range(index(count)):
            result[b] = max(result[index(2) * b], result[index(2) * b + index(1)])
    for b in range(index(count)):
        result[b] = widen_magnitude(result[b], words[first_word])
    return largest < infinity


@jit
def spread(factor, groups_per_block, count):
    """Turns one factor per block into one per group, in place."""
    if groups_per_block == 2:
        for b in range(count - 1, -1, -1):
            factor[2 * b + 1] = factor[b]
            factor[2 * b] = factor[b]


@jit
def multiply_finite_e2m1(words, first, groups, factor, even_shift, odd_shift, packed, target):
    """E2M1 codes of x * factor, all finite."""
    first, target = index(first), index(target)
    for g in range(index(groups)):
        f = factor[g]
        for j in range(GROUP):
            word = words[first + g * GROUP + j]
            even = encode_finite_e2m1(low(word) * f)
            odd = encode_finite_e2m1(high(word) * f)
            packed[target + g * GROUP + j] = np.uint8((even << even_shift) | (odd << odd_shift))


@jit
def multiply_e2m1(words, first, groups, factor, even_shift, odd_shift, packed, target):
    """E2M1 codes of x * factor."""
    first, target = index(first), index(target)
    for g in range(index(groups)):
        f = factor[g]
        for j in range(GROUP):
            word = words[first + g * GROUP + j]
            even = encode_e2m1(low(word) * f)
            odd = encode_e2m1(high(word) * f)
            packed[target + g * GROUP + j] = np.uint8((even << even_shift) | (odd << odd_shift))


@jit
def divide_e2m1(words, first, groups, factor, zero_mask, even_shift, odd_shift, packed, target):
    """E2M1 codes of x / factor; a divisor of 0 gives 0, `zero_mask` 0 drops the sign of zero."""
    first, target = index(first), index(target)
    for g in range(index(groups)):
        divisor = factor[g]
        all_mask = u32(0) if divisor == f32(0) else u32(15)
        for j in range(GROUP):
            word = words[first + g * GROUP + j]
            x, y = low(word), high(word)
            even, odd = encode_e2m1(x / divisor) & all_mask, encode_e2m1(y / divisor) & all_mask
            even = even & zero_mask if x == f32(0) else even
            odd = odd & zero_mask if y == f32(0) else odd
            packed[target + g * GROUP + j] = np.uint8((even << even_shift) | (odd << odd_shift))


@jit
def multiply_float8(words, first, groups, factor, mantissa_bits, bias, max_value, packed, target):
    """FP8 codes of x * factor, two per 16-bit word."""
    first, target = index(first), index(target)
    for g in range(index(groups)):
        f = factor[g]
        for j in range(GROUP):
            word = words[first + g * GROUP + j]
            even = encode_float8(low(word) * f, mantissa_bits, bias, max_value, u32(0x7F))
            odd = encode_float8(high(word) * f, mantissa_bits, bias, max_value, u32(0x7F))
            packed[target + g * GROUP + j] = np.uint16(even | (odd << u32(8)))


def encode_groups(words, first, groups, factor, finite, rules, element, low_first, packed, target):
    """Encodes groups of words: E2M1 if `packed` holds bytes, FP8 if it holds 16-bit words."""


@overload(encode_groups, inline="always")
def _encode_groups(words, first, groups, factor, finite, rules, element, low_first, packed, target):
    def to_e2m1(words, first, groups, factor, finite, rules, element, low_first, packed, target):
        even_shift = u32(0) if low_first else u32(4)
        odd_shift = u32(4) - even_shift
        if rules[3]:
            zero_mask = u32(15) if rules[4] else u32(0)
            divide_e2m1(
                words, first, groups, factor, zero_mask, even_shift, odd_shift, packed, target
            )
        elif finite:
            multiply_finite_e2m1(
                words, first, groups, factor, even_shift, odd_shift, packed, target
            )
        else:
            multiply_e2m1(words, first, groups, factor, even_shift, odd_shift, packed, target)

    def to_float8(words, first, groups, factor, finite, rules, element, low_first, packed, target):
        multiply_float8(
            words, first, groups, factor, u32(element[0]), u32(element[1]), f32(element[2]),
            packed, target,
        )  # fmt: skip

    return to_e2m1 if packed.dtype == types.uint8 else to_float8


@jit
def quantize_tile(
    words, first, count, block_words, rules, element, has_second, second, low_first,
    packed, packed_first, byte, byte_first, factor, amaxes,
):  # fmt: skip
    """Quantizes `count` <= TILE blocks that share one second-level scale.

    Args:
        words: input words of all blocks.
        first: first block.
        count: number of blocks.
        block_words: words in a block, 8 or 16.
        rules: (recipe or NO_RECIPE, scale rule, dtype index, divides, keeps the sign of zero).
        element: (mantissa bits, bias, largest value, largest exponent).
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
    per_block = block_words // 8
    finite = block_amaxes(words, first * block_words, per_block, count, amaxes)
    scales = byte[byte_first : byte_first + count]
    if rules[0] == NO_RECIPE:
        mx_scales(rules[1], element[0], element[3], f32(element[2]), amaxes, count, scales, factor)
    else:
        nvfp4_scales(rules[0], has_second, second, rules[2], amaxes, count, scales, factor)
    for b in range(index(count)):
        finite &= factor[b] == factor[b]
    spread(factor, per_block, count)
    encode_groups(
        words, first * block_words, count * per_block, factor, finite, rules, element, low_first,
        packed, packed_first * block_words,
    )  # fmt: skip


@jit
def quantize_range(
    words, begin, end, block_words, rules, element, second, blocks_per_scale, low_first,
    packed, byte,
):  # fmt: skip
    """Quantizes blocks begin..end; block b uses second[b // blocks_per_scale] (empty: none)."""
    factor = np.empty(2 * TILE, np.float32)
    amaxes = np.empty(2 * TILE, np.uint32)
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
            words, b, stop - b, block_words, rules, element, has_second, scale, low_first,
            packed, b, byte, b, factor, amaxes,
        )  # fmt: skip
        b = stop
