# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A call apart from its arrays: what belongs to it beside the scheme, and its plan.

What stays the same from call to call (scheme, shape, type, device) is planned once and remembered;
a call that is like an earlier one costs a lookup.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.interface import NO_SEED, Backend, Seed
from fp4kit.errors import OptionError, brief
from fp4kit.formats import SECOND_LEVEL_SCALES, one_of
from fp4kit.plan import Plan, plan_of
from fp4kit.scheme import Scheme

from .backends import BACKEND_NAMES, engine_for

NONFINITE_POLICIES = ("raise", "propagate")


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about one direction of a call but the arrays; equal ones are one object.

    Attributes:
        plan: what the backend is to do.
        engine: the backend that does it.
        packed_shape: shape of the codes as the caller sees them.
        scale_shape: the same of the block scales.
        is_empty: whether there is nothing to do.
    """

    plan: Plan
    engine: Backend
    packed_shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    is_empty: bool


class GivenScales(NamedTuple):
    """The second-level scales that the caller passed.

    Attributes:
        name: `amax`, `decode_scale` or `encode_scale`; None if none was.
        values: one for each direction, as they were passed.
    """

    name: str | None
    values: tuple[Any, ...]


NOTHING_GIVEN = GivenScales(None, (None, None))


class CallData(NamedTuple):
    """What belongs to a call and not to its scheme, checked.

    Attributes:
        given: second-level scales.
        seed: of stochastic rounding.
        refuses: whether NaN and infinity are refused.
        backend: the name of one, or None.
    """

    given: GivenScales
    seed: Seed
    refuses: bool
    backend: str | None

    def measures(self, scheme: Scheme) -> bool:
        """Whether the second level comes from an amax of the whole array that nobody passed."""
        return scheme.parts[0].second_level == "tensor" and self.given.name is None


def call_data(
    scheme: Scheme,
    scales: tuple[Any, Any, Any],
    seed: int | None,
    subsequence: int,
    nonfinite: str,
    backend: str | None,
) -> CallData:
    """Checks what belongs to a call.

    Args:
        scheme: the scheme.
        scales: amax, decode scale and encode scale, as they were passed.
        seed: as it was passed.
        subsequence: as it was passed.
        nonfinite: `raise` or `propagate`.
        backend: name, or None.

    Raises:
        OptionError: for unknown or contradictory arguments.
    """
    given = NOTHING_GIVEN
    if any(value is not None for value in scales):
        given = _given_scales(scheme, scales)
    random = NO_SEED
    if (
        seed is not None
        or type(subsequence) is not int
        or subsequence
        or scheme.rounding == "stochastic"
    ):
        random = _seed_of(scheme, seed, subsequence)
    if not isinstance(nonfinite, str) or nonfinite not in NONFINITE_POLICIES:
        one_of("nonfinite", nonfinite, NONFINITE_POLICIES)
    if backend is not None:
        one_of("backend", backend, BACKEND_NAMES)
    return CallData(given, random, nonfinite == "raise", backend)


def _given_scales(scheme: Scheme, scales: tuple[Any, Any, Any]) -> GivenScales:
    passed = [name for name, x in zip(SECOND_LEVEL_SCALES, scales, strict=True) if x is not None]
    if len(passed) > 1:
        raise OptionError(f"pass one of {', '.join(passed)}, not all")
    (name,) = passed
    value = scales[SECOND_LEVEL_SCALES.index(name)]
    recipe, level = scheme.recipe_spec, scheme.parts[0].second_level
    if isinstance(value, str):
        raise OptionError(
            f"{name}={value!r} is text; row_scaled and per_token are values of second_level"
        )
    if scheme.spec.has_scale_grid:
        _check_grid_scale(scheme, name)
    elif recipe is None or level == "none":
        raise OptionError(
            f"a second-level scale was passed ({name}), but {scheme.format}"
            f"{'' if recipe is None else ' with second_level=none'} has none"
        )
    elif level != "tensor":
        raise OptionError(f"second_level={level!r} measures its scales; {name} was passed as well")
    elif name not in ("amax", recipe.keeps):
        allowed = " or ".join(dict.fromkeys(("amax", recipe.keeps)))
        raise OptionError(
            f"recipe {recipe.name} takes {allowed}, not {name}; the scales are not exact inverses "
            "of each other, so convert on purpose: fp4kit.convert_second_level"
        )
    if len(scheme.parts) == 1:
        return GivenScales(name, (value,))
    if isinstance(value, tuple):
        if len(value) != 2:
            raise OptionError(
                f"{name} is one value or a pair (rowwise, columnwise), got {len(value)}"
            )
        return GivenScales(name, value)
    if scheme.parts[0].rht != scheme.parts[1].rht:
        raise OptionError(
            "one direction is rotated, so the two have different amaxes; pass a pair "
            f"{name}=(rowwise, columnwise), the second after the rotation, or leave it out"
        )
    return GivenScales(name, (value, value))


def _check_grid_scale(scheme: Scheme, name: str) -> None:
    if name == "encode_scale":
        raise OptionError(f"{scheme.format} takes amax or decode_scale, not {name}")
    if scheme.parts[0].granularity == "block":
        raise OptionError(f"granularity='block' measures its scales; {name} was passed as well")


def _seed_of(scheme: Scheme, seed: int | None, subsequence: int) -> Seed:
    if scheme.rounding != "stochastic":
        raise OptionError("seed and subsequence belong to rounding='stochastic'")
    for name, value, bits in (("seed", seed, 64), ("subsequence", subsequence, 32)):
        if not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << bits:
            raise OptionError(
                f"rounding='stochastic' needs {name}, a whole number from 0 to 2^{bits} - 1, got "
                f"{brief(value)}; equal seeds and subsequences give equal bits, so give each "
                "tensor its own"
            )
    return int(seed or 0), int(subsequence)


@lru_cache(maxsize=2048)
def call_for(
    operation: str,
    part: Scheme,
    pad: bool,
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    scales: int,
    backend: str | None,
) -> Call:
    """Plans one direction and chooses the backend.

    Args:
        operation: `quantize` or `quantize_dequantize`.
        part: scheme of the direction.
        pad: whether vectors are padded to whole blocks.
        shape: shape of the array.
        dtype: its element type.
        device: where it lies.
        scales: number of second-level values; -1: one for each vector.
        backend: name, or None.

    Raises:
        ShapeError: for shapes that the format cannot take.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.
    """
    if scales == -1:
        vectors = shape[-1:] if part.direction == "columnwise" else shape[:-1]
        scales = max(prod(vectors), 1)
    plan = plan_of(shape, part, scales, pad=pad)
    engine = engine_for(operation, device, dtype, part, backend)
    lead = shape[:-1]
    return Call(
        plan=plan,
        engine=engine,
        packed_shape=plan.packed_shape if plan.is_columnwise else (*lead, plan.packed_shape[1]),
        scale_shape=plan.scale_shape_of(lead),
        is_empty=plan.rows == 0 or plan.cols == 0,
    )
