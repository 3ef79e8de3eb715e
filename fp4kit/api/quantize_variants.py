# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantize calls that are not plain: directions, tiles, per token, searches, rotation, rounding."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit import arrays
from fp4kit.arrays import Raw
from fp4kit.arrays.frameworks import Origin
from fp4kit.arrays.overlap import Place
from fp4kit.errors import OptionError
from fp4kit.formats import one_of
from fp4kit.variant import AMAX_WORDS, PLAIN, Variant, sign_mask

from .activated import Ahead
from .buffers import (
    Reused,
    given_places,
    given_second_level,
    in_rows,
    output_buffers,
    per_token_amax,
    rows_of,
)
from .measure import scanned_amax
from .planning import Call, Options, quantize_call, quantize_options
from .tensor import QuantizedTensor

NO_DIRECTION: tuple[str, ...] = ()
DIRECTIONS = {"row": ("row",), "column": ("column",), "both": ("row", "column")}


class Directions(NamedTuple):
    """One array quantized in both directions.

    Attributes:
        rowwise: blocks along the last axis.
        columnwise: blocks along the rows.
    """

    rowwise: QuantizedTensor
    columnwise: QuantizedTensor


class Choices(NamedTuple):
    """The arguments of `quantize` that make a call not plain, as they were passed."""

    axis: str = "row"
    block: str = "1d"
    scale_search: str | None = None
    error: str | None = None
    e4m3_max: int = 448
    rounding: str = "nearest"
    seed: int | None = None
    stream: int = 0
    hadamard: bool | int | None = None
    hadamard_axis: str | None = None
    rht_rounding: str | None = None


PLAIN_CHOICES = Choices()


class PlainChoices(NamedTuple):
    """The arguments that plain calls have too, in the order of `planning.quantize_options`."""

    format: str
    recipe: str
    scale_rule: str | None
    second_level: bool
    scale_layout: str
    nibble_order: str
    pad: bool
    nonfinite: str


class Direction(NamedTuple):
    """One direction of a call, ready to run."""

    call: Call
    packed: Any
    block_scale: Any
    given: Any
    kept: Any


@lru_cache(maxsize=1024)
def variants_of(choices: Choices, per_token: bool) -> tuple[Variant, ...]:
    """The variant of each direction of a call.

    Raises:
        OptionError: for unknown or contradictory choices.
    """
    names = DIRECTIONS[one_of("axis", choices.axis, DIRECTIONS)]
    if choices.hadamard is None or choices.hadamard is False:
        mask, rotated = None, NO_DIRECTION
        for name in ("hadamard_axis", "rht_rounding"):
            if getattr(choices, name) is not None:
                raise OptionError(f"{name} belongs to hadamard; pass hadamard=True or a mask")
    else:
        mask = sign_mask(choices.hadamard)
        # As published: of both directions only the columnwise one is rotated.
        default = "column" if choices.axis == "both" else choices.axis
        rotated = DIRECTIONS[one_of("hadamard_axis", choices.hadamard_axis or default, DIRECTIONS)]
        if not set(rotated) <= set(names):
            raise OptionError(
                f"hadamard_axis={choices.hadamard_axis!r} is not quantized under "
                f"axis={choices.axis!r}"
            )
    return tuple(
        Variant(
            axis=name,
            block=choices.block,
            per_token=per_token,
            scale_search=choices.scale_search,
            error=choices.error or ("mse" if choices.scale_search is not None else None),
            e4m3_max=choices.e4m3_max,
            rounding=choices.rounding,
            hadamard=mask if name in rotated else None,
            rht_rounding=(choices.rht_rounding or "bf16") if name in rotated else None,
        )
        for name in names
    )


def seed_of(choices: Choices) -> tuple[int, int]:
    """(key, stream) of a call.

    Raises:
        OptionError: if it is missing, not needed, or out of range.
    """
    if choices.rounding != "stochastic":
        if choices.seed is not None or choices.stream != 0:
            raise OptionError("seed and stream belong to rounding='stochastic'")
        return 0, 0
    for name, bits in (("seed", 64), ("stream", 32)):
        value = getattr(choices, name)
        if not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << bits:
            raise OptionError(
                f"rounding='stochastic' needs {name}, a whole number from 0 to 2^{bits} - 1, got "
                f"{value!r}; equal seeds and streams give equal bits, so give each tensor its own"
            )
    return int(choices.seed or 0), int(choices.stream)


