# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of integers that callers pass beside the data: channel orders, sizes, offsets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import index as as_integer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit import arrays
from fp4kit.errors import DtypeError, ShapeError, brief

from .frameworks import Origin, open_raw


def as_shape(value: Any, what: str = "shape") -> tuple[int, ...]:
    """A shape as a tuple of Python numbers.

    Raises:
        ShapeError: if it is none.
    """
    try:
        shape = tuple(map(as_integer, value))
    except TypeError:
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise ShapeError(f"{what}={brief(value)} is no shape; pass a tuple of whole numbers from 0")
    return shape


def _accept_integers(what: str, dtype: str, itemsize: int) -> None:
    if not dtype.startswith(("int", "uint")):
        raise DtypeError(f"{what} is {dtype}; it holds whole numbers: pass int64 (or a list)")


def host_integers(x: Sequence[Any], what: str) -> NDArray[Any]:
    """A sequence of Python integers as an array on the host.

    Raises:
        DtypeError: if it holds anything else.
    """
    try:
        host = np.asarray(x, None if len(x) else np.int64)
    except ValueError as error:
        raise DtypeError(f"{what} is no list of whole numbers: {error}") from None
    _accept_integers(what, host.dtype.name, host.dtype.itemsize)
    return host


def ingest_integers(x: Any, what: str, like: Origin) -> Any:
    """A raw contiguous int64 array on the device of `like`; other integer types are converted.

    Sequences of Python integers are sent to the device.

    Raises:
        DtypeError: for other element types, or an array on another device.
    """
    if isinstance(x, (list, tuple)):
        x = arrays.array_module(like).asarray(host_integers(x, what))
    data, _, origin = open_raw(x, what, partial(_accept_integers, what))
    if origin.device != like.device:
        raise DtypeError(
            f"{what} lies on {origin.device}, the input on {like.device}; move it there first "
            "(fp4kit never copies between devices on its own)"
        )
    converted = data.astype(np.int64, copy=False)
    if converted is not data and like.device_kind != "cpu":
        arrays.keep_if_captured(converted)
    return arrays.contiguous(converted, like)
