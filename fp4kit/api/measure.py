# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What quantizing functions measure first: whether all is finite, and the second-level scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arrays import Raw
from fp4kit.backend.interface import Backend
from fp4kit.errors import NonFiniteError


def check_finite(engine: Backend, x: Any, dtype: str, shape: tuple[int, ...], what: str) -> Any:
    """The amax of `x` (float32 (1,)) if all of it is finite.

    Raises:
        NonFiniteError: naming the array, the counts and the first index.
    """
    amax_value, finite = engine.scan(x, dtype)
    if not finite:
        raise _nonfinite(engine, x, dtype, shape, what)
    return amax_value


def _nonfinite(
    engine: Backend, x: Any, dtype: str, shape: tuple[int, ...], what: str
) -> NonFiniteError:
    nans, infinities, first = engine.count_nonfinite(x, dtype)
    index = []
    for size in reversed(shape):
        index.append(first % size)
        first //= size
    return NonFiniteError(
        f"{what} holds {nans} NaN and {infinities} infinite values, the first at index "
        f'{tuple(reversed(index))}; clean it, or pass nonfinite="propagate" to quantize it as it is'
    )


def checked(engine: Backend, x: Any, raw: Raw) -> Raw:
    """`raw` with its amax known, after all of it was found to be finite.

    Args:
        engine: backend.
        x: the rows of `raw`.
        raw: an array that is not empty.

    Raises:
        NonFiniteError: if it holds NaN or infinity.
    """
    shape = tuple(raw.data.shape)
    if raw.scan is None:
        amax = check_finite(engine, x, raw.dtype, shape, "x")
        return raw._replace(scan=amax.view(np.uint32))
    if int(raw.scan[1]):
        raise _nonfinite(engine, x, raw.dtype, shape, "x")
    return raw
