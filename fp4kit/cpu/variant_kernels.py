# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The numba kernels of variants: panels of an array, quantized along rows, columns or both.

An array is cut into panels of 128 rows and 256 columns, which are widened to float32 once. A panel
stays in the cache while its tiles are loaded for one direction, then for the other, and 128 rows
of 4-bit codes fill a cache line of the packed transpose.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .encode import NO_RECIPE, encode_e2m1
from .jit import jit, jit_inner, jit_of
from .random import encode_stochastically, random_words
from .scales import TE, MxRules, Nvfp4Rules, encode_float8, mx_scales, nvfp4_scales
from .search import NO_SEARCH, search, te_scales
from .tiles import (
    GROUP,
    LONGEST,
    PANEL_COLS,
    PANEL_ROWS,
    TILE,
    block_amaxes,
    index,
    load_columns,
    load_rows,
    rotate,
    store_bytes,
    store_column_bytes,
    store_columns,
    store_rows,
    store_transposed,
    tile_amaxes,
    widen,
)
from .words import f32, float_bits, u32, u64


class How(NamedTuple):
    """What a kernel has to know of a plan, as numbers.

    Attributes:
        rows: rows of the array.
        cols: columns of it.
        columnwise: whether the codes are columnwise.
        tiled: 2-D tiles (worked on in rows).
        size: block size.
        bits: of a code.
        recipe: index, or NO_RECIPE.
        rule: scale rule.
        dtype: element type, as cpu_scales numbers them.
        divides: whether elements are divided by the factor.
        keeps_zero: whether the sign of zero is kept.
        low_first: nibble order.
        mantissa_bits: of the element.
        bias: of the element.
        largest_code: largest value of the element.
        max_exponent: of the element.
        has_second: whether there is a second level.
        per_scale: vectors that share one second-level value.
        largest: 6 * e4m3_max.
        per_token: the factor of pull request 3045.
        search: NO_SEARCH, FOUR_OVER_SIX or SWEEP.
        error: what a search compares.
        rotated: whether to rotate.
        mask: signs of the rotation.
        to_bfloat: whether to round rotated values.
        stochastic: how to round.
        key: of the random numbers.
        stream: of the random numbers.
        scale_vector: distance of the scales of neighbouring vectors.
        scale_block: distance of the scales of neighbouring blocks.
    """

    rows: int
    cols: int
    columnwise: bool
    tiled: bool
    size: int
    bits: int
    recipe: int
    rule: int
    dtype: int
    divides: bool
    keeps_zero: bool
    low_first: bool
    mantissa_bits: int
    bias: int
    largest_code: np.float32
    max_exponent: int
    has_second: bool
    per_scale: int
    largest: np.float32
    per_token: bool
    search: int
    error: int
    rotated: bool
    mask: int
    to_bfloat: bool
    stochastic: bool
    key: np.uint64
    stream: int
    scale_vector: int
    scale_block: int


@jit_inner
def tile_scales(how, v, count, rows, blocks, second, amax, byte, factor, work):
    """Scale bytes and element factors of the blocks of a tile; `second` has a value per block."""
    block_amaxes(v, count, how.size, amax)
    if how.tiled:
        tile_amaxes(amax, how.size, blocks)
    if how.recipe == NO_RECIPE:
        mx = MxRules(
            how.rule, how.mantissa_bits, how.bias, how.largest_code, how.max_exponent
        )  # fmt: skip
        mx_scales(mx, False, f32(1), amax, count, byte, 0, factor)
    elif how.search != NO_SEARCH:
        search(
            v, count, how.search, how.error, how.tiled, rows, blocks, second, how.largest, amax,
            byte, factor, work,
        )  # fmt: skip
    elif how.recipe == TE:
        te_scales(second, how.largest, how.per_token, amax, count, byte, factor)
    else:
        b = 0
        while b < count:
            stop = b + 1
            while stop < count and float_bits(second[stop]) == float_bits(second[b]):
                stop += 1
            rules = Nvfp4Rules(how.recipe, how.dtype, how.divides, how.keeps_zero)
            nvfp4_scales(
                rules, how.has_second, second[b], amax[b:stop], stop - b, byte, b, factor[b:stop]
            )
            b = stop


