# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The one path of every quantizing call: ingest, plan, allocate, job, wrap."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit import arrays, trace
from fp4kit.arrays import Raw, is_contiguous
from fp4kit.arrays.frameworks import Origin
from fp4kit.arrays.overlap import Place, place_of
from fp4kit.backend.interface import Backend, Job
from fp4kit.errors import OptionError, ShapeError
from fp4kit.plan import Plan
from fp4kit.reference.grid import zero_scale
from fp4kit.scheme import Scheme

from .backends import engine_for
from .buffers import Target, in_rows, new_target, output_buffers, per_token_amax, rows_of
from .calls import Call, CallData, call_for
from .measure import checked
from .prologue import ArrayPrologue
from .repeat import Repeat, remember, repeatable
from .tensor import DirectionPair, QuantizedTensor


class Reused(NamedTuple):
    """A result to overwrite, or None, and the call that does it, as the caller made it."""

    out: QuantizedTensor | DirectionPair | None
    x: Any
    arguments: tuple[Any, ...]


class Planned(NamedTuple):
    """One direction of a call: its plan, and the second-level scale that was passed, raw."""

    call: Call
    given: Any


def planned(
    operation: str, scheme: Scheme, raw: Raw, shape: tuple[int, ...], data: CallData
) -> list[Planned]:
    """Plans every direction of a call for `shape`, which `raw` has or gets by its prologue."""
    result = []
    for part, value in zip(scheme.parts, data.given.values, strict=False):
        given, scales = None, 1
        if value is not None:
            assert data.given.name is not None
            given = arrays.ingest_scale(value, data.given.name, raw.origin)
            scales = given.size
        elif part.second_level in ("row_scaled", "per_token"):
            scales = -1
        device = raw.origin.device
        call = call_for(operation, part, scheme.pad, shape, raw.dtype, device, scales, data.backend)
        expected = prod(call.plan.scale_shape)
        if given is not None and call.plan.grid is not None and scales != expected:
            raise ShapeError(
                f"{data.given.name} has {scales} scales; granularity={part.granularity!r} of shape "
                f"{tuple(shape)} takes {expected}"
            )
        if trace.ENABLED:  # plans are remembered, and with them the choice
            engine_for(operation, device, raw.dtype, part, data.backend)
        result.append(Planned(call, given))
    return result


def second_levels(run: Sequence[Planned], name: str | None, x: Any, raw: Raw) -> list[Any]:
    """What the recipe keeps as the second level of each direction, or None.

    Args:
        run: the directions.
        name: which scale was passed.
        x: rows of the array, None if a prologue makes them and all scales are passed.
        raw: the array, with what is known of its values.
    """
    engine = run[0].call.engine
    scanned = None if raw.scan is None else raw.scan[:1].view(np.float32)
    measured: list[Any] = [None] * len(run)
    missing = []
    for number, (call, given) in enumerate(run):
        if not call.plan.needs_amax or given is not None:
            continue
        if scanned is not None and call.plan.has_plain_amax:
            measured[number] = scanned
        else:
            missing.append(number)
    if len(missing) == 2:
        measured[:] = engine.plan_amax_both(run[0].call.plan, run[1].call.plan, x, raw.dtype)
    elif missing:
        measured[missing[0]] = engine.plan_amax(run[missing[0]].call.plan, x, raw.dtype)
    seconds: list[Any] = []
    for (call, given), amax in zip(run, measured, strict=True):
        recipe = call.plan.recipe
        keeps = "decode_scale" if recipe is None else recipe.keeps
        if (amax if given is None else given) is None:
            seconds.append(None)
        elif given is not None and name == keeps:
            seconds.append(given)
        else:
            own = amax if given is None else given
            seconds.append(engine.second_level(own, call.plan, raw.dtype))
    return seconds


def used_second(plan: Plan, second: Any, origin: Origin) -> Any:
    """The second level as the backend counts with it."""
    if second is None or plan.scheme.second_level != "per_token":
        return second
    return per_token_amax(second, origin)


def quantize(
    raw: Raw,
    scheme: Scheme,
    data: CallData,
    prologue: ArrayPrologue | None,
    reused: Reused,
) -> QuantizedTensor | DirectionPair:
    """`fp4kit.quantize`, its arguments checked.

    Args:
        raw: the array.
        scheme: what is wanted.
        data: what belongs to the call.
        prologue: what is still to be done to the array first, or None.
        reused: the result to overwrite, if there is one.
    """
    out = reused.out
    read: tuple[Place, ...] = ()
    if out is not None:
        read = (place_of("x", raw.data), *(() if prologue is None else prologue.places))
    # Nothing is looked at, or made of the array, before the kernel that quantizes it.
    is_direct = raw.origin.device_kind == "cuda" and prologue is None and not data.refuses
    if prologue is not None and (data.refuses or _measures(scheme, data)):
        # The result is looked at before it is quantized.
        raw, prologue = prologue.run(data.refuses, data.measures(scheme), data.backend), None
    shape = raw.data.shape if prologue is None else prologue.shape
    run = planned("quantize", scheme, raw, shape, data)
    outs = _outputs(out, len(run))
    origin = raw.origin
    with arrays.device_scope(origin):
        targets = []
        for one, own in zip(run, outs, strict=True):
            target = _target(one, data.given.name, own, shape, origin, read)
            targets.append(target)
            read += target.places
        first = run[0].call
        rows = None if prologue is not None else rows_of(raw, first.plan.rows, first.plan.cols)
        if data.refuses and not first.is_empty:
            raw = checked(first.engine, rows, raw)
        jobs, seconds = _quantize(run, data, rows, raw, prologue, targets)
        results = [
            _wrap(one.call, target, second, own, raw, shape)
            for one, target, second, own in zip(run, targets, seconds, outs, strict=True)
        ]
        if out is not None and is_direct and not first.is_empty and is_contiguous(raw.data):
            _remember(reused, first.engine, scheme, data, raw, jobs, targets)
    if isinstance(out, DirectionPair):
        return out
    return results[0] if len(results) == 1 else DirectionPair(*results)


