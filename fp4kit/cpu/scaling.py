# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Block scales: the formulas of :mod:`fp4kit.reference.scaling` as loops that LLVM vectorizes.

Every loop works on one entry per block. Each kernel is compiled for one function of this file:
one for all recipes and formats would compile three times as long as what a run uses of it.
Comparisons are written so that NaN passes through, as NumPy's minimum and maximum do.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit import formats
from fp4kit.backend.interface import Plan
from fp4kit.formats import E2M1, SCALE_RULES
from fp4kit.reference import scaling

from .buffers import records
from .codecs import decode_e4m3, decode_e8m0, encode_e4m3, reverse_e8m0
from .elements import (
    at_least,
    at_most,
    bits_float,
    f32,
    float_bits,
    index,
    narrow_half,
    round_to_bfloat,
    u32,
    widen_half,
)
from .intrinsics import F32, I32, I64, U32, intrinsic, least, most, where
from .jit import jit_inner, jit_part

TE = formats.TE.index
NVFUSER = formats.NVFUSER.index
TORCHAO = formats.TORCHAO.index
MODELOPT = formats.MODELOPT.index
COMPRESSED_TENSORS = formats.COMPRESSED_TENSORS.index
COMFY = formats.COMFY.index
#: The number of no recipe: an MX format.
NO_RECIPE = -1
FLOOR, CEIL, EVEN, RCEIL = range(len(formats.SCALE_RULES))

ONE = f32(1)
SIX = f32(E2M1.max)
FLT_MAX = formats.FLT_MAX
RANGE = formats.SECOND_LEVEL_RANGE
RECIPROCAL_6 = formats.RECIPROCAL_6
TORCHAO_SCALE_MIN = scaling.TORCHAO_SCALE_MIN
MODELOPT_SCALE_MIN = scaling.MODELOPT_SCALE_MIN
ZERO_SCALE_CODE = u32(scaling.COMPRESSED_TENSORS_ZERO_SCALE)
#: Index of an element type in the kernels, by name.
DTYPE_INDEX = {"float32": 0, "float16": 1, "bfloat16": 2}


@intrinsic(F32(F32, F32))
def encode_scale(amax, largest):
    """`scaling.te_encode_scale` of one amax; `largest` is 6 * e4m3_max."""
    scale = largest / amax
    scale = where(scale <= FLT_MAX, scale, FLT_MAX)
    return where(amax.equals(0) | (scale <= 0), 1, scale)


@intrinsic(F32(F32))
def usable(scale):
    """`scaling.usable` of one scale."""
    return where((scale > 0) & (scale <= FLT_MAX), scale, 1)


@jit_inner
def round_to(value, dtype):
    """A float32 rounded to an element type (an index of DTYPE_INDEX) and widened again."""
    if dtype == 2:
        return round_to_bfloat(value)
    if dtype == 1:
        return widen_half(narrow_half(value))
    return value


class Rules(NamedTuple):
    """What the formulas have to know of a plan.

    Attributes:
        recipe: index, or NO_RECIPE.
        dtype: element type of the input, or of the decoded result; see DTYPE_INDEX.
        largest: 6 * e4m3_max, what a second-level scale maps the amax onto.
        divides: whether elements are divided by their factor.
        keeps_zero: whether encoding keeps the sign of zero.
        decodes_zero: whether code 8 decodes to -0.0.
        rule: MX scale rule.
        mantissa_bits: of the element.
        bias: of the element.
        max_value: largest value of the element.
        max_exponent: of the element.
    """

    recipe: int
    dtype: int
    largest: np.float32
    divides: bool
    keeps_zero: bool
    decodes_zero: bool
    rule: int
    mantissa_bits: int
    bias: int
    max_value: np.float32
    max_exponent: int


@cache
def rules_of(plan: Plan, dtype: str) -> Rules:
    """The rules of a plan for an element type."""
    recipe, element = plan.recipe, plan.format.element
    return Rules(
        recipe=NO_RECIPE if recipe is None else recipe.index,
        dtype=DTYPE_INDEX[dtype],
        largest=scaling.second_level_range(plan.scheme.e4m3_max),
        divides=recipe is not None and recipe.divides,
        keeps_zero=recipe is None or recipe.keeps_negative_zero,
        decodes_zero=recipe is None or recipe.decodes_negative_zero,
        rule=SCALE_RULES.index(plan.scale_rule) if plan.scale_rule else 0,
        mantissa_bits=element.mantissa_bits,
        bias=element.bias,
        max_value=np.float32(element.max),
        max_exponent=element.max_exponent,
    )


