# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Rowwise dequantization, and quantization with it in one pass (quantize_dequantize)."""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.interface import Job, Plan

from .blocks import GROUP, TILE, block_range, next_tile, run_blocks, spread
from .buffers import aligned_output, code_words, read_only
from .codecs import decode_e2m1, decode_times, is_ordinary, nibble_shifts
from .elements import f32, index, join, join_finite, u32, words
from .jit import jit_of, jit_part
from .quantize import Encode, encode_of, encoding, tile_quantizer
from .scaling import factors_of, rule_record, scales_of
from .swizzle import linear_scales


class Decode(NamedTuple):
    """What the decoding kernels work on.

    Attributes:
        packed: code words, see `quantize.Encode`.
        byte: linear scale bytes, flat.
        out: output words of two elements.
        rules: one record of `scaling.Rules`.
        block_words: words in a block, 8 or 16.
        low_first: whether the even element takes the low nibble.
        table: float32 (256,), the value of each 8-bit code.
    """

    packed: np.ndarray
    byte: np.ndarray
    out: np.ndarray
    rules: np.ndarray
    block_words: int
    low_first: bool
    table: np.ndarray


class RoundTrip(NamedTuple):
    """Both, through the codes of one tile."""

    encode: Encode
    decode: Decode


@jit_part
def decode_e2m1s(data, source, target, groups, factor, last, low_first):
    """Words of two elements from bytes of two E2M1 codes.

    Most factors leave no room for anything unusual: then half of each is exact and finite.
    """
    packed, out = data.packed, data.out
    even_shift, odd_shift = nibble_shifts(low_first)
    decodes_zero = data.rules[0].decodes_zero
    ordinary = decodes_zero and last == f32(1)
    for g in range(groups):
        ordinary &= is_ordinary(factor[g])
    zero_mask = u32(0xFFFFFFFF) if decodes_zero else u32(0)
    if ordinary:
        for g in range(groups):
            half = factor[g] * f32(0.5)
            for j in range(GROUP):
                byte = u32(packed[source + g * GROUP + j])
                x = decode_times(byte >> even_shift, half)
                y = decode_times(byte >> odd_shift, half)
                place = target + g * GROUP + j
                out[place] = join_finite(x, y, out[place])
    else:
        for g in range(groups):
            for j in range(GROUP):
                byte = u32(packed[source + g * GROUP + j])
                x = decode_e2m1((byte >> even_shift) & u32(15), factor[g], last, zero_mask)
                y = decode_e2m1((byte >> odd_shift) & u32(15), factor[g], last, zero_mask)
                place = target + g * GROUP + j
                out[place] = join(x, y, out[place])


@jit_part
def decode_float8s(data, source, target, groups, factor, last, low_first):
    """Words of two elements from 16-bit words of two FP8 codes."""
    packed, out, table = data.packed, data.out, data.table
    for g in range(groups):
        for j in range(GROUP):
            word = u32(packed[source + g * GROUP + j])
            x = table[word & u32(0xFF)] * factor[g]
            y = table[word >> u32(8)] * factor[g]
            place = target + g * GROUP + j
            out[place] = join(x, y, out[place])


def decode_of(plan: Plan) -> Any:
    """The function that decodes a plan's codes."""
    return decode_float8s if plan.format.codes_per_byte == 1 else decode_e2m1s


def tile_decoder(factors: Any, decode: Any, *, reads: bool = True, keeps: bool = True) -> Any:
    """The function that decodes a tile.

    Args:
        factors: turns block scales into factors, see :mod:`fp4kit.cpu.scaling`.
        decode: `decode_e2m1s` or `decode_float8s`.
        reads: whether there are codes of all tiles, or of one alone.
        keeps: whether the results of all tiles are kept, or of one alone.
    """

    @jit_part
    def dequantize_tile(data, tile, scratch):
        factor, block_words, blocks = scratch.factor, data.block_words, tile.blocks
        source, target = tile.first if reads else 0, tile.first if keeps else 0
        per_block = block_words // 8
        last = factors(data.rules[0], tile.second, data.byte, source, blocks, factor)
        spread(factor, per_block, blocks)
        groups = index(blocks * per_block)
        first = index(source * block_words)
        low_first = data.low_first if reads else True
        decode(data, first, index(target * block_words), groups, factor, last, low_first)

    return dequantize_tile


