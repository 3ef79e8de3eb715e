# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The random Hadamard transform of 16 points, in NumPy.

y = (x16 @ (diag(s) H)) / 4 with H[r][c] = (-1)^popcount(r & c): Transformer Engine's rotation
(`NVFP4QuantizerRef._apply_rht`). The sum is a butterfly of fixed order, so that every backend
gives the same bits where the published matrix product leaves the order open.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4kit.options import GROUP

from . import codecs

Floats = NDArray[np.float32]


def signs(mask: int) -> Floats:
    """-1 for each set bit of a mask, else 1, as float32 (16,)."""
    bits = (mask >> np.arange(GROUP)) & 1
    return np.where(bits == 1, np.float32(-1), np.float32(1))


def butterfly(groups: Floats) -> Floats:
    """H / 4 times each group: four stages of sums and differences, distances 1, 2, 4 and 8."""
    values = groups.copy()
    for distance in (1, 2, 4, 8):
        pairs = values.reshape(*groups.shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        values = np.stack([first + second, first - second], axis=-2).reshape(groups.shape)
    return values * np.float32(0.25)


def rotate(values: Floats, mask: int, rounding: str, *, inverse: bool = False) -> Floats:
    """Rotates groups of 16 along the last axis.

    Args:
        values: float32 (..., n), n a multiple of 16.
        mask: 16 bits; bit i = 1 negates element i before (inverse: after) the butterfly.
        rounding: `bf16` rounds the result to bfloat16, `none` does not.
        inverse: undo instead.
    """
    groups = values.reshape(*values.shape[:-1], -1, GROUP)
    result = butterfly(groups) * signs(mask) if inverse else butterfly(groups * signs(mask))
    result = result.reshape(values.shape)
    return codecs.round_to(result, "bfloat16") if rounding == "bf16" else result