@jit_part
def te_scales(rules, second, amax_bits, count, byte, first, factor):
    """Scale bytes and element factors of `count` blocks from the bits of their amaxes, recipe te.

    Args:
        rules: Rules.
        second: second-level scale, 1 if there is none.
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


@jit_inner
def te_scales_each(rules, second, per_token, amax_bits, count, byte, factor):
    """:func:`te_scales` under a second-level scale for each block, perhaps with its own factor."""
    largest = rules.largest
    for b in range(index(count)):
        encode = encode_scale(second[b], largest)
        scaled = bits_float(amax_bits[b]) * (encode * RECIPROCAL_6)
        code = encode_e4m3(at_most(scaled, FLT_MAX))
        byte[b] = code
        q = decode_e4m3(code)
        if per_token:
            factor[b] = encode / q if code != u32(0) else f32(0)
        else:
            factor[b] = at_most(ONE / (q * (ONE / encode)), FLT_MAX)


@jit_part
def nvfp4_scales(rules, second, amax_bits, count, byte, first, factor):
    """:func:`te_scales` of the other recipes."""
    recipe, dtype, scale = rules.recipe, rules.dtype, usable(second)
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
            code = encode_e4m3(scale * round_to(bits_float(amax_bits[i]) / SIX, dtype))
            if code == u32(0):
                code = ZERO_SCALE_CODE
            byte[index(first) + i] = code
            factor[i] = decode_e4m3(code) / scale
    else:
        for i in range(index(count)):
            code = encode_e4m3(bits_float(amax_bits[i]) / SIX / scale)
            byte[index(first) + i] = code
            factor[i] = decode_e4m3(code) * scale


@jit_part
def te_factors(rules, second, byte, first, count, factor):
    """Fills the first decode factor of `count` blocks and returns the second one (of them all).

    Args:
        rules: Rules.
        second: second-level scale, 1 if there is none.
        byte: scale bytes.
        first: place of the first one.
        count: number of blocks.
        factor: output.
    """
    largest = rules.largest
    encode = encode_scale(second, largest)
    clamped = largest / second > FLT_MAX and second != f32(0)
    reciprocal = ONE / largest
    for i in range(index(count)):
        q = decode_e4m3(u32(byte[index(first) + i]))
        factor[i] = q / encode if clamped else q * second * reciprocal
    return ONE


@jit_part
def nvfp4_factors(rules, second, byte, first, count, factor):
    """:func:`te_factors` of the other recipes, and of recipe te without a second level."""
    recipe, dtype, last, scale = rules.recipe, rules.dtype, ONE, usable(second)
    if recipe == NVFUSER:
        for i in range(index(count)):
            factor[i] = decode_e4m3(u32(byte[index(first) + i]))
        last = ONE / scale
    elif recipe == COMPRESSED_TENSORS:
        for i in range(index(count)):
            factor[i] = decode_e4m3(u32(byte[index(first) + i])) / scale
    elif recipe == COMFY:
        rounded = round_to(scale, dtype)
        for i in range(index(count)):
            q = decode_e4m3(u32(byte[index(first) + i]))
            factor[i] = round_to(rounded * q, dtype)
    else:
        for i in range(index(count)):
            factor[i] = scale * decode_e4m3(u32(byte[index(first) + i]))
    return last


@jit_part
def mx_factors(rules, second, byte, first, count, factor):
    """:func:`te_factors` of E8M0 scales."""
    for i in range(index(count)):
        factor[i] = decode_e8m0(u32(byte[index(first) + i]))
    return ONE


@intrinsic(U32(U32, I64, I64, I64, F32))
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


@jit_part
def mx_scales(rules, second, amax_bits, count, byte, first, factor):
    """:func:`te_scales` of MX formats: `scaling.mx_block_scale`."""
    reciprocal, rule = ONE / rules.max_value, rules.rule
    mantissa_bits, max_exponent = rules.mantissa_bits, rules.max_exponent
    for i in range(index(count)):
        code = mx_exponent(amax_bits[i], rule, mantissa_bits, max_exponent, reciprocal)
        byte[index(first) + i] = code
        # 2^(127 - exponent), of 2^(exponent - 127).
        factor[i] = decode_e8m0(reverse_e8m0(code))


@cache
def rule_record(plan: Plan, dtype: str) -> np.ndarray:
    """:func:`rules_of` a plan as the kernels take them: one record."""
    return records(rules_of(plan, dtype))


def scales_of(plan: Plan) -> Any:
    """The function that makes a plan's block scales."""
    if plan.format.scale_type == "e8m0":
        return mx_scales
    assert plan.recipe is not None
    return te_scales if plan.recipe.index == TE else nvfp4_scales


def factors_of(plan: Plan) -> Any:
    """The function that turns a plan's block scales into decode factors."""
    if plan.format.scale_type == "e8m0":
        return mx_factors
    assert plan.recipe is not None
    if plan.recipe.index == TE and plan.has_second_level:
        return te_factors
    return nvfp4_factors
