# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Block scales on the CPU: the formulas of :mod:`fp4kit.scaling`, as loops that LLVM vectorizes.

Every function works on a tile: arrays of one entry per block. The recipe is chosen outside the
loops. Comparisons are written so that NaN passes through, as NumPy's minimum and maximum do.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from fp4kit import formats, scaling
from fp4kit.formats import E2M1, E4M3

from .cpu_jit import jit
from .cpu_words import (
    ABS,
    INF_BITS,
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
#: Index of an element type in the kernels, by name.
DTYPE_INDEX = {"float32": 0, "float16": 1, "bfloat16": 2}


@jit
def encode_float8(value, mantissa_bits, bias, max_value, nan_code):
    """Code (u32, sign included) of a saturating 8-bit float, nearest even; NaN -> nan_code."""
    bits = float_bits(value)
    magnitude = bits & ABS
    is_nan = magnitude > INF_BITS
    clamped = bits_float(magnitude)
    if clamped > max_value:
        clamped = max_value
    magnitude = float_bits(clamped)
    shift = u32(23) - mantissa_bits
    odd = (magnitude >> shift) & u32(1)
    half = (u32(1) << (shift - u32(1))) - u32(1)
    code = ((magnitude + half + odd) >> shift) - ((u32(127) - bias) << mantissa_bits)
    if magnitude < ((u32(128) - bias) << u32(23)):
        # Below the smallest normal the codes are multiples of the smallest subnormal: adding the
        # float whose unit in the last place is that subnormal rounds to it.
        magic = (u32(151) - bias - mantissa_bits) << u32(23)
        code = float_bits(bits_float(magnitude) + bits_float(magic)) - magic
    code |= (bits >> u32(24)) & u32(0x80)
    if is_nan:
        code = nan_code
    return code


@jit
def encode_e4m3(value):
    """E4M3 scale byte (u32) of a non-negative float32 or NaN."""
    return encode_float8(value, u32(3), u32(7), E4M3_MAX, u32(0x7F))


@jit
def decode_e4m3(code):
    """float32 of an E4M3 code (u32); foreign files may hold negative scales."""
    magnitude = code & u32(0x7F)
    bits = (magnitude << u32(20)) + u32(120 << 23)
    if magnitude < u32(8):
        bits = float_bits(f32(magnitude) * f32(2.0**-9))
    if magnitude == u32(0x7F):
        bits = u32(0x7FC00000)
    return bits_float(bits | ((code & u32(0x80)) << u32(24)))


@jit
def encode_scale(amax, largest):
    """`scaling.te_encode_scale` of one amax; `largest` is 6 * e4m3_max."""
    scale = largest / amax
    if not scale <= FLT_MAX:
        scale = FLT_MAX
    if amax == f32(0) or scale <= f32(0):
        scale = ONE
    return scale


@jit
def te_encode_scale(amax):
    """`encode_scale` of plain recipe te."""
    return encode_scale(amax, RANGE)


@jit
def usable(scale):
    """`scaling.usable` of one scale."""
    if scale > f32(0) and scale <= FLT_MAX:
        return scale
    return ONE


@jit
def round_to(value, dtype):
    """A float32 rounded to an element type (an index of DTYPE_INDEX) and widened again."""
    if dtype == 2:
        return bits_float(narrow_bfloat(value) << u32(16))
    if dtype == 1:
        return widen_half(narrow_half(value))
    return value


@jit
def at_most(value, limit):
    """min(value, limit), NaN passing through."""
    if value > limit:
        return limit
    return value


@jit
def at_least(value, limit):
    """max(value, limit), NaN passing through."""
    if value < limit:
        return limit
    return value


@jit
def nvfp4_scales(recipe, has_second, second, dtype, amax_bits, count, byte, factor):
    """Fills scale bytes and element factors of `count` blocks from the bits of their amaxes."""
    scale = ONE
    if has_second and recipe != TE:
        scale = usable(second)
    inverse = ONE / scale
    if recipe == TE:
        encode = te_encode_scale(second)
        multiplier = encode * RECIPROCAL_6
        inverse = ONE / encode
        for i in range(count):
            code = encode_e4m3(at_most(bits_float(amax_bits[i]) * multiplier, FLT_MAX))
            byte[i] = code
            factor[i] = at_most(ONE / (decode_e4m3(code) * inverse), FLT_MAX)
    elif recipe == NVFUSER:
        for i in range(count):
            code = encode_e4m3(bits_float(amax_bits[i]) / SIX * scale)
            byte[i] = code
            factor[i] = at_most(ONE / (decode_e4m3(code) * inverse), FLT_MAX)
    elif recipe == TORCHAO:
        for i in range(count):
            t = at_least(bits_float(amax_bits[i]) / SIX / scale, TORCHAO_SCALE_MIN)
            code = encode_e4m3(t)
            byte[i] = code
            factor[i] = at_most(inverse / decode_e4m3(code), FLT_MAX)
    elif recipe == MODELOPT:
        divisor = SIX * scale
        for i in range(count):
            t = bits_float(amax_bits[i]) / divisor
            if t == f32(0):
                t = ONE
            code = encode_e4m3(at_least(t, MODELOPT_SCALE_MIN))
            byte[i] = code
            factor[i] = decode_e4m3(code) * scale
    elif recipe == COMPRESSED_TENSORS:
        for i in range(count):
            code = encode_e4m3(scale * round_to(bits_float(amax_bits[i]) / SIX, dtype))
            if code == u32(0):
                code = ZERO_SCALE_CODE
            byte[i] = code
            factor[i] = decode_e4m3(code) / scale
    else:
        for i in range(count):
            code = encode_e4m3(bits_float(amax_bits[i]) / SIX / scale)
            byte[i] = code
            factor[i] = decode_e4m3(code) * scale


@jit
def nvfp4_factors(recipe, has_second, second, out_dtype, byte, first_byte, count, first):
    """Fills the first decode factor of `count` blocks and returns the second one (of them all)."""
    last = ONE
    if not has_second:
        for i in range(count):
            first[i] = decode_e4m3(u32(byte[first_byte + i]))
        return last
    scale = usable(second)
    if recipe in (TE, TE_256):
        largest = RANGE if recipe == TE else RANGE_256
        encode = encode_scale(second, largest)
        clamped = largest / second > FLT_MAX and second != f32(0)
        reciprocal = ONE / largest
        for i in range(count):
            q = decode_e4m3(u32(byte[first_byte + i]))
            if clamped:
                first[i] = q / encode
            else:
                first[i] = q * second * reciprocal
    elif recipe == NVFUSER:
        last = ONE / scale
        for i in range(count):
            first[i] = decode_e4m3(u32(byte[first_byte + i]))
    elif recipe == COMPRESSED_TENSORS:
        for i in range(count):
            first[i] = decode_e4m3(u32(byte[first_byte + i])) / scale
    elif recipe == COMFY:
        rounded = round_to(scale, out_dtype)
        for i in range(count):
            q = decode_e4m3(u32(byte[first_byte + i]))
            first[i] = round_to(rounded * q, out_dtype)
    else:
        for i in range(count):
            first[i] = scale * decode_e4m3(u32(byte[first_byte + i]))
    return last


@jit
def power_of_two(exponent):
    """2^exponent as float32 for exponent in -127..127; -127 is a subnormal."""
    bits = u32(exponent + 127) << u32(23)
    if exponent == -127:
        bits = u32(0x00400000)
    return bits_float(bits)


@jit
def mx_scales(rule, mantissa_bits, max_exponent, max_value, amax_bits, count, byte, factor):
    """Fills E8M0 bytes and element factors of `count` blocks: `scaling.mx_block_scale`."""
    reciprocal = ONE / max_value
    half_ulp = np.int64(1) << (22 - mantissa_bits)
    for i in range(count):
        if rule == RCEIL:
            scaled = float_bits(bits_float(amax_bits[i]) * reciprocal)
            exponent = np.int64(scaled >> u32(23))
            mantissa = scaled & u32(0x7FFFFF)
            if exponent == 255:
                exponent = 255 if mantissa != 0 else 254
            elif mantissa != 0 and exponent != 254 and (exponent != 0 or mantissa > 0x400000):
                exponent += 1
        else:
            bits = np.int64(amax_bits[i])
            if rule == EVEN:
                bits += half_ulp
            exponent = bits >> 23
            if rule == CEIL and bits & 0x7FFFFF != 0:
                exponent += 1
            exponent = min(max(exponent - max_exponent, 0), 254)
        byte[i] = exponent
        factor[i] = power_of_two(127 - exponent) if exponent != 255 else f32(np.nan)
