# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of integers that callers pass beside the data: channel orders, sizes, offsets."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays
from .arrays import Origin
from .errors import DtypeError


def ingest_integers(x: Any, what: str, like: Origin) -> Any:
    """A raw contiguous int64 array on the device of `like`; other integer types are converted.

    Sequences of Python integers are sent to the device.

    Raises:
        DtypeError: for other element types, or an array on another device.
    """
    xp = arrays.array_module(like)
    if isinstance(x, (list, tuple)):
        x = np.asarray(x, np.int64) if like.device_kind == "cpu" else xp.asarray(x, np.int64)
    data, dtype, origin = arrays.open_raw(x)
    if data.dtype.kind not in "iu":
        raise DtypeError(f"{what} is {dtype}; it holds whole numbers: pass int64 (or a list)")
    if origin.device != like.device:
        raise DtypeError(
            f"{what} lies on {origin.device}, the input on {like.device}; move it there first "
            "(fp4kit never copies between devices on its own)"
        )
    converted = data.astype(np.int64, copy=False)
    if converted is not data and like.device_kind != "cpu":
        arrays.keep_if_captured(converted)
    return arrays.contiguous(converted, like)
