# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The result of quantizing a group of matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, overload

import numpy as np

from fp4kit.arrays.index_arrays import as_shape
from fp4kit.backend.groups import GroupedPlan
from fp4kit.errors import OptionError, ShapeError, brief
from fp4kit.layout import TILE
from fp4kit.plan import plan_of
from fp4kit.scheme import Scheme

from .schemed import Schemed
from .stored_tensor import StoredTensor
from .tensor import QuantizedTensor

#: swizzled_128x4 scales of all members in one matrix that is as large for any division of its rows.
GROUPED_LAYOUT = "grouped_128x4"


@dataclass(frozen=True, eq=False, repr=False)
class GroupedTensor(Schemed, StoredTensor):
    """The members of a group, quantized in one direction.

    Attributes:
        packed: uint8, the codes of all members, one after the other.
        block_scale: uint8, their block scales; each member's in the layout it would have alone. One
            matrix for scale_layout `grouped_128x4`.
        scheme: how they were quantized: one direction, with every default filled in.
        dims: rows and columns of each member.
        starts: element of the buffer where each member begins.
        shape: shape of the buffer that was quantized, with whatever lies behind the members.
        amax: second-level values of all members, float32, if the recipe keeps amaxes; one for each
            member, or for each row (column) of it, as the scheme says.
        decode_scale: the same as amax/2688.
        encode_scale: the same as 2688/amax.
        source_dtype: element type that was quantized.
    """

    packed: Any
    block_scale: Any
    scheme: Scheme
    dims: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    amax: Any = None
    decode_scale: Any = None
    encode_scale: Any = None
    source_dtype: str = "float32"

    @cached_property
    def plan(self) -> GroupedPlan:
        """Where each member's codes, block scales and second-level values lie.

        Raises:
            OptionError: if the scheme is none.
            ShapeError: for members that do not lie in the buffer, or that the format cannot take.
        """
        if not isinstance(self.scheme, Scheme):
            raise OptionError(f"scheme={brief(self.scheme)} is no Scheme")
        if not isinstance(self.dims, (list, tuple)):
            raise ShapeError(f"dims={brief(self.dims)} are no shapes of members")
        dims = tuple(as_shape(one, "a member's shape") for one in self.dims)
        starts, size = as_shape(self.starts, "starts"), prod(as_shape(self.shape))
        if len(starts) != len(dims) or any(len(one) != 2 for one in dims):
            raise ShapeError("a group has rows and columns of each member, and where it starts")
        if any(start + prod(one) > size for start, one in zip(starts, dims, strict=True)):
            raise ShapeError(f"members of shapes {brief(dims)} do not lie in {self.shape}")
        return grouped_plan(dims, starts, self.scheme, pad=True)

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

    def _named(self) -> list[str]:
        return [repr(self.format), *self.scheme.words(), f"{len(self)} members"]

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element of the members, 0.0 if there is none."""
        elements = sum(map(prod, self.dims))
        return 8 * self.nbytes / elements if elements else 0.0

    def __len__(self) -> int:
        return len(self.dims)

    @overload
    def __getitem__(self, number: int) -> QuantizedTensor: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[QuantizedTensor, ...]: ...

    def __getitem__(self, number: Any) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
        if isinstance(number, slice):
            return tuple(self.member(one) for one in range(len(self))[number])
        return self.member(number)

    def __iter__(self) -> Iterator[QuantizedTensor]:
        return map(self.member, range(len(self)))

    def dequantize(
        self, dtype: Any = "float32", *, backend: str | None = None, out: Any = None
    ) -> Any:
        """The decoded buffer: see :func:`fp4kit.dequantize_grouped`."""
        import fp4kit

        return fp4kit.dequantize_grouped(self, dtype, backend=backend, out=out)

    def member(self, number: int) -> QuantizedTensor:
        """A member by itself: views of its codes and scales.

        Raises:
            IndexError: if there is no such member.
            OptionError: if it is no number.
        """
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise OptionError(f"{brief(number)} is neither a member's number nor a range of them")
        if not -len(self) <= number < len(self):
            raise IndexError(f"member {number} of a group of {len(self)}")
        number %= len(self)
        plan, place = self.plan.members[number], slice(number, number + 2)
        codes = slice(*self.plan.packed_offsets[place])
        scales = slice(*self.plan.scale_offsets[place])
        second = slice(*self.plan.second_offsets[place])
        level = self.second_level
        return QuantizedTensor.made(
            plan,
            self.packed[codes].reshape(plan.packed_shape),
            self.block_scale.reshape(-1)[scales].reshape(plan.scale_shape),
            self.dims[number],
            {} if level is None else {level[0]: level[1][second]},
            self.source_dtype,
        )


@dataclass(frozen=True)
class GroupedPair:
    """One group quantized in both directions: `rowwise` and `columnwise`."""

    rowwise: GroupedTensor
    columnwise: GroupedTensor

    __hash__ = None  # type: ignore[assignment]

    def to(self, device: Any) -> GroupedPair:
        """Both on another device: see :meth:`QuantizedTensor.to`."""
        return GroupedPair(self.rowwise.to(device), self.columnwise.to(device))


def member_layout(layout: str) -> str:
    """The layout of a member's scales by themselves."""
    return "swizzled_128x4" if layout == GROUPED_LAYOUT else layout


def check_one_matrix(dims: Sequence[tuple[int, int]], direction: str) -> None:
    """Refuses groups whose scales are not rows of one matrix.

    Raises:
        OptionError: for columnwise scales.
        ShapeError: for members of different K.
    """
    if direction != "rowwise":
        raise OptionError(
            f"scale_layout={GROUPED_LAYOUT!r} puts rows of scales below one another, direction="
            f"{direction!r} has columns; use swizzled_128x4"
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
    dims: tuple[tuple[int, int], ...], starts: tuple[int, ...], scheme: Scheme, *, pad: bool
) -> GroupedPlan:
    """The plan of a group, one object for equal ones; errors name the member.

    Args:
        dims: rows and columns of each member.
        starts: element where each begins.
        scheme: of one direction.
        pad: whether vectors are padded to whole blocks.

    Raises:
        ShapeError: for a member that the format cannot take.
    """
    known: dict[tuple[int, int], Any] = {}
    columnwise, each = scheme.direction == "columnwise", has_level_per_vector(scheme)
    own = scheme.replace(scale_layout=member_layout(scheme.scale_layout))
    for number, shape in enumerate(dims):
        if shape in known:
            continue
        scales = max(shape[1 if columnwise else 0], 1) if each else 1
        try:
            known[shape] = plan_of(shape, own, scales, pad=pad)
        except ShapeError as error:
            raise ShapeError(f"member {number} of the group: {error}") from None
    return GroupedPlan(tuple(known[shape] for shape in dims), starts)


def has_level_per_vector(scheme: Scheme) -> bool:
    """Whether each row (column) of a member has its own second-level value."""
    return scheme.second_level in ("row_scaled", "per_token")