def _amaxes(
    directions: tuple[str, ...], amax: Any, variants: tuple[Variant, ...]
) -> tuple[tuple[Any, ...], str | None]:
    """(the amax passed for each direction, or None; the word passed instead)."""
    if isinstance(amax, str):
        return (None,) * len(directions), one_of("amax", amax, AMAX_WORDS)
    if len(directions) == 1 or amax is None:
        return (amax,) * len(directions), None
    if isinstance(amax, tuple):
        if len(amax) != len(directions):
            raise OptionError(f"amax is one value or a pair (rowwise, columnwise), got {len(amax)}")
        return amax, None
    if variants[0].hadamard != variants[1].hadamard:
        raise OptionError(
            "one direction is rotated, so the two have different amaxes; pass a pair "
            "amax=(rowwise, columnwise), the second after the rotation, or leave it out"
        )
    return (amax, amax), None


def plans_of(
    operation: str,
    raw: Raw,
    shape: tuple[int, ...],
    plain: PlainChoices,
    choices: Choices,
    amax: Any,
    decode_scale: Any,
    encode_scale: Any,
    backend: str | None,
) -> list[tuple[Call, Any]]:
    """The call and the given second-level scale of each direction."""
    variants = variants_of(choices, isinstance(amax, str) and amax == "per_token")
    amaxes, word = _amaxes(DIRECTIONS[choices.axis], amax, variants)
    result = []
    for variant, own in zip(variants, amaxes, strict=True):
        options = quantize_options(
            operation,
            *plain,
            own is not None,
            decode_scale is not None,
            encode_scale is not None,
            None if variant.is_plain else variant,
        )
        if word is not None:
            _check_word(options, word)
        given = given_second_level(options, own, decode_scale, encode_scale, raw.origin)
        scales = 1 if given is None else given.size
        if word is not None:
            vectors = prod(shape[:-1]) if variant.axis == "row" else prod(shape[-1:])
            scales = max(vectors, 1)
        device = raw.origin.device
        result.append((quantize_call(options, shape, raw.dtype, device, scales, backend), given))
    return result


def _check_word(options: Options, word: str) -> None:
    """Refuses per-token amaxes where there is none, or only one, to have.

    Raises:
        OptionError: with the reason.
    """
    if options.recipe is None or not options.second_level:
        raise OptionError(f"amax={word!r}: {options.format.name} has no second-level scale here")
    if options.given is not None:
        raise OptionError(f"amax={word!r} measures the scales that were passed as well")
    if options.variant is not None and options.variant.block == "2d":
        raise OptionError(f"a 2-D tile has one scale, amax={word!r} one per row: no both")


def quantize_variants(
    raw: Raw,
    ahead: Ahead | None,
    plain: PlainChoices,
    choices: Choices,
    amax: Any,
    decode_scale: Any,
    encode_scale: Any,
    backend: str | None,
    reused: Reused,
) -> QuantizedTensor | Directions:
    """`fp4kit.quantize` of a call that is not plain; the arguments are described there.

    `ahead`: what is still to be done to `raw` first.
    """
    seed = seed_of(choices)
    shape = tuple(raw.data.shape) if ahead is None else ahead.shape
    plans = plans_of(
        "quantize", raw, shape, plain, choices, amax, decode_scale, encode_scale, backend
    )
    out, read = reused
    outs = _outputs(out, len(plans))
    origin, dtype = raw.origin, raw.dtype
    with arrays.device_scope(origin):
        run = []
        for (call, given), target in zip(plans, outs, strict=True):
            own = read + given_places(call.options, given)
            direction, written = _direction(call, given, target, shape, origin, own)
            run.append(direction)
            read += written
        plan = run[0].call.plan
        rows = None if ahead is not None else rows_of(raw, plan.rows, plan.cols)
        scanned = scanned_amax(run[0].call, rows, raw)
        targets = [
            (
                in_rows(one.packed, one.call.plan.packed_shape),
                in_rows(one.block_scale, one.call.plan.scale_shape),
            )
            for one in run
        ]
        measured = _measured_at_once(run, rows, dtype, targets, seed)
        if measured is not None:
            seconds = [measured]
        else:
            seconds = second_levels(run, rows, dtype, scanned)
            calls = [one.call for one in run]
            if ahead is not None and not ahead.fused(calls, seconds, targets, seed):
                rows = rows_of(ahead.run(False, False, backend), plan.rows, plan.cols)
            if rows is not None:
                _quantize(run, rows, dtype, seconds, targets, seed, origin)
        results = [
            _result(one, second, target, raw, shape)
            for one, second, target in zip(run, seconds, outs, strict=True)
        ]
    if isinstance(out, Directions):
        return out
    return results[0] if len(results) == 1 else Directions(*results)


def _outputs(
    out: QuantizedTensor | Directions | None, count: int
) -> tuple[QuantizedTensor | None, ...]:
    if out is None:
        return (None,) * count
    if count == 1 and isinstance(out, QuantizedTensor):
        return (out,)
    if count == 2 and isinstance(out, Directions):
        return tuple(out)
    raise OptionError(
        f"out is a {type(out).__name__}; axis='both' takes a pair as it returns one, other axes "
        "take a tensor"
    )


