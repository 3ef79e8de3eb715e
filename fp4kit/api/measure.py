# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What quantizing functions measure first: whether all is finite, and the second-level scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arrays import Raw
from fp4kit.backend.interface import Backend
from fp4kit.errors import NonFiniteError

from .planning import Call


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


def scanned_amax(call: Call, x: Any, raw: Raw) -> Any:
    """The amax of `raw`, as rows `x`, if the check for NaN or something before gave it; or None.

    Raises:
        NonFiniteError: if the call refuses NaN and infinity and there are some.
    """
    refuses = call.options.refuses_nonfinite and not call.is_empty
    shape = tuple(raw.data.shape)
    if raw.scan is None:
        return check_finite(call.engine, x, raw.dtype, shape, "x") if refuses else None
    if refuses and int(raw.scan[1]):
        raise _nonfinite(call.engine, x, raw.dtype, shape, "x")
    return raw.scan[:1].view(np.float32)


def second_level_for(call: Call, x: Any, raw: Raw, given: Any) -> Any:
    """The second level in the recipe's direction (or None), after the non-finite check."""
    measured = scanned_amax(call, x, raw)
    recipe = call.plan.recipe
    if recipe is None or not call.plan.has_second_level:
        return None
    if given is not None:
        if call.options.given == recipe.direction:
            return given
        measured = given
    elif measured is None:
        measured = call.engine.amax(x, raw.dtype, 1)
    return call.engine.second_level(measured, call.plan, raw.dtype)
