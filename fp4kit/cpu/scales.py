# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Block scales: the formulas of :mod:`fp4kit.reference.scaling` as loops that LLVM vectorizes.

Every function works on a tile: arrays of one entry per block. The recipe is chosen outside the
loops. Comparisons are written so that NaN passes through, as NumPy's minimum and maximum do.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit import formats
from fp4kit.formats import E2M1, E4M3
from fp4kit.reference import scaling

from .jit import jit_inner, jit_part
from .scalars import F32, I32, I64, U32, least, most, scalar, where
from .words import (
    ABS,
    INF_BITS,
    QUIET_NAN,
    bits_float,
    f32,
    float_bits,
    narrow_bfloat,
    narrow_half,
    u32,
    widen_half,
)

TE = formats.TE.index
NVFUSER = formats.NVFUSER.index
TORCHAO = formats.TORCHAO.index
MODELOPT = formats.MODELOPT.index
COMPRESSED_TENSORS = formats.COMPRESSED_TENSORS.index
COMFY = formats.COMFY.index
#: Recipe te with a second level for scales up to 256, to the kernels that decode.
TE_256 = len(formats.ALL_RECIPES)
FLOOR, CEIL, EVEN, RCEIL = range(len(formats.SCALE_RULES))

ONE = f32(1)
SIX = f32(E2M1.max)
FLT_MAX = formats.FLT_MAX
RANGE = formats.SECOND_LEVEL_RANGE
RECIPROCAL_6 = formats.RECIPROCAL_6
RANGE_256 = f32(scaling.second_level_range(256))
E4M3_MAX = f32(E4M3.max)
TORCHAO_SCALE_MIN = scaling.TORCHAO_SCALE_MIN
MODELOPT_SCALE_MIN = scaling.MODELOPT_SCALE_MIN
ZERO_SCALE_CODE = u32(scaling.COMPRESSED_TENSORS_ZERO_SCALE)
#: Indices are unsigned because numba otherwise tests each one for Python's negative indexing.
index = np.uint64
#: Index of an element type in the kernels, by name.
DTYPE_INDEX = {"float32": 0, "float16": 1, "bfloat16": 2}


@scalar(U32(F32, U32, U32, F32, U32))
def encode_float8(value, mantissa_bits, bias, max_value, nan_code):
    """Code (u32, sign included) of a saturating 8-bit float, nearest even; NaN -> nan_code."""
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
    return where(is_nan, nan_code, code | ((bits >> 24) & 0x80))


@scalar(U32(F32))
def encode_e4m3(value):
    """E4M3 scale byte (u32) of a non-negative float32 or NaN."""
    bits = float_bits(value)
    number = [bits.made(bits.like(field)) for field in (E4M3.mantissa_bits, E4M3.bias, 0x7F)]
    return encode_float8(value, number[0], number[1], E4M3_MAX, number[2])


@scalar(F32(U32))
def decode_e4m3(code):
    """float32 of an E4M3 code (u32); foreign files may hold negative scales."""
    magnitude = code & 0x7F
    bits = (magnitude << 20) + (120 << 23)
    bits = where(magnitude < 8, float_bits(magnitude.cast(F32) * 2.0**-9), bits)
    bits = where(magnitude.equals(0x7F), 0x7FC00000, bits)
    return bits_float(bits | ((code & 0x80) << 24))


@scalar(F32(F32, F32))
def encode_scale(amax, largest):
    """`scaling.te_encode_scale` of one amax; `largest` is 6 * e4m3_max."""
    scale = largest / amax
    scale = where(scale <= FLT_MAX, scale, FLT_MAX)
    return where(amax.equals(0) | (scale <= 0), 1, scale)


@scalar(F32(F32))
def te_encode_scale(amax):
    """`encode_scale` of plain recipe te."""
    return encode_scale(amax, amax.made(amax.like(RANGE)))


@scalar(F32(F32))
def usable(scale):
    """`scaling.usable` of one scale."""
    return where((scale > 0) & (scale <= FLT_MAX), scale, 1)


@jit_inner
def round_to(value, dtype):
    """A float32 rounded to an element type (an index of DTYPE_INDEX) and widened again."""
    if dtype == 2:
        return bits_float(narrow_bfloat(value) << u32(16))
    if dtype == 1:
        return widen_half(narrow_half(value))
    return value


@scalar(F32(F32, F32))
def at_most(value, limit):
    """min(value, limit), NaN passing through."""
    return where(value > limit, limit, value)


@scalar(F32(F32, F32))
def at_least(value, limit):
    """max(value, limit), NaN passing through."""
    return where(value < limit, limit, value)


