# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The result of quantizing a group of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from fp4kit.backend.groups import GroupedPlan
from fp4kit.errors import OptionError, ShapeError
from fp4kit.formats import SCALE_LAYOUTS, SECOND_LEVEL_DIRECTIONS
from fp4kit.layout import TILE
from fp4kit.variant import Variant

from .planning import plan_quantize
from .tensor import QuantizedTensor

#: swizzled_128x4 scales of all members in one matrix that is as large for any division of its rows.
GROUPED_LAYOUT = "grouped_128x4"
GROUPED_LAYOUTS = (*SCALE_LAYOUTS, GROUPED_LAYOUT)


@dataclass(frozen=True, eq=False)
class GroupedTensor:
    """The members of a group, quantized in one direction.

    Attributes:
        packed: uint8, the codes of all members, one after the other.
        block_scale: uint8, their block scales; each member's in the layout it would have alone. One
            matrix for scale_layout `grouped_128x4`.
        format: as in :class:`fp4kit.QuantizedTensor`.
        dims: rows and columns of each member.
        starts: element of the buffer where each member begins.
        shape: shape of the buffer that was quantized, with whatever lies behind the members.
        recipe: NVFP4 recipe, None for MX formats.
        scale_rule: MX scale rule, None for nvfp4.
        amax: second-level values of all members, float32, if the recipe keeps amaxes.
        decode_scale: the same as amax/2688.
        encode_scale: the same as 2688/amax.
        scale_layout: `linear`, `swizzled_128x4`, `swizzled_8x4` or `grouped_128x4`.
        nibble_order: `low_first` or `high_first`.
        source_dtype: element type that was quantized.
        per_vector: whether each row (column) of a member has its own second-level value.
        variant: how the quantization differs from the plain rowwise one.
    """

    packed: Any
    block_scale: Any
    format: str
    dims: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    recipe: str | None = None
    scale_rule: str | None = None
    amax: Any = None
    decode_scale: Any = None
    encode_scale: Any = None
    scale_layout: str = "linear"
    nibble_order: str = "low_first"
    source_dtype: str = "float32"
    per_vector: bool = False
    variant: Variant | None = None

    @cached_property
    def plan(self) -> GroupedPlan:
        """Where each member's codes, block scales and second-level values lie."""
        return grouped_plan(
            self.dims,
            self.starts,
            self.per_vector,
            format=self.format,
            recipe=self.recipe,
            scale_rule=self.scale_rule,
            second_level=self.second_level is not None,
            scale_layout=member_layout(self.scale_layout),
            nibble_order=self.nibble_order,
            pad=True,
            variant=self.variant,
        )

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of `block_scale`."""
        if self.scale_layout == GROUPED_LAYOUT:
            return one_matrix_shape(self.plan, self.shape)
        return (self.plan.scale_offsets[-1],)

    @property
    def scale_row_offsets(self) -> tuple[int, ...]:
        """Rows of `block_scale` where members begin, and the end, for `grouped_128x4`.

        Raises:
            OptionError: for other layouts.
        """
        if self.scale_layout != GROUPED_LAYOUT:
            raise OptionError(f"scales in layout {self.scale_layout} are no rows of one matrix")
        cols = max(self.scale_shape[1], 1)
        return tuple(offset // cols for offset in self.plan.scale_offsets)

    @property
    def second_level(self) -> tuple[str, Any] | None:
        """(direction, float32 array of all members), or None."""
        values = (self.amax, self.decode_scale, self.encode_scale)
        for direction, value in zip(SECOND_LEVEL_DIRECTIONS, values, strict=True):
            if value is not None:
                return direction, value
        return None

    def __len__(self) -> int:
        return len(self.dims)

    def member(self, number: int) -> QuantizedTensor:
        """A member by itself: views of its codes and scales.

        Raises:
            IndexError: if there is no such member.
        """
        if not -len(self) <= number < len(self):
            raise IndexError(f"member {number} of a group of {len(self)}")
        number %= len(self)
        plan, place = self.plan.members[number], slice(number, number + 2)
        codes = slice(*self.plan.packed_offsets[place])
        scales = slice(*self.plan.scale_offsets[place])
        second = slice(*self.plan.second_offsets[place])
        names = ("amax", "decode_scale", "encode_scale")
        values = {name: getattr(self, name) for name in names}
        return QuantizedTensor(
            packed=self.packed[codes].reshape(plan.packed_shape),
            block_scale=self.block_scale.reshape(-1)[scales].reshape(plan.scale_shape),
            format=self.format,
            shape=self.dims[number],
            recipe=self.recipe,
            scale_rule=self.scale_rule,
            scale_layout=plan.scale_layout,
            nibble_order=self.nibble_order,
            source_dtype=self.source_dtype,
            variant=self.variant,
            **{name: None if value is None else value[second] for name, value in values.items()},
        )


@dataclass(frozen=True, eq=False)
class GroupedDirections:
    """One group quantized in both directions: `rowwise` and `columnwise`."""

    rowwise: GroupedTensor
    columnwise: GroupedTensor


def member_layout(layout: str) -> str:
    """The layout of a member's scales by themselves."""
    return "swizzled_128x4" if layout == GROUPED_LAYOUT else layout


def check_one_matrix(dims: Sequence[tuple[int, int]], axis: str) -> None:
    """Refuses groups whose scales are not rows of one matrix.

    Raises:
        OptionError: for columnwise scales.
        ShapeError: for members of different K.
    """
    if axis != "row":
        raise OptionError(
            f"scale_layout={GROUPED_LAYOUT!r} puts rows of scales below one another, axis={axis!r} "
            "has columns; use swizzled_128x4"
        )
    widths = {cols for _, cols in dims}
    if len(widths) > 1:
        raise ShapeError(
            f"scale_layout={GROUPED_LAYOUT!r} is for members of one K, got {sorted(widths)}"
        )


def one_matrix_shape(plan: GroupedPlan, shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of `grouped_128x4` scales: enough rows for members of any heights."""
    tile_rows, tile_cols = TILE["swizzled_128x4"]
    blocks = plan.members[0].blocks if plan.members else 0
    rows = prod(shape[:-1]) + (tile_rows - 1) * len(plan.members)
    return rows, -(-blocks // tile_cols) * tile_cols


@lru_cache(maxsize=64)
def grouped_plan(
    dims: tuple[tuple[int, int], ...], starts: tuple[int, ...], per_vector: bool, **options: Any
) -> GroupedPlan:
    """The plan of a group, one object for equal ones; errors name the member.

    Raises:
        OptionError: for unknown or contradictory options.
        ShapeError: for a member that the format cannot take.
    """
    known: dict[tuple[int, int], Any] = {}
    variant = options.get("variant")
    columnwise = variant is not None and variant.axis == "column"
    for number, shape in enumerate(dims):
        if shape in known:
            continue
        scales = max(shape[1 if columnwise else 0], 1) if per_vector else 1
        try:
            known[shape] = plan_quantize(shape, scales=scales, **options)
        except ShapeError as error:
            raise ShapeError(f"member {number} of the group: {error}") from None
    return GroupedPlan(tuple(known[shape] for shape in dims), starts)
