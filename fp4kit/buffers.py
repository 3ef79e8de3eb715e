# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Raw input and output buffers of a call: contiguity, devices, `out=`, second-level scales."""

from __future__ import annotations

from typing import Any

from . import arrays
from .arrays import Origin, Raw
from .backends.base import Plan
from .errors import DtypeError, OptionError, ShapeError
from .formats import Recipe
from .tensor import QuantizedTensor


def rows_of(raw: Raw, rows: int, cols: int) -> Any:
    """Raw data as a C-contiguous (rows, cols) array; copied on its device only if it must be."""
    xp = arrays.array_module(raw.origin)
    return xp.ascontiguousarray(raw.data).reshape(rows, cols)


def given_second_level(
    recipe: Recipe, given: dict[str, Any], origin: Origin
) -> tuple[str, Any] | None:
    """(direction, raw float32 array) of the one scale the caller passed, or None.

    Raises:
        OptionError: if several were passed, or one in a direction the recipe cannot take.
    """
    passed = [(name, value) for name, value in given.items() if value is not None]
    if not passed:
        return None
    names = {"amax": "amax", "decode": "decode_scale", "encode": "encode_scale"}
    if len(passed) > 1:
        raise OptionError(f"pass one of {', '.join(names[name] for name, _ in passed)}, not all")
    direction, value = passed[0]
    if direction not in ("amax", recipe.direction):
        raise OptionError(
            f"recipe {recipe.name} takes amax or {names[recipe.direction]}, not "
            f"{names[direction]}; the two are not exact inverses, so convert on purpose"
        )
    return direction, arrays.ingest_scale(value, names[direction], origin)


def check_out(buffer: Raw, origin: Origin, what: str) -> None:
    """Refuses an output buffer that is on another device or not C-contiguous and writable.

    Raises:
        DtypeError: for a wrong device.
        ShapeError: for a layout that cannot be written in place.
    """
    if buffer.origin.device != origin.device:
        raise DtypeError(f"{what} lies on {buffer.origin.device}, the input on {origin.device}")
    if not buffer.data.flags.c_contiguous:
        raise ShapeError(f"{what} must be C-contiguous to be written in place")
    if not getattr(buffer.data.flags, "writeable", True):
        raise ShapeError(f"{what} is read-only; pass a writable array")


def output_buffers(
    out: QuantizedTensor | None, plan: Plan, raw: Raw, shapes: tuple[tuple[int, ...], ...]
) -> tuple[Any, Any]:
    """Raw uint8 (packed, block_scale) to write into: new, or those of `out` after checks."""
    xp = arrays.array_module(raw.origin)
    if out is None:
        return xp.empty(shapes[0], "uint8"), xp.empty(shapes[1], "uint8")
    wanted = (
        plan.format.name,
        tuple(raw.data.shape),
        plan.recipe and plan.recipe.name,
        plan.scale_rule,
        plan.scale_layout,
        plan.nibble_order,
        plan.has_second_level,
    )
    got = (
        out.format,
        out.shape,
        out.recipe,
        out.scale_rule,
        out.scale_layout,
        out.nibble_order,
        out.second_level is not None,
    )
    if wanted != got:
        raise OptionError(f"out was made for {got}, this call needs {wanted}")
    buffers = []
    for what, array in (("out.packed", out.packed), ("out.block_scale", out.block_scale)):
        buffer = arrays.ingest_bytes(array, what)
        check_out(buffer, raw.origin, what)
        buffers.append(buffer.data)
    return buffers[0], buffers[1]


def store_second_level(out: QuantizedTensor, second: Any, origin: Origin) -> None:
    """Overwrites the second-level scale of a reused result, on its device."""
    current = out.second_level
    if current is not None:
        arrays.ingest_scale(current[1], "out", origin)[...] = second


def result_buffer(out: Any, shape: tuple[int, ...], dtype: str, origin: Origin) -> Any:
    """A raw array to write floats into: new, or `out` after checks."""
    if out is None:
        return arrays.array_module(origin).empty(shape, arrays.RAW_DTYPES[dtype])
    buffer = arrays.ingest(out, "out")
    check_out(buffer, origin, "out")
    if buffer.dtype != dtype or tuple(buffer.data.shape) != tuple(shape):
        raise ShapeError(
            f"out is {buffer.dtype} {tuple(buffer.data.shape)}, the result {dtype} {tuple(shape)}"
        )
    return buffer.data


def decoding_arrays(q: QuantizedTensor) -> tuple[Plan, Origin, Any, Any, Any]:
    """(plan, origin, packed (rows, .), block_scale (plan.scale_shape), second level or None)."""
    plan = q.plan()
    packed = arrays.ingest_bytes(q.packed, "packed")
    block_scale = arrays.ingest_bytes(q.block_scale, "block_scale")
    if block_scale.origin.device != packed.origin.device:
        raise DtypeError(
            f"packed lies on {packed.origin.device}, block_scale on {block_scale.origin.device}"
        )
    second = q.second_level
    scale = None
    if second is not None:
        scale = arrays.ingest_scale(second[1], "the second-level scale", packed.origin)
    with arrays.device_scope(packed.origin):
        return (
            plan,
            packed.origin,
            rows_of(packed, *plan.packed_shape),
            rows_of(block_scale, *plan.scale_shape),
            scale,
        )
