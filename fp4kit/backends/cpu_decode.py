# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The decoding numba kernels: dequantize, quantize_dequantize, error sums, swizzle."""

# ruff: noqa: ANN001, ANN202, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from .cpu_encode import GROUP, NO_RECIPE, TILE, index, quantize_tile, spread
from .cpu_jit import jit, jit_sums
from .cpu_scales import nvfp4_factors, power_of_two
from .cpu_words import (
    bits_double,
    bits_float,
    double_bits,
    f32,
    float_bits,
    high,
    join,
    join_finite,
    low,
    u32,
)

#: Twice the value of E2M1 magnitude code c stands in bits 4c..4c+3.
DOUBLED_VALUES = u32(0xC8643210)
#: Bits of 2^-125 and up to 2^120: half of such a factor is exact, and 12 times it finite.
SMALLEST_ORDINARY = u32(0x01000000)
ORDINARY_RANGE = u32(0x7B800000 - 0x01000000)
MAGNITUDE_64 = np.int64(0x7FFFFFFFFFFFFFFF)


@jit
def decode_e2m1(code, first, last, zero_mask):
    """float32 of an E2M1 code (u32): (value * first) * last, zero staying zero unless under NaN.

    `zero_mask` 0 drops the sign of zero.
    """
    magnitude = code & u32(7)
    sign = (code & u32(8)) << u32(28)
    value = f32((DOUBLED_VALUES >> (magnitude << u32(2))) & u32(15)) * f32(0.5)
    result = float_bits(value * first * last)
    known_zero = magnitude == u32(0) and first == first and last == last
    result = u32(0) if known_zero else result
    sign = sign & zero_mask if magnitude == u32(0) else sign
    return bits_float(result ^ sign)


@jit
def decode_any_e2m1(
    packed, source, groups, factor, last, zero_mask, even_shift, odd_shift, out, target
):
    """Words of two elements from bytes of two E2M1 codes, for any factors."""
    source, target = index(source), index(target)
    for g in range(index(groups)):
        for j in range(GROUP):
            byte = u32(packed[source + g * GROUP + j])
            x = decode_e2m1((byte >> even_shift) & u32(15), factor[g], last, zero_mask)
            y = decode_e2m1((byte >> odd_shift) & u32(15), factor[g], last, zero_mask)
            place = target + g * GROUP + j
            out[place] = join(x, y, out[place])


@jit
def decode_ordinary_e2m1(packed, source, groups, factor, even_shift, odd_shift, out, target):
    """The same where half of every factor is exact and finite, and no second factor exists."""
    source, target = index(source), index(target)
    for g in range(index(groups)):
        half = factor[g] * f32(0.5)
        for j in range(GROUP):
            byte = u32(packed[source + g * GROUP + j])
            even, odd = byte >> even_shift, byte >> odd_shift
            x = f32((DOUBLED_VALUES >> ((even & u32(7)) << u32(2))) & u32(15)) * half
            y = f32((DOUBLED_VALUES >> ((odd & u32(7)) << u32(2))) & u32(15)) * half
            x = bits_float(float_bits(x) ^ ((even & u32(8)) << u32(28)))
            y = bits_float(float_bits(y) ^ ((odd & u32(8)) << u32(28)))
            place = target + g * GROUP + j
            out[place] = join_finite(x, y, out[place])


@jit
def decode_float8(packed, source, groups, factor, table, out, target):
    """Words of two elements from 16-bit words of two FP8 codes."""
    source, target = index(source), index(target)
    for g in range(index(groups)):
        for j in range(GROUP):
            word = u32(packed[source + g * GROUP + j])
            x = table[word & u32(0xFF)] * factor[g]
            y = table[word >> u32(8)] * factor[g]
            place = target + g * GROUP + j
            out[place] = join(x, y, out[place])


def decode_groups(packed, source, groups, factor, last, keep_sign, low_first, table, out, target):
    """Decodes groups of words: E2M1 if `packed` holds bytes, FP8 if it holds 16-bit words."""


