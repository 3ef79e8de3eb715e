# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Block scales from linear into swizzled layouts and back."""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from .buffers import read_only
from .elements import index
from .jit import jit, jit_part
from .threads import run

#: Rows of a tile, which is four blocks wide.
TILE_ROWS = {"swizzled_128x4": 128, "swizzled_8x4": 8}


@jit_part
def _inside(row, tile_rows):
    """Where the first scale of a row stands in its tile."""
    return (row % 32) * 16 + (row // 32) * 4 if tile_rows == 128 else row * 4


@jit
def swizzle_range(linear, blocks, tile_rows, begin, end, out):
    """Copies tile rows begin..end of linear scales into 128x4 or 8x4 order, padding 0."""
    tiles, rows = (blocks + 3) // 4, linear.size // blocks
    for tile_row in range(begin, end):
        for tile in range(tiles):
            base = (tile_row * tiles + tile) * tile_rows * 4
            for r in range(tile_rows):
                row = tile_row * tile_rows + r
                inside = _inside(r, tile_rows)
                for c in range(4):
                    column = tile * 4 + c
                    value = np.uint8(0)
                    if row < rows and column < blocks:
                        value = linear[row * blocks + column]
                    out[base + inside + c] = value


@jit
def unswizzle_range(swizzled, blocks, tile_rows, begin, end, out):
    """Copies rows begin..end of swizzled scales into linear order."""
    tiles = (blocks + 3) // 4
    for row in range(begin, end):
        first = (row // tile_rows) * tiles * tile_rows * 4 + _inside(row % tile_rows, tile_rows)
        for column in range(blocks):
            offset = first + (column // 4) * tile_rows * 4 + column % 4
            out[row * blocks + column] = swizzled[offset]


@jit
def unswizzle_rows(swizzled, first, tile_rows, out):
    """Copies rows from `first` on in linear order to `out`; both are words of four scales."""
    tiles, rows, flat = index(out.shape[1]), index(out.shape[0]), out.reshape(-1)
    apart = index(4) if tile_rows == 128 else index(1)
    begin, end = index(first), index(first) + rows
    # Four rows at a time: they share cache lines.
    for group in range(begin // index(4) * index(4), end, index(4)):
        strip, inside = group // index(tile_rows), group % index(tile_rows)
        source = strip * tiles * index(tile_rows) + index(_inside(inside, tile_rows)) // index(4)
        for tile in range(tiles):
            for row in range(max(group, begin), min(group + index(4), end)):
                flat[(row - begin) * tiles + tile] = swizzled[source + (row - group) * apart]
            source += index(tile_rows)


def swizzle(scales: np.ndarray, layout: str, out: np.ndarray) -> None:
    """`Backend.swizzle`."""
    if layout == "linear":
        out[...] = scales
        return
    (rows, blocks), tile_rows = scales.shape, TILE_ROWS[layout]
    source, target = read_only(scales.reshape(-1)), out.reshape(-1)
    run(
        lambda begin, end: swizzle_range(source, blocks, tile_rows, begin, end, target),
        -(-rows // tile_rows),
        tile_rows * blocks,
    )


def unswizzle(swizzled: np.ndarray, layout: str, out: np.ndarray) -> None:
    """`Backend.unswizzle`."""
    if layout == "linear":
        out[...] = swizzled.reshape(out.shape)
        return
    (rows, blocks), tile_rows = out.shape, TILE_ROWS[layout]
    source, target = read_only(swizzled.reshape(-1)), out.reshape(-1)
    run(
        lambda begin, end: unswizzle_range(source, blocks, tile_rows, begin, end, target),
        rows,
        blocks,
    )


@contextmanager
def linear_output(
    block_scale: np.ndarray, layout: str, shape: tuple[int, int]
) -> Iterator[np.ndarray]:
    """Linear scales to fill, flat: the output itself, or a buffer that is swizzled at the end."""
    if layout == "linear":
        yield block_scale.reshape(-1)
        return
    linear = np.empty(shape, np.uint8)
    yield linear.reshape(-1)
    swizzle(linear, layout, block_scale)


def linear_scales(block_scale: np.ndarray, layout: str, shape: tuple[int, int]) -> np.ndarray:
    """Linear scales of a shape, or what stands there already."""
    if layout == "linear":
        return block_scale
    linear = np.empty(shape, np.uint8)
    unswizzle(block_scale, layout, linear)
    return linear
