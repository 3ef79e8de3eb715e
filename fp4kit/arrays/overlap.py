# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Whether what a call writes shares memory with what it reads: such calls are refused before work.

First and last bytes are compared, which costs next to nothing; only where these ranges meet are
strides looked at, as views of one array may be interleaved without sharing a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4kit.errors import OptionError

from . import is_contiguous

#: Steps of an exact comparison of strides; what takes more counts as overlapping.
_MAX_WORK = 10_000
# Any number of steps is allowed, unlike what NumPy's types say.
_exact: Callable[..., bool] = np.shares_memory


class Place(NamedTuple):
    """Where an array lies.

    Attributes:
        name: what it is to the caller.
        data: the raw array.
        start: address of its first byte.
        end: address behind its last one.
    """

    name: str
    data: Any
    start: int
    end: int


def place_of(name: str, data: Any) -> Place:
    """The place of a raw array of any strides."""
    if isinstance(data, np.ndarray):
        start = int(data.__array_interface__["data"][0])
    else:
        start = int(data.data.ptr)
    if is_contiguous(data):
        return Place(name, data, start, start + data.nbytes)
    if not data.size:
        return Place(name, data, start, start)
    steps = [(count - 1) * stride for count, stride in zip(data.shape, data.strides, strict=True)]
    below, above = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    return Place(name, data, start + below, start + above + data.dtype.itemsize)


def places(**arrays: Any) -> tuple[Place, ...]:
    """The places of raw arrays by name, without those that are None."""
    return tuple(place_of(name, data) for name, data in arrays.items() if data is not None)


class _Addresses:
    """An array of the same addresses for NumPy to compare; nothing reads through it."""

    def __init__(self, data: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{data.dtype.itemsize}",
            "shape": data.shape,
            "strides": data.strides,
            "data": (data.data.ptr, False),
        }


def _comparable(data: Any) -> NDArray[Any]:
    return data if isinstance(data, np.ndarray) else np.asarray(_Addresses(data))


def _share_bytes(first: Place, second: Place) -> bool:
    if first.start >= second.end or second.start >= first.end:
        return False
    try:
        return _exact(_comparable(first.data), _comparable(second.data), max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True


def is_same(first: Place, second: Place) -> bool:
    """Whether two contiguous arrays are the same bytes."""
    return first[2:] == second[2:] and is_contiguous(first.data) and is_contiguous(second.data)


def refuse_overlap(written: Iterable[Place], others: Iterable[Place]) -> None:
    """Refuses to write to memory that stands for something else in the same call.

    Raises:
        OptionError: naming both.
    """
    others = tuple(others)
    for output in written:
        for other in others:
            if _share_bytes(output, other):
                raise OptionError(
                    f"{output.name} and {other.name} share memory, and one would be overwritten "
                    f"while the other is needed; give {output.name} memory of its own"
                )
