# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The decoding numba kernels of variants: columnwise codes, and rotations of whole arrays.

Both fill a panel of float32 elements (see :mod:`fp4kit.cpu.tiles`), which another kernel
then rounds to the element type of the result.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from .decode import decode_e2m1
from .encode import NO_RECIPE
from .jit import jit, jit_inner, jit_of
from .scalars import F32, I16, U16, scalar
from .scales import any_factors, decode_e8m0
from .tiles import (
    GROUP,
    LONGEST,
    PANEL_COLS,
    PANEL_ROWS,
    TILE,
    code_at,
    index,
    load_columns,
    load_rows,
    rotate,
)
from .words import canonical, f32, float_bits, narrow_bfloat, narrow_half, u32


@scalar(U16(F32, U16), I16(F32, I16), F32(F32, F32))
def narrow(value, element):
    """A float32 rounded to the element type of a raw element."""
    if element.kind == U16:
        return narrow_bfloat(value).cast(U16)
    return narrow_half(canonical(value)).cast(I16) if element.kind == I16 else canonical(value)


@jit
def narrow_panel(panel, rows, cols, row, col, out):
    """Copies a panel of float32 to its place among the flat elements of a result."""
    count = min(PANEL_COLS, cols - col)
    for r in range(min(PANEL_ROWS, rows - row)):
        source, target = index(r * PANEL_COLS), index((row + r) * cols + col)
        for c in range(index(count)):
            out[target + c] = narrow(panel[source + c], out[target + c])


@jit_inner
def column_factors(how, col, count, byte, second, first, last):
    """Decode factors of one block of each of some columns; runs of equal second levels at once."""
    if how.recipe == NO_RECIPE:
        for b in range(count):
            first[b] = decode_e8m0(u32(byte[b]))
            last[b] = f32(1)
        return
    b = 0
    while b < count:
        value = second[(col + b) // how.per_scale] if how.has_second else f32(1)
        stop = b + 1
        while stop < count and (
            not how.has_second
            or float_bits(second[(col + stop) // how.per_scale]) == float_bits(value)
        ):
            stop += 1
        of_all = any_factors(
            how.recipe, how.dtype, how.has_second, value, byte, b, stop - b, first[b:stop]
        )
        for i in range(b, stop):
            last[i] = of_all
        b = stop


@jit_of()
def decode_panel(how, row, col, packed, codes, scales, second, keeps_zero, table, panel):
    """Decodes a panel of columnwise codes.

    Args:
        how: `cpu_variant_kernels.How` of the plan, `recipe` being the decoding one.
        row: first row of the panel.
        col: first column.
        packed: uint32 words of 4-bit codes.
        codes: the same memory as bytes.
        scales: scale bytes.
        second: second-level scales.
        keeps_zero: whether code 8 decodes to -0.0.
        table: values of all FP8 codes.
        panel: output, rows of PANEL_COLS elements.
    """
    first, last = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    byte, words = np.empty(TILE, np.uint8), np.empty((4, TILE), np.uint32)
    zero_mask = u32(0xFFFFFFFF) if keeps_zero else u32(0)
    size = how.size
    blocks = (how.rows + size - 1) // size
    count = min(PANEL_COLS, how.cols - col)
    turn = index(0) if how.low_first else index(1)
    for start in range(row, min(row + PANEL_ROWS, how.rows), size):
        block = start // size
        for b in range(count):
            byte[b] = scales[(col + b) * how.scale_vector + block * how.scale_block]
        column_factors(how, col, count, byte, second, first, last)
        if how.bits == 4:
            per_block = size // 8
            for b in range(count):
                place = index(((col + b) * blocks + block) * per_block)
                for w in range(index(per_block)):
                    words[w, b] = packed[place + w]
        for k in range(index(min(size, how.rows - start))):
            target = index((start - row) * PANEL_COLS) + k * index(PANEL_COLS)
            if how.bits == 4:
                for b in range(index(count)):
                    code = code_at(words, k ^ turn, b, 4)
                    panel[target + b] = decode_e2m1(code, first[b], last[b], zero_mask)
            else:
                source = (index(start) + k) * index(how.cols) + index(col)
                for b in range(index(count)):
                    panel[target + b] = table[codes[source + b]] * first[b]


@jit_of()
def rotate_panel(panel, rows, cols, columnwise, mask, to_bfloat, inverse):
    """Rotates a panel of `rows` x `cols` elements in place."""
    v = np.empty((LONGEST, TILE), np.float32)
    for first in range(0, rows, GROUP):
        blocks = cols // GROUP
        if columnwise:
            load_columns(panel, rows, cols, first, 0, cols, GROUP, v)
            rotate(v, cols, GROUP, mask, to_bfloat, inverse)
            for k in range(index(GROUP)):
                place = (index(first) + k) * index(PANEL_COLS)
                for b in range(index(cols)):
                    panel[place + b] = v[k, b]
            continue
        load_rows(panel, rows, cols, first, GROUP, 0, blocks, GROUP, v)
        rotate(v, GROUP * blocks, GROUP, mask, to_bfloat, inverse)
        for r in range(index(min(GROUP, rows - first))):
            place = (index(first) + r) * index(PANEL_COLS)
            for j in range(index(blocks)):
                for k in range(index(GROUP)):
                    panel[place + j * index(GROUP) + k] = v[k, r * index(blocks) + j]