class TeRules(NamedTuple):
    """NVFP4 by recipe te. Kernels are compiled for the kind of rules that they are called with.

    Attributes:
        largest: 6 * 448, the largest scaled magnitude.
    """

    largest: np.float32 = RANGE


class Nvfp4Rules(NamedTuple):
    """NVFP4 by another recipe.

    Attributes:
        recipe: its index.
        dtype: element type of the input, see DTYPE_INDEX.
        divides: whether elements are divided by their factor.
        keeps_zero: whether the sign of zero is kept.
    """

    recipe: int
    dtype: int
    divides: bool
    keeps_zero: bool


class MxRules(NamedTuple):
    """Any MX format.

    Attributes:
        rule: scale rule.
        mantissa_bits: of the element.
        bias: of the element.
        max_value: largest value of the element.
        max_exponent: of the element.
    """

    rule: int
    mantissa_bits: int
    bias: int
    max_value: np.float32
    max_exponent: int


@jit_part
def te_scales(rules, has_second, second, amax_bits, count, byte, first, factor):
    """Scale bytes and element factors of `count` blocks from the bits of their amaxes, recipe te.

    Args:
        rules: a TeRules.
        has_second: whether `second` counts; it does.
        second: second-level scale.
        amax_bits: of each block.
        count: number of blocks.
        byte: output scale bytes.
        first: place of the first one.
        factor: output, what each element is multiplied with or divided by.
    """
    encode = encode_scale(second, rules.largest)
    multiplier = encode * RECIPROCAL_6
    inverse = ONE / encode
    for i in range(index(count)):
        code = encode_e4m3(at_most(bits_float(amax_bits[i]) * multiplier, FLT_MAX))
        byte[index(first) + i] = code
        factor[i] = at_most(ONE / (decode_e4m3(code) * inverse), FLT_MAX)


@jit_part
def nvfp4_scales(rules, has_second, second, amax_bits, count, byte, first, factor):
    """:func:`te_scales` of the other recipes; `rules` are Nvfp4Rules."""
    recipe = rules.recipe
    scale = usable(second) if has_second else ONE
    inverse = ONE / scale
    if recipe == NVFUSER:
        for i in range(index(count)):
            code = encode_e4m3(bits_float(amax_bits[i]) / SIX * scale)
            byte[index(first) + i] = code
            factor[i] = at_most(ONE / (decode_e4m3(code) * inverse), FLT_MAX)
    elif recipe == TORCHAO:
        for i in range(index(count)):
            t = at_least(bits_float(amax_bits[i]) / SIX / scale, TORCHAO_SCALE_MIN)
            code = encode_e4m3(t)
            byte[index(first) + i] = code
            factor[i] = at_most(inverse / decode_e4m3(code), FLT_MAX)
    elif recipe == MODELOPT:
        divisor = SIX * scale
        for i in range(index(count)):
            t = bits_float(amax_bits[i]) / divisor
            if t == f32(0):
                t = ONE
            code = encode_e4m3(at_least(t, MODELOPT_SCALE_MIN))
            byte[index(first) + i] = code
            factor[i] = decode_e4m3(code) * scale
    elif recipe == COMPRESSED_TENSORS:
        for i in range(index(count)):
            code = encode_e4m3(scale * round_to(bits_float(amax_bits[i]) / SIX, rules.dtype))
            if code == u32(0):
                code = ZERO_SCALE_CODE
            byte[index(first) + i] = code
            factor[i] = decode_e4m3(code) / scale
    else:
        for i in range(index(count)):
            code = encode_e4m3(bits_float(amax_bits[i]) / SIX / scale)
            byte[index(first) + i] = code
            factor[i] = decode_e4m3(code) * scale


class TeFactors(NamedTuple):
    """NVFP4 codes that recipe te made.

    Attributes:
        largest: 6 * e4m3_max, the largest scaled magnitude.
    """

    largest: np.float32


class Nvfp4Factors(NamedTuple):
    """NVFP4 codes of another recipe, or without a second level.

    Attributes:
        recipe: its index.
        dtype: element type of the result, see DTYPE_INDEX.
    """

    recipe: int
    dtype: int


class MxFactors(NamedTuple):
    """Codes under E8M0 scales.

    Attributes:
        bias: of the exponents.
    """

    bias: int = 127


