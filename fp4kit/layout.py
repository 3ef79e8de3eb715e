# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Where each block scale lies: pure index arithmetic, shared by every backend.

Scale (i, j) belongs to row i and to block j of that row. The swizzled orders are those of the
cuBLASLt / CUTLASS block-scaled matrix products: tiles of 128x4 (or 8x4) scales, 512 (or 32) bytes
each, in row-major order of tiles; every padding byte is 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Rows and columns that each layout pads to.
TILE = {"linear": (1, 1), "swizzled_128x4": (128, 4), "swizzled_8x4": (8, 4)}


def padded_scale_shape(rows: int, blocks: int, layout: str) -> tuple[int, int]:
    """Rows and columns of the stored scale matrix; rows and columns are padded independently."""
    tile_rows, tile_cols = TILE[layout]
    return -(-rows // tile_rows) * tile_rows, -(-blocks // tile_cols) * tile_cols


def scale_offsets(rows: int, blocks: int, layout: str) -> NDArray[np.int64]:
    """Flat offset of scale (i, j) for every i < rows, j < blocks, as an int64 (rows, blocks)."""
    i = np.arange(rows, dtype=np.int64)[:, None]
    j = np.arange(blocks, dtype=np.int64)[None, :]
    if layout == "linear":
        return i * blocks + j
    tiles = -(-blocks // 4)
    if layout == "swizzled_128x4":
        inside = (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
        return ((i // 128) * tiles + j // 4) * 512 + inside
    return ((i // 8) * tiles + j // 4) * 32 + (i % 8) * 4 + j % 4
