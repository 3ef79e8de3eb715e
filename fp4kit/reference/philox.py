# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Random bits for stochastic rounding, and the rounding itself, in NumPy: the ground truth.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, 2011): the
bits of an element depend on the seed and on the element's place among the packed codes only, not
on a backend, a device or a launch shape. One call serves a group of 16 elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.formats import E2M1
from fp4kit.options import GROUP

Words = NDArray[np.uint32]
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
#: Of a float32.
MANTISSA_BITS = 23
WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)


def round_keys(key: int) -> list[tuple[int, int]]:
    """(low word, high word) of the key, of 64 bits, as each round takes it."""
    low, high = key & 0xFFFFFFFF, key >> 32
    first, second = KEY_STEPS
    return [
        ((low + first * i) & 0xFFFFFFFF, (high + second * i) & 0xFFFFFFFF) for i in range(ROUNDS)
    ]


def philox(counter: tuple[Any, Any, Any, Any], key: int) -> list[Words]:
    """Four random words for each counter.

    Args:
        counter: four arrays of 32-bit numbers that broadcast against each other, lowest word first.
        key: 64 bits, the low word first.

    Returns:
        Four uint32 arrays.
    """
    c = [np.asarray(word, np.uint64) for word in counter]
    for low, high in round_keys(key):
        first, second = np.uint64(MULTIPLIERS[0]) * c[0], np.uint64(MULTIPLIERS[1]) * c[2]
        c = [
            (second >> WORD_BITS) ^ c[1] ^ np.uint64(low),
            second & WORD,
            (first >> WORD_BITS) ^ c[3] ^ np.uint64(high),
            first & WORD,
        ]
    return [word.astype(np.uint32) for word in c]


def random_bits(groups: int, seed: tuple[int, int], direction: int) -> NDArray[np.uint32]:
    """24 random bits for each element of `groups` groups.

    The counter of group g is (g low, g high, direction, stream). Element e takes the upper three
    bytes of word e // 4, rotated right by 8 * (e % 4): the leading byte, which nearly always
    decides, is its own, the lower ones it shares with its neighbours.

    Args:
        groups: number of groups of 16 elements.
        seed: (key of 64 bits, stream of 32 bits).
        direction: 0 for rowwise codes, 1 for columnwise ones.

    Returns:
        uint32 (groups, 16), below 2^24.
    """
    key, stream = seed
    g = np.arange(groups, dtype=np.uint64)
    words = philox((g & WORD, g >> WORD_BITS, np.uint64(direction), np.uint64(stream)), key)
    word = np.broadcast_to(np.stack(words, axis=-1)[:, :, None], (groups, 4, 4))
    turn = np.arange(4, dtype=np.uint32) * np.uint32(8)
    bits = (word >> turn) | (word << ((np.uint32(32) - turn) & np.uint32(31)))
    return (bits >> np.uint32(8)).reshape(-1, GROUP)


def code_and_rest(magnitude: NDArray[np.float32]) -> Words:
    """How far `magnitude` is along the E2M1 codes, in steps of 2^-22 of a code.

    These are the bits of the float32 product `magnitude * 2^-126`: 1 then has the exponent field 1,
    as it has in E2M1, with equal steps below it (subnormals) and binades above it, so that what is
    above the last 22 bits is the code rounded down. Magnitudes below 1 are rounded to multiples of
    2^-23, ties to even, all others are exact.

    A processor may be slow with subnormals, or flush them, so they are not formed here:

    - From 1 on, the product has the mantissa of the number and an exponent field that is 126 less:
      the first operand of the maximum. The second is no larger, as `magnitude + 1` is at most
      twice the number, and so is its rounded value.
    - Below 1, the product counts steps of 2^-23, and so does the mantissa of `magnitude + 1`
      (between 1 and 2), with the same ties: the second operand. The first is no larger. It is
      (2 * magnitude - 1) * 2^23 from 1/2 on, which is at most magnitude * 2^23 and an integer, and
      below 1/2 not positive.

    Args:
        magnitude: numbers from +0.0 to before 8.
    """
    plus_one = magnitude + np.float32(1)
    from_one_on = magnitude.view(np.int32) - np.int32(126 << MANTISSA_BITS)
    below_one = plus_one.view(np.int32) - np.int32(127 << MANTISSA_BITS)
    result: Words = np.maximum(from_one_on, below_one).view(np.uint32)
    return result


def round_stochastically(
    scaled: NDArray[np.float32], random: NDArray[np.uint32]
) -> NDArray[np.uint8]:
    """E2M1 codes of `scaled`, each one of its two neighbours.

    The upper one is taken if the part of the step that `scaled` has gone, plus random * 2^-24,
    reaches 1: so exact values stay. Saturates at 6; NaN becomes code 7, as in rounding to nearest.

    Args:
        scaled: float32 of any shape.
        random: numbers of 24 bits, of the same shape.
    """
    magnitude = np.minimum(np.abs(scaled), np.float32(E2M1.max))
    is_nan = np.isnan(scaled)
    gone = code_and_rest(np.where(is_nan, np.float32(0), magnitude)) << np.uint32(2)
    code = (gone + random) >> np.uint32(24)
    sign = np.signbit(scaled).astype(np.uint32) << np.uint32(E2M1.bits - 1)
    return np.where(is_nan, E2M1.nan_code, code | sign).astype(np.uint8)
