# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The numba kernels of :mod:`fp4kit.cpu.ggml_blocks`."""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

import numpy as np

from .elements import index, widen
from .jit import jit, jit_inner

_U64 = np.uint64
_BYTES, _PAIRS, _NIBBLES = (
    _U64(0x0000FFFF0000FFFF),
    _U64(0x00FF00FF00FF00FF),
    _U64(0x0F0F0F0F0F0F0F0F),
)


@jit_inner
def _spread(word):
    """Eight nibbles as the low halves of eight bytes."""
    word = (word | (word << _U64(16))) & _BYTES
    word = (word | (word << _U64(8))) & _PAIRS
    return (word | (word << _U64(4))) & _NIBBLES


@jit_inner
def _gather(word):
    """The low halves of eight bytes as eight nibbles: the inverse of `_spread`."""
    word = word & _NIBBLES
    word = (word | (word >> _U64(4))) & _PAIRS
    word = (word | (word >> _U64(8))) & _BYTES
    return (word | (word >> _U64(16))) & _U64(0xFFFFFFFF)


@jit_inner
def _load(data, at):
    """Four bytes as a little-endian word."""
    return (
        _U64(data[at])
        | (_U64(data[at + index(1)]) << _U64(8))
        | (_U64(data[at + index(2)]) << _U64(16))
        | (_U64(data[at + index(3)]) << _U64(24))
    )


@jit_inner
def _store(word, data, at):
    """The low half of a word as four little-endian bytes."""
    data[at] = np.uint8(word & _U64(0xFF))
    data[at + index(1)] = np.uint8((word >> _U64(8)) & _U64(0xFF))
    data[at + index(2)] = np.uint8((word >> _U64(16)) & _U64(0xFF))
    data[at + index(3)] = np.uint8((word >> _U64(24)) & _U64(0xFF))


@jit
def join_range(packed, scales, count, half, begin, end, out):
    """Makes blocks begin..end of codes and of `count` scales for each."""
    count, half, eight, four = index(count), index(half), index(8), index(4)
    size = count * (index(1) + half)
    for block in range(index(begin), index(end)):
        at = block * size
        for k in range(count):
            out[at + k] = scales[block * count + k]
            source, target = (block * count + k) * half, at + count + k * half
            for word in range(half // eight):
                low = _load(packed, source + word * four)
                high = _load(packed, source + half // index(2) + word * four)
                made = _spread(low) | (_spread(high) << _U64(4))
                _store(made, out, target + word * eight)
                _store(made >> _U64(32), out, target + word * eight + four)


@jit
def codes_range(blocks, count, half, begin, end, packed):
    """The codes of blocks begin..end, each with `count` scales."""
    count, half, eight, four = index(count), index(half), index(8), index(4)
    size = count * (index(1) + half)
    for block in range(index(begin), index(end)):
        for k in range(count):
            source, target = block * size + count + k * half, (block * count + k) * half
            for word in range(half // eight):
                at = source + word * eight
                made = _load(blocks, at) | (_load(blocks, at + four) << _U64(32))
                _store(_gather(made), packed, target + word * four)
                high = target + half // index(2) + word * four
                _store(_gather(made >> _U64(4)), packed, high)


@jit
def scales_range(blocks, count, half, table, begin, end, scales):
    """The scales of blocks begin..end, each byte as the table says."""
    count = index(count)
    size = count * (index(1) + index(half))
    for block in range(index(begin), index(end)):
        for k in range(count):
            scales[block * count + k] = table[blocks[block * size + k]]


@jit
def q8_0_amax_range(codes, halves, begin, end, out):
    """The largest magnitude in each of blocks begin..end of Q8_0; see `q8_0_range`."""
    for block in range(index(begin), index(end)):
        source, largest = block * index(34) + index(2), np.int32(0)
        for k in range(index(32)):
            largest = max(largest, abs(np.int32(codes[source + k])))
        out[block] = np.float32(largest) * abs(widen(halves[block * index(17)]))


@jit
def q8_0_range(codes, halves, begin, end, out):
    """The float32 elements of blocks begin..end of Q8_0, whose bytes are seen in two ways.

    Args:
        codes: int8; 32 elements follow the two bytes of each scale.
        halves: int16; each 17th is the scale of a block, as float16.
        begin: first block.
        end: one behind the last.
        out: the elements.
    """
    for block in range(index(begin), index(end)):
        factor = widen(halves[block * index(17)])
        source, target = block * index(34) + index(2), block * index(32)
        for k in range(index(32)):
            out[target + k] = np.float32(codes[source + k]) * factor
