# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Elements of arrays in kernels: one by one, or two neighbours as one machine word.

The type of what a kernel gets names the element type. Single elements are uint16 (bfloat16), int16
(float16) or float32; words of two are uint32, int32 or uint64. Packing two codes of a word stays
within one vector lane: LLVM vectorizes widening, encoding and packing without a single shuffle.
"""

# ruff: noqa: ANN001, ANN201 - intrinsics have no Python types

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite.binding import get_default_triple, get_host_cpu_features
from numba.core import config as untyped_config

from .intrinsics import F32, F64, HALF, I16, I32, I64, U16, U32, U64, intrinsic, where

config: Any = untyped_config
ELEMENT_TYPES = {"bfloat16": np.uint16, "float16": np.int16, "float32": np.float32}
WORD_TYPES = {"bfloat16": np.uint32, "float16": np.int32, "float32": np.uint64}

u32 = np.uint32
u64 = np.uint64
f32 = np.float32
#: Indices are unsigned because numba otherwise tests each one for Python's negative indexing.
index = np.uint64
ABS = u32(0x7FFFFFFF)
INF_BITS = u32(0x7F800000)
QUIET_NAN = u32(0x7FC00000)
#: A function of one word of each type.
OF_WORD = (U32(U32), U32(I32), U32(U64))


def elements(x: np.ndarray, dtype: str) -> np.ndarray:
    """A raw array as flat elements; a copy if it is not aligned."""
    flat = x.reshape(-1)
    if not flat.flags.aligned:
        flat = flat.copy()
    result: np.ndarray = flat.view(ELEMENT_TYPES[dtype])
    return result


def words(x: np.ndarray, dtype: str) -> np.ndarray:
    """A raw array of an even number of elements as flat words of two; a copy if not aligned."""
    result: np.ndarray = elements(x, dtype).view(WORD_TYPES[dtype])
    return result


@intrinsic(U32(F32))
def float_bits(value):
    """Bit pattern of a float32."""
    return value.bits_as(U32)


@intrinsic(F32(U32))
def bits_float(bits):
    """float32 of a bit pattern."""
    return bits.bits_as(F32)


@intrinsic(I64(F64))
def double_bits(value):
    """Bit pattern of a float64, as int64."""
    return value.bits_as(I64)


@intrinsic(F64(I64))
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
widen_half = intrinsic(F32(U32))(widen_half_hardware if HAS_HALF else widen_half_software)
narrow_half = intrinsic(U32(F32))(narrow_half_hardware if HAS_HALF else narrow_half_software)


@intrinsic(U32(F32))
def narrow_finite_bfloat(value):
    """bfloat16 bits (u32) of a float32 that is not NaN, nearest even."""
    bits = float_bits(value)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@intrinsic(U32(F32))
def narrow_bfloat(value):
    """bfloat16 bits (u32) of a float32, nearest even; NaN becomes 7FC0."""
    return where((float_bits(value) & ABS) > INF_BITS, 0x7FC0, narrow_finite_bfloat(value))


@intrinsic(F32(F32))
def canonical(value):
    """A float32 with every NaN the positive quiet one: what the processor makes has a sign."""
    bits = float_bits(value)
    return bits_float(where((bits & ABS) > INF_BITS, QUIET_NAN, bits))


@intrinsic(F32(U32), F32(I32), F32(U64))
def low(word):
    """The even element of a word, as float32."""
    if word.kind == U32:
        return bits_float(word << 16)
    if word.kind == I32:
        return widen_half(word.cast(U32) & 0xFFFF)
    return bits_float(word.cast(U32))


@intrinsic(F32(U32), F32(I32), F32(U64))
def high(word):
    """The odd element of a word, as float32."""
    if word.kind == U32:
        return bits_float(word & 0xFFFF0000)
    if word.kind == I32:
        return widen_half(word.cast(U32) >> 16)
    return bits_float((word >> 32).cast(U32))


@intrinsic(*OF_WORD)
def low_magnitude(word):
    """Sign-cleared bits (u32) of the even element, in its own format."""
    return word.cast(U32) & (ABS if word.kind == U64 else 0x7FFF)


@intrinsic(*OF_WORD)
def high_magnitude(word):
    """Sign-cleared bits (u32) of the odd element, in its own format."""
    if word.kind == U64:
        return (word >> 32).cast(U32) & ABS
    return (word.cast(U32) >> 16) & 0x7FFF


@intrinsic(U32(U32, U32), U32(U32, I32), U32(U32, U64))
def widen_magnitude(bits, word):
    """Sign-cleared element bits (u32) as the bits of the float32 of the same value."""
    if word.kind == U32:
        return bits << 16
    return float_bits(widen_half(bits)) if word.kind == I32 else bits


@intrinsic(*OF_WORD)
def infinity_of(word):
    """Sign-cleared bits (u32) of infinity in the element's own format; NaN lies above."""
    infinity = {U32: 0x7F80, I32: 0x7C00, U64: INF_BITS}[word.kind]
    return (word.cast(U32) & 0) | infinity


@intrinsic(U32(F32, F32, U32), I32(F32, F32, I32), U64(F32, F32, U64))
def join_finite(even, odd, word):
    """`join` of two float32 that are not NaN."""
    if word.kind == U32:
        return narrow_finite_bfloat(even) | (narrow_finite_bfloat(odd) << 16)
    if word.kind == I32:
        return (narrow_half(even) | (narrow_half(odd) << 16)).cast(I32)
    return float_bits(even).cast(U64) | (float_bits(odd).cast(U64) << 32)


@intrinsic(U32(F32, F32, U32), I32(F32, F32, I32), U64(F32, F32, U64))
def join(even, odd, word):
    """Rounds two float32 to the element type of `word`, NaN canonical, into one such word."""
    if word.kind == U32:
        return narrow_bfloat(even) | (narrow_bfloat(odd) << 16)
    return join_finite(canonical(even), canonical(odd), word)


@intrinsic(F32(U16), F32(I16), F32(F32))
def widen(element):
    """An element as float32."""
    if element.kind == U16:
        return bits_float(element.cast(U32) << 16)
    return widen_half(element.cast(U32) & 0xFFFF) if element.kind == I16 else element


@intrinsic(U16(F32, U16), I16(F32, I16), F32(F32, F32))
def narrow(value, element):
    """A float32 rounded to the element type of `element`, NaN canonical."""
    if element.kind == U16:
        return narrow_bfloat(value).cast(U16)
    return narrow_half(canonical(value)).cast(I16) if element.kind == I16 else canonical(value)


@intrinsic(F32(F32))
def round_to_bfloat(value):
    """A float32 rounded to bfloat16 and widened again."""
    return bits_float(narrow_bfloat(value) << 16)


@intrinsic(F32(F32, F32))
def at_most(value, limit):
    """min(value, limit), NaN passing through."""
    return where(value > limit, limit, value)


@intrinsic(F32(F32, F32))
def at_least(value, limit):
    """max(value, limit), NaN passing through."""
    return where(value < limit, limit, value)
