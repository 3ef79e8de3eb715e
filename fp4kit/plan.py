# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a call asks of a backend, and the plan that decides every byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from fp4kit.options import check_groups
from fp4kit.scheme import Scheme

from .errors import OptionError, ShapeError
from .formats import GRID_BLOCK, FormatSpec, GridRecipe, Recipe
from .layout import padded_scale_shape


@dataclass(frozen=True)
class Request:
    """A call, before any work: what a backend is asked whether it can do.

    `scheme` is that of one direction, None for operations that have none.
    """

    operation: str
    device: str
    dtype: str
    scheme: Scheme | None = None

    @property
    def device_kind(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.split(":")[0]

    def describe(self) -> str:
        """The request in words, for error messages."""
        words = [self.operation, f"{self.dtype} arrays on {self.device}"]
        if self.scheme is not None:
            words.append(f"as {self.scheme.describe()}")
        return " ".join(words)


@dataclass(frozen=True)
class Plan:
    """A scheme of one direction and the shape it is applied to: all that decides bytes.

    `rows` and `cols` are those of the array, whatever the direction of the blocks; a vector is what
    blocks divide: a row of it, or a column.

    Attributes:
        scheme: one of :attr:`Scheme.parts`.
        rows: product of the leading dimensions.
        cols: length of the last dimension.
        rows_per_scale: vectors that share one second-level value.
    """

    scheme: Scheme
    rows: int
    cols: int
    rows_per_scale: int = 1

    # Plans are the keys of caches on the path of every call: what is derived is derived once.

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.scheme, self.rows, self.cols, self.rows_per_scale))

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of strings differ from process to process.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def format(self) -> FormatSpec:
        """Facts of the block format."""
        return self.scheme.spec

    @cached_property
    def recipe(self) -> Recipe | None:
        """Facts of the NVFP4 order of operations, None for MX formats."""
        return self.scheme.recipe_spec

    @cached_property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns that share a float32 scale, None for formats with scales of blocks."""
        if not self.format.has_scale_grid:
            return None
        if self.scheme.granularity == "block":
            return GRID_BLOCK, GRID_BLOCK
        rows, cols = max(self.rows, 1), max(self.cols, 1)
        if self.scheme.granularity == "tensor":
            return rows, cols
        return (rows, 1) if self.is_columnwise else (1, cols)

    @cached_property
    def grid_recipe(self) -> GridRecipe:
        """Facts of the order of operations under float32 scales."""
        recipe = self.scheme.grid_recipe
        assert recipe is not None
        return recipe

    @cached_property
    def has_one_scale(self) -> bool:
        """Whether one float32 scale serves the whole tensor."""
        return self.scheme.granularity == "tensor"

    @cached_property
    def needs_amax(self) -> bool:
        """Whether the amax of the whole tensor decides the scale of each element."""
        return self.has_second_level or self.has_one_scale

    @cached_property
    def scale_rule(self) -> str | None:
        """MX rule, None for NVFP4."""
        return self.scheme.scale_rule

    @cached_property
    def scale_layout(self) -> str:
        """Order of the block scales."""
        return self.scheme.scale_layout

    @cached_property
    def nibble_order(self) -> str:
        """Which nibble the even element takes."""
        return self.scheme.nibble_order

    @cached_property
    def has_second_level(self) -> bool:
        """Whether a second-level scale exists (which one: `recipe.keeps`)."""
        return self.scheme.second_level != "none"

    @cached_property
    def is_plain(self) -> bool:
        """See :attr:`Scheme.is_plain`."""
        return self.scheme.is_plain

    @cached_property
    def decoding(self) -> Plan:
        """The plan that decodes what this one quantizes."""
        scheme = self.scheme.decoding
        return self if scheme is self.scheme else replace(self, scheme=scheme)

    @cached_property
    def is_columnwise(self) -> bool:
        """Whether blocks run along the columns of the array."""
        return self.scheme.direction == "columnwise"

    @cached_property
    def transposes(self) -> bool:
        """Whether the codes are those of the transpose: columnwise FP4."""
        return self.is_columnwise and self.format.transposes_columns

    @cached_property
    def has_plain_amax(self) -> bool:
        """Whether the second level comes from the amax of all elements as they are."""
        return self.scales == 1 and self.scheme.rht is None

    @cached_property
    def vectors(self) -> int:
        """Number of vectors that blocks divide: rows, or columns."""
        return self.cols if self.is_columnwise else self.rows

    @cached_property
    def length(self) -> int:
        """Elements of such a vector."""
        return self.rows if self.is_columnwise else self.cols

    @cached_property
    def scales(self) -> int:
        """Number of second-level values."""
        return max(self.vectors // self.rows_per_scale, 1)

    @cached_property
    def groups_rows(self) -> bool:
        """Whether runs of rows have a second level each: experts in one tensor."""
        return self.has_second_level and not self.is_columnwise and self.scales > 1

    @cached_property
    def blocks(self) -> int:
        """Blocks per vector."""
        return self.format.num_blocks(self.length)

    @cached_property
    def packed_shape(self) -> tuple[int, int]:
        """Shape of the packed codes, rows flattened."""
        if self.is_columnwise and not self.transposes:
            return self.blocks * self.format.block_size, self.cols
        return self.vectors, self.format.packed_cols(self.length)

    @cached_property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the stored block scales, rows flattened, layout padding included.

        Scales that are not transposed (columnwise MXFP8) are stored as (blocks, cols) when linear;
        swizzled, they are those of the transposed scale matrix, as matrix products take them.
        """
        if self.grid is not None:
            if self.scheme.granularity == "block":
                return -(-self.rows // GRID_BLOCK), -(-self.cols // GRID_BLOCK)
            if self.has_one_scale:
                return 1, 1
            return (1, self.cols) if self.is_columnwise else (self.rows, 1)
        shape = (self.vectors, self.blocks)
        if self.vectors and self.length:
            shape = padded_scale_shape(*shape, self.scale_layout)
        if self.is_columnwise and not self.transposes and self.scale_layout == "linear":
            return shape[1], shape[0]
        return shape

    def scale_shape_of(self, lead: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the block scales as callers see them, of an array of shape (*lead, cols)."""
        if self.is_columnwise or self.scale_layout != "linear":
            return self.scale_shape
        if self.grid is None:
            return (*lead, self.blocks)
        if self.has_one_scale:
            return (1,)
        return (*lead, 1) if self.grid[0] == 1 else self.scale_shape


def plan_of(shape: tuple[int, ...], scheme: Scheme, scales: int = 1, *, pad: bool = False) -> Plan:
    """The plan of one direction for an array, checked against its shape.

    Args:
        shape: shape (..., K) of the array.
        scheme: one of :attr:`Scheme.parts`.
        scales: number of second-level values.
        pad: whether vectors are padded to whole blocks.

    Raises:
        OptionError: for the scales of groups.
        ShapeError: for shapes that the format cannot take.
    """
    spec, columnwise, tiled = scheme.spec, scheme.direction != "rowwise", scheme.block_shape == "2d"
    if scheme.scale_layout == "grouped_128x4":
        raise OptionError("scale_layout='grouped_128x4' is for groups; use swizzled_128x4")
    if not shape:
        raise ShapeError(f"{spec.name} quantizes the last axis, but the array is 0-dimensional")
    rows, cols = prod(shape[:-1]), shape[-1]
    if scheme.rht is not None:
        check_groups(rows if columnwise else cols, scheme.direction, shape)
    if cols % spec.block_size and not pad and (tiled or not columnwise):
        raise ShapeError(
            f"{spec.name} needs the last axis to be a multiple of {spec.block_size}, got shape "
            f"{tuple(shape)}; pass pad=True or reshape"
        )
    if rows % spec.block_size and not pad and (tiled or columnwise):
        raise ShapeError(
            f"{spec.name} in {'2-D tiles' if tiled else 'columns'} needs the number of rows to be "
            f"a multiple of {spec.block_size}, got {rows} in shape {tuple(shape)}; pass pad=True"
        )
    vectors = cols if columnwise else rows
    if spec.has_scale_grid:
        return Plan(scheme, rows, cols, max(vectors, 1) if scheme.granularity == "tensor" else 1)
    if scales == 0 or vectors % scales:
        raise ShapeError(
            f"{scales} second-level scales do not divide the {vectors} "
            f"{'columns' if columnwise else 'rows'} of shape {tuple(shape)}"
        )
    if tiled and scales > 1 and (columnwise or rows // scales % spec.block_size):
        raise ShapeError(
            f"{scales} second-level scales would cut 2-D tiles of {spec.block_size} rows of shape "
            f"{tuple(shape)}; pass one scale"
        )
    return Plan(scheme, rows, cols, max(vectors // scales, 1))
