# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Searched block scales: :mod:`fp4kit.reference.scale_search` as loops over the blocks of a tile.

Rounding to nearest and both neighbours' errors are even in the sign, so only magnitudes are looked
at.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from fp4kit.formats import E4M3
from fp4kit.reference import scale_search

from .codecs import E4M3_MAX, decode_e4m3, encode_e4m3
from .elements import ABS, at_most, bits_float, f32, float_bits, index, u32
from .jit import jit_inner
from .scaling import FLT_MAX, ONE, RECIPROCAL_6, SIX, encode_scale
from .tiles import TILE

GROUP = index(16)
NO_SEARCH, FOUR_OVER_SIX, SWEEP = range(3)
#: Numbers of `scheme.SEARCH_ERRORS`, in their order.
MSE, MAE, MSE_SCALED, MAE_SCALED = range(4)
#: Adding one of these rounds to a multiple of 0.5, 1 or 2, ties to the even multiple.
ROUND_HALVES, ROUND_ONES, ROUND_TWOS = f32(1.5 * 2**22), f32(1.5 * 2**23), f32(1.5 * 2**24)
LARGEST_CODE = E4M3.max_code
STEPS = np.array(scale_search.SWEEP_STEPS, np.int32)


@jit_inner
def nearest_magnitude(y):
    """The E2M1 magnitude nearest to y >= 0; NaN stays."""
    y = at_most(y, SIX)
    magic = ROUND_HALVES if y < f32(2) else (ROUND_ONES if y < f32(4) else ROUND_TWOS)
    return (y + magic) - magic


@jit_inner
def add_error(d, squared):
    """What a difference adds to a block's error."""
    return d * d if squared else bits_float(float_bits(d) & ABS)


@jit_inner
def errors_in_input(v, factor, decode, squared, total):
    """Sum over each block of the errors of value * decode against x, for a sweep."""
    count = index(total.size)
    for b in range(count):
        total[b] = f32(0)
    for k in range(GROUP):
        for b in range(count):
            x = bits_float(float_bits(v[k, b]) & ABS)
            d = nearest_magnitude(x * factor[b]) * decode[b] - x
            total[b] = total[b] + add_error(d, squared)


@jit_inner
def weigh_columns(weights, tile, size, out):
    """What the error of each element of a tile of rows counts: `out[k, b]`, 0 past the end."""
    blocks, cols = index(tile.blocks) // index(size), index(weights.size)
    for k in range(GROUP):
        for j in range(blocks):
            column = index(tile.col) + j * GROUP + k
            weight = weights[column] if column < cols else f32(0)
            for r in range(index(size)):
                out[k, r * blocks + j] = weight


@jit_inner
def errors_weighted(v, factor, decode, weights, total):
    """`errors_in_input`, squared, each times the weight of its column."""
    count = index(total.size)
    for b in range(count):
        total[b] = f32(0)
    for k in range(GROUP):
        for b in range(count):
            x = bits_float(float_bits(v[k, b]) & ABS)
            d = nearest_magnitude(x * factor[b]) * decode[b] - x
            total[b] = total[b] + (d * d) * weights[k, b]


@jit_inner
def errors_scaled(v, factor, q, encode, squared, total):
    """The same of value * q against x * S, for both searches."""
    count = index(total.size)
    for b in range(count):
        total[b] = f32(0)
    for k in range(GROUP):
        for b in range(count):
            x = bits_float(float_bits(v[k, b]) & ABS)
            d = nearest_magnitude(x * factor[b]) * q[b] - x * encode[b]
            total[b] = total[b] + add_error(d, squared)


@jit_inner
def errors_by_division(v, factor, q, second, largest, squared, total):
    """The same of value * q * amax / largest against x, for four_over_six."""
    count = index(total.size)
    for b in range(count):
        total[b] = f32(0)
    for k in range(GROUP):
        for b in range(count):
            x = bits_float(float_bits(v[k, b]) & ABS)
            d = nearest_magnitude(x * factor[b]) * q[b] * second[b] / largest - x
            total[b] = total[b] + add_error(d, squared)


