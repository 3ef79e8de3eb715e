# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles of blocks for the quantizing kernels of variants: load, rotate, amax, store.

A tile holds up to TILE blocks as float32 `v[k, b]`, element k of block b, so that every loop over
b vectorizes whatever runs along k: a rotation, a sum of errors, or the packing of codes. Its
blocks are those of some rows (b = row * blocks + block), or one block of each of some columns.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from .jit import jit_inner
from .scalars import F32, I16, U16, U32, scalar
from .words import ABS, INF_BITS, bits_float, f32, float_bits, narrow_bfloat, u32, widen_half

#: An array is worked on in panels of this many rows and columns.
PANEL_ROWS = 128
PANEL_COLS = 256
#: Blocks in a tile; its rows times its columns are 256 blocks of 16, or 32 x 256 elements.
TILE = 256
#: Longest block.
LONGEST = 32
#: Elements that are rotated together.
GROUP = 16
#: Raw elements as the loaders take them: the type of the bits names the element type.
ELEMENT_TYPES = {"bfloat16": np.uint16, "float16": np.int16, "float32": np.float32}
index = np.uint64
SIGN = u32(0x80000000)


@scalar(F32(U16), F32(I16), F32(F32))
def widen(element):
    """A raw element as float32."""
    if element.kind == U16:
        return bits_float(element.cast(U32) << 16)
    return widen_half(element.cast(U32) & 0xFFFF) if element.kind == I16 else element


@jit_inner
def load_rows(x, rows, cols, row, count, col, blocks, size, v):
    """v[k, r * blocks + j] = x[row + r, col + j * size + k], zero outside of the panel."""
    for r in range(index(count)):
        for j in range(index(blocks)):
            b = r * index(blocks) + j
            first = index(col) + j * index(size)
            place = (index(row) + r) * index(PANEL_COLS) + first
            if index(row) + r < index(rows) and first + index(size) <= index(cols):
                for k in range(index(size)):
                    v[k, b] = x[place + k]
            else:
                for k in range(index(size)):
                    inside = index(row) + r < index(rows) and first + k < index(cols)
                    v[k, b] = x[place + k] if inside else f32(0)


@jit_inner
def load_columns(x, rows, cols, row, col, count, size, v):
    """v[k, b] = x[row + k, col + b], zero below the last row."""
    for k in range(index(size)):
        if index(row) + k < index(rows):
            place = (index(row) + k) * index(PANEL_COLS) + index(col)
            for b in range(index(count)):
                v[k, b] = x[place + b]
        else:
            for b in range(index(count)):
                v[k, b] = f32(0)


@jit_inner
def rotate(v, count, size, mask, to_bfloat, inverse):
    """`rotation.rotate` of each group of 16 elements of `count` blocks, in place."""
    for group in range(index(0), index(size), index(GROUP)):
        if not inverse:
            flip(v, count, group, mask)
        distance = index(1)
        while distance < index(GROUP):
            for k in range(index(GROUP)):
                if k & distance == index(0):
                    one, other = group + k, group + k + distance
                    for b in range(index(count)):
                        x, y = v[one, b], v[other, b]
                        v[one, b] = x + y
                        v[other, b] = x - y
            distance = distance * index(2)
        for k in range(index(GROUP)):
            for b in range(index(count)):
                v[group + k, b] = v[group + k, b] * f32(0.25)
        if inverse:
            flip(v, count, group, mask)
        if to_bfloat:
            for k in range(index(GROUP)):
                for b in range(index(count)):
                    v[group + k, b] = bits_float(narrow_bfloat(v[group + k, b]) << u32(16))


@jit_inner
def flip(v, count, group, mask):
    """Flips the signs that a mask names."""
    for k in range(index(GROUP)):
        if (mask >> np.int64(k)) & 1:
            for b in range(index(count)):
                v[group + k, b] = bits_float(float_bits(v[group + k, b]) ^ SIGN)


@jit_inner
def block_amaxes(v, count, size, amax):
    """Bits of the largest magnitude of each block, NaN ignored."""
    for b in range(index(count)):
        amax[b] = u32(0)
    for k in range(index(size)):
        for b in range(index(count)):
            bits = float_bits(v[k, b]) & ABS
            known = bits if bits <= INF_BITS else u32(0)
            amax[b] = max(amax[b], known)


@jit_inner
def tile_amaxes(amax, rows, blocks):
    """Gives every row of a 2-D tile the largest amax of all its rows."""
    for j in range(index(blocks)):
        largest = u32(0)
        for r in range(index(rows)):
            largest = max(largest, amax[r * index(blocks) + j])
        for r in range(index(rows)):
            amax[r * index(blocks) + j] = largest


@jit_inner
def store_rows(words, count_rows, blocks, per_block, row, first_block, row_blocks, packed):
    """Code words of a tile of rows to packed rows of `row_blocks` blocks."""
    for r in range(index(count_rows)):
        target = ((index(row) + r) * index(row_blocks) + index(first_block)) * index(per_block)
        for j in range(index(blocks)):
            for w in range(index(per_block)):
                packed[target + j * index(per_block) + w] = words[w, r * index(blocks) + j]


@jit_inner
def store_columns(words, count, per_block, col, block, column_blocks, packed):
    """Code words of one block of each of some columns to the packed transpose."""
    for b in range(index(count)):
        target = ((index(col) + b) * index(column_blocks) + index(block)) * index(per_block)
        for w in range(index(per_block)):
            packed[target + w] = words[w, b]


@jit_inner
def code_at(words, element, block, bits):
    """One code out of the words of a block."""
    per_word = index(32 // bits)
    shift = (element % per_word) * index(bits)
    return (words[element // per_word, block] >> u32(shift)) & u32((1 << bits) - 1)


@jit_inner
def store_transposed(words, size, blocks, tile, col, cols, column_blocks, low_first, packed):
    """The codes of a 2-D tile of rows (4-bit codes) to the packed transpose, as block `tile`."""
    turn = index(0) if low_first else index(1)
    per_block = index(size // 8)
    for j in range(index(blocks)):
        for k in range(index(size)):
            column = index(col) + j * index(size) + k
            if column < index(cols):
                # A word holds the codes of eight rows; the order of nibbles has been applied to k.
                place = (column * index(column_blocks) + index(tile)) * per_block
                for w in range(per_block):
                    word = u32(0)
                    for i in range(index(8)):
                        block = (w * index(8) + i) * index(blocks) + j
                        word |= code_at(words, k ^ turn, block, 4) << u32((i ^ turn) * index(4))
                    packed[place + w] = word


@jit_inner
def store_bytes(words, rows, blocks, size, row, col, cols, packed):
    """The FP8 codes of a tile of rows to a matrix of codes of `cols` columns."""
    for r in range(index(rows)):
        for j in range(index(blocks)):
            for k in range(index(size)):
                column = index(col) + j * index(size) + k
                if column < index(cols):
                    code = code_at(words, k, r * index(blocks) + j, 8)
                    packed[(index(row) + r) * index(cols) + column] = np.uint8(code)


@jit_inner
def store_column_bytes(words, count, size, row, col, cols, packed):
    """The FP8 codes of one block of each of some columns to a matrix of codes."""
    for k in range(index(size)):
        place = (index(row) + k) * index(cols) + index(col)
        for b in range(index(count)):
            packed[place + b] = np.uint8(code_at(words, k, b, 8))