@jit_part
def te_factors(rules, has_second, second, byte, first_byte, count, factor):
    """Fills the first decode factor of `count` blocks and returns the second one (of them all).

    Args:
        rules: a TeFactors.
        has_second: whether `second` counts.
        second: second-level scale.
        byte: scale bytes.
        first_byte: place of the first one.
        count: number of blocks.
        factor: output.
    """
    largest = rules.largest
    encode = encode_scale(second, largest)
    clamped = largest / second > FLT_MAX and second != f32(0)
    reciprocal = ONE / largest
    for i in range(index(count)):
        q = decode_e4m3(u32(byte[index(first_byte) + i]))
        usual = q * second * reciprocal if has_second else q
        factor[i] = q / encode if clamped and has_second else usual
    return ONE


@jit_part
def nvfp4_factors(rules, has_second, second, byte, first_byte, count, factor):
    """:func:`te_factors` of the other recipes, or without a second level."""
    recipe, last, scale = rules.recipe, ONE, usable(second)
    if not has_second or recipe == NVFUSER:
        for i in range(index(count)):
            factor[i] = decode_e4m3(u32(byte[index(first_byte) + i]))
        last = ONE / scale if has_second else ONE
    elif recipe == COMPRESSED_TENSORS:
        for i in range(index(count)):
            factor[i] = decode_e4m3(u32(byte[index(first_byte) + i])) / scale
    elif recipe == COMFY:
        rounded = round_to(scale, rules.dtype)
        for i in range(index(count)):
            q = decode_e4m3(u32(byte[index(first_byte) + i]))
            factor[i] = round_to(rounded * q, rules.dtype)
    else:
        for i in range(index(count)):
            factor[i] = scale * decode_e4m3(u32(byte[index(first_byte) + i]))
    return last


@jit_part
def mx_factors(rules, has_second, second, byte, first_byte, count, factor):
    """:func:`te_factors` of E8M0 scales."""
    for i in range(index(count)):
        factor[i] = decode_e8m0(u32(byte[index(first_byte) + i]))
    return ONE


@jit_inner
def any_factors(recipe, dtype, has_second, second, byte, first_byte, count, factor):
    """:func:`te_factors` of any NVFP4 recipe, chosen by its index (TE_256 included)."""
    if recipe in (TE, TE_256):
        rules = TeFactors(RANGE if recipe == TE else RANGE_256)
        last = te_factors(rules, has_second, second, byte, first_byte, count, factor)
    else:
        others = Nvfp4Factors(recipe, dtype)
        last = nvfp4_factors(others, has_second, second, byte, first_byte, count, factor)
    return last


@scalar(U32(U32, I64, I64, I64, F32))
def mx_exponent(bits, rule, mantissa_bits, max_exponent, reciprocal):
    """E8M0 byte (u32) of the bits of a block's amax; `reciprocal` of the largest element."""
    scaled = float_bits(bits_float(bits) * reciprocal)
    exponent, mantissa = scaled >> 23, scaled & 0x7FFFFF
    inexact = mantissa.differs(0)
    grows = inexact & exponent.differs(254) & (exponent.differs(0) | (mantissa > 0x400000))
    by_rceil = where(grows, exponent + 1, exponent)
    by_rceil = where(exponent.equals(255), where(inexact, exponent, 254), by_rceil)
    half_ulp = 1 << (22 - mantissa_bits).cast(U32)
    bits = where(rule.equals(EVEN), bits + half_ulp, bits)
    exponent = bits >> 23
    exponent = where(rule.equals(CEIL) & (bits & 0x7FFFFF).differs(0), exponent + 1, exponent)
    exponent = exponent.cast(I32) - max_exponent.cast(I32)
    exponent = least(most(exponent, 0), 254).cast(U32)
    return where(rule.equals(RCEIL), by_rceil, exponent)


@scalar(F32(U32))
def decode_e8m0(byte):
    """float32 of an E8M0 byte (u32): 2^(byte - 127), the first a subnormal, the last NaN."""
    bits = where(byte.equals(0), 0x00400000, byte << 23)
    return bits_float(where(byte.equals(255), QUIET_NAN, bits))


@scalar(U32(U32))
def reverse_e8m0(byte):
    """The E8M0 byte (u32) of the reciprocal; that of NaN is NaN's."""
    return where(byte.equals(255), byte, 254 - byte)


@jit_part
def mx_scales(rules, has_second, second, amax_bits, count, byte, first, factor):
    """:func:`te_scales` of MX formats: `scaling.mx_block_scale`; `rules` are MxRules."""
    reciprocal = ONE / rules.max_value
    for i in range(index(count)):
        code = mx_exponent(
            amax_bits[i], rules.rule, rules.mantissa_bits, rules.max_exponent, reciprocal
        )
        byte[index(first) + i] = code
        # 2^(127 - exponent), of 2^(exponent - 127).
        factor[i] = decode_e8m0(reverse_e8m0(code))
