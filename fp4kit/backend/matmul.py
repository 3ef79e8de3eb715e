# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a backend is handed to multiply: operands as (rows, depth), whatever their tensors were.

The product of `a` (rows_a, depth) and `b` (rows_b, depth) is (rows_a, rows_b): the depth is the
axis that is summed, and blocks run along it. What it is stands in :func:`fp4kit.matmul`.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import FormatSpec

from .jobs import RawArray
from .prepared import WeightsJob


def _rows_per_level(rows: int, level: RawArray | None) -> int:
    return rows if level is None else max(rows // max(level.size, 1), 1)


class FloatOperand(NamedTuple):
    """A matrix of numbers.

    Attributes:
        data: (rows, depth), C-contiguous.
        dtype: `float32`, `float16` or `bfloat16` (then data is uint16).
    """

    data: RawArray
    dtype: str

    @property
    def rows(self) -> int:
        """Rows of the product that it makes."""
        return int(self.data.shape[0])

    @property
    def depth(self) -> int:
        """Elements that are summed."""
        return int(self.data.shape[1])


class QuantizedOperand(NamedTuple):
    """A quantized matrix, its blocks along the depth.

    Attributes:
        format: its traits.
        rows: rows of the product that it makes.
        depth: elements that are summed; those that pad the last block do not count.
        packed: uint8 codes: (rows, format.packed_cols(depth)), or, transposed, (padded depth,
            rows).
        block_scale: scale bytes, (rows, blocks) when linear, else in the layout's order of these;
            transposed and linear (blocks, rows). None for formats with float32 scales.
        scale_layout: order of the block scales.
        low_first: whether the even element takes the low nibble.
        transposed: whether codes lie in the order of the transpose: columnwise tensors of 8-bit
            elements.
        grid_scale: float32 scales of 128 x 128 elements, (rows / 128, depth / 128), the other way
            round if transposed, rounded up; or None.
        level: float32 (levels,) second-level values, each of rows / levels rows; or None.
        level_name: the direction of the level: `amax`, which is taken as it is, as scales of
            fp8 are too; `decode_scale`; or `encode_scale`, which divides. What is no positive
            finite number counts as 1 in the last two, as everywhere.
        level_range: what an amax was mapped onto, which divides the product: 2688, or 1536 under
            e4m3_max=256; 1 for the rest.
        kept: room for what a backend finds out about products with it, while its arrays stay where
            they are; or None if they may not.
    """

    format: FormatSpec
    rows: int
    depth: int
    packed: RawArray
    block_scale: RawArray | None
    scale_layout: str
    low_first: bool
    transposed: bool
    grid_scale: RawArray | None
    level: RawArray | None
    level_name: str
    level_range: float
    kept: dict[Any, Any] | None = None

    @property
    def blocks(self) -> int:
        """Blocks along the depth."""
        return self.format.num_blocks(self.depth)

    @property
    def rows_per_level(self) -> int:
        """Consecutive rows that share a second-level value."""
        return _rows_per_level(self.rows, self.level)


class PreparedOperand(NamedTuple):
    """An FP4 matrix in tiles: see :mod:`fp4kit.backend.prepared`.

    Attributes:
        format: its traits.
        rows: rows of the product that it makes.
        depth: elements that are summed.
        tiles: uint8, of `prepared.tile_shape`.
        is_plain: whether no block scale is one that the kernels of small products do not take.
        level: as of a :class:`QuantizedOperand`.
        level_name: likewise.
        level_range: likewise.
        kept: likewise.
    """

    format: FormatSpec
    rows: int
    depth: int
    tiles: RawArray
    is_plain: bool
    level: RawArray | None
    level_name: str
    level_range: float
    kept: dict[Any, Any] | None = None

    @property
    def blocks(self) -> int:
        """Blocks along the depth."""
        return self.format.num_blocks(self.depth)

    @property
    def rows_per_level(self) -> int:
        """Consecutive rows that share a second-level value."""
        return _rows_per_level(self.rows, self.level)

    def stored_as(self, packed: RawArray, block_scale: RawArray) -> QuantizedOperand:
        """The operand in rows: codes (low nibble first) and linear scales were restored there."""
        return QuantizedOperand(
            format=self.format,
            rows=self.rows,
            depth=self.depth,
            packed=packed,
            block_scale=block_scale,
            scale_layout="linear",
            low_first=True,
            transposed=False,
            grid_scale=None,
            level=self.level,
            level_name=self.level_name,
            level_range=self.level_range,
        )

    def weights_job(self, packed: RawArray, block_scale: RawArray) -> WeightsJob:
        """The job that restores such an operand."""
        return WeightsJob(
            self.format, self.rows, self.depth, packed, block_scale, "linear", True, self.tiles
        )


Operand = FloatOperand | QuantizedOperand | PreparedOperand


class MatmulJob(NamedTuple):
    """A product and where it goes; no axis of `out` is empty, the depth may be 0.

    Attributes:
        a: rows of the product.
        b: columns of the product.
        out: (rows of a, rows of b) to fill, C-contiguous; never among what is read, but `c`.
        out_dtype: its element type.
        alpha: factor of the product, a binary32 number.
        bias: (rows of b,) to add to every row, or None.
        bias_dtype: its element type.
        c: like out, to add, or None.
        c_dtype: its element type.
    """

    a: Operand
    b: Operand
    out: RawArray
    out_dtype: str
    alpha: float = 1.0
    bias: RawArray | None = None
    bias_dtype: str = "float32"
    c: RawArray | None = None
    c_dtype: str = "float32"

    @property
    def divisor(self) -> np.float32:
        """What the ranges of both second levels divide by, a binary32 number."""
        ranges = [one.level_range for one in (self.a, self.b) if not isinstance(one, FloatOperand)]
        return np.float32(prod(ranges))


class RaggedMatmulJob(NamedTuple):
    """Products of consecutive rows of one matrix with a weight of their own for each range.

    Attributes:
        a: rows of all ranges.
        members: the weights, alike but for their arrays.
        offsets: int32 or int64 (members + 1,) on the device: rows where each range begins, and the
            end. They rise; they were not looked at, and what is beyond the rows of `a` is nothing.
            Rows that no range holds are left alone.
        out: (rows of a, rows of a member) to fill.
        out_dtype: its element type.
        alpha: factor of the products.
        bias: (members, rows of a member), or None.
        bias_dtype: its element type.
    """

    a: FloatOperand
    members: tuple[QuantizedOperand | PreparedOperand, ...]
    offsets: RawArray
    out: RawArray
    out_dtype: str
    alpha: float = 1.0
    bias: RawArray | None = None
    bias_dtype: str = "float32"
