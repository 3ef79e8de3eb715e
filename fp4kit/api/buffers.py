# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Raw input and output buffers of a call: contiguity, devices, `out=`, second-level scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit import arrays
from fp4kit.arrays import Raw
from fp4kit.arrays.frameworks import Origin, torch_array
from fp4kit.arrays.overlap import Place, is_same, place_of, places, refuse_overlap
from fp4kit.backend.interface import Plan
from fp4kit.errors import DtypeError, OptionError, ShapeError
from fp4kit.formats import SECOND_LEVEL_SCALES
from fp4kit.reference.scaling import PER_TOKEN_SMALLEST

from .calls import Call
from .tensor import QuantizedTensor

_SECOND_LEVEL = "the second-level scale of out"


class Target(NamedTuple):
    """Raw views of a reused result, their places, and the call that it was found to fit."""

    call: Call
    packed: Any
    block_scale: Any
    second: Any
    places: tuple[Place, ...]


class Decoding(NamedTuple):
    """What a backend needs to decode a tensor: plan, origin and raw arrays, rows flattened.

    `read` is where the tensor's own arrays lie.
    """

    plan: Plan
    origin: Origin
    packed: Any
    block_scale: Any
    second: Any
    read: tuple[Place, ...]


def in_rows(data: Any, shape: tuple[int, ...]) -> Any:
    """Contiguous data in a two-dimensional shape."""
    return data if data.shape == shape else data.reshape(shape)


def rows_of(raw: Raw, rows: int, cols: int) -> Any:
    """Raw data as a C-contiguous (rows, cols) array; copied on its device only if it must be."""
    return in_rows(arrays.contiguous(raw.data, raw.origin), (rows, cols))


def new_target(call: Call, origin: Origin) -> Target:
    """Arrays for a new result."""
    xp = arrays.array_module(origin)
    packed, block_scale = (
        xp.empty(call.packed_shape, np.uint8),
        xp.empty(call.scale_shape, call.plan.format.scales.dtype),
    )
    return Target(call, packed, block_scale, None, ())


def per_token_amax(amax: Any, origin: Origin) -> Any:
    """The raw amaxes that per-token scales count with: raised to at least 1e-12; NaN stays."""
    with arrays.device_scope(origin):
        raised = arrays.array_module(origin).maximum(amax, PER_TOKEN_SMALLEST)
        return raised if origin.device_kind == "cpu" else arrays.keep_if_captured(raised)


def check_out(buffer: Raw, origin: Origin, what: str) -> None:
    """Refuses an output buffer that is on another device or not C-contiguous and writable.

    Raises:
        DtypeError: for a wrong device.
        ShapeError: for a layout that cannot be written in place.
    """
    if buffer.origin.device != origin.device:
        raise DtypeError(f"{what} lies on {buffer.origin.device}, the input on {origin.device}")
    if not arrays.is_contiguous(buffer.data):
        raise ShapeError(f"{what} must be C-contiguous to be written in place")
    if origin.device_kind == "cpu" and not buffer.data.flags.writeable:
        raise ShapeError(f"{what} is read-only; pass a writable array")


def output_buffers(
    out: QuantizedTensor,
    call: Call,
    shape: tuple[int, ...],
    origin: Origin,
    read: Sequence[Place] = (),
) -> Target:
    """The raw arrays of `out` to write into, after checks that are made once for equal calls.

    Args:
        out: the reused result.
        call: the call that writes to it.
        shape: shape of what is quantized.
        origin: where that lies.
        read: places of all other arrays of the call.

    Raises:
        OptionError: if it was made for another call, or shares memory with another array.
        DtypeError: for arrays on another device.
        ShapeError: for arrays that cannot be written in place.
    """
    if not isinstance(out, QuantizedTensor):
        raise OptionError(
            f"out is a {type(out).__name__}; pass a QuantizedTensor that an equal call returned"
        )
    kept: Target | None = getattr(out, "_target", None)
    if kept is None or kept.call is not call or not _still_writable(out, origin):
        kept = _open_target(out, call, shape, origin)
    codes, second = kept.places[:2], kept.places[2:]
    refuse_overlap(codes, read)
    # The second level may be the very memory that was passed, where it is copied onto itself, or
    # that of another direction, which has the same one then.
    sharable = (_SECOND_LEVEL, *SECOND_LEVEL_SCALES)
    for level in second:
        others = [one for one in read if one.name not in sharable or not is_same(one, level)]
        refuse_overlap(second, others)
    return kept


