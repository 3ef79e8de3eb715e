# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP4 weights prepared for tensor cores: the layout of their bytes, and what prepares them.

A prepared matrix of `rows` rows, whose blocks run along its depth, is an array of tiles (row_tiles,
depth_tiles, tile_bytes), uint8: 16 rows x 128 elements of the depth each. What pads the rows to 16
and the depth to 128 has codes and scales 0. A tile is 1024 bytes of codes, then its block scales:
128 bytes (nvfp4, 16 to a block) or 64 (mxfp4, 32 to a block): 4.5 or 4.25 bits an element.

**Codes.** Word i (0 .. 15, 32 bits, little endian) of row r of a tile holds elements 8 i .. 8 i + 7
and lies at byte

    (r % 2 * 32 + r // 2 * 4 + i // 4) * 16 + i % 4 * 4

so that lane 4 g + t of a warp takes 32 elements of row 2 g, and of row 2 g + 1, by one access of 16
bytes. Bits 0 .. 15 of the word hold codes 0, 2, 4 and 6 of the eight, bits 16 .. 31 codes 1, 3, 5
and 7. In each half, with s the sign of a code and m its magnitude (three bits, m[2] the highest),
the first to the fourth of its codes being 0 to 3:

    bit   15    14    13    12    11    10    9     8..6  5..3  2..0
          s0    m3[1] m3[0] s1    s3    m3[2] s2    m0    m1    m2

Shifts by 0, 3 and 6 bits put three pairs of codes, one shift and a product the fourth, where
bfloat16 has its sign, the low two bits of its exponent and the first of its mantissa.

**Scales.** The byte of block b of row r of a tile, with L = 2 (nvfp4) or 1 (mxfp4) blocks to a
lane, lies at byte 1024 + ((r // 2 * 4 + b // L) * 2 + r % 2) * L + b % L.
"""

from __future__ import annotations

from typing import NamedTuple

from fp4kit.formats import FormatSpec

from .jobs import RawArray

#: Elements of a tile: rows, and along the depth.
TILE_ROWS, TILE_DEPTH = 16, 128
#: Bytes of codes of a tile.
TILE_CODES = TILE_ROWS * TILE_DEPTH // 2
#: The largest E8M0 scale that is plain: products with codes, times 2^-7, are below 2^128.
MOST_SCALE_E8M0 = 135
#: Scale bytes below this, of blocks that are not zero, are too small for them.
LEAST_SCALE_E8M0 = 2


def tile_shape(spec: FormatSpec, rows: int, depth: int) -> tuple[int, int, int]:
    """Shape of the tiles of a matrix of a format."""
    scale_bytes = TILE_ROWS * TILE_DEPTH // spec.block_size
    return -(-rows // TILE_ROWS), -(-depth // TILE_DEPTH), TILE_CODES + scale_bytes


class WeightsJob(NamedTuple):
    """A stored matrix and its tiles; none is empty.

    Attributes:
        format: traits of nvfp4 or mxfp4.
        rows: rows of the matrix.
        depth: elements along its blocks.
        packed: uint8 codes (rows, format.packed_cols(depth)).
        block_scale: uint8 scale bytes, (rows, blocks) when linear.
        scale_layout: order of the block scales; `linear` for what is restored.
        low_first: whether the even element takes the low nibble.
        tiles: uint8 of :func:`tile_shape`.
    """

    format: FormatSpec
    rows: int
    depth: int
    packed: RawArray
    block_scale: RawArray
    scale_layout: str
    low_first: bool
    tiles: RawArray

    @property
    def blocks(self) -> int:
        """Blocks along the depth."""
        return self.format.num_blocks(self.depth)
