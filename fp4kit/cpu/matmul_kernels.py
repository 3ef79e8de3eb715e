# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of products: which rows and chunks are multiplied when, and what becomes of sums.

A result is summed in one order whatever is multiplied beside it, so that how work is cut, and how
many rows a processor has registers for, does not change it.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba.core.registry import cpu_target

from .chunks import copy_tail, whole_chunks
from .elements import index, narrow
from .jit import jit, jit_of
from .product_code import CHUNK, SLACK, VECTOR_BYTES, Coding, Tile
from .product_functions import panel_product, row_decoder, sum_lanes, tile_product
from .vectors import LANES, features_of

#: Coded rows whose scales decide together how they are multiplied.
GROUP_ROWS = 4
#: Chunks of the depth of a block: its decoded rows stay in the first cache, its panels in the
#: second.
BLOCK_CHUNKS = 2
#: Largest scale byte that makes no product of it and a code overflow, by the type of scales.
LARGEST_SCALE = {"e4m3": 0x7E, "e8m0": 252}


class Registers(NamedTuple):
    """What fits into the registers of a processor.

    Attributes:
        rows: coded rows of a tile, a divisor of GROUP_ROWS.
        batch: most rows of numbers of a tile.
        panel_rows: decoded rows that are multiplied with panels.
        panels: panels of 16 rows of numbers that they are multiplied with.
    """

    rows: int
    batch: int
    panel_rows: int
    panels: int


@cache
def registers() -> Registers:
    """Those of the processor that numba compiles for: 32 of 16 numbers, or less."""
    is_wide = "avx512f" in features_of(cpu_target.target_context)
    return Registers(4, 4, 12, 2) if is_wide else Registers(2, 2, 6, 1)


class Scratch(NamedTuple):
    """Room for what lies between the loops.

    Attributes:
        numbers: float32, partial sums of a tile or decoded rows of a block.
        codes: uint8, a chunk of each row of a tile.
        scales: likewise.
    """

    numbers: np.ndarray
    codes: np.ndarray
    scales: np.ndarray


def scratch() -> Scratch:
    """Room for either kernel."""
    fits = registers()
    decoded = fits.panel_rows * BLOCK_CHUNKS * CHUNK
    sums = fits.rows * fits.batch * LANES
    codes, scales = (np.empty(GROUP_ROWS * CHUNK + SLACK, np.uint8) for _ in range(2))
    return Scratch(np.zeros(max(decoded, sums), np.float32), codes, scales)


@cache
def row_kernel(code: Coding, batch: int) -> Any:
    """A kernel that multiplies coded rows begin..end with all rows of numbers.

    Args:
        code: how the rows are coded.
        batch: rows of numbers that are multiplied together.
    """
    tile_rows = registers().rows
    exact = tile_product(Tile(code, tile_rows, batch))
    # Scaling afterwards pays where nothing else is shared by several rows of numbers.
    chooses = batch == 1 and code.element == "e2m1"
    quick = tile_product(Tile(code, tile_rows, batch, ordinary=True)) if chooses else exact
    largest = np.uint8(LARGEST_SCALE.get(code.scale, 0))

    @jit_of(exact)
    def multiply_rows(rows, numbers, ordinary, begin, end, scratch, out):
        shape, zero, one = rows.shape[0], index(0), index(1)
        sums, tail_codes, tail_scales = scratch
        number_row = index(4 * numbers.shape[1])
        row = index(begin)
        while row < index(end):
            # What is left over is multiplied row by row, each as if it were a whole tile.
            is_group = row + index(GROUP_ROWS) <= index(end)
            group = index(GROUP_ROWS) if is_group else one
            count = index(tile_rows) if is_group else one
            code_row = shape.code_row if is_group else zero
            scale_row = shape.scale_row if is_group else zero
            simple = chooses and ordinary
            if simple:
                worst = np.uint8(0)
                for i in range(row * shape.scale_row, (row + group) * shape.scale_row):
                    worst = max(worst, rows.scales[i])
                simple = worst <= largest
            for first in range(row, row + group, count):
                chunks = whole_chunks(rows, first + count)
                rest = shape.depth > chunks * index(CHUNK)
                if rest:
                    copy_tail(rows, first, chunks, count, tail_codes, tail_scales)
                for top in range(zero, index(numbers.shape[0]), index(batch)):
                    codes = (rows.codes, first * shape.code_row, code_row)
                    scales = (rows.scales, first * shape.scale_row, scale_row)
                    x = (numbers, top * number_row, number_row)
                    length, fresh = chunks, one
                    for _ in range(2 if rest else 1):
                        if simple:
                            quick(codes, scales, x, length, (sums, zero, fresh))
                        else:
                            exact(codes, scales, x, length, (sums, zero, fresh))
                        apart = index(is_group)
                        codes = (tail_codes, zero, apart * shape.code_chunk)
                        scales = (tail_scales, zero, apart * shape.scale_chunk)
                        x = (numbers, top * number_row + chunks * index(4 * CHUNK), number_row)
                        length, fresh = one, zero
                    for column in range(min(index(batch), index(out.shape[0]) - top)):
                        for r in range(count):
                            place = (r * index(batch) + column) * index(VECTOR_BYTES)
                            goal = first + r - index(begin)
                            out[top + column, goal] = sum_lanes(sums, place)
            row += group

    return multiply_rows


