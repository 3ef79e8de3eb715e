# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Rowwise quantization: block amaxes as integer maxima, block scales, then codes.

What needs more than that (columnwise codes, 2-D blocks, rotation, search, stochastic rounding)
stands in :mod:`fp4kit.cpu.panels`.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.interface import Job, Plan

from .blocks import GROUP, block_range, next_tile, run_blocks, spread
from .buffers import code_words, padded_rows, read_only
from .codecs import divided, encode_e2m1, encode_finite_e2m1, encode_float8, nibble_shifts, pack
from .elements import (
    f32,
    high,
    high_magnitude,
    index,
    infinity_of,
    low,
    low_magnitude,
    u32,
    widen_magnitude,
    words,
)
from .intrinsics import I32, U32, U64, intrinsic, most, where
from .jit import jit_of, jit_part
from .scaling import rule_record, scales_of
from .swizzle import linear_output


class Encode(NamedTuple):
    """What the quantizing kernels work on.

    Attributes:
        words: elements of all blocks.
        packed: output code words, uint8 of two 4-bit codes or uint16 of two 8-bit codes.
        byte: output scale bytes.
        rules: one record of `scaling.Rules`.
        block_words: words in a block, 8 or 16.
        low_first: whether the even element takes the low nibble.
    """

    words: np.ndarray
    packed: np.ndarray
    byte: np.ndarray
    rules: np.ndarray
    block_words: int
    low_first: bool


@intrinsic(U32(U32), U32(I32), U32(U64))
def largest_known(word):
    """Sign-cleared bits (u32) of the larger element of a word that is not NaN, or 0."""
    even, odd, infinity = low_magnitude(word), high_magnitude(word), infinity_of(word)
    return most(where(even <= infinity, even, 0), where(odd <= infinity, odd, 0))


@jit_part
def block_amaxes(words, first_word, groups_per_block, count, result):
    """Bits of the float32 amax of each of `count` blocks, NaN ignored; returns if all is finite."""
    first_word, groups = index(first_word), index(count * groups_per_block)
    infinity = infinity_of(words[first_word])
    for g in range(groups):
        even, odd = u32(0), u32(0)
        for j in range(GROUP):
            word = words[first_word + g * GROUP + j]
            even = max(even, low_magnitude(word))
            odd = max(odd, high_magnitude(word))
        result[g] = max(even, odd)
    largest = u32(0)
    for g in range(groups):
        largest = max(largest, result[g])
    if largest > infinity:
        for g in range(groups):
            known = u32(0)
            for j in range(GROUP):
                known = max(known, largest_known(words[first_word + g * GROUP + j]))
            result[g] = known
    if groups_per_block == 2:
        for b in range(index(count)):
            result[b] = max(result[index(2) * b], result[index(2) * b + index(1)])
    for b in range(index(count)):
        result[b] = widen_magnitude(result[b], words[first_word])
    return largest < infinity


