# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of elements as machine words, so that packing two codes stays within one vector lane.

Input and output arrays reach the kernels as arrays of words of two neighbouring elements, and the
word's type names the element type: uint32 is two bfloat16, int32 two float16, uint64 two float32.
LLVM then vectorizes widening, encoding and packing without a single shuffle across lanes.
"""

# ruff: noqa: ANN001, ANN201 - numbers of kernels, see cpu_scalars

from __future__ import annotations

import numpy as np
from llvmlite.binding import get_default_triple, get_host_cpu_features
from numba.core import config

from .jit import jit
from .scalars import F32, F64, HALF, I32, I64, U16, U32, U64, scalar, where

WORD_TYPES = {"bfloat16": np.uint32, "float16": np.int32, "float32": np.uint64}

u32 = np.uint32
u64 = np.uint64
f32 = np.float32
ABS = u32(0x7FFFFFFF)
INF_BITS = u32(0x7F800000)
QUIET_NAN = u32(0x7FC00000)
#: A function of one word of each type.
OF_WORD = (U32(U32), U32(I32), U32(U64))


@scalar(U32(F32))
def float_bits(value):
    """Bit pattern of a float32."""
    return value.bits_as(U32)


@scalar(F32(U32))
def bits_float(bits):
    """float32 of a bit pattern."""
    return bits.bits_as(F32)


@scalar(I64(F64))
def double_bits(value):
    """Bit pattern of a float64, as int64."""
    return value.bits_as(I64)


@scalar(F64(I64))
def bits_double(bits):
    """float64 of a bit pattern (int64)."""
    return bits.bits_as(F64)


def widen_half_hardware(half):
    """float32 of float16 bits (u32), by the processor's instruction."""
    return half.cast(U16).bits_as(HALF).cast(F32)


def narrow_half_hardware(value):
    """float16 bits (u32) of a float32, nearest even, by the processor's instruction."""
    return value.cast(HALF).bits_as(U16).cast(U32)


def widen_half_software(half):
    """float32 of float16 bits (u32), exact, subnormals and NaN included."""
    magnitude = half & 0x7FFF
    bits = (magnitude << 13) + (112 << 23)
    small = float_bits(magnitude.cast(F32) * 2.0**-24)
    bits = where(magnitude < 0x0400, small, bits)
    bits = where(magnitude >= 0x7C00, (magnitude << 13) | INF_BITS, bits)
    return bits_float(bits | ((half & 0x8000) << 16))


def narrow_half_software(value):
    """float16 bits (u32) of a float32, nearest even, overflow to infinity; NaN becomes 7E00."""
    bits = float_bits(value)
    magnitude = bits & ABS
    code = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10)
    # Adding 0.5 rounds to multiples of 2^-24, the spacing of float16 subnormals.
    small = float_bits(bits_float(magnitude) + 0.5) - 0x3F000000
    code = where(magnitude < (113 << 23), small, code)
    code = where(magnitude >= 0x477FF000, 0x7C00, code)
    return where(magnitude > INF_BITS, 0x7E00, code | ((bits >> 16) & 0x8000))


def target_has_half() -> bool:
    """Whether the processor that numba compiles for converts float16 itself.

    Without the instructions LLVM would call library functions that are not there. The processor is
    the host's unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES name another.
    """
    if "aarch64" in get_default_triple() or "arm64" in get_default_triple():
        return True
    if config.CPU_FEATURES is None:
        return bool(get_host_cpu_features().get("f16c", False))
    named = [name for name in config.CPU_FEATURES.split(",") if name[1:] == "f16c"]
    return bool(named) and named[-1][0] == "+"


HAS_HALF = target_has_half()
widen_half = scalar(F32(U32))(widen_half_hardware if HAS_HALF else widen_half_software)
narrow_half = scalar(U32(F32))(narrow_half_hardware if HAS_HALF else narrow_half_software)


@scalar(U32(F32))
def narrow_finite_bfloat(value):
    """bfloat16 bits (u32) of a float32 that is not NaN, nearest even."""
    bits = float_bits(value)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@scalar(U32(F32))
def narrow_bfloat(value):
    """bfloat16 bits (u32) of a float32, nearest even; NaN becomes 7FC0."""
    return where((float_bits(value) & ABS) > INF_BITS, 0x7FC0, narrow_finite_bfloat(value))


@scalar(F32(F32))
def canonical(value):
    """A float32 with every NaN the positive quiet one: what the processor makes has a sign."""
    bits = float_bits(value)
    return bits_float(where((bits & ABS) > INF_BITS, QUIET_NAN, bits))


@scalar(F32(U32), F32(I32), F32(U64))
def low(word):
    """The even element of a word, as float32."""
    if word.kind == U32:
        return bits_float(word << 16)
    if word.kind == I32:
        return widen_half(word.cast(U32) & 0xFFFF)
    return bits_float(word.cast(U32))


@scalar(F32(U32), F32(I32), F32(U64))
def high(word):
    """The odd element of a word, as float32."""
    if word.kind == U32:
        return bits_float(word & 0xFFFF0000)
    if word.kind == I32:
        return widen_half(word.cast(U32) >> 16)
    return bits_float((word >> 32).cast(U32))


@scalar(*OF_WORD)
def low_magnitude(word):
    """Sign-cleared bits (u32) of the even element, in its own format."""
    return word.cast(U32) & (ABS if word.kind == U64 else 0x7FFF)


@scalar(*OF_WORD)
def high_magnitude(word):
    """Sign-cleared bits (u32) of the odd element, in its own format."""
    if word.kind == U64:
        return (word >> 32).cast(U32) & ABS
    return (word.cast(U32) >> 16) & 0x7FFF


@scalar(U32(U32, U32), U32(U32, I32), U32(U32, U64))
def widen_magnitude(bits, word):
    """Sign-cleared element bits (u32) as the bits of the float32 of the same value."""
    if word.kind == U32:
        return bits << 16
    return float_bits(widen_half(bits)) if word.kind == I32 else bits


@scalar(*OF_WORD)
def infinity_of(word):
    """Sign-cleared bits (u32) of infinity in the element's own format; NaN lies above."""
    infinity = {U32: 0x7F80, I32: 0x7C00, U64: INF_BITS}[word.kind]
    return (word.cast(U32) & 0) | infinity


@scalar(U32(F32, F32, U32), I32(F32, F32, I32), U64(F32, F32, U64))
def join_finite(even, odd, word):
    """`join` of two float32 that are not NaN."""
    if word.kind == U32:
        return narrow_finite_bfloat(even) | (narrow_finite_bfloat(odd) << 16)
    if word.kind == I32:
        return (narrow_half(even) | (narrow_half(odd) << 16)).cast(I32)
    return float_bits(even).cast(U64) | (float_bits(odd).cast(U64) << 32)


@scalar(U32(F32, F32, U32), I32(F32, F32, I32), U64(F32, F32, U64))
def join(even, odd, word):
    """Rounds two float32 to the element type of `word`, NaN canonical, into one such word."""
    if word.kind == U32:
        return narrow_bfloat(even) | (narrow_bfloat(odd) << 16)
    return join_finite(canonical(even), canonical(odd), word)


@jit
def round_range(pairs, begin, end, out):
    """Rounds pairs begin..end of float32 (u64 words) to the element type of the words of `out`."""
    for i in range(begin, end):
        out[i] = join(low(pairs[i]), high(pairs[i]), out[i])
