# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The decoding numba kernels: dequantize, quantize_dequantize, error sums, swizzle."""

# ruff: noqa: ANN001, ANN202, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from .encode import GROUP, TILE, spread, tile_quantizer
from .jit import jit, jit_inner_sums, jit_of, jit_part
from .scalars import BOOL, F32, U32, scalar, where
from .scales import index
from .words import (
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


@scalar(F32(U32, F32, F32, U32))
def decode_e2m1(code, first, last, zero_mask):
    """float32 of an E2M1 code (u32): (value * first) * last, zero staying zero unless under NaN.

    `zero_mask` 0 drops the sign of zero.
    """
    magnitude = code & 7
    is_zero = magnitude.equals(0)
    sign = (code & 8) << 28
    value = ((DOUBLED_VALUES >> (magnitude << 2)) & 15).cast(F32) * 0.5
    result = float_bits(value * first * last)
    known_zero = is_zero & first.equals(first) & last.equals(last)
    sign = where(is_zero, sign & zero_mask, sign)
    return bits_float(where(known_zero, 0, result) ^ sign)


@scalar(BOOL(F32))
def is_ordinary(factor):
    """Whether half of a factor is exact and twelve times it finite, or the factor 0."""
    bits = float_bits(factor)
    return bits.equals(0) | (bits - SMALLEST_ORDINARY <= ORDINARY_RANGE)


@scalar(F32(U32, F32))
def decode_times(code, half):
    """float32 of the E2M1 code in the lowest bits of a word (u32), times twice `half`."""
    doubled = ((DOUBLED_VALUES >> ((code & 7) << 2)) & 15).cast(F32)
    return bits_float(float_bits(doubled * half) ^ ((code & 8) << 28))


@jit_part
def decode_e2m1s(packed, source, groups, factor, last, keep_sign, low_first, table, out, target):
    """Words of two elements from bytes of two E2M1 codes.

    Most factors leave no room for anything unusual: then half of each is exact and finite.
    """
    even_shift = u32(0) if low_first else u32(4)
    odd_shift = u32(4) if low_first else u32(0)
    ordinary = keep_sign and last == f32(1)
    for g in range(groups):
        ordinary &= is_ordinary(factor[g])
    zero_mask = u32(0xFFFFFFFF) if keep_sign else u32(0)
    if ordinary:
        for g in range(groups):
            half = factor[g] * f32(0.5)
            for j in range(GROUP):
                byte = u32(packed[source + g * GROUP + j])
                x = decode_times(byte >> even_shift, half)
                y = decode_times(byte >> odd_shift, half)
                place = target + g * GROUP + j
                out[place] = join_finite(x, y, out[place])
    else:
        for g in range(groups):
            for j in range(GROUP):
                byte = u32(packed[source + g * GROUP + j])
                x = decode_e2m1((byte >> even_shift) & u32(15), factor[g], last, zero_mask)
                y = decode_e2m1((byte >> odd_shift) & u32(15), factor[g], last, zero_mask)
                place = target + g * GROUP + j
                out[place] = join(x, y, out[place])


@jit_part
def decode_float8s(packed, source, groups, factor, last, keep_sign, low_first, table, out, target):
    """Words of two elements from 16-bit words of two FP8 codes."""
    for g in range(groups):
        for j in range(GROUP):
            word = u32(packed[source + g * GROUP + j])
            x = table[word & u32(0xFF)] * factor[g]
            y = table[word >> u32(8)] * factor[g]
            place = target + g * GROUP + j
            out[place] = join(x, y, out[place])


def tile_decoder(factors, decode):
    """The part of kernels that decodes up to TILE blocks under one second-level scale.

    Args:
        factors: how block scales become factors, of :mod:`fp4kit.cpu.scales`.
        decode: `decode_e2m1s` or `decode_float8s`.
    """

    @jit_part
    def dequantize_tile(
        packed, packed_first, byte, byte_first, count, block_words, rules, has_second, second,
        keep_zero_sign, low_first, table, out, out_first, factor,
    ):  # fmt: skip
        last = factors(rules, has_second, second, byte, byte_first, count, factor)
        per_block = block_words // 8
        spread(factor, per_block, count)
        decode(
            packed, index(packed_first * block_words), index(count * per_block), factor, last,
            keep_zero_sign, low_first, table, out, index(out_first * block_words),
        )  # fmt: skip

    return dequantize_tile


def decoder(factors, decode):
    """A kernel that decodes a range of blocks; see :func:`tile_decoder`."""
    dequantize_tile = tile_decoder(factors, decode)

    @jit_of(factors, decode)
    def dequantize_range(
        packed, byte, begin, end, block_words, rules, second, blocks_per_scale, keep_zero_sign,
        low_first, table, out, factor,
    ):  # fmt: skip
        """Decodes blocks begin..end; block b uses second[b // blocks_per_scale] (empty: none)."""
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
                packed, b, byte, b, stop - b, block_words, rules, has_second, scale,
                keep_zero_sign, low_first, table, out, b, factor,
            )  # fmt: skip
            b = stop

    return dequantize_range


def round_tripper(scales, encode, factors, decode):
    """A kernel that quantizes and decodes a range of blocks; see the makers of its parts."""
    quantize_tile = tile_quantizer(scales, encode)
    dequantize_tile = tile_decoder(factors, decode)

    @jit_of(scales, encode, factors, decode)
    def quantize_dequantize_range(
        words, begin, end, block_words, rules, decoding, second, blocks_per_scale, keep_zero_sign,
        table, codes, out, factor, amaxes, byte,
    ):  # fmt: skip
        """Quantizes and decodes blocks begin..end; `codes` and `byte` are scratch for one tile."""
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
                words, b, stop - b, block_words, rules, has_second, scale, True,
                codes, 0, byte, 0, factor, amaxes,
            )  # fmt: skip
            dequantize_tile(
                codes, 0, byte, 0, stop - b, block_words, decoding, has_second, scale,
                keep_zero_sign, True, table, out, b, factor,
            )  # fmt: skip
            b = stop

    return quantize_dequantize_range


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


def error_measurer(factors, decode):
    """A kernel that measures a range of blocks against their codes; see :func:`tile_decoder`."""
    dequantize_tile = tile_decoder(factors, decode)

    @jit_of(factors, decode)
    def quantized_error_range(
        words, packed, byte, begin, end, block_words, rules, second, blocks_per_scale,
        keep_zero_sign, low_first, table, sums, counts, factor, decoded,
    ):  # fmt: skip
        """Error sums of blocks begin..end, decoded to float32 tile by tile.

        Args:
            words: original, words of all blocks.
            packed: code words of all blocks.
            byte: linear scale bytes.
            begin: first block.
            end: one past the last block.
            block_words: words in a block.
            rules: numbers that `factors` takes.
            second: second-level scales, empty if there are none.
            blocks_per_scale: blocks that share one of them.
            keep_zero_sign: whether code 8 decodes to -0.0.
            low_first: nibble order.
            table: float32 (256,) values of FP8 codes.
            sums: float64 (5,), see `add_errors`.
            counts: int64 (2,): blocks with scale byte 0 and a non-zero element, blocks with scale
                bytes 1..7; both whatever the scale type.
            factor: scratch, float32 (2 * TILE,).
            decoded: scratch, uint64 (TILE * block_words,).
        """
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
                packed, b, byte, b, stop - b, block_words, rules, has_second, scale,
                keep_zero_sign, low_first, table, decoded, 0, factor,
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

    return quantized_error_range


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