@jit_part
def multiply(data, source, target, groups, factor, finite, low_first):
    """E2M1 codes of x * factor; `finite` if every x and every factor is."""
    words, packed = data.words, data.packed
    even_shift, odd_shift = nibble_shifts(low_first)
    if finite:
        for g in range(groups):
            f = factor[g]
            for j in range(GROUP):
                word = words[source + g * GROUP + j]
                even, odd = encode_finite_e2m1(low(word) * f), encode_finite_e2m1(high(word) * f)
                packed[target + g * GROUP + j] = pack(even, odd, even_shift, odd_shift)
    else:
        for i in range(groups * GROUP):
            word, f = words[source + i], factor[i // GROUP]
            even, odd = encode_e2m1(low(word) * f), encode_e2m1(high(word) * f)
            packed[target + i] = pack(even, odd, even_shift, odd_shift)


@jit_part
def divide(data, source, target, groups, factor, finite, low_first):
    """E2M1 codes of x / factor: 0 if that is 0, and of zeros without a sign if the rules say so."""
    words, packed = data.words, data.packed
    even_shift, odd_shift = nibble_shifts(low_first)
    zero_mask = u32(15) if data.rules[0].keeps_zero else u32(0)
    for g in range(groups):
        divisor = factor[g]
        all_mask = u32(0) if divisor == f32(0) else u32(15)
        for j in range(GROUP):
            word = words[source + g * GROUP + j]
            even = divided(low(word), divisor, all_mask, zero_mask)
            odd = divided(high(word), divisor, all_mask, zero_mask)
            packed[target + g * GROUP + j] = pack(even, odd, even_shift, odd_shift)


@jit_part
def multiply_float8(data, source, target, groups, factor, finite, low_first):
    """FP8 codes of x * factor, two per 16-bit word."""
    words, packed = data.words, data.packed
    rules = data.rules[0]
    mantissa_bits, bias = u32(rules.mantissa_bits), u32(rules.bias)
    max_value = rules.max_value
    for g in range(groups):
        f = factor[g]
        for j in range(GROUP):
            word = words[source + g * GROUP + j]
            even = encode_float8(low(word) * f, mantissa_bits, bias, max_value)
            odd = encode_float8(high(word) * f, mantissa_bits, bias, max_value)
            packed[target + g * GROUP + j] = np.uint16(even | (odd << u32(8)))


def encode_of(plan: Plan) -> Any:
    """The function that makes a plan's codes."""
    if plan.format.codes_per_byte == 1:
        return multiply_float8
    return divide if plan.recipe is not None and plan.recipe.divides else multiply


def tile_quantizer(scales: Any, encode: Any, *, keeps: bool = True) -> Any:
    """The function that quantizes a tile.

    Args:
        scales: makes block scales, see :mod:`fp4kit.cpu.scaling`.
        encode: makes codes: `multiply`, `divide` or `multiply_float8`.
        keeps: whether codes and scales of all tiles are kept, or of one alone.
    """

    @jit_part
    def quantize_tile(data, tile, scratch):
        factor, amaxes, block_words = scratch.factor, scratch.amaxes, data.block_words
        first, blocks, per_block = tile.first, tile.blocks, block_words // 8
        target = first if keeps else 0
        finite = block_amaxes(data.words, first * block_words, per_block, blocks, amaxes)
        scales(data.rules[0], tile.second, amaxes, blocks, data.byte, target, factor)
        for b in range(index(blocks)):
            finite &= factor[b] == factor[b]
        spread(factor, per_block, blocks)
        source, groups = index(first * block_words), index(blocks * per_block)
        low_first = data.low_first if keeps else True
        encode(data, source, index(target * block_words), groups, factor, finite, low_first)

    return quantize_tile


@cache
def quantizer(scales: Any, encode: Any) -> Any:
    """A kernel that quantizes a range of blocks; see :func:`tile_quantizer`."""
    quantize_tile = tile_quantizer(scales, encode)

    @jit_of(scales, encode)
    def quantize_range(data, begin, end, second, blocks_per_second, scratch):
        while begin < end:
            tile = next_tile(begin, end, second, blocks_per_second)
            quantize_tile(data, tile, scratch)
            begin += tile.blocks

    return quantize_range


def encoding(job: Job, packed: np.ndarray, byte: np.ndarray) -> Encode:
    """A plain job as the kernels take it, with its codes and linear scales, flat."""
    plan: Plan = job.plan
    block = plan.format.block_size
    source = read_only(words(padded_rows(job.x, plan.blocks * block), job.dtype))
    rules, low_first = rule_record(plan, job.dtype), plan.nibble_order == "low_first"
    return Encode(source, code_words(packed, plan), byte, rules, block // 2, low_first)


def quantize(job: Job) -> None:
    """`Backend.quantize` of a plain plan."""
    plan: Plan = job.plan
    kernel = quantizer(scales_of(plan), encode_of(plan))
    with linear_output(job.block_scale, plan.scale_layout, (plan.rows, plan.blocks)) as byte:
        data = encoding(job, job.packed, byte)
        run_blocks(plan, block_range(plan, kernel, job.second, lambda: data))
