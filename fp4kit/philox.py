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

from .formats import E2M1
from .variant import GROUP

Words = NDArray[np.uint32]
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)


def philox(counter: tuple[Any, Any, Any, Any], key: int) -> list[Words]:
    """Four random words for each counter.

    Args:
        counter: four arrays of 32-bit numbers that broadcast against each other, lowest word first.
        key: 64 bits, the low word first.

    Returns:
        Four uint32 arrays.
    """
    c = [np.asarray(word, np.uint64) for word in counter]
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(ROUNDS):
        first, second = np.uint64(MULTIPLIERS[0]) * c[0], np.uint64(MULTIPLIERS[1]) * c[2]
        c = [
            (second >> WORD_BITS) ^ c[1] ^ np.uint64(low),
            second & WORD,
            (first >> WORD_BITS) ^ c[3] ^ np.uint64(high),
            first & WORD,
        ]
        low, high = (low + KEY_STEPS[0]) & 0xFFFFFFFF, (high + KEY_STEPS[1]) & 0xFFFFFFFF
    return [word.astype(np.uint32) for word in c]


def random_bits(groups: int, seed: tuple[int, int], direction: int) -> NDArray[np.uint32]:
    """16 random bits for each element of `groups` groups.

    The counter of group g is (g low, g high, direction, stream). Element e takes the upper half of
    word e // 4, rotated right by 8 * (e % 4): the leading byte, which nearly always decides, is its
    own, the lower one it shares with a neighbour.

    Args:
        groups: number of groups of 16 elements.
        seed: (key of 64 bits, stream of 32 bits).
        direction: 0 for rowwise codes, 1 for columnwise ones.

    Returns:
        uint32 (groups, 16), below 2^16.
    """
    key, stream = seed
    g = np.arange(groups, dtype=np.uint64)
    words = philox((g & WORD, g >> WORD_BITS, np.uint64(direction), np.uint64(stream)), key)
    word = np.broadcast_to(np.stack(words, axis=-1)[:, :, None], (groups, 4, 4))
    turn = np.arange(4, dtype=np.uint32) * np.uint32(8)
    bits = (word >> turn) | (word << ((np.uint32(32) - turn) & np.uint32(31)))
    return (bits >> np.uint32(16)).reshape(-1, GROUP)


def round_stochastically(
    scaled: NDArray[np.float32], random: NDArray[np.uint32]
) -> NDArray[np.uint8]:
    """E2M1 codes of `scaled`, each one of its two neighbours.

    The upper one is taken if the fraction of the step that `scaled` has gone, plus random * 2^-16,
    reaches 1: so exact values stay. Saturates at 6; NaN becomes code 7, as in rounding to nearest.

    Args:
        scaled: float32 of any shape.
        random: numbers of 16 bits, of the same shape.
    """
    magnitude = np.minimum(np.abs(scaled), np.float32(E2M1.max))
    # In steps of the code's binade, counted from its first code.
    below_2, below_4 = magnitude < 2, magnitude < 4
    per_step = np.where(below_2, np.float32(2), np.where(below_4, np.float32(1), np.float32(0.5)))
    steps = magnitude * per_step
    first = np.where(below_2, 0, np.where(below_4, 2, 4))
    whole = np.floor(steps)
    with np.errstate(invalid="ignore"):
        gone = np.nan_to_num(np.floor((steps - whole) * np.float32(1 << 16))).astype(np.int64)
        code = first + np.nan_to_num(whole).astype(np.int64) + ((gone + random) >> 16)
    sign = np.signbit(scaled).astype(np.int64) << (E2M1.bits - 1)
    return np.where(np.isnan(scaled), E2M1.nan_code, code | sign).astype(np.uint8)