@overload(decode_groups, inline="always")
def _decode_groups(packed, source, groups, factor, last, keep_sign, low_first, table, out, target):
    def from_e2m1(packed, source, groups, factor, last, keep_sign, low_first, table, out, target):
        even_shift = u32(0) if low_first else u32(4)
        odd_shift = u32(4) - even_shift
        ordinary = keep_sign and last == f32(1)
        for g in range(index(groups)):
            bits = float_bits(factor[g])
            ordinary &= bits == u32(0) or bits - SMALLEST_ORDINARY <= ORDINARY_RANGE
        if ordinary:
            decode_ordinary_e2m1(packed, source, groups, factor, even_shift, odd_shift, out, target)
        else:
            zero_mask = u32(0xFFFFFFFF) if keep_sign else u32(0)
            decode_any_e2m1(
                packed, source, groups, factor, last, zero_mask, even_shift, odd_shift, out, target
            )

    def from_float8(packed, source, groups, factor, last, keep_sign, low_first, table, out, target):
        decode_float8(packed, source, groups, factor, table, out, target)

    return from_e2m1 if packed.dtype == types.uint8 else from_float8


@jit
def dequantize_tile(
    packed, packed_first, byte, byte_first, count, block_words, recipe, has_second, second,
    keep_zero_sign, low_first, table, out, out_first, out_dtype, factor,
):  # fmt: skip
    """Decodes `count` <= TILE blocks that share one second-level scale; see quantize_tile."""
    last = f32(1)
    if recipe == NO_RECIPE:
        for b in range(count):
            exponent = np.int64(byte[byte_first + b]) - 127
            factor[b] = power_of_two(exponent) if exponent != 128 else f32(np.nan)
    else:
        last = nvfp4_factors(recipe, has_second, second, out_dtype, byte, byte_first, count, factor)
    per_block = block_words // 8
    spread(factor, per_block, count)
    decode_groups(
        packed, packed_first * block_words, count * per_block, factor, last, keep_zero_sign,
        low_first, table, out, out_first * block_words,
    )  # fmt: skip


@jit
def dequantize_range(
    packed, byte, begin, end, block_words, recipe, second, blocks_per_scale, keep_zero_sign,
    low_first, table, out, out_dtype,
):  # fmt: skip
    """Decodes blocks begin..end; block b uses second[b // blocks_per_scale] (empty: none)."""
    factor = np.empty(2 * TILE, np.float32)
    has_second = second.size > 0
    scale = f32(1)
    b = begin
    while b < end:
        stop = min(end, b + TILE)
        if has_second:
            group = b // blocks_per_scale
            stop = min(stop, (group + 1) * blocks_per_scale)
            scale = second[group]
        dequantize_tile(
            packed, b, byte, b, stop - b, block_words, recipe, has_second, scale,
            keep_zero_sign, low_first, table, out, b, out_dtype, factor,
        )  # fmt: skip
        b = stop


@jit
def quantize_dequantize_range(
    words, begin, end, block_words, rules, element, second, blocks_per_scale, keep_zero_sign,
    table, codes, out, out_dtype,
):  # fmt: skip
    """Quantizes and decodes blocks begin..end; `codes` is scratch for one tile of code words."""
    factor = np.empty(2 * TILE, np.float32)
    amaxes = np.empty(2 * TILE, np.uint32)
    byte = np.empty(TILE, np.uint8)
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
            words, b, stop - b, block_words, rules, element, has_second, scale, True,
            codes, 0, byte, 0, factor, amaxes,
        )  # fmt: skip
        dequantize_tile(
            codes, 0, byte, 0, stop - b, block_words, rules[0], has_second, scale,
            keep_zero_sign, True, table, out, b, out_dtype, factor,
        )  # fmt: skip
        b = stop


@jit_sums
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
def count_codes(packed, begin, end, saturated_code, sign_mask):
    """(codes of the largest finite magnitude, codes of magnitude 0) of one-byte codes."""
    saturated, zero = 0, 0
    for i in range(index(begin), index(end)):
        magnitude = packed[i] & sign_mask
        saturated += magnitude == saturated_code
        zero += magnitude == 0
    return saturated, zero


