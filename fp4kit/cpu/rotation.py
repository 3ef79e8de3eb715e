# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Random Hadamard transform: :mod:`fp4kit.reference.rotation` over the blocks of a tile."""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from fp4kit.backend.jobs import Rotation

from .buffers import read_only
from .elements import bits_float, elements, f32, float_bits, index, round_to_bfloat, u32
from .jit import jit_inner, jit_of
from .panels import PANEL_COLS, Panel, fill_panels, widen_panel
from .tiles import GROUP, LONGEST, TILE, load

SIGN = u32(0x80000000)


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
                    v[group + k, b] = round_to_bfloat(v[group + k, b])


@jit_inner
def flip(v, count, group, mask):
    """Flips the signs that a mask names."""
    for k in range(index(GROUP)):
        if (mask >> np.int64(k)) & 1:
            for b in range(index(count)):
                v[group + k, b] = bits_float(float_bits(v[group + k, b]) ^ SIGN)


@jit_of(allocates=True)
def rotate_panel(panel, columnwise, mask, to_bfloat, inverse):
    """Rotates a panel in place."""
    v, x = np.empty((LONGEST, TILE), np.float32), panel.x
    rows, cols = panel.rows, panel.cols
    blocks = cols // GROUP
    count = cols if columnwise else GROUP * blocks
    for first in range(0, rows, GROUP):
        load(panel, columnwise, first, count, GROUP, v)
        rotate(v, count, GROUP, mask, to_bfloat, inverse)
        if columnwise:
            for k in range(index(GROUP)):
                place = (index(first) + k) * index(PANEL_COLS)
                for b in range(index(cols)):
                    x[place + b] = v[k, b]
        else:
            for r in range(index(min(GROUP, rows - first))):
                place = (index(first) + r) * index(PANEL_COLS)
                for j in range(index(blocks)):
                    for k in range(index(GROUP)):
                        x[place + j * index(GROUP) + k] = v[k, r * index(blocks) + j]


def rotate_array(
    x: np.ndarray, dtype: str, rotation: Rotation, out: np.ndarray, out_dtype: str
) -> None:
    """`Backend.rotate`."""
    source, cols = read_only(elements(x, dtype)), x.shape[1]
    columnwise, to_bfloat = rotation.direction == "columnwise", rotation.rounding == "bf16"

    def work(panel: Panel) -> None:
        widen_panel(source, cols, panel)
        rotate_panel(panel, columnwise, rotation.mask, to_bfloat, rotation.inverse)

    fill_panels(out, out_dtype, work)
