# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantization with residual channels: what 4 bits lose of the last channels, in 4 more bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import numpy as np

from fp4kit import arrays
from fp4kit.arrays import Raw
from fp4kit.arrays.dtypes import dtype_name
from fp4kit.arrays.index_arrays import as_shape, host_integers, ingest_integers
from fp4kit.arrays.overlap import places
from fp4kit.arrays.torch_rules import leave_uncompiled
from fp4kit.backend.interface import Job
from fp4kit.backend.operations import ResidualPlan
from fp4kit.errors import OptionError, ShapeError, brief
from fp4kit.formats import NIBBLE_ORDERS, NVFP4, SCALE_LAYOUTS, one_of
from fp4kit.scheme import Scheme

from .backends import engine_for
from .buffers import in_rows, result_buffer, rows_of, stored_bytes
from .calls import NONFINITE_POLICIES
from .measure import check_finite
from .stored_tensor import StoredTensor
from .tensor import QuantizedTensor

#: What residuals are quantized by.
NVFUSER = Scheme("nvfp4", recipe="nvfuser").parts[0]
MODES = ("activation", "weight")
LAYOUTS = ("interleaved", "appended")


@dataclass(frozen=True, eq=False, repr=False)
class ResidualTensor(StoredTensor):
    """An nvfp4 tensor (..., K) with residual blocks for its last channels.

    Attributes:
        packed: uint8 codes (..., (K + residual_channels) / 2).
        block_scale: uint8 E4M3 scales of K + residual_channels channels.
        encode_scale: float32 (1,), 2688/amax.
        shape: logical shape (..., K).
        residual_channels: how many of the last channels have residuals.
        mode: `activation` or `weight`.
        layout: `interleaved` or `appended`.
        order: int64 (K,): channel j of the codes is channel order[j] of the array, or None.
        scale_layout: order of the block scales.
        nibble_order: `low_first` or `high_first`.
        source_dtype: element type that was quantized.
        rounds: whether scaled values and residuals were rounded to bfloat16.
    """

    _ARRAYS: ClassVar[tuple[str, ...]] = ("packed", "block_scale", "encode_scale", "order")

    packed: Any
    block_scale: Any
    encode_scale: Any
    shape: tuple[int, ...]
    residual_channels: int
    mode: str = "activation"
    layout: str = "interleaved"
    order: Any = None
    scale_layout: str = "swizzled_128x4"
    nibble_order: str = "low_first"
    source_dtype: str = "float32"
    rounds: bool = False

    @property
    def format(self) -> str:
        """Name of the format."""
        return NVFP4.name

    def _named(self) -> list[str]:
        names = ("residual_channels", "mode", "layout", "scale_layout", "nibble_order")
        fields = self.__dataclass_fields__
        shown = (name for name in names if getattr(self, name) != fields[name].default)
        return [repr(self.format), *(f"{name}={getattr(self, name)!r}" for name in shown)]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> ResidualTensor:
        """Some rows, as of a :class:`QuantizedTensor`; all channels, as residuals belong to them.

        Raises:
            OptionError: for parts that cannot be views, with what is possible.
            IndexError: for numbers out of range, or too many.
        """
        whole = self.as_tensor()
        part = whole[index]
        if part.shape[-1] != whole.shape[-1]:
            raise OptionError(
                "a tensor with residuals is cut along rows alone: leave the last axis"
            )
        return replace(
            self,
            packed=part.packed,
            block_scale=part.block_scale,
            shape=(*part.shape[:-1], self.shape[-1]),
        )

    def dequantize(
        self, dtype: Any = "float32", *, backend: str | None = None, out: Any = None
    ) -> Any:
        """The decoded values: see :func:`fp4kit.dequantize_residual`."""
        return dequantize_residual(self, dtype, backend=backend, out=out)

    @cached_property
    def plan(self) -> ResidualPlan:
        """The plan that decodes this tensor.

        Raises:
            OptionError: for unknown options.
            ShapeError: for channels that are no multiples of 16.
        """
        return residual_plan(
            self.shape,
            self.residual_channels,
            self.mode,
            self.layout,
            self.scale_layout,
            self.nibble_order,
            self.rounds,
        )

    def as_tensor(self) -> QuantizedTensor:
        """All blocks in the order they are stored, as a matrix product takes them."""
        return QuantizedTensor(
            self.packed,
            self.block_scale,
            "nvfp4",
            (*self.shape[:-1], self.shape[-1] + self.residual_channels),
            recipe="nvfuser",
            encode_scale=self.encode_scale,
            scale_layout=self.scale_layout,
            nibble_order=self.nibble_order,
            source_dtype=self.source_dtype,
        )


