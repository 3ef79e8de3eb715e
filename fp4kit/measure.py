# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What quantizing functions measure first: whether all is finite, and the second-level scale."""

from __future__ import annotations

from typing import Any

from .backends.base import Backend
from .errors import NonFiniteError
from .planning import Call


def check_finite(engine: Backend, x: Any, dtype: str, shape: tuple[int, ...], what: str) -> Any:
    """The amax of `x` (float32 (1,)) if all of it is finite.

    Raises:
        NonFiniteError: naming the array, the counts and the first index.
    """
    amax_value, finite = engine.scan(x, dtype)
    if finite:
        return amax_value
    nans, infinities, first = engine.count_nonfinite(x, dtype)
    index = []
    for size in reversed(shape):
        index.append(first % size)
        first //= size
    raise NonFiniteError(
        f"{what} holds {nans} NaN and {infinities} infinite values, the first at index "
        f'{tuple(reversed(index))}; clean it, or pass nonfinite="propagate" to quantize it as it is'
    )


def second_level_for(call: Call, x: Any, dtype: str, shape: tuple[int, ...], given: Any) -> Any:
    """The second level in the recipe's direction (or None), after the non-finite check."""
    measured = None
    if call.options.refuses_nonfinite and not call.is_empty:
        measured = check_finite(call.engine, x, dtype, shape, "x")
    recipe = call.plan.recipe
    if recipe is None or not call.plan.has_second_level:
        return None
    if given is not None:
        if call.options.given == recipe.direction:
            return given
        measured = given
    elif measured is None:
        measured = call.engine.amax(x, dtype, 1)
    return call.engine.second_level(measured, call.plan, dtype)
