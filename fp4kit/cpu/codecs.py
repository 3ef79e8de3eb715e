# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Codes of single numbers: :mod:`fp4kit.reference.codecs` as intrinsics (E2M1, FP8, E8M0)."""

# ruff: noqa: ANN001, ANN201 - intrinsics have no Python types

from __future__ import annotations

from fp4kit.formats import E4M3

from .elements import ABS, INF_BITS, QUIET_NAN, at_most, bits_float, f32, float_bits, u32
from .intrinsics import BOOL, F32, U8, U32, intrinsic, least, where
from .jit import jit_part

# Adding about 2^23 rounds to integers, ties to even; the sums differ in where codes step.
ROUND_HALVES = f32(8388608.0)
ROUND_ONES = f32(8388610.0)
ROUND_TWOS = f32(8388612.0)
LARGEST_SUM = u32(0x4B000007)
#: Twice the value of E2M1 magnitude code c stands in bits 4c..4c+3.
DOUBLED_VALUES = u32(0xC8643210)
#: Bits of 2^-125 and up to 2^120: half of such a factor is exact, and 12 times it finite.
SMALLEST_ORDINARY = u32(0x01000000)
ORDINARY_RANGE = u32(0x7B800000 - 0x01000000)
E4M3_MAX = f32(E4M3.max)
#: What NaN becomes as an FP8 code, in E4M3 and E5M2.
NAN_CODE = E4M3.nan_code


@intrinsic(U32(F32))
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


@intrinsic(U32(F32))
def encode_e2m1(value):
    """`encode_finite_e2m1`, and 7 for NaN."""
    is_nan = (float_bits(value) & ABS) > INF_BITS
    return where(is_nan, 7, encode_finite_e2m1(value))


@intrinsic(U32(F32, F32, U32, U32))
def divided(value, divisor, all_mask, zero_mask):
    """E2M1 code (u32) of a quotient, less what the masks take away."""
    code = encode_e2m1(value / divisor) & all_mask
    return where(value.equals(0), code & zero_mask, code)


@jit_part
def nibble_shifts(low_first):
    """Where the codes of even and odd elements stand in their byte."""
    even = u32(0) if low_first else u32(4)
    odd = u32(4) if low_first else u32(0)
    return even, odd


@intrinsic(U8(U32, U32, U32, U32))
def pack(even, odd, even_shift, odd_shift):
    """The byte of two codes of four bits."""
    return ((even << even_shift) | (odd << odd_shift)).cast(U8)


@intrinsic(F32(U32, F32, F32, U32))
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


@intrinsic(BOOL(F32))
def is_ordinary(factor):
    """Whether half of a factor is exact and twelve times it finite, or the factor 0."""
    bits = float_bits(factor)
    return bits.equals(0) | (bits - SMALLEST_ORDINARY <= ORDINARY_RANGE)


@intrinsic(F32(U32, F32))
def decode_times(code, half):
    """float32 of the E2M1 code in the lowest bits of a word (u32), times twice `half`."""
    doubled = ((DOUBLED_VALUES >> ((code & 7) << 2)) & 15).cast(F32)
    return bits_float(float_bits(doubled * half) ^ ((code & 8) << 28))


@intrinsic(U32(F32, U32, U32, F32))
def encode_float8(value, mantissa_bits, bias, max_value):
    """Code (u32, sign included) of a saturating 8-bit float, nearest even; NaN -> NAN_CODE."""
    bits = float_bits(value)
    is_nan = (bits & ABS) > INF_BITS
    magnitude = float_bits(at_most(bits_float(bits & ABS), max_value))
    shift = 23 - mantissa_bits
    odd = (magnitude >> shift) & 1
    half = (1 << (shift - 1)) - 1
    code = ((magnitude + half + odd) >> shift) - ((127 - bias) << mantissa_bits)
    # Below the smallest normal the codes are multiples of the smallest subnormal: adding the float
    # whose unit in the last place is that subnormal rounds to it.
    magic = (151 - bias - mantissa_bits) << 23
    small = float_bits(bits_float(magnitude) + bits_float(magic)) - magic
    code = where(magnitude < ((128 - bias) << 23), small, code)
    return where(is_nan, NAN_CODE, code | ((bits >> 24) & 0x80))


@intrinsic(U32(F32))
def encode_e4m3(value):
    """E4M3 scale byte (u32) of a non-negative float32 or NaN."""
    bits = float_bits(value)
    mantissa_bits, bias = (
        bits.made(bits.like(field)) for field in (E4M3.mantissa_bits, E4M3.bias)
    )  # fmt: skip
    return encode_float8(value, mantissa_bits, bias, E4M3_MAX)


@intrinsic(F32(U32))
def decode_e4m3(code):
    """float32 of an E4M3 code (u32); foreign files may hold negative scales."""
    magnitude = code & 0x7F
    bits = (magnitude << 20) + (120 << 23)
    bits = where(magnitude < 8, float_bits(magnitude.cast(F32) * 2.0**-9), bits)
    bits = where(magnitude.equals(0x7F), QUIET_NAN, bits)
    return bits_float(bits | ((code & 0x80) << 24))


@intrinsic(F32(U32))
def decode_e8m0(byte):
    """float32 of an E8M0 byte (u32): 2^(byte - 127), the first a subnormal, the last NaN."""
    bits = where(byte.equals(0), 0x00400000, byte << 23)
    return bits_float(where(byte.equals(255), QUIET_NAN, bits))


@intrinsic(U32(U32))
def reverse_e8m0(byte):
    """The E8M0 byte (u32) of the reciprocal; that of NaN is NaN's."""
    return where(byte.equals(255), byte, 254 - byte)
