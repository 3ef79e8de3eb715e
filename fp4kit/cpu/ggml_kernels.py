# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The numba kernels of :mod:`fp4kit.cpu.ggml_blocks`."""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

import numpy as np

from .jit import jit, jit_part


@jit_part
def _interleave(packed, source, out, target, quarter):
    """The codes of one scale, `quarter` bytes of either half, in ggml's order."""
    for pair in range(quarter):
        first, second = packed[source + pair], packed[source + quarter + pair]
        out[target + 2 * pair] = (first & 0x0F) | (second << 4)
        out[target + 2 * pair + 1] = (first >> 4) | (second & 0xF0)


@jit_part
def _separate(blocks, source, packed, target, quarter):
    """The inverse of `_interleave`."""
    for pair in range(quarter):
        even, odd = blocks[source + 2 * pair], blocks[source + 2 * pair + 1]
        packed[target + pair] = (even & 0x0F) | (odd << 4)
        packed[target + quarter + pair] = (even >> 4) | (odd & 0xF0)


@jit
def join_range(packed, scales, count, quarter, begin, end, out):
    """Makes blocks begin..end of codes and of `count` scales for each."""
    size = count * (1 + 2 * quarter)
    for block in range(begin, end):
        at = block * size
        for k in range(count):
            out[at + k] = scales[block * count + k]
            first = (block * count + k) * 2 * quarter
            _interleave(packed, first, out, at + count + k * 2 * quarter, quarter)


@jit
def codes_range(blocks, count, quarter, begin, end, packed):
    """The codes of blocks begin..end, each with `count` scales."""
    size = count * (1 + 2 * quarter)
    for block in range(begin, end):
        for k in range(count):
            source = block * size + count + k * 2 * quarter
            _separate(blocks, source, packed, (block * count + k) * 2 * quarter, quarter)


@jit
def scales_range(blocks, count, quarter, table, begin, end, scales):
    """The scales of blocks begin..end, each byte as the table says."""
    size = count * (1 + 2 * quarter)
    for block in range(begin, end):
        for k in range(count):
            scales[block * count + k] = table[blocks[block * size + k]]


@jit
def q8_0_range(blocks, factors, begin, end, out):
    """The float32 elements of blocks begin..end of Q8_0, given their scales as float32."""
    for block in range(begin, end):
        for k in range(32):
            code = np.int8(blocks[block * 34 + 2 + k])
            out[block * 32 + k] = np.float32(code) * factors[block]