@cache
def decoder(factors: Any, decode: Any) -> Any:
    """A kernel that decodes a range of blocks; see :func:`tile_decoder`."""
    dequantize_tile = tile_decoder(factors, decode)

    @jit_of(factors, decode)
    def dequantize_range(data, begin, end, second, blocks_per_second, scratch):
        while begin < end:
            tile = next_tile(begin, end, second, blocks_per_second)
            dequantize_tile(data, tile, scratch)
            begin += tile.blocks

    return dequantize_range


@cache
def round_tripper(scales: Any, encode: Any, factors: Any, decode: Any) -> Any:
    """A kernel that quantizes and decodes a range of blocks; its data is a RoundTrip."""
    quantize_tile = tile_quantizer(scales, encode, keeps=False)
    dequantize_tile = tile_decoder(factors, decode, reads=False)

    @jit_of(scales, encode, factors, decode)
    def quantize_dequantize_range(data, begin, end, second, blocks_per_second, scratch):
        while begin < end:
            tile = next_tile(begin, end, second, blocks_per_second)
            quantize_tile(data.encode, tile, scratch)
            dequantize_tile(data.decode, tile, scratch)
            begin += tile.blocks

    return quantize_dequantize_range


def decoding(
    plan: Plan, packed: np.ndarray, byte: np.ndarray, out: np.ndarray, dtype: str
) -> Decode:
    """A rowwise plan and its arrays as the kernels take them.

    Args:
        plan: rowwise.
        packed: codes.
        byte: linear scale bytes.
        out: words to fill.
        dtype: element type of the words.
    """
    codes, scales = read_only(code_words(packed, plan)), read_only(byte.reshape(-1))
    rules, low_first = rule_record(plan, dtype), plan.nibble_order == "low_first"
    table, block_words = read_only(plan.format.element.values), plan.format.block_size // 2
    return Decode(codes, scales, out, rules, block_words, low_first, table)


def dequantize(job: Job, out: np.ndarray, dtype: str) -> None:
    """`Backend.dequantize` of a rowwise plan."""
    plan: Plan = job.plan
    byte = linear_scales(job.block_scale, plan.scale_layout, (plan.rows, plan.blocks))
    kernel = decoder(factors_of(plan), decode_of(plan))
    with aligned_output(out, plan.blocks * plan.format.block_size) as whole:
        data = decoding(plan, job.packed, byte, words(whole, dtype), dtype)
        run_blocks(plan, block_range(plan, kernel, job.second, lambda: data))


def quantize_dequantize(job: Job, out: np.ndarray, out_dtype: str) -> None:
    """`Backend.quantize_dequantize` of a plain plan."""
    plan: Plan = job.plan
    kernel = round_tripper(scales_of(plan), encode_of(plan), factors_of(plan), decode_of(plan))
    tile_bytes = TILE * plan.format.packed_cols(plan.format.block_size)
    with aligned_output(out, plan.blocks * plan.format.block_size) as whole:
        nothing = np.empty(0, np.uint8)
        encode = encoding(job, nothing, nothing)
        decode = decoding(plan, nothing, nothing, words(whole, out_dtype), out_dtype)

        def data() -> RoundTrip:
            packed = code_words(np.empty(tile_bytes, np.uint8), plan)
            byte = np.empty(TILE, np.uint8)
            return RoundTrip(
                encode._replace(packed=packed, byte=byte),
                decode._replace(packed=packed, byte=byte),
            )

        run_blocks(plan, block_range(plan, kernel, job.second, data))
