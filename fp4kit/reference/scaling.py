# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""From block amax to block scale, one recipe or rule at a time, in NumPy: the ground truth.

All arithmetic is binary32, one rounding per operation in the order written. Symbols: `a` block
amax, `A` tensor amax, `S` encode scale 2688/A, `P` decode scale A/2688, `q` the stored block scale
decoded to binary32. A kept encode or decode scale that is zero, negative, infinite or NaN counts
as 1 everywhere, so that a dead tensor never turns into NaN bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4kit.formats import (
    E2M1,
    E4M3,
    E8M0_BIAS,
    E8M0_NAN,
    FLT_MAX,
    RECIPROCAL_6,
    SECOND_LEVEL_RANGE,
    ElementType,
    Recipe,
)

from . import codecs

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
ONE = np.float32(1)
SIX = np.float32(E2M1.max)
SCALE_MAX = np.float32(E4M3.max)
#: torchao never stores a subnormal scale; ModelOpt never stores zero.
TORCHAO_SCALE_MIN = np.float32(2.0**-6)
MODELOPT_SCALE_MIN = np.float32(2.0**-9)
#: compressed-tensors replaces a zero scale by 0.125.
COMPRESSED_TENSORS_ZERO_SCALE = np.uint8(0x20)

#: The least amax that the second pass of pull request 3045 counts with.
PER_TOKEN_SMALLEST = np.float32(1e-12)


def quiet() -> np.errstate:
    """Overflow, division by zero and NaN are part of the contract, not warnings."""
    return np.errstate(all="ignore")


# ------------------------------------------------------------------------------------------------
# The second level
# ------------------------------------------------------------------------------------------------


def second_level_range(e4m3_max: int = 448) -> np.float32:
    """What the tensor's amax is mapped onto: the largest code times the largest scale, 2688."""
    return SIX * np.float32(e4m3_max)


def te_encode_scale(amax: Floats, e4m3_max: int = 448) -> Floats:
    """`S` of recipe te: min(2688/A, FLT_MAX), NaN -> FLT_MAX; 1 where A is 0 or S not above 0."""
    scale = second_level_range(e4m3_max) / amax
    scale = np.where(np.isnan(scale), FLT_MAX, np.minimum(scale, FLT_MAX))
    return np.where((amax == 0) | (scale <= 0), ONE, scale)


def usable(scale: Floats) -> Floats:
    """A kept encode or decode scale, with unusable values (0, negative, inf, NaN) read as 1."""
    return np.where((scale > 0) & (scale <= FLT_MAX), scale, ONE)


def second_level_from_amax(amax: Floats, recipe: Recipe, dtype: str) -> Floats:
    """The second-level scale that the recipe keeps.

    Args:
        amax: float32 (n,), one value per scale.
        recipe: decides which one, and its formula.
        dtype: input element type: compressed-tensors computes its scale in that type.

    Returns:
        float32 (n,).
    """
    if recipe.keeps == "amax":
        return amax
    if recipe.keeps == "decode_scale":
        return usable(amax / SECOND_LEVEL_RANGE)
    if recipe.name == "compressed-tensors":
        reciprocal = codecs.round_to(ONE / amax, dtype)
        return usable(codecs.round_to(reciprocal * SECOND_LEVEL_RANGE, dtype))
    return te_encode_scale(amax)


def convert_second_level(value: Floats, source: str, target: str, e4m3_max: int = 448) -> Floats:
    """A second-level scale as another one; unusable values give 1, never inf or NaN.

    Args:
        value: float32 of any shape.
        source: what `value` is: `amax`, `decode_scale` or `encode_scale`.
        target: what is wanted.
        e4m3_max: largest block scale, which amaxes are mapped to.
    """
    largest = second_level_range(e4m3_max)
    if source == target:
        return value
    if source == "amax":
        return (
            te_encode_scale(value, e4m3_max)
            if target == "encode_scale"
            else usable(value / largest)
        )
    if target == "amax":
        scale = usable(value)
        return largest / scale if source == "encode_scale" else scale * largest
    return usable(ONE / usable(value))


# ------------------------------------------------------------------------------------------------
# NVFP4: block scale byte, element factor, decode factors
# ------------------------------------------------------------------------------------------------


def te_block_scale(amax: Floats, second: Floats, e4m3_max: int = 448) -> Codes:
    """Scale bytes of recipe te from block amaxes and the tensor's amax."""
    multiplier = te_encode_scale(second, e4m3_max) * RECIPROCAL_6
    return codecs.encode(np.minimum(amax * multiplier, FLT_MAX), E4M3)


def te_element_factor(byte: Codes, second: Floats, e4m3_max: int = 448) -> Floats:
    """What recipe te multiplies the elements of a block with."""
    q = codecs.decode(byte, E4M3)
    factor: Floats = np.minimum(ONE / (q * (ONE / te_encode_scale(second, e4m3_max))), FLT_MAX)
    return factor


def per_token_factor(byte: Codes, second: Floats) -> Floats:
    """The element factor of Transformer Engine's pull request 3045: S/q, 0 where q is 0."""
    q = codecs.decode(byte, E4M3)
    return np.where(q == 0, np.float32(0), te_encode_scale(second) / q)


def te_decode_factor(q: Floats, second: Floats, e4m3_max: int = 448) -> Floats:
    """What recipe te multiplies a block's values with, its two corrections included.

    Args:
        q: decoded block scales.
        second: amaxes, broadcastable to `q`.
        e4m3_max: largest scale of the second level.
    """
    largest = second_level_range(e4m3_max)
    clamped = (largest / second > FLT_MAX) & (second != 0)
    factor = (q * second) * (ONE / largest)
    return np.where(clamped, q / te_encode_scale(second, e4m3_max), factor)