def _open_target(
    out: QuantizedTensor, call: Call, shape: tuple[int, ...], origin: Origin
) -> Target:
    plan, second = call.plan, out.second_level
    if (out.scheme, out.shape) != (plan.scheme, tuple(shape)):
        raise OptionError(
            f"out was made for {out.scheme!r} of shape {out.shape}, this call needs "
            f"{plan.scheme!r} of shape {tuple(shape)}"
        )
    packed = arrays.ingest_bytes(out.packed, "out.packed")
    check_out(packed, origin, "out.packed")
    block_scale = arrays.ingest_scales(out.block_scale, "out.block_scale", plan.format)
    check_out(block_scale, origin, "out.block_scale")
    level = None
    if second is not None:
        level = arrays.open_scale(second[1], "out", origin)
        if origin.device_kind == "cpu" and not level.flags.writeable:
            raise ShapeError(f"out.{second[0]} is read-only; pass a writable one")
        if level.size != plan.scales:
            raise ShapeError(
                f"out.{second[0]} has {level.size} values, this call makes {plan.scales}"
            )
    members = [
        place_of("out.packed", packed.data),
        place_of("out.block_scale", block_scale.data),
        *([] if level is None else [place_of(_SECOND_LEVEL, level)]),
    ]
    for number, member in enumerate(members):
        refuse_overlap([member], members[:number])
    target = Target(
        call,
        packed.data.reshape(plan.packed_shape),
        block_scale.data.reshape(plan.scale_shape),
        level,
        tuple(members),
    )
    if _keeps_memory(out):
        object.__setattr__(out, "_target", target)
    return target


def _members(q: QuantizedTensor) -> tuple[Any, ...]:
    """The tensor's arrays."""
    second = q.second_level
    return (q.packed, q.block_scale) if second is None else (q.packed, q.block_scale, second[1])


def _still_writable(out: QuantizedTensor, origin: Origin) -> bool:
    """Whether arrays that were writable in an earlier call are so now: NumPy's may change."""
    if origin.device_kind == "cuda":
        return True
    return all(member.flags.writeable for member in _members(out))


def _keeps_memory(q: QuantizedTensor) -> bool:
    """Whether views of the tensor's arrays stay good for as long as the tensor lives."""
    return all(arrays.keeps_memory(member) for member in _members(q))


def result_buffer(
    out: Any,
    shape: tuple[int, ...],
    dtype: str,
    origin: Origin,
    read: Iterable[Place] = (),
    what: str = "out",
    *,
    light: bool = False,
) -> Any:
    """A raw array to write a result into (floats, or uint8): new, or `out` after checks.

    Args:
        out: the caller's array, or None.
        shape: shape of the result.
        dtype: its element type.
        origin: where the input lies.
        read: places of all other arrays of the call.
        what: the argument's name, for messages about them.
        light: see :func:`fp4kit.arrays.ingest`.

    Raises:
        DtypeError: for another device, or elements that cannot be written as they are.
        ShapeError: for another shape or type, or a layout that cannot be written in place.
        OptionError: if it shares memory with another array.
    """
    if out is None:
        return arrays.array_module(origin).empty(shape, arrays.RAW_DTYPES.get(dtype, dtype))
    if dtype == "uint8":
        buffer = arrays.ingest_bytes(out, "out")
    else:
        buffer = arrays.ingest(out, "out", in_place=True, light=light)
    if buffer.dtype != dtype or buffer.data.shape != shape:
        raise ShapeError(f"out is {buffer.dtype} {buffer.data.shape}, the result {dtype} {shape}")
    check_out(buffer, origin, "out")
    refuse_overlap([place_of(what, buffer.data)], read)
    return buffer.data


