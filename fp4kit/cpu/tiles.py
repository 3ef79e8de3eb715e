# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles of a panel: up to 256 blocks side by side, so that every loop over them vectorizes.

`v[k, b]` is element k of block b as float32; that serves whatever runs along k: a rotation, a sum
of errors, the packing of codes. The blocks are those of some rows (b = row * blocks + block) or,
columnwise, one block of each of some columns.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from .elements import ABS, INF_BITS, f32, float_bits, index, u32
from .jit import jit_inner
from .panels import PANEL_COLS

#: Blocks in a tile; its rows times its columns are 256 blocks of 16, or 32 x 256 elements.
TILE = 256
#: Longest block.
LONGEST = 32
#: Elements that are rotated together, and that share one call of the random generator.
GROUP = 16


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