def nvfp4_block_scale(amax: Floats, recipe: Recipe, second: Floats | None, dtype: str) -> Codes:
    """E4M3 scale byte of each block.

    Args:
        amax: float32 block amaxes (rows, blocks), NaN already ignored.
        recipe: the order of operations.
        second: second-level scale in the recipe's direction, broadcastable to `amax`, or None.
        dtype: input element type (compressed-tensors rounds a/6 to it).

    Returns:
        uint8 (rows, blocks).
    """
    if recipe.name == "te":
        assert second is not None
        return te_block_scale(amax, second)
    if recipe.name == "modelopt":
        assert second is not None
        scale = amax / (SIX * usable(second))
        scale = np.where(scale == 0, ONE, scale)
        return codecs.encode(np.clip(scale, MODELOPT_SCALE_MIN, SCALE_MAX), E4M3)
    sixth = amax / SIX
    if recipe.name == "compressed-tensors":
        assert second is not None
        scale = usable(second) * codecs.round_to(sixth, dtype)
        byte = codecs.encode(np.minimum(scale, SCALE_MAX), E4M3)
        return np.where(byte == 0, COMPRESSED_TENSORS_ZERO_SCALE, byte)
    if second is None:
        scale = sixth
    elif recipe.name == "nvfuser":
        scale = sixth * usable(second)
    else:
        scale = sixth / usable(second)
    if recipe.name == "torchao":
        scale = np.maximum(scale, TORCHAO_SCALE_MIN)
    return codecs.encode(np.minimum(scale, SCALE_MAX), E4M3)


def nvfp4_element_factor(byte: Codes, recipe: Recipe, second: Floats | None) -> Floats:
    """What each element of a block is multiplied with (or divided by, if `recipe.divides`).

    A divisor of 0 stands for "all codes are 0".
    """
    if recipe.name == "te":
        assert second is not None
        return te_element_factor(byte, second)
    q = codecs.decode(byte, E4M3)
    factor: Floats
    if second is None:
        factor = np.minimum(ONE / q, FLT_MAX)
        return factor
    scale = usable(second)
    if recipe.name == "nvfuser":
        factor = np.minimum(ONE / (q * (ONE / scale)), FLT_MAX)
        return factor
    if recipe.name == "torchao":
        factor = np.minimum((ONE / scale) / q, FLT_MAX)
        return factor
    if recipe.name == "compressed-tensors":
        return q / scale
    return q * scale


def nvfp4_decode_factors(
    byte: Codes, recipe: Recipe, second: Floats | None, out_dtype: str, e4m3_max: int = 448
) -> tuple[Floats, Floats]:
    """Factors (f, g) of a block: element = fl(fl(value * f) * g), value = 0 staying 0.

    The product value * f is exact whenever g is not 1. Recipe te has two documented corrections
    to the published amax formula: where q * A overflows a zero code still decodes to 0, and where
    the encode scale was clamped (A below about 7.9e-36) the clamped scale is used.
    """
    q = codecs.decode(byte, E4M3)
    if second is None:
        return q, np.ones_like(q)
    if recipe.name == "te":
        return te_decode_factor(q, second, e4m3_max), np.ones_like(q)
    scale = usable(second)
    if recipe.name == "nvfuser":
        return q, np.broadcast_to(ONE / scale, q.shape)
    if recipe.rounds_factor:
        factor = codecs.round_to(codecs.round_to(scale, out_dtype) * q, out_dtype)
    elif recipe.keeps == "encode_scale":
        factor = q / scale
    else:
        factor = scale * q
    return factor, np.ones_like(factor)


# ------------------------------------------------------------------------------------------------
# MX: E8M0 scale byte
# ------------------------------------------------------------------------------------------------


def mx_block_scale(amax: Floats, element: ElementType, rule: str) -> Codes:
    """E8M0 scale byte of each block under a named rule, from the bits of the amax.

    Args:
        amax: float32 block amaxes, any shape, NaN already ignored.
        element: element type: its largest exponent, mantissa width and maximum enter the rules.
        rule: `floor`, `ceil`, `even` or `rceil` (numerics.md section 4).

    Returns:
        uint8 of the same shape.
    """
    if rule == "rceil":
        scaled = amax * (ONE / np.float32(element.max))
        bits = scaled.view(np.uint32)
        exponent = (bits >> 23).astype(np.int64)
        mantissa = bits & np.uint32(0x7FFFFF)
        subnormal_floor = (exponent == 0) & (mantissa <= 0x400000)
        round_up = (mantissa != 0) & (exponent != 254) & ~subnormal_floor
        byte = np.where(np.isinf(scaled), 254, exponent + round_up)
        return np.where(np.isnan(scaled), E8M0_NAN, byte).astype(np.uint8)
    bits = amax.view(np.uint32).astype(np.int64)
    if rule == "even":
        # Half a unit of the element's last mantissa bit carries into the exponent when it must.
        bits = bits + (1 << (23 - element.mantissa_bits - 1))
    exponent = bits >> 23
    if rule == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) != 0)
    return np.clip(exponent - element.max_exponent, 0, 2 * E8M0_BIAS).astype(np.uint8)


def mx_element_factor(byte: Codes) -> Floats:
    """2^(127 - byte), what each element of a block is multiplied with; NaN for byte 255."""
    value = np.ldexp(np.float64(1), E8M0_BIAS - byte.astype(np.int64)).astype(np.float32)
    return np.where(byte == E8M0_NAN, np.float32(np.nan), value)
