# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles of a panel: up to 256 blocks side by side, so that every loop over them vectorizes.

`v[k, b]` is element k of block b as float32; that serves whatever runs along k: a rotation, a sum
of errors, the packing of codes. The blocks are those of some rows (b = row * blocks + block) or,
columnwise, one block of each of some columns.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .elements import ABS, INF_BITS, f32, float_bits, index, u32
from .jit import jit_inner
from .panels import PANEL_COLS

#: Blocks in a tile; its rows times its columns are 256 blocks of 16, or 32 x 256 elements.
TILE = 256
#: Longest block.
LONGEST = 32
#: Elements that are rotated together, and that share one call of the random generator.
GROUP = 16


class Tile(NamedTuple):
    """Where a tile stands.

    Attributes:
        row: its first row in the array.
        col: its first column.
        rows: rows of it that exist, at most the block size.
        blocks: blocks in it.
    """

    row: int
    col: int
    rows: int
    blocks: int


class Scratch(NamedTuple):
    """Room for a tile, an entry per block in the last axis: see :func:`make_scratch`."""

    v: np.ndarray
    second: np.ndarray
    group: np.ndarray
    amax: np.ndarray
    byte: np.ndarray
    factor: np.ndarray
    search: np.ndarray
    words: np.ndarray
    random: np.ndarray
    weights: np.ndarray


class Output(NamedTuple):
    """Where codes and scales of one direction go.

    Attributes:
        words: packed codes as words of 32 bits.
        codes: the same memory, where it is written byte by byte.
        scales: scale bytes.
    """

    words: np.ndarray
    codes: np.ndarray
    scales: np.ndarray


@jit_inner
def make_scratch():
    """Buffers for a tile."""
    return Scratch(
        np.empty((LONGEST, TILE), np.float32),
        np.empty(TILE, np.float32),
        np.empty(TILE, np.uint64),
        np.empty(TILE, np.uint32),
        np.empty(TILE, np.uint8),
        np.empty(TILE, np.float32),
        np.empty((6, TILE), np.float32),
        np.empty((8, TILE), np.uint32),
        np.empty((4, TILE), np.uint32),
        np.empty((GROUP, TILE), np.float32),
    )


@jit_inner
def load(panel, columnwise, first, count, size, v):
    """Loads `count` blocks of `size` elements, zero outside of the panel.

    Columnwise v[k, b] = x[first + k, b], else v[k, r * blocks + j] = x[first + r, j * size + k].
    """
    x, rows, cols = panel.x, index(panel.rows), index(panel.cols)
    if columnwise:
        for k in range(index(size)):
            place = (index(first) + k) * index(PANEL_COLS)
            if index(first) + k < rows:
                for b in range(index(count)):
                    v[k, b] = x[place + b]
            else:
                for b in range(index(count)):
                    v[k, b] = f32(0)
    else:
        blocks = index(count) // index(size)
        for r in range(index(size)):
            for j in range(blocks):
                b = r * blocks + j
                place = (index(first) + r) * index(PANEL_COLS) + j * index(size)
                exists = index(first) + r < rows
                if exists and (j + index(1)) * index(size) <= cols:
                    for k in range(index(size)):
                        v[k, b] = x[place + k]
                else:
                    for k in range(index(size)):
                        inside = exists and j * index(size) + k < cols
                        v[k, b] = x[place + k] if inside else f32(0)


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
def code_at(words, element, block, bits):
    """One code out of the words of a block."""
    per_word = index(32 // bits)
    shift = (element % per_word) * index(bits)
    return (words[element // per_word, block] >> u32(shift)) & u32((1 << bits) - 1)


@jit_inner
def store_words(words, vectors, blocks, per_block, first, stride, out):
    """Code words of `blocks` blocks of each of some vectors.

    Args:
        words: of the tile.
        vectors: how many.
        blocks: of each.
        per_block: words in a block.
        first: number of the first block in the output.
        stride: blocks in a vector of the output.
        out: packed codes.
    """
    for r in range(index(vectors)):
        target = (index(first) + r * index(stride)) * index(per_block)
        for j in range(index(blocks)):
            for w in range(index(per_block)):
                out[target + j * index(per_block) + w] = words[w, r * index(blocks) + j]


@jit_inner
def store_transposed(plan, tile, words, out):
    """The 4-bit codes of a 2-D tile of rows to the packed transpose."""
    turn, size = index(plan.high_first), index(plan.size)
    blocks, down = index(tile.blocks) // size, (index(plan.rows) + size - index(1)) // size
    per_block = size // index(8)
    for j in range(blocks):
        for k in range(size):
            column = index(tile.col) + j * size + k
            if column < index(plan.cols):
                # A word holds the codes of eight rows; the order of nibbles has been applied to k.
                place = (column * down + index(tile.row) // size) * per_block
                for w in range(per_block):
                    word = u32(0)
                    for i in range(index(8)):
                        block = (w * index(8) + i) * blocks + j
                        word |= code_at(words, k ^ turn, block, 4) << u32((i ^ turn) * index(4))
                    out[place + w] = word


@jit_inner
def store_bytes(plan, tile, words, out):
    """The 8-bit codes of a tile to a matrix of codes in the order of the data."""
    size, cols = index(plan.size), index(plan.cols)
    if plan.in_columns:
        for k in range(size):
            place = (index(tile.row) + k) * cols + index(tile.col)
            for b in range(index(tile.blocks)):
                out[place + b] = np.uint8(code_at(words, k, b, 8))
    else:
        blocks = index(tile.blocks) // size
        for r in range(size):
            for j in range(blocks):
                for k in range(size):
                    column = index(tile.col) + j * size + k
                    if column < cols:
                        code = code_at(words, k, r * blocks + j, 8)
                        out[(index(tile.row) + r) * cols + column] = np.uint8(code)


@jit_inner
def store_tile(plan, tile, scratch, output):
    """Writes the codes and scales of a tile."""
    words, byte, scales, size = scratch.words, scratch.byte, output.scales, plan.size
    down, across = (plan.rows + size - 1) // size, (plan.cols + size - 1) // size
    row_block, col_block, blocks = tile.row // size, tile.col // size, tile.blocks // size
    per_block = size * plan.bits // 32
    vector_stride, block_stride = plan.vector_stride, plan.block_stride
    if plan.in_columns:
        for b in range(tile.blocks):
            scales[(tile.col + b) * vector_stride + row_block * block_stride] = byte[b]
        if plan.bits == 4:
            first = tile.col * down + row_block
            store_words(words, tile.blocks, 1, per_block, first, down, output.words)
        else:
            store_bytes(plan, tile, words, output.codes)
    elif plan.columnwise:
        for j in range(blocks):
            start = tile.col + j * size
            for column in range(start, min(start + size, plan.cols)):
                scales[column * vector_stride + row_block * block_stride] = byte[j]
        if plan.bits == 4:
            store_transposed(plan, tile, words, output.words)
        else:
            store_bytes(plan, tile, words, output.codes)
    else:
        for r in range(tile.rows):
            place = (tile.row + r) * vector_stride + col_block * block_stride
            for j in range(blocks):
                scales[place + j * block_stride] = byte[r * blocks + j]
        first = tile.row * across + col_block
        store_words(words, tile.rows, blocks, per_block, first, across, output.words)