@cache
def panel_kernel(code: Coding) -> Any:
    """A kernel that adds products of coded rows begin..end and panels of numbers to sums.

    Codes of a block are decoded once, while the block's panels are in the cache.
    """
    fits = registers()
    together, most, room_row = fits.panel_rows, fits.panels, 4 * CHUNK * BLOCK_CHUNKS
    decode_row = row_decoder(code)
    single = panel_product(together, 1, room_row)
    several = panel_product(together, most, room_row)

    @jit_of(decode_row, several)
    def multiply_panels(rows, numbers, begin, end, scratch, sums):
        shape, zero = rows.shape[0], index(0)
        room, codes, scales = scratch
        width = index(numbers.shape[1])
        panels, chunks = index(numbers.shape[0] // LANES), width // index(CHUNK)
        panel_bytes, sum_row = width * index(VECTOR_BYTES), index(4 * sums.shape[1])
        code_ahead = index(together) * shape.code_row
        scale_ahead = index(together) * shape.scale_row
        for first in range(zero, chunks, index(BLOCK_CHUNKS)):
            count = min(index(BLOCK_CHUNKS), chunks - first)
            for group in range(index(begin), index(end), index(together)):
                for r in range(min(index(together), index(end) - group)):
                    row = group + r
                    whole = whole_chunks(rows, row + index(1))
                    here = min(max(whole, first) - first, count)
                    code = row * shape.code_row + first * shape.code_chunk
                    scale = row * shape.scale_row + first * shape.scale_chunk
                    place = r * index(room_row)
                    coded = (rows.codes, code, code_ahead), (rows.scales, scale, scale_ahead)
                    decode_row(coded[0], coded[1], (room, place), here)
                    if here < count:
                        copy_tail(rows, row, whole, 1, codes, scales)
                        place += here * index(4 * CHUNK)
                        tail = (codes, zero, zero), (scales, zero, zero)
                        decode_row(tail[0], tail[1], (room, place), index(1))
                depth, panel = count * index(CHUNK), zero
                while panel < panels:
                    start = panel * panel_bytes + first * index(CHUNK * VECTOR_BYTES)
                    goal = (group - index(begin)) * sum_row + panel * index(VECTOR_BYTES)
                    x, target = (numbers, start, panel_bytes), (sums, goal, sum_row)
                    if panel + index(most) <= panels:
                        several((room, zero), x, depth, target)
                        panel += index(most)
                    else:
                        single((room, zero), x, depth, target)
                        panel += index(1)

    return multiply_panels


class Factors(NamedTuple):
    """What turns sums into the product.

    Attributes:
        rows: factor of each row.
        cols: factor of each column.
        divisor: what divides their product.
        alpha: factor of all.
        bias: added to each row, or empty.
        c: added, or empty.
    """

    rows: np.ndarray
    cols: np.ndarray
    divisor: np.float32
    alpha: np.float32
    bias: np.ndarray
    c: np.ndarray


@jit
def finish(sums, factors, top, first, out):
    """Elements of the product from their sums: factors, bias, what is added, rounding.

    Args:
        sums: some rows and columns.
        factors: of the whole product.
        top: row of the product where the sums begin.
        first: column where they begin.
        out: the product.
    """
    has_bias, has_c = factors.bias.size > 0, factors.c.size > 0
    for i in range(index(sums.shape[0])):
        row = index(top) + i
        factor = factors.rows[row]
        for j in range(index(sums.shape[1])):
            column = index(first) + j
            scale = factor * factors.cols[column] / factors.divisor * factors.alpha
            value = scale * sums[i, j]
            if has_bias:
                value += factors.bias[column]
            if has_c:
                value += factors.c[row, column]
            out[row, column] = narrow(value, out[row, column])
