# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of matrices in one buffer (mixture of experts): quantize and dequantize."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fp4kit import arrays
from fp4kit.arrays import Raw
from fp4kit.arrays.dtypes import dtype_name
from fp4kit.arrays.frameworks import Origin
from fp4kit.arrays.overlap import places
from fp4kit.arrays.torch_rules import leave_uncompiled
from fp4kit.backend.groups import GroupedPlan
from fp4kit.backend.interface import Job
from fp4kit.errors import OptionError, ShapeError
from fp4kit.group_shapes import GroupShapes, group_shapes
from fp4kit.scheme import Scheme, as_scheme

from .backends import engine_for
from .buffers import per_token_amax, result_buffer, rows_of, stored_bytes
from .calls import CallData, call_data
from .group_inputs import check_members, group_prologue
from .grouped_tensor import (
    GROUPED_LAYOUT,
    GroupedPair,
    GroupedTensor,
    check_one_matrix,
    grouped_plan,
    has_level_per_vector,
    one_matrix_shape,
)
from .prologue import refuse_lone_input

if TYPE_CHECKING:
    from typing import Unpack

    from fp4kit.options import Direction, Format

    from .options import GroupData, GroupOptions


@overload
def quantize_grouped(
    x: Any, scheme: Format = "nvfp4", *, direction: Literal["both"], **options: Unpack[GroupOptions]
) -> GroupedPair: ...


@overload
def quantize_grouped(
    x: Any, scheme: Format = "nvfp4", *, direction: Direction = ..., **options: Unpack[GroupOptions]
) -> GroupedTensor: ...


# A Scheme's direction is not part of its type: what it gives is left to the reader.
@overload
def quantize_grouped(x: Any, scheme: Scheme, **options: Unpack[GroupData]) -> Any: ...


