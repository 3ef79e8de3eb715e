# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MXFP4 to NVFP4 in closed form: the same codes, the same values.

A block of MXFP4 is q * 2^k, with k the scale byte minus 127; one of NVFP4 is q * s * D, with an
E4M3 block scale s and a second level D (decode direction) that a whole fusion group shares. With
D = 2^m and s = 2^(k - m) the values are equal and the codes stay as they are. E4M3 holds the powers
of two from 2^-9 (subnormal) to 2^8, so that m = kmax - 8, and every k down to kmax - 17 fits, kmax
being the largest k of a block in the group that is not all zeros. Blocks of zeros get scale byte 0.

m is never below -126, so that D and its inverse are normal numbers of binary32: GPUs that flush
subnormals would otherwise read D as 0. For the tiny groups whom that concerns (kmax < -118) it only
makes smaller exponents fit. See checkpoints.md section 5 and Model-Optimizer's pull request 1372.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.checkpoint.views.mxfp4 import CODE_BYTES, Mxfp4View
from fp4kit.formats import E4M3, E8M0_BIAS, E8M0_NAN, MXFP4, NVFP4
from fp4kit.reference import codecs

Bytes = NDArray[np.uint8]
#: Exponents of the largest and smallest power of two that E4M3 holds.
LARGEST_SCALE = E4M3.max_exponent
SMALLEST_SCALE = 1 - E4M3.bias - E4M3.mantissa_bits
#: Smallest exponent of a normal number of binary32.
SMALLEST_SECOND_LEVEL = int(np.finfo(np.float32).minexp)
#: Codes and scales that are scanned at a time, in bytes.
SCAN_BYTES = 8 << 20
#: Everything of eight packed pairs of codes but their signs.
MAGNITUDES = np.uint64(0x7777777777777777)
NVFP4_BLOCKS = MXFP4.block_size // NVFP4.block_size


@dataclass(frozen=True, eq=False)
class Exponents:
    """How often each scale byte occurs in some MXFP4 blocks.

    Attributes:
        counts: int64 (256,), blocks with a code that is not zero, by scale byte.
        zero_blocks: blocks whose codes are all zero.
    """

    counts: NDArray[np.int64]
    zero_blocks: int

    def __add__(self, other: Exponents) -> Exponents:
        """Those of both together: of two chunks, or of two members of a fusion group."""
        return Exponents(self.counts + other.counts, self.zero_blocks + other.zero_blocks)

    @property
    def blocks(self) -> int:
        """Number of all blocks."""
        return int(self.counts.sum()) + self.zero_blocks

    @property
    def largest(self) -> int | None:
        """kmax; None if every code is zero."""
        used = np.flatnonzero(self.counts)
        return int(used[-1]) - E8M0_BIAS if len(used) else None

    @property
    def second_level(self) -> PowerOfTwo:
        """The second level under which most blocks keep their values: m = kmax - 8."""
        largest = self.largest
        if largest is None:
            # The decode scale of a zero tensor is 1.
            return PowerOfTwo(0)
        return PowerOfTwo(max(largest - LARGEST_SCALE, SMALLEST_SECOND_LEVEL))

    @property
    def misfits(self) -> int:
        """Blocks whose scale would be too small for E4M3: 0 if the conversion is lossless."""
        smallest = self.second_level.exponent + SMALLEST_SCALE
        return int(self.counts[: max(smallest + E8M0_BIAS, 0)].sum())


@dataclass(frozen=True)
class PowerOfTwo:
    """A power of two as second level.

    Attributes:
        exponent: m.
    """

    exponent: int

    @property
    def decode(self) -> np.float32:
        """2^m, what block scales are multiplied by."""
        return np.float32(np.ldexp(1.0, self.exponent))

    @property
    def encode(self) -> np.float32:
        """2^-m, its exact inverse."""
        return np.float32(np.ldexp(1.0, -self.exponent))


class Recoder(ABC):
    """From codes and scales of a weight to those of another format, rows at a time.

    Attributes:
        rounded: elements so far whose value the new format does not hold.
    """

    rounded = 0

    @abstractmethod
    def __call__(self, packed: Bytes, scale: Bytes) -> tuple[Bytes, NDArray[Any]]:
        """The new codes and scales of some rows, the first one a multiple of the plan's step."""


class Nvfp4Recoder(Recoder):
    """NVFP4 under a second level that every block fits; the codes stay."""

    def __init__(self, level: PowerOfTwo) -> None:
        self._level = level

    def __call__(self, packed: Bytes, scale: Bytes) -> tuple[Bytes, Bytes]:  # noqa: D102
        return packed, block_scales(packed, scale, self._level)


def nonzero_blocks(packed: Bytes) -> NDArray[np.bool_]:
    """Which blocks hold a code that is not zero (+0 and -0 are).

    Args:
        packed: uint8 (rows, I / 2), C-contiguous, either nibble order.

    Returns:
        bool (rows, I / 32).
    """
    words = packed.reshape(len(packed), -1, CODE_BYTES).view(np.uint64)
    result: NDArray[np.bool_] = ((words[..., 0] | words[..., 1]) & MAGNITUDES) != 0
    return result


def exponents_of(packed: Bytes, scale: Bytes) -> Exponents:
    """The exponents of some rows.

    Args:
        packed: uint8 (rows, I / 2), C-contiguous.
        scale: uint8 (rows, I / 32), E8M0 bytes without NaN (255).
    """
    assert not (scale == E8M0_NAN).any(), "a NaN scale has no exponent"
    used = scale[nonzero_blocks(packed)]
    counts = np.bincount(used, minlength=256).astype(np.int64)
    return Exponents(counts, scale.size - len(used))


def scan(view: Mxfp4View) -> Exponents:
    """The exponents of a whole tensor, read in chunks."""
    rows, cols = view.matrix
    total = Exponents(np.zeros(256, np.int64), 0)
    width = cols // MXFP4.codes_per_byte
    step = max(SCAN_BYTES // max(width, 1), 1)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        total += exponents_of(*view.codes(first, last))
    return total


def scan_group(views: Iterable[Mxfp4View]) -> Exponents:
    """The exponents of every member of a fusion group together."""
    return sum((scan(view) for view in views), Exponents(np.zeros(256, np.int64), 0))


def block_scales(packed: Bytes, scale: Bytes, level: PowerOfTwo) -> Bytes:
    """NVFP4's block scales of some rows under a second level; the codes stay as they are.

    Args:
        packed: uint8 (rows, I / 2), C-contiguous.
        scale: uint8 (rows, I / 32), E8M0 bytes.
        level: second level of the fusion group, with no misfits.

    Returns:
        uint8 (rows, I / 16), E4M3 bytes; both halves of a block have the same one.
    """
    exponents = np.arange(256) - E8M0_BIAS - level.exponent
    fits = (exponents >= SMALLEST_SCALE) & (exponents <= LARGEST_SCALE)
    fits[E8M0_NAN] = False
    powers = np.ldexp(np.float32(1), np.where(fits, exponents, 0)).astype(np.float32)
    table = codecs.encode(powers, E4M3)
    used = nonzero_blocks(packed)
    assert fits[scale[used]].all(), "a block does not fit this second level"
    return np.repeat(np.where(used, table[scale], np.uint8(0)), NVFP4_BLOCKS, axis=1)
