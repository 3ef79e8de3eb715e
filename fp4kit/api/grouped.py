# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of matrices in one buffer (mixture of experts): quantize and dequantize."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from fp4kit import arrays
from fp4kit.arrays import Raw
from fp4kit.arrays.frameworks import Origin
from fp4kit.arrays.overlap import places
from fp4kit.backend.groups import GroupedPlan
from fp4kit.errors import OptionError, ShapeError
from fp4kit.formats import DTYPES, one_of
from fp4kit.group_shapes import GroupShapes, group_shapes
from fp4kit.variant import AMAX_WORDS

from .activated import measures_amax, refuse_lone_input
from .backends import engine_for
from .buffers import given_second_level, per_token_amax, result_buffer, rows_of
from .group_inputs import check_members, group_ahead
from .grouped_tensor import (
    GROUPED_LAYOUT,
    GROUPED_LAYOUTS,
    GroupedDirections,
    GroupedTensor,
    check_one_matrix,
    grouped_plan,
    member_layout,
    one_matrix_shape,
)
from .planning import Options, quantize_options
from .quantize_variants import Choices, PlainChoices, seed_of, variants_of


def quantize_grouped(
    x: Any,
    format: str = "nvfp4",
    *,
    members: int | None = None,
    first_dims: Sequence[int] | None = None,
    last_dims: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    row_offsets: Sequence[int] | None = None,
    axis: str = "row",
    recipe: str = "te",
    scale_rule: str | None = None,
    amax: Any = None,
    decode_scale: Any = None,
    encode_scale: Any = None,
    second_level: bool = True,
    scale_layout: str = "linear",
    nibble_order: str = "low_first",
    pad: bool = False,
    nonfinite: str = "raise",
    block: str = "1d",
    scale_search: str | None = None,
    error: str | None = None,
    e4m3_max: int = 448,
    rounding: str = "nearest",
    seed: int | None = None,
    stream: int = 0,
    hadamard: bool | int | None = None,
    hadamard_axis: str | None = None,
    rht_rounding: str | None = None,
    activation: str | None = None,
    activation_input: Any = None,
    dbias: Any = None,
    backend: str | None = None,
) -> GroupedTensor | GroupedDirections:
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
        format: block format.
        members: number of members of equal size.
        first_dims: rows of each member.
        last_dims: columns of each member.
        offsets: n + 1 element offsets where members begin, the last one their end; None if they
            follow each other.
        row_offsets: n + 1 rows where members begin, the last one their end, instead of all that.
        axis: `row`, `column` or `both`.
        recipe: see :func:`fp4kit.quantize`, like what follows.
        scale_rule: see above.
        amax: one for all, or float32 (n,); None measures one per member; `row_scaled` or
            `per_token` one per row.
        decode_scale: see above; one for all, or float32 (n,).
        encode_scale: see above; one for all, or float32 (n,).
        second_level: see above.
        scale_layout: layout of each member's scales by themselves; or `grouped_128x4`, rowwise
            alone and for members of one K: swizzled_128x4 scales in one matrix of M + 127 n rows
            for a buffer of M, as nvFuser's grouped matrix product takes them (their rows begin at
            :attr:`GroupedTensor.scale_row_offsets`; those behind are 0).
        nibble_order: see above.
        pad: see above; pads each member.
        nonfinite: see above; errors name the member.
        block: see above.
        scale_search: see above.
        error: see above.
        e4m3_max: see above.
        rounding: see above.
        seed: see above.
        stream: of the first member; each has the next one.
        hadamard: see above.
        hadamard_axis: see above.
        rht_rounding: see above.
        activation: see above; halves the columns of each member if it is swiglu.
        activation_input: see above; a buffer like x.
        dbias: float32 array to write the column sums of what is quantized into: (n, K) for members
            of one K, or (sum of all K,).
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.

    Returns:
        A :class:`GroupedTensor`, for axis="both" :class:`GroupedDirections`.

    Raises:
        OptionError: for unknown or contradictory options, or sizes that are no numbers.
        ShapeError: for members that do not fit the buffer or the format.
        DtypeError: for other element types.
        NonFiniteError: under `nonfinite="raise"`, naming the member.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Example:
        >>> import numpy as np
        >>> g = quantize_grouped(np.ones((48, 32), np.float32), first_dims=[16, 0, 32])
        >>> [g.member(i).shape for i in range(len(g))]
        [(16, 32), (0, 32), (32, 32)]
    """
    raw = arrays.ingest(x)
    group = group_shapes(
        tuple(raw.data.shape), members, first_dims, last_dims, offsets, row_offsets
    )
    choices = Choices(
        axis, block, scale_search, error, e4m3_max, rounding, seed, stream, hadamard,
        hadamard_axis, rht_rounding,
    )  # fmt: skip
    ahead = None
    if activation is None and dbias is None:
        refuse_lone_input(activation_input)
    else:
        ahead = group_ahead(raw, group, activation, activation_input, dbias)
        group, refuses = ahead.group, nonfinite != "propagate"
        measures = second_level and measures_amax(format, amax, decode_scale, encode_scale)
        if refuses or measures or isinstance(amax, str) or dbias is not None:
            # The result is looked at before it is quantized.
            raw, ahead = ahead.run(refuses, measures, backend), None
    origin, dtype = raw.origin, raw.dtype
    buffer_shape = tuple(raw.data.shape) if ahead is None else ahead.shape
    one_of("scale_layout", scale_layout, GROUPED_LAYOUTS)
    if scale_layout == GROUPED_LAYOUT:
        check_one_matrix(group.dims, axis)
    word = one_of("amax", amax, AMAX_WORDS) if isinstance(amax, str) else None
    plain = PlainChoices(
        format, recipe, scale_rule, second_level, scale_layout, nibble_order, pad, nonfinite
    )
    given_amax = None if word is not None else amax
    options = [
        quantize_options(
            "quantize",
            *plain,
            given_amax is not None,
            decode_scale is not None,
            encode_scale is not None,
            None if variant.is_plain else variant,
        )
        for variant in variants_of(choices, word == "per_token")
    ]
    plans = tuple(_plan(group, own, word is not None) for own in options)
    own_seed = seed_of(choices)
    name = options[0].recipe.name if options[0].recipe is not None else None
    # Both directions are served by one backend, or refused.
    engine, *_ = [
        engine_for("quantize", origin.device, dtype, own.format.name, name, backend, own.variant)
        for own in options
    ]
    with arrays.device_scope(origin):
        xp = arrays.array_module(origin)
        flat = None if ahead is not None else _flat(raw)
        if options[0].refuses_nonfinite and (raw.scan is None or int(raw.scan[-1])):
            check_members(engine, group, flat, dtype, "the group")
        seconds: list[Any] = []
        used = []
        for plan, own in zip(plans, options, strict=True):
            given = given_second_level(own, given_amax, decode_scale, encode_scale, origin)
            if seconds and given is None and word is None and not _any_rotated(options):
                second = seconds[0]  # the amaxes of whole members have no direction
            else:
                if given is None:
                    given = _measured(plan, raw)
                second = _second_levels(engine, plan, own, flat, dtype, given, origin)
            seconds.append(second)
            floor = second is not None and own.variant is not None and own.variant.per_token
            used.append(per_token_amax(second, origin) if floor else second)
        packed = tuple(xp.empty(plan.packed_offsets[-1], np.uint8) for plan in plans)
        scales, filled = zip(
            *(
                _scale_buffer(plan, own, buffer_shape, xp)
                for plan, own in zip(plans, options, strict=True)
            ),
            strict=True,
        )
        parts = tuple(used), packed, filled, own_seed
        if ahead is not None and not ahead.fused(engine, plans, *parts):
            flat = _flat(ahead.run(False, False, backend))
        if flat is not None:
            engine.quantize_grouped(plans, flat, dtype, *parts)
        results = [
            _tensor(own, group, buffer_shape, raw, *each, per_vector=word is not None)
            for own, each in zip(options, zip(packed, scales, seconds, strict=True), strict=True)
        ]
    return results[0] if len(results) == 1 else GroupedDirections(*results)


def _flat(raw: Raw) -> Any:
    return rows_of(raw, 1, prod(raw.data.shape)).reshape(-1)


def _plan(group: GroupShapes, options: Options, per_vector: bool) -> GroupedPlan:
    if per_vector and (options.recipe is None or not options.second_level):
        raise OptionError(f"{options.format.name} has no second-level scale here, let alone many")
    return grouped_plan(
        group.dims,
        group.starts,
        per_vector,
        format=options.format.name,
        recipe=options.recipe.name if options.recipe is not None else None,
        scale_rule=options.scale_rule,
        second_level=options.second_level,
        scale_layout=member_layout(options.scale_layout),
        nibble_order=options.nibble_order,
        pad=options.pad,
        variant=options.variant,
    )


def _any_rotated(options: Sequence[Options]) -> bool:
    return any(own.variant is not None and own.variant.hadamard is not None for own in options)


def _scale_buffer(
    plan: GroupedPlan, options: Options, shape: tuple[int, ...], xp: Any
) -> tuple[Any, Any]:
    """The scales as the caller gets them, and the flat part of them that members fill."""
    size = plan.scale_offsets[-1]
    if options.scale_layout != GROUPED_LAYOUT:
        whole = xp.empty(size, np.uint8)
        return whole, whole
    whole = xp.empty(one_matrix_shape(plan, shape), np.uint8)
    flat = whole.reshape(-1)
    flat[size:] = 0
    return whole, flat[:size]


def _measured(plan: GroupedPlan, raw: Raw) -> Any:
    """The amaxes of all members if something before gave them and they are what counts, or None."""
    if raw.scan is None or not all(member.has_plain_amax for member in plan.members):
        return None
    return raw.scan[:-1].view(np.float32)


def _second_levels(
    engine: Any,
    plan: GroupedPlan,
    options: Options,
    flat: Any,
    dtype: str,
    given: Any,
    origin: Origin,
) -> Any:
    """The second-level values of all members in the recipe's direction, or None."""
    recipe, count = options.recipe, plan.second_offsets[-1]
    if recipe is None or not options.second_level:
        return None
    if given is None:
        given = arrays.scratch(count, np.float32, origin)
        engine.grouped_amax(plan, flat, dtype, given)
    elif given.size == 1:
        one, given = given, arrays.scratch(count, np.float32, origin)
        given[...] = one
    elif given.size != count:
        raise ShapeError(f"{given.size} second-level scales were passed for {count} members")
    if options.given == recipe.direction or not count:
        return given
    return engine.second_level(given, plan.members[0], dtype)