def result_of(
    out: Any,
    shape: tuple[int, ...],
    dtype: str,
    origin: Origin,
    read: Iterable[Place] = (),
    *,
    light: bool = False,
) -> tuple[Any, Any]:
    """:func:`result_buffer`, and the array that a call returns: None if it is to be emitted.

    The result for a torch tensor on a GPU is torch's own: what a graph of torch captures lies in
    memory that torch keeps for it.
    """
    of_torch = origin.framework == "torch" and origin.device_kind == "cuda"
    if out is None and of_torch and 0 not in shape:
        return torch_array(shape, dtype, origin, light=light)
    return result_buffer(out, shape, dtype, origin, read, light=light), out


def check_is_quantized(q: object) -> None:
    """Refuses what is no quantized tensor.

    Raises:
        OptionError: saying what to pass.
    """
    if not isinstance(q, QuantizedTensor):
        raise OptionError(
            f"a {type(q).__name__} cannot be decoded here; pass the QuantizedTensor that "
            "fp4kit.quantize returned (one direction of a pair; dequantize_grouped takes groups)"
        )


def stored_bytes(q: Any, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Raw, Raw]:
    """Codes and scale bytes of a tensor, raw.

    Args:
        q: a tensor with `packed` and `block_scale`.
        shapes: what they must hold, of whatever shape.

    Raises:
        DtypeError: for elements that are not single bytes, or arrays on two devices.
        ShapeError: for another number of bytes.
    """
    packed = arrays.ingest_bytes(q.packed, "packed")
    block_scale = arrays.ingest_bytes(q.block_scale, "block_scale")
    named = (("packed", packed), ("block_scale", block_scale))
    for (what, array), shape in zip(named, shapes, strict=True):
        if prod(array.data.shape) != prod(shape):
            raise ShapeError(f"{what} has shape {tuple(array.data.shape)}, not that of {shape}")
        if array.origin.device != packed.origin.device:
            raise DtypeError(
                f"{what} lies on {array.origin.device}, packed on {packed.origin.device}"
            )
    return packed, block_scale


def decoding_arrays(q: QuantizedTensor) -> Decoding:
    """The plan and raw arrays that decode `q`; found once if they are views of its arrays."""
    check_is_quantized(q)
    kept: Decoding | None = getattr(q, "_decoding", None)
    if kept is not None:
        return kept
    plan = q.plan()
    packed = arrays.ingest_bytes(q.packed, "packed")
    block_scale = arrays.ingest_scales(q.block_scale, "block_scale", plan.format)
    origin = packed.origin
    if block_scale.origin.device != origin.device:
        raise DtypeError(
            f"packed lies on {origin.device}, block_scale on {block_scale.origin.device}"
        )
    second = q.second_level
    scale, level, views = None, None, True
    if second is not None:
        scale = arrays.ingest_scale(second[1], "the second-level scale", origin)
        level = arrays.open_scale(second[1], "the second-level scale", origin)
        views = arrays.is_contiguous(level) and level.dtype.isnative
        if q.scheme.second_level == "per_token":
            scale, views = per_token_amax(scale, origin), False
    # `reshape` makes new array objects: nobody else can change their shape.
    decoding = Decoding(
        plan,
        origin,
        arrays.contiguous(packed.data, origin).reshape(plan.packed_shape),
        arrays.contiguous(block_scale.data, origin).reshape(plan.scale_shape),
        scale,
        places(packed=packed.data, block_scale=block_scale.data, second_level=level),
    )
    views = views and arrays.is_contiguous(packed.data) and arrays.is_contiguous(block_scale.data)
    if views and _keeps_memory(q):
        object.__setattr__(q, "_decoding", decoding)
    return decoding
