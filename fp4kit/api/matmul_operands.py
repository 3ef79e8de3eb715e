# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays and tensors as operands of a product: (rows, depth), blocks along the depth."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit import arrays
from fp4kit.arrays.frameworks import Origin
from fp4kit.arrays.index_arrays import ingest_integers
from fp4kit.arrays.overlap import Place, place_of, places
from fp4kit.backend.matmul import FloatOperand, Operand, PreparedOperand, QuantizedOperand
from fp4kit.errors import DtypeError, OptionError, ShapeError
from fp4kit.reference.scaling import second_level_range
from fp4kit.scheme import Scheme

from .buffers import Decoding, decoding_arrays, per_token_amax, rows_of
from .prepared import PreparedTensor
from .residual import ResidualTensor
from .tensor import QuantizedTensor
from .torch_weights import of_lasting


class Opened(NamedTuple):
    """An operand, and what a call needs to know of where it comes from.

    Attributes:
        operand: as backends take it.
        origin: framework and device.
        read: where its arrays lie.
        lead: axes that it gives to the product.
        dtype: its element type, or the one that was quantized.
        scheme: how it was quantized, or None.
    """

    operand: Operand
    origin: Origin
    read: tuple[Place, ...]
    lead: tuple[int, ...]
    dtype: str
    scheme: Scheme | None


def open_quantized(q: QuantizedTensor) -> Opened:
    """A quantized tensor as an operand; found once if its arrays stay the same memory.

    Raises:
        DtypeError: for arrays on several devices.
        ShapeError: for arrays that do not fit its shape.
    """
    kept: Opened | None = getattr(q, "_operand", None)
    if kept is not None:
        return kept
    decoding = decoding_arrays(q)
    columnwise = q.scheme.direction == "columnwise"
    lead = q.shape[-1:] if columnwise else q.shape[:-1]
    operand = _operand(q, decoding)
    opened = Opened(operand, decoding.origin, decoding.read, lead, q.source_dtype, q.scheme)
    if getattr(q, "_decoding", None) is not None:
        object.__setattr__(q, "_operand", opened)
    return opened


def _level_range(scheme: Scheme, second: tuple[str, Any] | None) -> float:
    """What the second level of a tensor divides products by: only amaxes are not factors."""
    if second is None or second[0] != "amax":
        return 1.0
    return float(second_level_range(scheme.e4m3_max))


def _operand(q: QuantizedTensor, decoding: Decoding) -> QuantizedOperand:
    plan, scheme, second = decoding.plan, q.scheme, q.second_level
    block_scale, grid_scale, level = decoding.block_scale, None, decoding.second
    if plan.grid is not None:
        shared, block_scale = block_scale, None
        if scheme.granularity == "block":
            grid_scale = shared
        else:
            level = shared.reshape(-1)
    name = "amax" if second is None else second[0]
    return QuantizedOperand(
        format=plan.format,
        rows=plan.vectors,
        depth=plan.length,
        packed=decoding.packed,
        block_scale=block_scale,
        scale_layout=plan.scale_layout,
        low_first=plan.nibble_order == "low_first",
        transposed=plan.is_columnwise and not plan.transposes,
        grid_scale=grid_scale,
        level=level,
        level_name=name,
        level_range=_level_range(scheme, second),
        kept={},
    )


def open_prepared(q: PreparedTensor) -> Opened:
    """Prepared weights as an operand; found once if their tiles stay the same memory."""
    kept: Opened | None = getattr(q, "_operand", None)
    if kept is not None:
        return kept
    plan, second = q.plan(), q.second_level
    raw = arrays.ingest_bytes(q.tiles, "tiles")
    level, name = None, "amax"
    if second is not None:
        name = second[0]
        level = arrays.ingest_scale(second[1], "the second-level scale", raw.origin)
        if q.scheme.second_level == "per_token":
            level = per_token_amax(level, raw.origin)
    operand = PreparedOperand(
        format=plan.format,
        rows=plan.vectors,
        depth=plan.length,
        tiles=arrays.contiguous(raw.data, raw.origin),
        is_plain=q.is_plain,
        level=level,
        level_name=name,
        level_range=_level_range(q.scheme, second),
        kept={},
    )
    lead = q.shape[-1:] if plan.is_columnwise else q.shape[:-1]
    read = places(tiles=raw.data, second_level=level)
    opened = Opened(operand, raw.origin, read, lead, q.source_dtype, q.scheme)
    lasting = [q.tiles] if second is None else [q.tiles, second[1]]
    if all(map(arrays.keeps_memory, lasting)) and arrays.is_contiguous(raw.data):
        object.__setattr__(q, "_operand", opened)
    return opened


def open_weights(b: QuantizedTensor | PreparedTensor) -> Opened:
    """:func:`open_prepared` or :func:`open_quantized`."""
    return open_prepared(b) if isinstance(b, PreparedTensor) else open_quantized(b)


def weights_beside(b: QuantizedTensor | PreparedTensor, origin: Origin) -> Opened:
    """:func:`open_weights`; what that computes is done on the stream of the other operand."""
    if origin.framework == "torch":
        b = of_lasting(b)
    kept: Opened | None = getattr(b, "_operand", None)
    if kept is not None:
        return kept
    with arrays.device_scope(origin):
        return open_weights(b)