def _tensor(
    options: Options,
    group: GroupShapes,
    shape: tuple[int, ...],
    raw: Raw,
    packed: Any,
    block_scale: Any,
    second: Any,
    *,
    per_vector: bool,
) -> GroupedTensor:
    recipe, origin = options.recipe, raw.origin
    scale = None if second is None else arrays.emit(second, "float32", origin)
    direction = recipe.direction if recipe is not None else None
    return GroupedTensor(
        packed=arrays.emit(packed, "uint8", origin),
        block_scale=arrays.emit(block_scale, "uint8", origin),
        format=options.format.name,
        dims=group.dims,
        starts=group.starts,
        shape=shape,
        recipe=recipe.name if recipe is not None else None,
        scale_rule=options.scale_rule,
        amax=scale if direction == "amax" else None,
        decode_scale=scale if direction == "decode" else None,
        encode_scale=scale if direction == "encode" else None,
        scale_layout=options.scale_layout,
        nibble_order=options.nibble_order,
        source_dtype=raw.dtype,
        per_vector=per_vector,
        variant=options.variant,
    )


def dequantize_grouped(
    group: GroupedTensor, dtype: str = "float32", *, backend: str | None = None, out: Any = None
) -> Any:
    """Decodes every member into its place in a buffer like the one that was quantized.

    Args:
        group: what :func:`quantize_grouped` gave, one direction of it.
        dtype: `float32`, `float16` or `bfloat16`.
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

    Example:
        >>> import numpy as np
        >>> group = quantize_grouped(np.full((3, 16), 6, np.float32), first_dims=[1, 0, 1])
        >>> dequantize_grouped(group)[:, 0].tolist()
        [6.0, 6.0, 0.0]
    """
    one_of("dtype", dtype, DTYPES)
    if not isinstance(group, GroupedTensor):
        raise OptionError(
            f"a {type(group).__name__} is no group; pass the GroupedTensor that quantize_grouped "
            "returned (one direction of a pair)"
        )
    plan = group.plan
    packed = arrays.ingest_bytes(group.packed, "packed")
    block_scale = arrays.ingest_bytes(group.block_scale, "block_scale")
    origin = packed.origin
    for what, array, wanted in (
        ("packed", packed, (plan.packed_offsets[-1],)),
        ("block_scale", block_scale, group.scale_shape),
    ):
        if tuple(array.data.shape) != wanted:
            raise ShapeError(
                f"{what} has shape {tuple(array.data.shape)}, the group needs {wanted}"
            )
    engine = engine_for(
        "dequantize", origin.device, dtype, group.format, group.recipe, backend, group.variant
    )
    with arrays.device_scope(origin):
        second = group.second_level
        scale = level = None
        if second is not None:
            level = arrays.open_scale(second[1], "the second-level scale", origin)
            scale = arrays.ingest_scale(second[1], "the second-level scale", origin)
            if group.variant is not None and group.variant.per_token:
                scale = per_token_amax(scale, origin)
        read = places(packed=packed.data, block_scale=block_scale.data, second_level=level)
        result = result_buffer(out, group.shape, dtype, origin, read)
        if out is None:
            result[...] = 0
        flat = [
            arrays.contiguous(array.data, origin).reshape(-1) for array in (packed, block_scale)
        ]
        engine.dequantize_grouped(plan, flat[0], flat[1], scale, result.reshape(-1), dtype)
        return out if out is not None else arrays.emit(result, dtype, origin)
