# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: :mod:`fp4kit.reference.philox` as loops over the blocks of a tile."""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from fp4kit.reference import philox

from .elements import ABS, INF_BITS, at_most, bits_float, f32, float_bits, index, u32, u64
from .jit import jit_inner
from .scaling import SIX

FIRST, SECOND = (u64(number) for number in philox.MULTIPLIERS)
FIRST_STEP, SECOND_STEP = (u32(number) for number in philox.KEY_STEPS)
ROUNDS = philox.ROUNDS
i32 = np.int32
FROM_ONE_ON, BELOW_ONE = (i32(field << philox.MANTISSA_BITS) for field in (126, 127))


@jit_inner
def random_words(groups, count, direction, subsequence, key, out):
    """The four words of each group, out[w, b]; `groups` are uint64 numbers."""
    for b in range(index(count)):
        c0, c1 = u32(groups[b]), u32(groups[b] >> u64(32))
        c2, c3 = u32(direction), u32(subsequence)
        low, high = u32(key), u32(key >> u64(32))
        for _ in range(ROUNDS):
            first, second = FIRST * u64(c0), SECOND * u64(c2)
            c0 = u32(u32(second >> u64(32)) ^ c1 ^ low)
            c2 = u32(u32(first >> u64(32)) ^ c3 ^ high)
            c1, c3 = u32(second), u32(first)
            low = u32(low + FIRST_STEP)
            high = u32(high + SECOND_STEP)
        out[0, b], out[1, b], out[2, b], out[3, b] = c0, c1, c2, c3


@jit_inner
def encode_stochastically(value, word, turn):
    """E2M1 code of a float32: up if the word, rotated right by `turn` bits, says so."""
    bits = float_bits(value)
    # numba widens shifts and sums of 32 bits to 64: back to 32 at once.
    rotated = u32(word >> turn) | u32(word << ((u32(32) - turn) & u32(31)))
    y = at_most(bits_float(bits & ABS), SIX)
    # philox.code_and_rest.
    from_one_on = i32(i32(float_bits(y)) - FROM_ONE_ON)
    below_one = i32(i32(float_bits(y + f32(1))) - BELOW_ONE)
    gone = u32(u32(max(from_one_on, below_one)) << u32(2))
    code = u32(u32(gone + u32(u32(rotated) >> u32(8))) >> u32(24))
    code = code | ((bits >> u32(28)) & u32(8))
    return u32(7) if (bits & ABS) > INF_BITS else code