def _remember(
    reused: Reused,
    engine: Backend,
    scheme: Scheme,
    data: CallData,
    raw: Raw,
    jobs: list[Job],
    targets: list[Target],
) -> None:
    """Has the result remember a call that can be repeated, and forget any other."""
    assert reused.out is not None
    launch = repeatable(engine, scheme, data.given.name, jobs, targets)
    repeat = None
    if launch is not None:
        out = reused.out if isinstance(reused.out, DirectionPair) else (reused.out,)
        repeat = Repeat(reused.arguments, reused.x, raw, launch, targets, out)
    remember(reused.out, repeat)


def _measures(scheme: Scheme, data: CallData) -> bool:
    """Whether any second level is to be measured."""
    part = scheme.parts[0]
    return part.granularity is not None or (part.second_level != "none" and data.given.name is None)


def _outputs(
    out: QuantizedTensor | DirectionPair | None, count: int
) -> tuple[QuantizedTensor | None, ...]:
    if out is None:
        return (None,) * count
    if count == 1 and isinstance(out, QuantizedTensor):
        return (out,)
    if count == 2 and isinstance(out, DirectionPair):
        return tuple(out)
    raise OptionError(
        f"out is a {type(out).__name__}; direction='both' takes a pair as it returns one, one "
        "direction takes the QuantizedTensor that an equal call returned"
    )


def _target(
    one: Planned,
    name: str | None,
    out: QuantizedTensor | None,
    shape: tuple[int, ...],
    origin: Origin,
    read: tuple[Place, ...],
) -> Target:
    """Where the codes and scales of a direction go."""
    if out is None:
        return new_target(one.call, origin)
    if one.given is not None and name is not None:
        read = (*read, place_of(name, one.given))
    return output_buffers(out, one.call, shape, origin, read)


def _quantize(
    run: list[Planned],
    data: CallData,
    rows: Any,
    raw: Raw,
    prologue: ArrayPrologue | None,
    targets: list[Target],
) -> tuple[list[Job], list[Any]]:
    """Fills the targets; returns what was done, and what the recipe keeps as second levels."""
    call, plan = run[0].call, run[0].call.plan
    jobs = [
        Job(
            one.call.plan,
            rows,
            raw.dtype,
            None,
            in_rows(target.packed, one.call.plan.packed_shape),
            in_rows(target.block_scale, one.call.plan.scale_shape),
            data.seed,
        )
        for one, target in zip(run, targets, strict=True)
    ]
    own_levels = plan.scheme.second_level in ("row_scaled", "per_token")
    of_rows = plan.scheme.deviations <= {"second_level", "rounding"}
    if own_levels and of_rows and len(run) == 1 and not call.is_empty:
        measured = call.engine.quantize_measured(jobs[0])
        if measured is not None:
            return jobs, [measured]
    seconds = second_levels(run, data.given.name, rows, raw)
    if call.is_empty:
        if prologue is not None:
            prologue.run(False, False, data.backend)
        if plan.grid is not None:
            for job in jobs:
                job.block_scale.fill(zero_scale(plan.grid_recipe, raw.dtype))
        return jobs, seconds
    jobs = [
        job._replace(second=used_second(job.plan, second, raw.origin))
        for job, second in zip(jobs, seconds, strict=True)
    ]
    if prologue is not None:
        if prologue.fused(call.engine, jobs):
            return jobs, seconds
        made = prologue.run(False, False, data.backend)
        rows = rows_of(made, plan.rows, plan.cols)
        jobs = [job._replace(x=rows) for job in jobs]
    if len(jobs) == 1:
        call.engine.quantize(jobs[0])
    else:
        call.engine.quantize_both(jobs[0], jobs[1])
    return jobs, seconds


def _wrap(
    call: Call,
    target: Target,
    second: Any,
    out: QuantizedTensor | None,
    raw: Raw,
    shape: tuple[int, ...],
) -> QuantizedTensor:
    """The result in the caller's framework."""
    if out is not None:
        if target.second is not None:
            arrays.overwrite_scale(target.second, second)
        return out
    recipe, origin = call.plan.recipe, raw.origin
    scale = None if second is None else arrays.emit(second, "float32", origin)
    return QuantizedTensor.made(
        call.plan,
        arrays.emit(target.packed, "uint8", origin),
        arrays.emit(target.block_scale, call.plan.format.scales.dtype, origin),
        shape,
        {} if scale is None or recipe is None else {recipe.keeps: scale},
        raw.dtype,
    )
