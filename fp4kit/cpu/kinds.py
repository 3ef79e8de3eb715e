# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which kernels a plan needs: each is compiled for one kind of scales and one kind of codes.

A kernel for all recipes and formats would compile three times as long as what a run uses of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.interface import Plan
from fp4kit.formats import SCALE_RULES

from . import decode as cpu_decode
from . import encode as cpu_encode
from . import scales as cpu_scales


class Encoding(NamedTuple):
    """How a plan makes codes.

    Attributes:
        scales: how block scales are made.
        encode: how elements are encoded.
        rules: the numbers that both take.
    """

    scales: Any
    encode: Any
    rules: Any


class Decoding(NamedTuple):
    """How a plan's codes become numbers.

    Attributes:
        factors: how block scales become factors.
        decode: how codes are decoded.
        rules: the numbers that `factors` takes.
    """

    factors: Any
    decode: Any
    rules: Any


def encoding(plan: Plan, dtype: str) -> Encoding:
    """How a plain plan makes codes of an element type."""
    recipe, element = plan.recipe, plan.format.element
    if recipe is None:
        rules = cpu_scales.MxRules(
            SCALE_RULES.index(plan.scale_rule) if plan.scale_rule else 0,
            element.mantissa_bits,
            element.bias,
            np.float32(element.max),
            element.max_exponent,
        )
        encode = cpu_encode.multiply_float8
        if plan.format.codes_per_byte == 2:
            encode = cpu_encode.multiply
        return Encoding(cpu_scales.mx_scales, encode, rules)
    if recipe.index == cpu_scales.TE:
        return Encoding(cpu_scales.te_scales, cpu_encode.multiply, cpu_scales.TeRules())
    return Encoding(
        cpu_scales.nvfp4_scales,
        cpu_encode.divide_or_multiply,
        cpu_scales.Nvfp4Rules(
            recipe.index,
            cpu_scales.DTYPE_INDEX[dtype],
            recipe.divides,
            recipe.keeps_negative_zero,
        ),
    )


def decoding(plan: Plan, dtype: str) -> Decoding:
    """How a plan's codes decode to an element type."""
    number = recipe_number(plan)
    if plan.format.codes_per_byte == 1:
        return Decoding(cpu_scales.mx_factors, cpu_decode.decode_float8s, cpu_scales.MxFactors())
    if number == cpu_encode.NO_RECIPE:
        return Decoding(cpu_scales.mx_factors, cpu_decode.decode_e2m1s, cpu_scales.MxFactors())
    if number in (cpu_scales.TE, cpu_scales.TE_256):
        largest = cpu_scales.RANGE if number == cpu_scales.TE else cpu_scales.RANGE_256
        rules = cpu_scales.TeFactors(largest)
        return Decoding(cpu_scales.te_factors, cpu_decode.decode_e2m1s, rules)
    others = cpu_scales.Nvfp4Factors(number, cpu_scales.DTYPE_INDEX[dtype])
    return Decoding(cpu_scales.nvfp4_factors, cpu_decode.decode_e2m1s, others)


def recipe_number(plan: Plan) -> int:
    """The number of the plan's recipe to the kernels that decode."""
    if plan.recipe is None:
        return cpu_encode.NO_RECIPE
    if plan.scheme.e4m3_max != 448:
        return int(cpu_scales.TE_256)
    return plan.recipe.index


quantizer = cache(cpu_encode.quantizer)
decoder = cache(cpu_decode.decoder)
round_tripper = cache(cpu_decode.round_tripper)
error_measurer = cache(cpu_decode.error_measurer)


def scratch() -> tuple[np.ndarray, np.ndarray]:
    """(factors, amaxes) for the blocks of a tile."""
    groups = 2 * cpu_encode.TILE
    return np.empty(groups, np.float32), np.empty(groups, np.uint32)