def residual_plan(
    shape: tuple[int, ...],
    channels: int,
    mode: str,
    layout: str,
    scale_layout: str,
    nibble_order: str,
    rounds: bool,
) -> ResidualPlan:
    """Checks the options of a call against a shape.

    Raises:
        OptionError: for unknown options.
        ShapeError: for channels that are no multiples of 16, or more than there are.
    """
    one_of("mode", mode, MODES)
    one_of("layout", layout, LAYOUTS)
    one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    one_of("nibble_order", nibble_order, NIBBLE_ORDERS)
    size = NVFP4.block_size
    shape = as_shape(shape)
    if not shape or shape[-1] % size:
        raise ShapeError(f"residuals need a last axis that is a multiple of {size}, got {shape}")
    if isinstance(channels, bool) or not isinstance(channels, (int, np.integer)):
        raise OptionError(f"residual_channels={brief(channels)} is not a number")
    if channels % size or not 0 <= channels <= shape[-1]:
        raise ShapeError(
            f"residual_channels={channels} must be a multiple of {size} from 0 to {shape[-1]}"
        )
    return ResidualPlan(
        prod(shape[:-1]), shape[-1], int(channels), mode, layout, scale_layout, nibble_order, rounds
    )


def _channel_order(reorder: Any, cols: int, raw: Raw, waits: bool) -> Any:
    """The raw int64 order of channels on the device of `raw`.

    What the host holds is always checked. An order on a GPU is only where the call waits anyway:
    kernels take a channel that there is not as the last one, so that none reads or writes outside.

    Args:
        reorder: array or sequence of integers.
        cols: number of channels.
        raw: the array that is reordered.
        waits: whether the call may wait for the stream.

    Raises:
        DtypeError: if it is no array of integers, or lies on another device.
        ShapeError: if it is no permutation of the channels.
    """
    origin = raw.origin
    checked: Any = None
    if isinstance(reorder, (list, tuple)):
        checked = host_integers(reorder, "reorder")
    order = ingest_integers(reorder, "reorder", origin)
    if checked is None and (waits or origin.device_kind == "cpu"):
        checked = order
    fits = order.shape == (cols,)
    if fits and checked is not None:
        xp = np if isinstance(checked, np.ndarray) else arrays.array_module(origin)
        fits = bool((xp.sort(checked) == xp.arange(cols)).all())
    if not fits:
        raise ShapeError(
            f"reorder must hold each channel 0 .. {cols - 1} once, got shape {tuple(order.shape)}"
        )
    return order


@leave_uncompiled
def quantize_residual(
    x: Any,
    residual_channels: int,
    *,
    mode: str = "activation",
    layout: str = "interleaved",
    amax: Any = None,
    encode_scale: Any = None,
    reorder: Any = None,
    intermediate: str | None = None,
    scale_layout: str = "swizzled_128x4",
    nibble_order: str = "low_first",
    nonfinite: str = "raise",
    backend: str | None = None,
) -> ResidualTensor:
    """Quantizes to nvfp4 and quantizes what that loses of the last channels as well.

    The formulas are those of TensorRT-LLM's `fp4_quantize_with_residual` (ARCQuant). An activation
    stores residuals, the weight it is multiplied with stores its blocks twice: the product of the
    two, over K + residual_channels channels, then contains the residuals.

    Args:
        x: float32, float16 or bfloat16 array (..., K), K a multiple of 16.
        residual_channels: how many of the last channels get residuals: a multiple of 16.
        mode: `activation` or `weight`.
        layout: `interleaved` (TensorRT-LLM: each residual block behind its main block) or
            `appended` (the paper: all residual blocks behind all main blocks).
        amax: largest magnitude that the second-level scale is made from: a float, or a float32
            array on the device of `x`. None measures it.
        encode_scale: instead of amax, 2688/amax itself.
        reorder: int32 or int64 array (K,), a permutation: channel j of the codes is channel
            reorder[j] of `x`, so that the channels with the largest errors come last. Checked, but
            on a GPU under `nonfinite="propagate"` only if it is a list, as a check there would have
            to wait for the stream. Of an array that is no permutation the result then is
            unspecified; nothing outside of the arrays is read or written.
        intermediate: `float32`, or `bfloat16` to round scaled values and residuals as TensorRT-LLM
            does when it reorders. None is `bfloat16` with `reorder`, else `float32`.
        scale_layout: `linear`, `swizzled_128x4` or `swizzled_8x4`.
        nibble_order: `low_first` or `high_first`.
        nonfinite: as in :func:`fp4kit.quantize`.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.

    Returns:
        A :class:`ResidualTensor`.

    Raises:
        OptionError: for unknown or contradictory options.
        ShapeError: if K or residual_channels is not a multiple of 16, or reorder no permutation.
        DtypeError: for other element types.
        NonFiniteError: under `nonfinite="raise"`.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> q = quantize_residual(np.ones((1, 32), np.float32), 16)
        >>> q.packed.shape, q.as_tensor().shape
        ((1, 24), (1, 48))
    """
    raw = arrays.ingest(x)
    shape, dtype, origin = tuple(raw.data.shape), raw.dtype, raw.origin
    one_of("nonfinite", nonfinite, NONFINITE_POLICIES)
    if amax is not None and encode_scale is not None:
        raise OptionError("pass one of amax, encode_scale, not both")
    if intermediate is None:
        intermediate = "float32" if reorder is None else "bfloat16"
    rounds = one_of("intermediate", intermediate, ("float32", "bfloat16")) == "bfloat16"
    plan = residual_plan(shape, residual_channels, mode, layout, scale_layout, nibble_order, rounds)
    engine = engine_for("quantize_residual", origin.device, dtype, NVFUSER, backend)
    lead = shape[:-1]
    with arrays.device_scope(origin):
        xp = arrays.array_module(origin)
        order = None
        if reorder is not None:
            order = _channel_order(reorder, plan.cols, raw, nonfinite == "raise")
        rows = rows_of(raw, plan.rows, plan.cols)
        measured = None
        if nonfinite == "raise" and plan.rows and plan.cols:
            measured = check_finite(engine, rows, dtype, shape, "x")
        if encode_scale is not None:
            scale = arrays.ingest_scale(encode_scale, "encode_scale", origin)
        else:
            if amax is not None:
                measured = arrays.ingest_scale(amax, "amax", origin)
            elif measured is None:
                measured = engine.amax(rows, dtype, 1)
            scale = engine.convert_second_level(measured, "amax", "encode_scale")
        if scale.size != 1:
            raise ShapeError(f"residuals take one second-level scale, got {scale.size}")
        linear = scale_layout == "linear"
        packed = xp.empty((*lead, plan.packed_shape[1]), np.uint8)
        block_scale = xp.empty((*lead, plan.blocks) if linear else plan.scale_shape, np.uint8)
        if plan.rows and plan.cols:
            targets = in_rows(packed, plan.packed_shape), in_rows(block_scale, plan.scale_shape)
            engine.quantize_residual(Job(plan, rows, dtype, scale, *targets), order)
        return ResidualTensor(
            packed=arrays.emit(packed, "uint8", origin),
            block_scale=arrays.emit(block_scale, "uint8", origin),
            encode_scale=arrays.emit(scale, "float32", origin),
            shape=shape,
            residual_channels=plan.residual,
            mode=mode,
            layout=layout,
            order=reorder,
            scale_layout=scale_layout,
            nibble_order=nibble_order,
            source_dtype=dtype,
            rounds=rounds,
        )