@leave_uncompiled
def quantize_grouped(
    x: Any,
    scheme: Scheme | str = "nvfp4",
    *,
    members: int | None = None,
    first_dims: Sequence[int] | None = None,
    last_dims: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    row_offsets: Sequence[int] | None = None,
    amax: Any = None,
    decode_scale: Any = None,
    encode_scale: Any = None,
    seed: int | None = None,
    subsequence: int = 0,
    activation_input: Any = None,
    dbias: Any = None,
    nonfinite: str = "raise",
    backend: str | None = None,
    **fields: Any,
) -> GroupedTensor | GroupedPair:
    """Quantizes matrices that lie behind each other in one buffer.

    Each member's bytes are those of quantizing it alone. Members may be empty, in any place, and
    the buffer may be longer than they are together: the rest is not looked at. Options that are
    not listed are those of :func:`fp4kit.quantize`.

    Args:
        x: float32, float16 or bfloat16 buffer. The sizes of its members, numbers on the host:
            - all alike: (n, M, K), or (n M, K) with `members` = n;
            - other numbers of rows: (.., K) with `first_dims` or `row_offsets`;
            - other numbers of columns, each member stored contiguously: (M, ..) with `last_dims`;
            - both: any shape with `first_dims` and `last_dims`.
        scheme: as in :func:`fp4kit.quantize`. `scale_layout` is that of each member's scales by
            themselves; or `grouped_128x4`, rowwise alone and for members of one K:
            swizzled_128x4 scales in one matrix of M + 127 n rows for a buffer of M, as nvFuser's
            grouped matrix product takes them (their rows begin at
            :attr:`GroupedTensor.scale_row_offsets`; those behind are 0).
        members: number of members of equal size.
        first_dims: rows of each member.
        last_dims: columns of each member.
        offsets: n + 1 element offsets where members begin, the last one their end; None if they
            follow each other.
        row_offsets: n + 1 rows where members begin, the last one their end, instead of all that.
        amax: one for all, or float32 (n,); None measures one per member.
        decode_scale: instead of amax, as in :func:`fp4kit.quantize`; one for all, or float32 (n,).
        encode_scale: instead of amax, as in :func:`fp4kit.quantize`; one for all, or float32 (n,).
        seed: for stochastic rounding.
        subsequence: of the first member; each has the next one.
        activation_input: see :func:`fp4kit.quantize`; a buffer like x. An activation is that of
            each member, and halves its columns if it is swiglu.
        dbias: float32 array to write the column sums of what is quantized into: (n, K) for members
            of one K, or (sum of all K,).
        nonfinite: see :func:`fp4kit.quantize`; errors name the member.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        **fields: fields of a :class:`fp4kit.Scheme`.

    Returns:
        A :class:`GroupedTensor`, for direction="both" a :class:`GroupedPair`.

    Raises:
        OptionError: for unknown or contradictory options, or sizes that are no numbers.
        ShapeError: for members that do not fit the buffer or the format.
        DtypeError: for other element types.
        NonFiniteError: under `nonfinite="raise"`, naming the member.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> g = quantize_grouped(np.ones((48, 32), np.float32), first_dims=[16, 0, 32])
        >>> [g.member(i).shape for i in range(len(g))]
        [(16, 32), (0, 32), (32, 32)]
    """
    wanted = as_scheme(scheme, fields)
    if wanted.spec.has_scale_grid:
        raise OptionError(
            f"{wanted.format} has float32 scales of whole matrices, which grouped kernels do not "
            "read; quantize the members one by one"
        )
    raw = arrays.ingest(x)
    group = group_shapes(
        tuple(raw.data.shape), members, first_dims, last_dims, offsets, row_offsets
    )
    data = call_data(
        wanted, (amax, decode_scale, encode_scale), seed, subsequence, nonfinite, backend
    )
    prologue = None
    if wanted.activation is None and dbias is None:
        refuse_lone_input(activation_input)
    else:
        prologue = group_prologue(raw, group, wanted.activation, activation_input, dbias)
        group = prologue.group
        levels = wanted.parts[0].second_level != "none" and data.given.name is None
        if data.refuses or levels or dbias is not None:
            # The result is looked at before it is quantized.
            raw = prologue.run(data.refuses, data.measures(wanted), backend)
            prologue = None
    buffer_shape = tuple(raw.data.shape) if prologue is None else prologue.shape
    if wanted.scale_layout == GROUPED_LAYOUT:
        check_one_matrix(group.dims, wanted.direction)
    plans = tuple(
        grouped_plan(group.dims, group.starts, part, pad=wanted.pad) for part in wanted.parts
    )
    # Both directions are served by one backend, or refused.
    origin, dtype = raw.origin, raw.dtype
    engine, *_ = [
        engine_for("quantize", origin.device, dtype, part, backend) for part in wanted.parts
    ]
    with arrays.device_scope(origin):
        flat = None if prologue is not None else _flat(raw)
        if data.refuses and (raw.scan is None or int(raw.scan[-1])):
            check_members(engine, group, flat, dtype, "the group")
        seconds = _second_levels(engine, wanted, plans, data, raw, flat)
        buffers = [
            _buffers(plan, part, buffer_shape, origin)
            for plan, part in zip(plans, wanted.parts, strict=True)
        ]
        jobs = tuple(
            Job(plan, flat, dtype, _used(part, second, origin), *own[:2], data.seed)
            for part, plan, second, own in zip(wanted.parts, plans, seconds, buffers, strict=True)
        )
        if prologue is not None and not prologue.fused(engine, jobs):
            flat = _flat(prologue.run(False, False, backend))
            jobs = tuple(job._replace(x=flat) for job in jobs)
        if flat is not None:
            engine.quantize_grouped(jobs)
        results = [
            _wrap(part, group, buffer_shape, raw, (packed, whole, second))
            for part, (packed, _, whole), second in zip(wanted.parts, buffers, seconds, strict=True)
        ]
    return results[0] if len(results) == 1 else GroupedPair(*results)


def _flat(raw: Raw) -> Any:
    return rows_of(raw, 1, prod(raw.data.shape)).reshape(-1)


def _buffers(
    plan: GroupedPlan, scheme: Scheme, shape: tuple[int, ...], origin: Origin
) -> tuple[Any, Any, Any]:
    """Codes, the flat scales that members fill, and the scales as the caller gets them."""
    xp, size = arrays.array_module(origin), plan.scale_offsets[-1]
    packed = xp.empty(plan.packed_offsets[-1], np.uint8)
    if scheme.scale_layout != GROUPED_LAYOUT:
        whole = xp.empty(size, np.uint8)
        return packed, whole, whole
    whole = xp.empty(one_matrix_shape(plan, shape), np.uint8)
    flat = whole.reshape(-1)
    flat[size:] = 0
    return packed, flat[:size], whole


def _used(scheme: Scheme, second: Any, origin: Origin) -> Any:
    """The second levels as the backend counts with them."""
    per_token = second is not None and scheme.second_level == "per_token"
    return per_token_amax(second, origin) if per_token else second