def open_float(a: Any, what: str, *, light: bool = False) -> Opened:
    """A float array (..., depth) as an operand; copied on its device only if it must be.

    Args:
        a: the array.
        what: the argument's name, for messages.
        light: see :func:`fp4kit.arrays.ingest`.

    Raises:
        DtypeError: for another element type.
        ShapeError: for an array without axes.
    """
    data, dtype, origin, _ = raw = arrays.ingest(a, what, light=light)
    shape = tuple(data.shape)
    if not shape:
        raise ShapeError(f"{what} has shape (); its last axis is the one that is summed")
    rows = rows_of(raw, prod(shape[:-1]), shape[-1])
    read = (place_of(what, data),)
    return Opened(FloatOperand(rows, dtype), origin, read, shape[:-1], dtype, None)


def open_residual(q: ResidualTensor) -> Opened:
    """All blocks of a tensor with residual channels, in the order they are stored."""
    opened = open_quantized(q.as_tensor())
    return opened._replace(lead=tuple(q.shape[:-1]), dtype=q.source_dtype)


def expanded(a: Opened, q: ResidualTensor, what: str) -> Opened:
    """A float operand in the order of the blocks of `q`, its channels where their blocks stand.

    A residual block is multiplied with the same channels as its main block, the copy of a main
    block (mode `weight`) with zeros: the product is that with the decoded values.

    Raises:
        ShapeError: if it has not as many channels.
    """
    plan, origin = q.plan, a.origin
    check_depth(a.operand.depth, plan.cols, what, "the tensor with residual channels")
    assert isinstance(a.operand, FloatOperand)
    blocks, size = np.arange(plan.main_blocks), plan.cols // max(plan.main_blocks, 1)

    def channels(place: Callable[[int], int], numbers: np.ndarray) -> np.ndarray:
        starts = np.array([place(int(number)) for number in numbers], np.int64) * size
        return (starts[:, None] + np.arange(size)).reshape(-1)

    with arrays.device_scope(origin):
        xp = arrays.array_module(origin)
        data = a.operand.data
        if q.order is not None:
            data = data[:, ingest_integers(q.order, "order", origin)]
        whole = xp.zeros((a.operand.rows, plan.cols + plan.residual), data.dtype)
        whole[:, xp.asarray(channels(plan.main_place, blocks))] = data
        if plan.mode == "activation" and plan.residual:
            places_of = xp.asarray(channels(plan.residual_place, blocks[plan.first :]))
            whole[:, places_of] = data[:, plan.first * size :]
        if origin.device_kind == "cuda":
            arrays.keep_if_captured(whole)
    return a._replace(operand=a.operand._replace(data=whole))


def check_depth(of_a: int, of_b: int, a: str, b: str) -> None:
    """Refuses operands whose summed axes differ.

    Raises:
        ShapeError: naming both.
    """
    if of_a != of_b:
        raise ShapeError(
            f"{a} has {of_a} elements along the axis that is summed, {b} has {of_b}; rowwise "
            "tensors (rows, K) are summed along their last axis, columnwise ones (K, rows) along "
            "their first"
        )


def check_rotation(a: Scheme | None, b: Scheme | None) -> None:
    """Refuses a product of a rotated operand and one that is not rotated alike.

    The same rotation of both leaves every product as it is.

    Raises:
        OptionError: naming the masks.
    """
    masks = [None if scheme is None else scheme.rht for scheme in (a, b)]
    if masks[0] != masks[1]:
        words = ["not rotated" if mask is None else f"rotated with rht={mask:#x}" for mask in masks]
        raise OptionError(
            f"a is {words[0]}, b is {words[1]}: their product is not that of the original numbers; "
            "quantize both with the same rht, or neither"
        )


def check_residual(a: ResidualTensor, b: ResidualTensor) -> None:
    """Refuses residual tensors whose blocks do not belong together.

    Raises:
        OptionError: saying what differs.
    """
    if {a.mode, b.mode} != {"activation", "weight"}:
        raise OptionError(
            f"both operands have mode={a.mode!r}; of a product, one is an activation with its "
            "residuals and the other a weight with its blocks twice"
        )
    for name in ("residual_channels", "layout"):
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            raise OptionError(f"a has {name}={mine!r}, b has {theirs!r}; they must be alike")
    if (a.order is None) != (b.order is None):
        raise OptionError("one operand is reordered and the other is not; pass both one order")
    if a.order is None or a.order is b.order:
        return
    origin = arrays.ingest_bytes(a.packed, "a.packed").origin
    orders = [ingest_integers(one.order, "order", origin) for one in (a, b)]
    # On a GPU this would have to wait for the stream.
    if origin.device_kind == "cpu" and not np.array_equal(orders[0], orders[1]):
        raise OptionError("a and b are reordered differently; pass both the same order")


def same_device(first: Origin, second: Origin, names: tuple[str, str]) -> None:
    """Refuses arrays on two devices.

    Raises:
        DtypeError: naming both.
    """
    if first.device != second.device:
        raise DtypeError(
            f"{names[1]} lies on {second.device}, {names[0]} on {first.device}; move it there "
            "first (fp4kit never copies between devices on its own)"
        )


def addend(
    x: Any, what: str, shape: tuple[int, ...], origin: Origin, *, light: bool = False
) -> tuple[Any, str, Place]:
    """A raw array to add to a product, its element type and place.

    Args:
        x: the array.
        what: the argument's name, for messages.
        shape: what it must have.
        origin: where the operands lie.
        light: see :func:`fp4kit.arrays.ingest`.

    Raises:
        DtypeError: for another element type or device.
        ShapeError: for another shape.
    """
    raw = arrays.ingest(x, what, light=light)
    same_device(origin, raw.origin, ("the operands", what))
    if tuple(raw.data.shape) != shape:
        raise ShapeError(f"{what} has shape {tuple(raw.data.shape)}, the product takes {shape}")
    return arrays.contiguous(raw.data, origin), raw.dtype, place_of(what, raw.data)