@jit_inner
def tile_codes(how, v, count, factor, groups, random, words):
    """Code words of the blocks of a tile: eight 4-bit codes or four bytes in each."""
    per_word = index(32 // how.bits)
    for w in range(index(how.size) // per_word):
        for b in range(index(count)):
            words[w, b] = u32(0)
    for k in range(index(how.size)):
        w = k // per_word
        place = k % per_word
        if how.bits == 8:
            for b in range(index(count)):
                code = encode_float8(
                    v[k, b] * factor[b], u32(how.mantissa_bits), u32(how.bias), how.largest_code,
                    u32(0x7F),
                )  # fmt: skip
                words[w, b] |= u32(code * u32(index(1) << (place * index(8))))
            continue
        if not how.low_first:
            place = place ^ index(1)
        # A product, because numba would shift in 64 bits.
        weight = u32(index(1) << (place * index(4)))
        if how.stochastic:
            element = k % index(GROUP)
            if element == index(0):
                # Groups are numbered along the packed codes, so a block's follow each other.
                direction = 1 if how.columnwise and not how.tiled else 0
                random_words(groups, count, direction, how.stream, how.key, random)
                for b in range(index(count)):
                    groups[b] += u64(1)
            source, turn = element // index(4), u32(element % index(4) * index(8))
            for b in range(index(count)):
                code = encode_stochastically(v[k, b] * factor[b], random[source, b], turn)
                words[w, b] |= u32(code * weight)
        elif how.divides:
            for b in range(index(count)):
                code = encode_e2m1(v[k, b] / factor[b])
                code = u32(0) if factor[b] == f32(0) else code
                code = u32(0) if v[k, b] == f32(0) and not how.keeps_zero else code
                words[w, b] |= u32(code * weight)
        else:
            for b in range(index(count)):
                code = encode_e2m1(v[k, b] * factor[b])
                code = u32(0) if v[k, b] == f32(0) and not how.keeps_zero else code
                words[w, b] |= u32(code * weight)


@jit_inner
def clear_padding(how, rows, cols, first, count, v):
    """Zeros what was loaded as padding: a rotation may have made it -0.0."""
    if how.columnwise and not how.tiled:
        for k in range(max(rows - first, 0), how.size):
            for b in range(count):
                v[k, b] = f32(0)
        return
    blocks = count // how.size
    for k in range(max(cols - (blocks - 1) * how.size, 0), how.size):
        for r in range(how.size):
            v[k, r * blocks + blocks - 1] = f32(0)


@jit_inner
def load_tile(how, x, rows, cols, first, col, count, v):
    """Loads a tile of a panel, rotated if the plan says so."""
    if how.columnwise and not how.tiled:
        load_columns(x, rows, cols, first, col, count, how.size, v)
    else:
        load_rows(x, rows, cols, first, how.size, col, count // how.size, how.size, v)
    if how.rotated:
        rotate(v, count, how.size, how.mask, how.to_bfloat, False)
        clear_padding(how, rows, cols, first, count, v)


@jit_inner
def number_tile(how, first, col, count, second, each, groups):
    """The second-level value and the number of the first group of 16 codes of each block."""
    per_block = how.size // GROUP
    if how.columnwise and not how.tiled:
        blocks = (how.rows + how.size - 1) // how.size
        for b in range(count):
            each[b] = second[(col + b) // how.per_scale] if how.has_second else f32(1)
            groups[b] = u64(((col + b) * blocks + first // how.size) * per_block)
        return
    blocks = count // how.size
    in_row = (how.cols + how.size - 1) // how.size
    for r in range(how.size):
        vector = min(first + r, how.rows - 1)
        number = 0 if how.columnwise else vector // how.per_scale
        value = second[number] if how.has_second else f32(1)
        for j in range(blocks):
            each[r * blocks + j] = value
            block = (first + r) * in_row + col // how.size + j
            groups[r * blocks + j] = u64(block * per_block)


@jit_inner
def store_tile(how, first, col, count, words, byte, packed, codes, scales):
    """Writes the codes and scales of a tile."""
    size = how.size
    down = (how.rows + size - 1) // size
    if how.columnwise and not how.tiled:
        block = first // size
        for b in range(count):
            scales[(col + b) * how.scale_vector + block * how.scale_block] = byte[b]
        if how.bits == 4:
            store_columns(words, count, size // 8, col, block, down, packed)
        else:
            store_column_bytes(words, count, size, first, col, how.cols, codes)
        return
    blocks = count // size
    if how.columnwise:
        for j in range(blocks):
            for column in range(col + j * size, min(col + (j + 1) * size, how.cols)):
                place = column * how.scale_vector + first // size * how.scale_block
                scales[place] = byte[j]
        if how.bits == 4:
            store_transposed(
                words, size, blocks, first // size, col, how.cols, down, how.low_first, packed
            )
        else:
            store_bytes(words, size, blocks, size, first, col, how.cols, codes)
        return
    rows = min(size, how.rows - first)
    for r in range(rows):
        for j in range(blocks):
            place = (first + r) * how.scale_vector + (col // size + j) * how.scale_block
            scales[place] = byte[r * blocks + j]
    in_row = (how.cols + size - 1) // size
    store_rows(words, rows, blocks, size * how.bits // 32, first, col // size, in_row, packed)


@jit_inner
def make_scratch():
    """Buffers for a tile."""
    return (
        np.empty((LONGEST, TILE), np.float32),
        np.empty(TILE, np.float32),
        np.empty((6, TILE), np.float32),
        np.empty(TILE, np.float32),
        np.empty(TILE, np.uint32),
        np.empty((8, TILE), np.uint32),
        np.empty((4, TILE), np.uint32),
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.uint64),
    )


@jit_inner
def tile_count(how, col):
    """Blocks in a tile whose first column is `col`."""
    columns = min(PANEL_COLS, how.cols - col)
    if how.columnwise and not how.tiled:
        return columns
    return (columns + how.size - 1) // how.size * how.size


@jit_of()
def quantize_panel(x, row, col, directions, hows, seconds, packeds, codes, scales):
    """Quantizes a panel in one or two directions.

    Args:
        x: float32 elements of the panel, rows of PANEL_COLS, flat.
        row: first row of the panel.
        col: first column.
        directions: how many of the two entries of each of the following to use.
        hows: two `How`.
        seconds: two float32 arrays of second-level scales.
        packeds: two uint32 arrays of packed code words.
        codes: two uint8 arrays: the same memory, where it is written byte by byte.
        scales: two uint8 arrays.
    """
    v, factor, work, each, amax, words, random, byte, groups = make_scratch()
    for d in range(directions):
        how = hows[d]
        rows, cols = min(PANEL_ROWS, how.rows - row), min(PANEL_COLS, how.cols - col)
        count = tile_count(how, col)
        for first in range(0, rows, how.size):
            load_tile(how, x, rows, cols, first, 0, count, v)
            number_tile(how, row + first, col, count, seconds[d], each, groups)
            existing = min(how.size, rows - first)
            tile_scales(how, v, count, existing, count // how.size, each, amax, byte, factor, work)
            tile_codes(how, v, count, factor, groups, random, words)
            store_tile(how, row + first, col, count, words, byte, packeds[d], codes[d], scales[d])


@jit_of()
def amax_panel(x, row, col, how, vectors):
    """Raises `vectors` to the largest magnitudes (bits, NaN ignored) of a panel."""
    v, _, _, _, amax, _, _, _, _ = make_scratch()
    rows, cols = min(PANEL_ROWS, how.rows - row), min(PANEL_COLS, how.cols - col)
    count = tile_count(how, col)
    blocks = count // how.size
    for first in range(0, rows, how.size):
        load_tile(how, x, rows, cols, first, 0, count, v)
        block_amaxes(v, count, how.size, amax)
        if how.columnwise:
            for b in range(count):
                vectors[col + b] = max(vectors[col + b], amax[b])
        else:
            for r in range(min(how.size, rows - first)):
                for j in range(blocks):
                    place = row + first + r
                    vectors[place] = max(vectors[place], amax[r * blocks + j])


@jit
def widen_panel(x, rows, cols, row, col, panel):
    """Copies a panel as float32 into rows of PANEL_COLS elements."""
    count = min(PANEL_COLS, cols - col)
    for r in range(min(PANEL_ROWS, rows - row)):
        source, target = index((row + r) * cols + col), index(r * PANEL_COLS)
        for c in range(index(count)):
            panel[target + c] = widen(x[source + c])
