# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a call asks of a backend, and the plan that decides every byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .formats import FormatSpec, Recipe
from .layout import padded_scale_shape
from .variant import Variant

RawArray = Any
"""A C-contiguous NumPy or CuPy array; see the module's docstring."""


Seed = tuple[int, int]
"""(key of 64 bits, stream of 32 bits) of the random numbers; see :mod:`fp4kit.reference.philox`."""

NO_SEED: Seed = (0, 0)


@dataclass(frozen=True)
class Request:
    """A call, before any work: what a backend is asked whether it can do."""

    operation: str
    device: str
    dtype: str
    format: str | None = None
    recipe: str | None = None
    variant: Variant | None = None

    @property
    def device_kind(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.split(":")[0]

    def describe(self) -> str:
        """The request in words, for error messages."""
        words = [self.operation, f"{self.dtype} arrays on {self.device}"]
        if self.format:
            words.append(f"as {self.format}")
        if self.recipe:
            words.append(f"with recipe {self.recipe}")
        if self.variant is not None:
            words.append(f"({self.variant.describe()})")
        return " ".join(words)


@dataclass(frozen=True)
class Plan:
    """Everything that decides bytes, except the arrays.

    `rows` and `cols` are those of the array, whatever the direction of the blocks; a vector is what
    blocks divide: a row of it, or a column.

    Attributes:
        format: block format.
        recipe: NVFP4 order of operations, None for MX formats.
        scale_rule: MX rule, None for NVFP4.
        rows: product of the leading dimensions.
        cols: length of the last dimension.
        scale_layout: order of the block scales.
        nibble_order: which nibble the even element takes.
        has_second_level: whether a second-level scale exists (in `recipe.direction`).
        rows_per_scale: vectors that share one second-level value.
        variant: deviations from plain rowwise quantization, None if there are none.
    """

    format: FormatSpec
    recipe: Recipe | None
    scale_rule: str | None
    rows: int
    cols: int
    scale_layout: str = "linear"
    nibble_order: str = "low_first"
    has_second_level: bool = True
    rows_per_scale: int = 1
    variant: Variant | None = None

    # Plans are the keys of caches on the path of every call: what is derived is derived once.

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of strings differ from process to process.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def decoding(self) -> Plan:
        """The plan that decodes what this one quantizes: without a variant if that is plain."""
        if self.variant is None or not self.variant.decodes_plainly:
            return self
        return replace(self, variant=None)

    @cached_property
    def is_columnwise(self) -> bool:
        """Whether blocks run along the columns of the array."""
        return self.variant is not None and self.variant.axis == "column"

    @cached_property
    def transposes(self) -> bool:
        """Whether the codes are those of the transpose: columnwise FP4."""
        return self.is_columnwise and self.format.codes_per_byte == 2

    @cached_property
    def has_plain_amax(self) -> bool:
        """Whether the second level comes from the amax of all elements as they are."""
        return self.scales == 1 and (self.variant is None or self.variant.hadamard is None)

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
        shape = (self.vectors, self.blocks)
        if self.vectors and self.length:
            shape = padded_scale_shape(*shape, self.scale_layout)
        if self.is_columnwise and not self.transposes and self.scale_layout == "linear":
            return shape[1], shape[0]
        return shape
