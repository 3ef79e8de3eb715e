# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to say how large the members of a group are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from .errors import OptionError, ShapeError


@dataclass(frozen=True, eq=False)
class GroupShapes:
    """Sizes and places of the members of a group; equal ones are one object, a key of caches.

    Attributes:
        dims: rows and columns of each member.
        starts: element where each begins.
    """

    dims: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]

    @cached_property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Ranges of elements that members fill without a gap, in order."""
        result: list[tuple[int, int]] = []
        for shape, start in zip(self.dims, self.starts, strict=True):
            if not prod(shape):
                continue
            if result and result[-1][1] == start:
                result[-1] = (result[-1][0], start + prod(shape))
            else:
                result.append((start, start + prod(shape)))
        return tuple(result)


def _numbers(values: Any, what: str) -> tuple[int, ...]:
    """Sizes or offsets as host numbers.

    Raises:
        OptionError: if they are none, or lie on a device.
    """
    if not isinstance(values, (list, tuple, range)):
        if not isinstance(values, np.ndarray) and getattr(values, "__cuda_array_interface__", None):
            raise OptionError(
                f"{what} lies on a GPU, but the size of the result depends on it; pass host "
                f"numbers, for example {what}.tolist()"
            )
        values = np.asarray(values).tolist()
    # By types, of which there are few, as there may be thousands of members.
    kinds = set(map(type, values)) if isinstance(values, (list, tuple, range)) else {None}
    whole = all(kind and issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds)
    if not whole or min(values, default=0) < 0:
        raise OptionError(f"{what} must be whole numbers of at least 0, one per member")
    return tuple(map(int, values))


def group_shapes(
    shape: tuple[int, ...],
    members: int | None,
    first_dims: Sequence[int] | None,
    last_dims: Sequence[int] | None,
    offsets: Sequence[int] | None,
    row_offsets: Sequence[int] | None = None,
) -> GroupShapes:
    """Sizes and places of the members of a buffer of a shape; see `quantize_grouped`.

    Raises:
        OptionError: for contradictory arguments, or values that are no numbers.
        ShapeError: for members that do not fit.
    """
    given = [
        None if values is None else _numbers(values, what)
        for what, values in (
            ("members", None if members is None else [members]),
            ("first_dims", first_dims),
            ("last_dims", last_dims),
            ("offsets", offsets),
            ("row_offsets", row_offsets),
        )
    ]
    return _shapes(shape, *given)


@lru_cache(maxsize=256)
def _shapes(
    shape: tuple[int, ...],
    members: tuple[int, ...] | None,
    first_dims: tuple[int, ...] | None,
    last_dims: tuple[int, ...] | None,
    offsets: tuple[int, ...] | None,
    row_offsets: tuple[int, ...] | None,
) -> GroupShapes:
    """:func:`group_shapes` of numbers."""
    if row_offsets is not None:
        if any(value is not None for value in (members, first_dims, last_dims, offsets)):
            raise OptionError("row_offsets says all about the members; leave the others out")
        first_dims, offsets = _of_row_offsets(shape, row_offsets)
    dims = _dims(shape, members, first_dims, last_dims)
    ends = (0, *accumulate(prod(pair) for pair in dims))
    if offsets is not None:
        given = offsets
        if len(given) != len(dims) + 1:
            raise ShapeError(f"offsets has {len(given)} entries for {len(dims)} members: n + 1")
        for number, pair in enumerate(dims):
            if given[number] + prod(pair) > given[number + 1]:
                raise ShapeError(
                    f"member {number} has {prod(pair)} elements, but offsets leave it "
                    f"{given[number]} to {given[number + 1]}"
                )
        ends = given
    if ends[-1] > prod(shape):
        raise ShapeError(
            f"the members end at element {ends[-1]}, but the buffer of shape {shape} has "
            f"{prod(shape)}"
        )
    return GroupShapes(dims, ends[:-1])


def _of_row_offsets(
    shape: tuple[int, ...], rows: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows of each member, elements where they begin and the last one ends)."""
    if len(shape) < 2 or not rows:
        raise ShapeError(
            f"row_offsets are n + 1 rows of a buffer (.., K); got {len(rows)} for shape {shape}"
        )
    sizes = tuple(end - begin for begin, end in pairwise(rows))
    if any(size < 0 for size in sizes):
        raise ShapeError("row_offsets must not fall: a member ends where the next one begins")
    return sizes, tuple(row * shape[-1] for row in rows)


def _dims(
    shape: tuple[int, ...],
    members: tuple[int, ...] | None,
    first: tuple[int, ...] | None,
    last: tuple[int, ...] | None,
) -> tuple[tuple[int, int], ...]:
    if first is None and last is None:
        if members is None:
            if len(shape) != 3:
                raise OptionError(
                    f"a buffer of shape {shape} needs members, first_dims or last_dims; only "
                    "(n, M, K) says by itself how many members it has"
                )
            return ((shape[1], shape[2]),) * shape[0]
        (count,) = members
        rows = prod(shape[:-1])
        if len(shape) < 2 or count == 0 or rows % count:
            raise ShapeError(f"{rows} rows of shape {shape} are not {count} equal members")
        return ((rows // count, shape[-1]),) * count
    if members is not None:
        raise OptionError("members is for members of equal size; leave it out beside first_dims")
    if first is None:
        assert last is not None
        if len(shape) != 2:
            raise ShapeError(f"last_dims alone needs a buffer (M, ..), got shape {shape}")
        first = (shape[0],) * len(last)
    if last is None:
        if len(shape) < 2:
            raise ShapeError(f"first_dims alone needs a buffer (.., K), got shape {shape}")
        last = (shape[-1],) * len(first)
    if len(first) != len(last):
        raise OptionError(f"first_dims names {len(first)} members, last_dims {len(last)}")
    return tuple(zip(first, last, strict=True))
