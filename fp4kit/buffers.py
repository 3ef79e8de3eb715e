# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Raw input and output buffers of a call: contiguity, devices, `out=`, second-level scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import arrays
from .arrays import Origin, Raw
from .backends.base import Plan
from .errors import DtypeError, OptionError, ShapeError
from .planning import SCALE_ARGUMENTS, Call, Options
from .scaling import PER_TOKEN_SMALLEST
from .tensor import QuantizedTensor


class Target(NamedTuple):
    """Raw views of a reused result, and the call that it was found to fit."""

    call: Call
    packed: Any
    block_scale: Any
    second: Any


class Decoding(NamedTuple):
    """What a backend needs to decode a tensor: plan, origin and raw arrays, rows flattened."""

    plan: Plan
    origin: Origin
    packed: Any
    block_scale: Any
    second: Any


def in_rows(data: Any, shape: tuple[int, ...]) -> Any:
    """Contiguous data in a two-dimensional shape."""
    return data if data.shape == shape else data.reshape(shape)


def rows_of(raw: Raw, rows: int, cols: int) -> Any:
    """Raw data as a C-contiguous (rows, cols) array; copied on its device only if it must be."""
    return in_rows(arrays.contiguous(raw.data, raw.origin), (rows, cols))


def given_second_level(
    options: Options, amax: Any, decode_scale: Any, encode_scale: Any, origin: Origin
) -> Any:
    """The raw float32 array of the one scale the caller passed, or None."""
    if options.given is None:
        return None
    value = amax
    if options.given != "amax":
        value = decode_scale if options.given == "decode" else encode_scale
    return arrays.ingest_scale(value, SCALE_ARGUMENTS[options.given], origin)


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
    out: QuantizedTensor, call: Call, shape: tuple[int, ...], origin: Origin
) -> Target:
    """The raw arrays of `out` to write into, after checks that are made once for equal calls.

    `shape` and `origin` are those of what is quantized.
    """
    kept: Target | None = getattr(out, "_target", None)
    if kept is not None and kept.call is call and _still_writable(out, origin):
        return kept
    plan = call.plan
    wanted = (
        plan.format.name,
        tuple(shape),
        plan.recipe and plan.recipe.name,
        plan.scale_rule,
        plan.scale_layout,
        plan.nibble_order,
        plan.has_second_level,
        plan.variant,
    )
    second = out.second_level
    got = (
        out.format,
        out.shape,
        out.recipe,
        out.scale_rule,
        out.scale_layout,
        out.nibble_order,
        second is not None,
        out.variant,
    )
    if wanted != got:
        raise OptionError(f"out was made for {got}, this call needs {wanted}")
    packed = arrays.ingest_bytes(out.packed, "out.packed")
    check_out(packed, origin, "out.packed")
    block_scale = arrays.ingest_bytes(out.block_scale, "out.block_scale")
    check_out(block_scale, origin, "out.block_scale")
    target = Target(
        call,
        packed.data.reshape(plan.packed_shape),
        block_scale.data.reshape(plan.scale_shape),
        None if second is None else arrays.open_scale(second[1], "out", origin),
    )
    if _keeps_memory(out):
        object.__setattr__(out, "_target", target)
    return target


def _still_writable(out: QuantizedTensor, origin: Origin) -> bool:
    """Whether arrays that were writable in an earlier call are so now: NumPy's may change."""
    if origin.device_kind == "cuda":
        return True
    return bool(out.packed.flags.writeable and out.block_scale.flags.writeable)


def _keeps_memory(q: QuantizedTensor) -> bool:
    """Whether views of the tensor's arrays stay good for as long as the tensor lives."""
    second = q.second_level
    members = (q.packed, q.block_scale) if second is None else (q.packed, q.block_scale, second[1])
    return all(arrays.keeps_memory(member) for member in members)


def result_buffer(out: Any, shape: tuple[int, ...], dtype: str, origin: Origin) -> Any:
    """A raw array to write a result into (floats, or uint8): new, or `out` after checks.

    Raises:
        DtypeError: for another device, or elements that cannot be written as they are.
        ShapeError: for another shape or type, or a layout that cannot be written in place.
    """
    if out is None:
        return arrays.array_module(origin).empty(shape, arrays.RAW_DTYPES.get(dtype, dtype))
    buffer = arrays.ingest_bytes(out, "out") if dtype == "uint8" else arrays.ingest(out, "out")
    if isinstance(out, np.ndarray) and not out.dtype.isnative:
        # `ingest` has copied it: what is written there would be lost.
        raise DtypeError(f"out is {out.dtype.str}; it must be {dtype} in native byte order")
    if buffer.dtype != dtype or buffer.data.shape != shape:
        raise ShapeError(f"out is {buffer.dtype} {buffer.data.shape}, the result {dtype} {shape}")
    check_out(buffer, origin, "out")
    return buffer.data


def decoding_arrays(q: QuantizedTensor) -> Decoding:
    """The plan and raw arrays that decode `q`; found once if they are views of its arrays."""
    kept: Decoding | None = getattr(q, "_decoding", None)
    if kept is not None:
        return kept
    plan = q.plan()
    packed = arrays.ingest_bytes(q.packed, "packed")
    block_scale = arrays.ingest_bytes(q.block_scale, "block_scale")
    origin = packed.origin
    if block_scale.origin.device != origin.device:
        raise DtypeError(
            f"packed lies on {origin.device}, block_scale on {block_scale.origin.device}"
        )
    second = q.second_level
    scale, views = None, True
    if second is not None:
        scale = arrays.ingest_scale(second[1], "the second-level scale", origin)
        views = arrays.is_contiguous(arrays.open_scale(second[1], "", origin))
        if q.variant is not None and q.variant.per_token:
            scale, views = per_token_amax(scale, origin), False
    # `reshape` makes new array objects: nobody else can change their shape.
    decoding = Decoding(
        plan,
        origin,
        arrays.contiguous(packed.data, origin).reshape(plan.packed_shape),
        arrays.contiguous(block_scale.data, origin).reshape(plan.scale_shape),
        scale,
    )
    views = views and arrays.is_contiguous(packed.data) and arrays.is_contiguous(block_scale.data)
    if views and _keeps_memory(q):
        object.__setattr__(q, "_decoding", decoding)
    return decoding