def _second_levels(
    engine: Any,
    scheme: Scheme,
    plans: tuple[GroupedPlan, ...],
    data: CallData,
    raw: Raw,
    flat: Any,
) -> list[Any]:
    """What the recipe keeps as second levels of all members, for each direction, or None."""
    seconds: list[Any] = []
    rotated = any(part.rht is not None for part in scheme.parts)
    for part, plan, value in zip(scheme.parts, plans, data.given.values, strict=False):
        recipe, count = part.recipe_spec, plan.second_offsets[-1]
        shared = value is None and not rotated and not has_level_per_vector(part)
        if recipe is None or part.second_level == "none":
            seconds.append(None)
            continue
        if seconds and shared:
            seconds.append(seconds[0])  # the amaxes of whole members have no direction
            continue
        if value is None:
            amax = _scanned(plan, raw)
            if amax is None:
                amax = arrays.scratch(count, np.float32, raw.origin)
                engine.grouped_amax(plan, flat, raw.dtype, amax)
        else:
            amax = _given(value, data.given.name or "amax", count, raw.origin)
        kept = data.given.name == recipe.keeps or (value is None and recipe.keeps == "amax")
        done = kept or not count
        seconds.append(amax if done else engine.second_level(amax, plan.members[0], raw.dtype))
    return seconds


def _scanned(plan: GroupedPlan, raw: Raw) -> Any:
    """The amaxes of all members if something before gave them and they are what counts, or None."""
    if raw.scan is None or not all(member.has_plain_amax for member in plan.members):
        return None
    return raw.scan[:-1].view(np.float32)


def _given(value: Any, name: str, count: int, origin: Origin) -> Any:
    """The scale that was passed for each member."""
    given = arrays.ingest_scale(value, name, origin)
    if given.size == 1:
        one, given = given, arrays.scratch(count, np.float32, origin)
        given[...] = one
    elif given.size != count:
        raise ShapeError(f"{given.size} second-level scales were passed for {count} members")
    return given


def _wrap(
    scheme: Scheme,
    group: GroupShapes,
    shape: tuple[int, ...],
    raw: Raw,
    result: tuple[Any, Any, Any],
) -> GroupedTensor:
    """The result, (codes, scales, second levels), in the caller's framework."""
    packed, block_scale, second = result
    recipe, origin = scheme.recipe_spec, raw.origin
    scale = None if second is None else arrays.emit(second, "float32", origin)
    return GroupedTensor(
        packed=arrays.emit(packed, "uint8", origin),
        block_scale=arrays.emit(block_scale, "uint8", origin),
        scheme=scheme,
        dims=group.dims,
        starts=group.starts,
        shape=shape,
        source_dtype=raw.dtype,
        **({} if scale is None or recipe is None else {recipe.keeps: scale}),
    )


@leave_uncompiled
def dequantize_grouped(
    group: GroupedTensor, dtype: Any = "float32", *, backend: str | None = None, out: Any = None
) -> Any:
    """Decodes every member into its place in a buffer like the one that was quantized.

    Args:
        group: what :func:`quantize_grouped` gave, one direction of it.
        dtype: `float32`, `float16` or `bfloat16`, by name or as a dtype of any framework.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous array of `group.shape` and `dtype`; what lies between and behind the
            members is left as it is. None makes one, with zeros there.

    Returns:
        Array of shape `group.shape` in the framework and on the device of `group.packed` (or
        `out`).

    Raises:
        OptionError: for an unknown dtype.
        ShapeError: if the arrays, or `out`, do not fit.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> group = quantize_grouped(np.full((3, 16), 6, np.float32), first_dims=[1, 0, 1])
        >>> dequantize_grouped(group)[:, 0].tolist()
        [6.0, 6.0, 0.0]
    """
    dtype = dtype_name(dtype)
    if not isinstance(group, GroupedTensor):
        raise OptionError(
            f"a {type(group).__name__} is no group; pass the GroupedTensor that quantize_grouped "
            "returned (one direction of a pair)"
        )
    plan = group.plan
    packed, block_scale = stored_bytes(group, ((plan.packed_offsets[-1],), group.scale_shape))
    origin = packed.origin
    engine = engine_for("dequantize", origin.device, dtype, group.scheme, backend)
    with arrays.device_scope(origin):
        second = group.second_level
        scale = level = None
        if second is not None:
            level = arrays.open_scale(second[1], "the second-level scale", origin)
            scale = arrays.ingest_scale(second[1], "the second-level scale", origin)
            scale = _used(group.scheme, scale, origin)
        read = places(packed=packed.data, block_scale=block_scale.data, second_level=level)
        result = result_buffer(out, group.shape, dtype, origin, read)
        if out is None:
            result[...] = 0
        flat = [
            arrays.contiguous(array.data, origin).reshape(-1) for array in (packed, block_scale)
        ]
        job = Job(plan, None, dtype, scale, flat[0], flat[1])
        engine.dequantize_grouped(job, result.reshape(-1), dtype)
        return out if out is not None else arrays.emit(result, dtype, origin)
