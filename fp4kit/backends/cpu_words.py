# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of elements as machine words, so that packing two codes stays within one vector lane.

Input and output arrays reach the kernels as arrays of words of two neighbouring elements, and the
word's type names the element type: uint32 is two bfloat16, int32 two float16, uint64 two float32.
LLVM then vectorizes widening, encoding and packing without a single shuffle across lanes.
"""

# ruff: noqa: ANN001, ANN202, ANN201 - numba infers the types

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_default_triple, get_host_cpu_features
from numba import types
from numba.extending import intrinsic, overload

from .cpu_jit import jit

WORD_TYPES = {"bfloat16": np.uint32, "float16": np.int32, "float32": np.uint64}

u32 = np.uint32
u64 = np.uint64
f32 = np.float32
ABS = u32(0x7FFFFFFF)
INF_BITS = u32(0x7F800000)
QUIET_NAN = u32(0x7FC00000)


@intrinsic
def float_bits(_context: Any, _value: Any) -> Any:
    """Bit pattern of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def bits_float(_context: Any, _value: Any) -> Any:
    """float32 of a bit pattern."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def double_bits(_context: Any, _value: Any) -> Any:
    """Bit pattern of a float64, as int64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def bits_double(_context: Any, _value: Any) -> Any:
    """float64 of a bit pattern (int64)."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def widen_half_hardware(_context: Any, _half: Any) -> Any:
    """float32 of float16 bits (u32), by the processor's instruction."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        half = builder.bitcast(builder.trunc(arguments[0], ir.IntType(16)), ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def narrow_half_hardware(_context: Any, _value: Any) -> Any:
    """float16 bits (u32) of a float32, nearest even, by the processor's instruction."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        half = builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))
        return builder.zext(half, ir.IntType(32))

    return types.uint32(types.float32), generate


@jit
def widen_half_software(half):
    """float32 of float16 bits (u32), exact, subnormals and NaN included."""
    magnitude = half & u32(0x7FFF)
    sign = (half & u32(0x8000)) << u32(16)
    bits = (magnitude << u32(13)) + u32(112 << 23)
    if magnitude < u32(0x0400):
        bits = float_bits(f32(magnitude) * f32(2.0**-24))
    if magnitude >= u32(0x7C00):
        bits = (magnitude << u32(13)) | INF_BITS
    return bits_float(bits | sign)


@jit
def narrow_half_software(value):
    """float16 bits (u32) of a float32, nearest even, overflow to infinity; NaN becomes 7E00."""
    bits = float_bits(value)
    sign = (bits >> u32(16)) & u32(0x8000)
    magnitude = bits & ABS
    rounded = (magnitude + u32(0xFFF) + ((magnitude >> u32(13)) & u32(1))) >> u32(13)
    code = rounded - u32(112 << 10)
    if magnitude < u32(113 << 23):
        # Adding 0.5 rounds to multiples of 2^-24, the spacing of float16 subnormals.
        code = float_bits(bits_float(magnitude) + f32(0.5)) - u32(0x3F000000)
    if magnitude >= u32(0x477FF000):
        code = u32(0x7C00)
    if magnitude > INF_BITS:
        return u32(0x7E00)
    return code | sign


# Without the instructions LLVM would call library functions that are not there.
HAS_HALF = get_host_cpu_features().get("f16c", False) or "aarch64" in get_default_triple()
widen_half = widen_half_hardware if HAS_HALF else widen_half_software
narrow_half = narrow_half_hardware if HAS_HALF else narrow_half_software


@jit
def narrow_finite_bfloat(value):
    """bfloat16 bits (u32) of a float32 that is not NaN, nearest even."""
    bits = float_bits(value)
    return (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)


@jit
def narrow_bfloat(value):
    """bfloat16 bits (u32) of a float32, nearest even; NaN becomes 7FC0."""
    rounded = narrow_finite_bfloat(value)
    return u32(0x7FC0) if (float_bits(value) & ABS) > INF_BITS else rounded


@jit
def canonical(value):
    """A float32 with every NaN the positive quiet one: what the processor makes has a sign."""
    bits = float_bits(value)
    return bits_float(u32(0x7FC00000) if (bits & ABS) > INF_BITS else bits)


def low(word):
    """The even element of a word, as float32."""


def high(word):
    """The odd element of a word, as float32."""


def low_magnitude(word):
    """Sign-cleared bits (u32) of the even element, in its own format."""


def high_magnitude(word):
    """Sign-cleared bits (u32) of the odd element, in its own format."""


def widen_magnitude(bits, word):
    """Sign-cleared element bits (u32) as the bits of the float32 of the same value."""


def infinity_of(word):
    """Sign-cleared bits (u32) of infinity in the element's own format; NaN lies above."""


def join_finite(even, odd, word):
    """`join` of two float32 that are not NaN."""


def join(even, odd, word):
    """Rounds two float32 to the element type of `word`, NaN canonical, into one such word."""


@overload(low, inline="always")
def _low(word):
    if word == types.uint32:
        return lambda word: bits_float(word << u32(16))
    if word == types.int32:
        return lambda word: widen_half(u32(word) & u32(0xFFFF))
    return lambda word: bits_float(u32(word))


@overload(high, inline="always")
def _high(word):
    if word == types.uint32:
        return lambda word: bits_float(word & u32(0xFFFF0000))
    if word == types.int32:
        return lambda word: widen_half(u32(word) >> u32(16))
    return lambda word: bits_float(u32(word >> u64(32)))


@overload(low_magnitude, inline="always")
def _low_magnitude(word):
    if word == types.uint64:
        return lambda word: u32(word) & ABS
    return lambda word: u32(word) & u32(0x7FFF)


@overload(high_magnitude, inline="always")
def _high_magnitude(word):
    if word == types.uint64:
        return lambda word: u32(word >> u64(32)) & ABS
    return lambda word: (u32(word) >> u32(16)) & u32(0x7FFF)


@overload(widen_magnitude, inline="always")
def _widen_magnitude(bits, word):
    if word == types.uint32:
        return lambda bits, word: bits << u32(16)
    if word == types.int32:
        return lambda bits, word: float_bits(widen_half(bits))
    return lambda bits, word: bits


@overload(infinity_of, inline="always")
def _infinity_of(word):
    if word == types.uint32:
        return lambda word: u32(0x7F80)
    if word == types.int32:
        return lambda word: u32(0x7C00)
    return lambda word: INF_BITS


@overload(join, inline="always")
def _join(even, odd, word):
    if word == types.uint32:
        return lambda even, odd, word: narrow_bfloat(even) | (narrow_bfloat(odd) << u32(16))
    if word == types.int32:
        return lambda even, odd, word: np.int32(
            narrow_half(canonical(even)) | (narrow_half(canonical(odd)) << u32(16))
        )
    return lambda even, odd, word: (
        u64(float_bits(canonical(even))) | (u64(float_bits(canonical(odd))) << u64(32))
    )


@overload(join_finite, inline="always")
def _join_finite(even, odd, word):
    if word == types.uint32:
        return lambda even, odd, word: (
            narrow_finite_bfloat(even) | (narrow_finite_bfloat(odd) << u32(16))
        )
    if word == types.int32:
        return lambda even, odd, word: np.int32(narrow_half(even) | (narrow_half(odd) << u32(16)))
    return lambda even, odd, word: u64(float_bits(even)) | (u64(float_bits(odd)) << u64(32))


@jit
def round_range(pairs, begin, end, out):
    """Rounds pairs begin..end of float32 (u64 words) to the element type of the words of `out`."""
    for i in range(begin, end):
        out[i] = join(low(pairs[i]), high(pairs[i]), out[i])