@leave_uncompiled
def dequantize_residual(
    q: ResidualTensor, dtype: Any = "float32", *, backend: str | None = None, out: Any = None
) -> Any:
    """Decodes a tensor with residuals; :func:`fp4kit.dequantize` does the same.

    Main and residual values are added in float32 (a weight's copies are not), divided by the
    encode scale and rounded once to `dtype`; reordered channels go back to their places. On a GPU
    nothing waits: an order there is not checked again.

    Args:
        q: what :func:`quantize_residual` gave.
        dtype: `float32`, `float16` or `bfloat16`, by name or as a dtype of any framework.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous array of `q.shape` and `dtype` to write into.

    Returns:
        Array of shape `q.shape` in the framework and on the device of `q.packed` (or `out`).

    Raises:
        OptionError: for an unknown dtype.
        ShapeError: if the arrays, or `out`, do not fit.
        DtypeError: if the arrays lie on different devices.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> x = np.full((1, 16), 5.1, np.float32)
        >>> x[0, 0] = 6
        >>> [round(float(dequantize_residual(quantize_residual(x, n))[0, 1]), 3) for n in (0, 16)]
        [6.0, 5.143]
    """
    dtype = dtype_name(dtype)
    if not isinstance(q, ResidualTensor):
        raise OptionError(
            f"a {type(q).__name__} has no residuals; pass the ResidualTensor that "
            "quantize_residual returned"
        )
    plan = q.plan
    packed, block_scale = stored_bytes(q, (plan.packed_shape, plan.scale_shape))
    origin = packed.origin
    engine = engine_for("dequantize_residual", origin.device, dtype, NVFUSER, backend)
    with arrays.device_scope(origin):
        order = None
        if q.order is not None:
            order = _channel_order(q.order, plan.cols, packed, False)
        scale = arrays.ingest_scale(q.encode_scale, "encode_scale", origin)
        level = None
        if not isinstance(q.encode_scale, (int, float)):
            level = arrays.open_scale(q.encode_scale, "encode_scale", origin)
        read = places(
            packed=packed.data, block_scale=block_scale.data, encode_scale=level, order=order
        )
        result = result_buffer(out, tuple(q.shape), dtype, origin, read)
        if plan.rows and plan.cols:
            job = Job(
                plan,
                None,
                dtype,
                scale,
                arrays.contiguous(packed.data, origin).reshape(plan.packed_shape),
                arrays.contiguous(block_scale.data, origin).reshape(plan.scale_shape),
            )
            target = in_rows(result, (plan.rows, plan.cols))
            engine.dequantize_residual(job, order, target, dtype)
        return out if out is not None else arrays.emit(result, dtype, origin)