@jit
def count_nibbles(packed, begin, end):
    """(codes of magnitude 6, codes of magnitude 0) of bytes of two E2M1 codes."""
    saturated, zero = 0, 0
    for i in range(index(begin), index(end)):
        byte = packed[i]
        saturated += np.int64((byte & 0x07) == 0x07) + np.int64((byte & 0x70) == 0x70)
        zero += np.int64((byte & 0x07) == 0) + np.int64((byte & 0x70) == 0)
    return saturated, zero


@jit
def quantized_error_range(
    words, packed, byte, begin, end, block_words, recipe, second, blocks_per_scale,
    keep_zero_sign, low_first, table, sums, counts,
):  # fmt: skip
    """Error sums of blocks begin..end against their codes, decoded to float32 tile by tile.

    Args:
        words: original, words of all blocks.
        packed: code words of all blocks.
        byte: linear scale bytes.
        begin: first block.
        end: one past the last block.
        block_words: words in a block.
        recipe: recipe index or NO_RECIPE.
        second: second-level scales, empty if there are none.
        blocks_per_scale: blocks that share one of them.
        keep_zero_sign: whether code 8 decodes to -0.0.
        low_first: nibble order.
        table: float32 (256,) values of FP8 codes.
        sums: float64 (5,), see `add_errors`.
        counts: int64 (2,): blocks with scale byte 0 and a non-zero element, blocks with scale
            bytes 1..7; both whatever the scale type.
    """
    factor = np.empty(2 * TILE, np.float32)
    decoded = np.empty(TILE * block_words, np.uint64)
    has_second = second.size > 0
    scale = f32(1)
    b = begin
    while b < end:
        stop = min(end, b + TILE)
        if has_second:
            group = b // blocks_per_scale
            stop = min(stop, (group + 1) * blocks_per_scale)
            scale = second[group]
        dequantize_tile(
            packed, b, byte, b, stop - b, block_words, recipe, has_second, scale,
            keep_zero_sign, low_first, table, decoded, 0, 0, factor,
        )  # fmt: skip
        add_errors(words, decoded, b * block_words, 0, (stop - b) * block_words, sums)
        for i in range(b, stop):
            if byte[i] == 0:
                nonzero = False
                for j in range(i * block_words, (i + 1) * block_words):
                    # NaN counts as zero, as it does in the block's amax.
                    nonzero |= abs(low(words[j])) > f32(0) or abs(high(words[j])) > f32(0)
                counts[0] += nonzero
            elif byte[i] < 8:
                counts[1] += 1
        b = stop


@jit
def swizzle_range(linear, blocks, tile_rows, first_row, end_row, rows, out):
    """Copies tile rows first_row..end_row of linear scales into 128x4 or 8x4 order, padding 0."""
    tiles = (blocks + 3) // 4
    for tile_row in range(first_row, end_row):
        for tile in range(tiles):
            base = (tile_row * tiles + tile) * tile_rows * 4
            for r in range(tile_rows):
                row = tile_row * tile_rows + r
                inside = (r % 32) * 16 + (r // 32) * 4 if tile_rows == 128 else r * 4
                for c in range(4):
                    column = tile * 4 + c
                    value = np.uint8(0)
                    if row < rows and column < blocks:
                        value = linear[row * blocks + column]
                    out[base + inside + c] = value


@jit
def unswizzle_range(swizzled, blocks, tile_rows, first_row, end_row, out):
    """Copies rows first_row..end_row of swizzled scales into linear order."""
    tiles = (blocks + 3) // 4
    for row in range(first_row, end_row):
        r = row % tile_rows
        inside = (r % 32) * 16 + (r // 32) * 4 if tile_rows == 128 else r * 4
        base = (row // tile_rows) * tiles * tile_rows * 4 + inside
        for column in range(blocks):
            offset = base + (column // 4) * tile_rows * 4 + column % 4
            out[row * blocks + column] = swizzled[offset]
