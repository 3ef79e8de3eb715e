# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MXFP4 to FP8 under float32 scales, in closed form: powers of two as scales, values kept.

A block of MXFP4 is q * 2^k, with q of E2M1 and k the scale byte minus 127. Blocks that share a
float32 scale 2^s become codes of E4M3 for q * 2^(k - s). Let E be the exponent of the largest
magnitude among them. With s = E - 8 that magnitude is 256 or 384, of 448 at most, and the smallest
step of E4M3, 2^-9, takes every q * 2^k down to k = E - 16: a block may be 2^14 times smaller than
the largest beside it, and keeps all values. Of blocks that are smaller still some values are
rounded, and counted. Nothing else is: the scale is a power of two.

The scale of a whole tensor is decided from the scale bytes alone, s = kmax - 6, as no magnitude is
above 6. s is never below -126, so that the scale is a normal number of binary32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4kit.checkpoint.views.mxfp4 import CODE_BYTES
from fp4kit.formats import E2M1, E4M3, E8M0_BIAS, GRID_BLOCK, MXFP4
from fp4kit.plan import Plan
from fp4kit.reference import codecs

from .lossless import SMALLEST_SECOND_LEVEL as SMALLEST_EXPONENT
from .lossless import Exponents, Recoder

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
#: Exponent of what has no value but zero.
NONE = -(1 << 20)
#: Exponents of 0.5, of 1 and 1.5, of 2 and 3, and of 4 and 6.
EXPONENTS = np.arange(-1, E2M1.max_exponent + 1, dtype=np.int32)
#: Bits 0, 1 and 2 of the sixteen codes of a word.
BITS = [np.uint64(0x1111111111111111 << bit) for bit in range(3)]
#: Under a larger or smaller k - s nothing changes: no block with a value has the former, and all
#: values are rounded to zero under the latter.
HIGHEST = E4M3.max_exponent + 1
LOWEST = 1 - E4M3.bias - E4M3.mantissa_bits - E2M1.max_exponent - 2
#: Below it some values are rounded.
LOWEST_EXACT = 1 - E4M3.bias - E4M3.mantissa_bits + 1


def _tables() -> tuple[NDArray[np.uint16], Bytes]:
    """Of every k - s and byte of two codes: the two codes of E4M3, and how many are rounded."""
    shifts = np.arange(LOWEST, HIGHEST + 1)[:, None]
    values = np.ldexp(E2M1.values, shifts).astype(np.float32)
    codes = codecs.encode(values, E4M3)
    rounded = (E4M3.values[codes] != values).astype(np.uint8)
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    pairs = codes[:, low].astype(np.uint16) | codes[:, high].astype(np.uint16) << np.uint16(8)
    return pairs.astype("<u2").reshape(-1), (rounded[:, low] + rounded[:, high]).reshape(-1)


PAIRS, ROUNDED = _tables()


def _tops(packed: Bytes, scale: Bytes) -> Ints:
    """The exponent of the largest magnitude of each block, (rows, I / 32)."""
    words = packed.reshape(len(packed), -1, CODE_BYTES).view(np.uint64)
    first, second = words[..., 0], words[..., 1]
    some = first | second
    # 6 alone has both bits of 4 and 2.
    six = ((first >> np.uint64(1)) & first | (second >> np.uint64(1)) & second) & BITS[1]
    tops = np.full(some.shape, NONE, np.int32)
    for bits, exponent in zip((*(some & bit for bit in BITS), six), EXPONENTS, strict=True):
        tops = np.where(bits != 0, exponent, tops)
    return np.where(tops == NONE, NONE, tops + scale - E8M0_BIAS).astype(np.int32)


class Fp8Recoder(Recoder):
    """FP8 under scales of a tensor, of rows or of blocks."""

    def __init__(self, plan: Plan, exponents: Exponents | None) -> None:
        """Takes what is known of the whole.

        Args:
            plan: of the result.
            exponents: of all weights that share one scale, None if rows or blocks have their own.
        """
        self._granularity = plan.scheme.granularity
        self._shift: int | None = None
        if exponents is not None:
            largest = exponents.largest
            top = None if largest is None else largest + E2M1.max_exponent
            self._shift = int(_shifts(np.array([NONE if top is None else top]))[0])

    def __call__(  # noqa: D102
        self, packed: Bytes, scale: Bytes
    ) -> tuple[Bytes, NDArray[np.float32]]:
        rows, blocks = scale.shape
        if self._shift is not None:
            shifts = np.full((1, 1), self._shift, np.int32)
            spread = np.broadcast_to(shifts, scale.shape)
        elif self._granularity == "channel":
            shifts = _shifts(_tops(packed, scale).max(1, keepdims=True, initial=NONE))
            spread = np.broadcast_to(shifts, scale.shape)
        else:
            per = GRID_BLOCK // MXFP4.block_size
            tops = np.maximum.reduceat(_tops(packed, scale), np.arange(0, rows, GRID_BLOCK), 0)
            shifts = _shifts(np.maximum.reduceat(tops, np.arange(0, blocks, per), 1))
            spread = shifts.repeat(GRID_BLOCK, 0)[:rows].repeat(per, 1)[:, :blocks]
        under = np.clip(scale.astype(np.int32) - E8M0_BIAS - spread, LOWEST, HIGHEST)
        base = ((under - LOWEST) << 8).astype(np.uint16)
        at = base.repeat(CODE_BYTES, 1) + packed
        if (under < LOWEST_EXACT).any():
            self.rounded += int(ROUNDED[at].sum(dtype=np.int64))
        scales = np.ldexp(np.float32(1), shifts).astype(np.float32)
        return PAIRS[at].view(np.uint8), scales


def _shifts(tops: Ints) -> Ints:
    """The s of every largest exponent; that of zeros is 0."""
    shifts = np.maximum(tops - E4M3.max_exponent, SMALLEST_EXPONENT)
    return np.where(tops <= NONE // 2, 0, shifts).astype(np.int32)