@jit_inner
def tile_errors(total, rows, blocks):
    """Sums a 2-D tile's row errors as `scale_search.tile_sums`; `rows` of 16 exist."""
    sums = np.empty(16, np.float32)
    for j in range(index(blocks)):
        for r in range(GROUP):
            sums[r] = total[r * index(blocks) + j] if r < index(rows) else f32(0)
        distance = index(8)
        while distance > index(0):
            for r in range(distance):
                sums[r] = sums[r] + sums[r + distance]
            distance = distance // index(2)
        for r in range(GROUP):
            total[r * index(blocks) + j] = sums[0]


@jit_inner
def search(plan, tile, weights, scratch):
    """Chooses the scale byte and element factor of each block: `scale_search.search`.

    Args:
        plan: `quantize_panels.PlanNumbers`; rows of 2-D blocks choose as one.
        tile: a Tile.
        weights: what an error of each column counts, float32 (cols,); none for all alike.
        scratch: holds elements, second-level values and the bits of block amaxes.
    """
    v, amax, second = scratch.v, scratch.amax, scratch.second
    byte, factor, count = scratch.byte, scratch.factor, index(tile.blocks)
    largest, four_over_six = plan.rules.largest, plan.search == FOUR_OVER_SIX
    squared = plan.error in (MSE, MSE_SCALED)
    scaled = plan.error in (MSE_SCALED, MAE_SCALED)
    encode, q, inverse, decode = (
        scratch.search[0], scratch.search[1], scratch.search[2], scratch.search[3],
    )  # fmt: skip
    total, best = scratch.search[4][:count], scratch.search[5]
    code, own = np.empty(TILE, np.uint32), np.empty(TILE, np.uint32)
    for b in range(count):
        encode[b] = encode_scale(second[b], largest)
        scaled_amax = bits_float(amax[b]) * (encode[b] * RECIPROCAL_6)
        own[b] = encode_e4m3(at_most(scaled_amax, FLT_MAX))
    reciprocal = ONE / largest
    weighted = weights.size > 0
    if weighted:
        weigh_columns(weights, tile, plan.size, scratch.weights)
    for number in range(2 if four_over_six else len(STEPS)):
        if four_over_six:
            for b in range(count):
                base = bits_float(amax[b]) / SIX * encode[b]
                base = base if number == 0 else base * f32(1.5)
                code[b] = encode_e4m3(at_most(base, E4M3_MAX))
        else:
            for b in range(count):
                moved = np.int32(np.int32(own[b]) + STEPS[number])
                possible = moved >= np.int32(1) and moved <= np.int32(LARGEST_CODE)
                code[b] = u32(moved) if possible else own[b]
        for b in range(count):
            q[b] = decode_e4m3(code[b])
        for b in range(count):
            inverse[b] = at_most(ONE / (q[b] * (ONE / encode[b])), FLT_MAX)
        if scaled:
            errors_scaled(v, inverse, q, encode, squared, total)
        elif four_over_six:
            errors_by_division(v, inverse, q, second, largest, squared, total)
        else:
            for b in range(count):
                clamped = largest / second[b] > FLT_MAX and second[b] != f32(0)
                usual = q[b] * second[b] * reciprocal
                decode[b] = q[b] / encode[b] if clamped else usual
            if weighted:
                errors_weighted(v, inverse, decode, scratch.weights, total)
            else:
                errors_in_input(v, inverse, decode, squared, total)
        if plan.is_2d:
            tile_errors(total, tile.rows, tile.blocks // plan.size)
        for b in range(count):
            if number == 0 or total[b] < best[b]:
                best[b] = total[b]
                byte[b] = code[b]
                factor[b] = inverse[b]