def _direction(
    call: Call,
    given: Any,
    out: QuantizedTensor | None,
    shape: tuple[int, ...],
    origin: Origin,
    read: tuple[Place, ...],
) -> tuple[Direction, tuple[Place, ...]]:
    """A direction, and the places that it writes to in arrays of the caller."""
    if out is None:
        xp = arrays.array_module(origin)
        packed = xp.empty(call.packed_shape, np.uint8)
        return Direction(call, packed, xp.empty(call.scale_shape, np.uint8), given, None), ()
    target = output_buffers(out, call, shape, origin, read)
    return (
        Direction(call, target.packed, target.block_scale, given, target.second),
        target.places,
    )


def _measured_at_once(
    run: list[Direction], x: Any, dtype: str, targets: list[tuple[Any, Any]], seed: tuple[int, int]
) -> Any:
    """The second levels of rows that each make their own, all else done; None if that is not so."""
    call, plan = run[0].call, run[0].call.plan
    variant = plan.variant or PLAIN
    of_rows = len(run) == 1 and variant.axis == "row" and variant.hadamard is None
    own = plan.has_second_level and plan.rows_per_scale == 1 and run[0].given is None
    if call.is_empty or not (of_rows and own):
        return None
    return call.engine.quantize_measured(plan, x, dtype, *targets[0], seed)


def _quantize(
    run: list[Direction],
    x: Any,
    dtype: str,
    seconds: list[Any],
    targets: list[tuple[Any, Any]],
    seed: tuple[int, int],
    origin: Origin,
) -> None:
    """Fills the targets of one or both directions from their second levels."""
    if run[0].call.is_empty:
        return
    engine, plan = run[0].call.engine, run[0].call.plan
    used = [used_second(one.call, second, origin) for one, second in zip(run, seconds, strict=True)]
    if len(run) == 1:
        engine.quantize(plan, x, dtype, used[0], *targets[0], seed)
    else:
        other, (row, column) = run[1].call.plan, used
        engine.quantize_both(plan, other, x, dtype, row, column, *targets[0], *targets[1], seed)


def second_levels(run: list[Direction], x: Any, dtype: str, scanned: Any) -> list[Any]:
    """The second level of each direction in its recipe's direction, or None."""
    engine = run[0].call.engine
    measured: list[Any] = [None] * len(run)
    missing = []
    for number, one in enumerate(run):
        plan = one.call.plan
        rotated = plan.variant is not None and plan.variant.hadamard is not None
        if not plan.has_second_level or one.given is not None:
            continue
        if plan.scales == 1 and not rotated and scanned is not None:
            measured[number] = scanned
        else:
            missing.append(number)
    if len(missing) == 2:
        measured[:] = engine.plan_amax_both(run[0].call.plan, run[1].call.plan, x, dtype)
    elif missing:
        measured[missing[0]] = engine.plan_amax(run[missing[0]].call.plan, x, dtype)
    seconds: list[Any] = []
    for one, value in zip(run, measured, strict=True):
        plan = one.call.plan
        if not plan.has_second_level or plan.recipe is None:
            seconds.append(None)
        elif one.given is not None and one.call.options.given == plan.recipe.direction:
            seconds.append(one.given)
        else:
            own = one.given if one.given is not None else value
            seconds.append(engine.second_level(own, plan, dtype))
    return seconds


def used_second(call: Call, second: Any, origin: Origin) -> Any:
    """The second level as the backend counts with it."""
    variant = call.plan.variant
    if second is None or variant is None or not variant.per_token:
        return second
    return per_token_amax(second, origin)


def _result(
    one: Direction, second: Any, out: QuantizedTensor | None, raw: Raw, shape: tuple[int, ...]
) -> QuantizedTensor:
    if out is not None:
        if second is not None:
            arrays.overwrite_scale(one.kept, second)
        return out
    plan, origin = one.call.plan, raw.origin
    direction = plan.recipe.direction if plan.recipe is not None else None
    scale = None if second is None else arrays.emit(second, "float32", origin)
    return QuantizedTensor(
        packed=arrays.emit(one.packed, "uint8", origin),
        block_scale=arrays.emit(one.block_scale, "uint8", origin),
        format=plan.format.name,
        shape=shape,
        recipe=plan.recipe.name if plan.recipe is not None else None,
        scale_rule=plan.scale_rule,
        amax=scale if direction == "amax" else None,
        decode_scale=scale if direction == "decode" else None,
        encode_scale=scale if direction == "encode" else None,
        scale_layout=plan.scale_layout,
        nibble_order=plan.nibble_order,
        source_dtype=raw.dtype,
        variant=plan.variant,
    )
