# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantize and dequantize arrays: validate, choose a backend, allocate, call, hand back."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from . import arrays
from .backends import engine_for
from .backends.base import Backend
from .buffers import (
    decoding_arrays,
    given_second_level,
    in_rows,
    output_buffers,
    result_buffer,
    rows_of,
)
from .errors import NonFiniteError
from .formats import DTYPES, one_of
from .planning import Call, quantize_call, quantize_options
from .tensor import QuantizedTensor


def check_finite(engine: Backend, x: Any, dtype: str, shape: tuple[int, ...], what: str) -> Any:
    """The amax of `x` (float32 (1,)) if all of it is finite.

    Raises:
        NonFiniteError: naming the array, the counts and the first index.
    """
    amax_value, finite = engine.scan(x, dtype)
    if finite:
        return amax_value
    nans, infinities, first = engine.count_nonfinite(x, dtype)
    index = []
    for size in reversed(shape):
        index.append(first % size)
        first //= size
    raise NonFiniteError(
        f"{what} holds {nans} NaN and {infinities} infinite values, the first at index "
        f'{tuple(reversed(index))}; clean it, or pass nonfinite="propagate" to quantize it as it is'
    )


def amax(x: Any, *, backend: str | None = None, out: Any = None) -> Any:
    """Largest magnitude of an array, NaN ignored.

    Args:
        x: float32, float16 or bfloat16 array of any shape, framework and device.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: float32 array of shape (1,) on the device of `x` to write into.

    Returns:
        float32 array of shape (1,) in the framework and on the device of `x` (or `out`); 0 for an
        empty one. On a GPU nothing waits for the result.

    Raises:
        DtypeError: for other element types, or if `out` lies on another device.
        ShapeError: if `out` does not fit.
        BackendUnavailableError: if the backend cannot serve the array, with the reason.

    Example:
        >>> import numpy as np
        >>> amax(np.array([[1.0, -3.0]], np.float32))
        array([3.], dtype=float32)
    """
    raw = arrays.ingest(x)
    engine = engine_for("amax", raw.origin.device, raw.dtype, None, None, backend)
    shape = raw.data.shape
    with arrays.device_scope(raw.origin):
        target = None if out is None else result_buffer(out, (1,), "float32", raw.origin)
        rows = rows_of(raw, *(shape if len(shape) == 2 else (1, prod(shape))))
        value = engine.amax(rows, raw.dtype, 1)
        if target is None:
            return arrays.emit(value, "float32", raw.origin)
        arrays.overwrite_scale(target, value)
        return out


def _second_level_for(call: Call, x: Any, dtype: str, shape: tuple[int, ...], given: Any) -> Any:
    """The second level in the recipe's direction (or None), after the non-finite check."""
    measured = None
    if call.options.refuses_nonfinite and not call.is_empty:
        measured = check_finite(call.engine, x, dtype, shape, "x")
    recipe = call.plan.recipe
    if recipe is None or not call.plan.has_second_level:
        return None
    if given is not None:
        if call.options.given == recipe.direction:
            return given
        measured = given
    elif measured is None:
        measured = call.engine.amax(x, dtype, 1)
    return call.engine.second_level(measured, call.plan, dtype)


def quantize(
    x: Any,
    format: str = "nvfp4",
    *,
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
    backend: str | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes the last axis of an array in blocks.

    Formats and MX scale rules follow the OCP Microscaling specification 1.0; NVFP4 recipes
    reproduce the order of operations of the project they are named after (see
    :mod:`fp4kit.scaling`), so that the bytes equal that project's.

    Args:
        x: float32, float16 or bfloat16 array (..., K) of any strides: NumPy, CuPy, torch, JAX, or
            anything with DLPack and an array-API namespace.
        format: `nvfp4`, `mxfp4`, `mxfp8` (E4M3 elements) or `mxfp8_e5m2`.
        recipe: for nvfp4: `te`, `nvfuser`, `torchao`, `modelopt`, `compressed-tensors`, `comfy`.
        scale_rule: for MX formats: `floor`, `ceil`, `even` or `rceil`; None is `even` for mxfp4
            and `rceil` for mxfp8.
        amax: largest magnitude that the second-level scale is made from: a float, or a float32
            array on the input's device with one value, or one per equal group of leading rows
            (experts). None measures it.
        decode_scale: instead of amax, the second-level scale amax/2688 itself (torchao, modelopt,
            comfy).
        encode_scale: instead of amax, the second-level scale 2688/amax itself (nvfuser,
            compressed-tensors).
        second_level: False quantizes without a second-level scale (nvfuser, torchao).
        scale_layout: `linear`, `swizzled_128x4` or `swizzled_8x4`; padding scales are 0.
        nibble_order: `low_first`, or `high_first` as ComfyUI stores it.
        pad: pad each row with zeros to whole blocks; the logical K is kept in `shape`.
        nonfinite: `raise` (the default) refuses NaN and infinity; on a GPU it has to wait for the
            stream to know, so it cannot be captured in a CUDA graph. `propagate` skips the check:
            amax ignores NaN, NaN becomes the element's NaN code (+6 for E2M1), infinity saturates.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the input's device.
        out: a result of an equal call whose arrays are overwritten and returned.

    Returns:
        A :class:`QuantizedTensor` whose arrays are in the framework and on the device of `x`.

    Raises:
        OptionError: for unknown or contradictory options.
        ShapeError: if K is not a multiple of the block size and `pad` is False.
        DtypeError: for other element types, or a scale on another device.
        NonFiniteError: under `nonfinite="raise"`, with the counts and the first index.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Example:
        >>> import numpy as np
        >>> q = quantize(np.linspace(-6, 6, 32, dtype=np.float32).reshape(2, 16))
        >>> q.packed.shape, q.block_scale.shape, float(q.amax[0])
        ((2, 8), (2, 1), 6.0)
    """
    raw = arrays.ingest(x)
    options = quantize_options(
        "quantize",
        format,
        recipe,
        scale_rule,
        second_level,
        scale_layout,
        nibble_order,
        pad,
        nonfinite,
        amax is not None,
        decode_scale is not None,
        encode_scale is not None,
    )
    dtype, origin, shape = raw.dtype, raw.origin, raw.data.shape
    given = given_second_level(options, amax, decode_scale, encode_scale, origin)
    scales = 1 if given is None else given.size
    call = quantize_call(options, shape, dtype, origin.device, scales, backend)
    plan = call.plan
    with arrays.device_scope(origin):
        if out is None:
            xp = arrays.array_module(origin)
            packed = xp.empty(call.packed_shape, np.uint8)
            block_scale = xp.empty(call.scale_shape, np.uint8)
        else:
            _, packed, block_scale, kept_second = output_buffers(out, call, raw)
        rows = rows_of(raw, plan.rows, plan.cols)
        second = _second_level_for(call, rows, dtype, shape, given)
        if not call.is_empty:
            call.engine.quantize(
                plan,
                rows,
                dtype,
                second,
                in_rows(packed, plan.packed_shape),
                in_rows(block_scale, plan.scale_shape),
            )
        if out is not None:
            if second is not None:
                arrays.overwrite_scale(kept_second, second)
            return out
        direction = plan.recipe.direction if plan.recipe is not None else None
        scale = None if second is None else arrays.emit(second, "float32", origin)
        return QuantizedTensor(
            packed=arrays.emit(packed, "uint8", origin),
            block_scale=arrays.emit(block_scale, "uint8", origin),
            format=plan.format.name,
            shape=shape,
            recipe=plan.recipe.name if plan.recipe is not None else None,
            scale_rule=plan.scale_rule,
            amax=scale if direction == "amax" else None,
            decode_scale=scale if direction == "decode" else None,
            encode_scale=scale if direction == "encode" else None,
            scale_layout=scale_layout,
            nibble_order=nibble_order,
            source_dtype=dtype,
        )


def dequantize(
    q: QuantizedTensor, dtype: str = "float32", *, backend: str | None = None, out: Any = None
) -> Any:
    """Decodes a quantized tensor.

    Each element is the exact product of code, block scale and second level in binary32 under the
    recipe's order of operations, rounded once to `dtype` (two published amax corner cases are
    corrected: see :func:`fp4kit.scaling.nvfp4_decode_factors`).

    Args:
        q: codes and scales of any format, layout and nibble order.
        dtype: `float32`, `float16` or `bfloat16`.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous array of `q.shape` and `dtype` to write into.

    Returns:
        Array of shape `q.shape` in the framework and on the device of `q.packed` (or `out`).

    Raises:
        OptionError: for an unknown dtype.
        ShapeError: if `out` does not fit.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Example:
        >>> import numpy as np
        >>> q = quantize(np.full((1, 16), 6, np.float32))
        >>> float(dequantize(q)[0, 0])
        6.0
    """
    one_of("dtype", dtype, DTYPES)
    plan, origin, packed, block_scale, second = decoding_arrays(q)
    engine = engine_for("dequantize", origin.device, dtype, q.format, q.recipe, backend)
    with arrays.device_scope(origin):
        result = result_buffer(out, q.shape, dtype, origin)
        if plan.rows and plan.cols:
            rows = in_rows(result, (plan.rows, plan.cols))
            engine.dequantize(plan, packed, block_scale, second, rows, dtype)
        return out if out is not None else arrays.emit(result, dtype, origin)


def quantize_dequantize(
    x: Any,
    format: str = "nvfp4",
    *,
    dtype: str | None = None,
    recipe: str = "te",
    scale_rule: str | None = None,
    amax: Any = None,
    decode_scale: Any = None,
    encode_scale: Any = None,
    second_level: bool = True,
    pad: bool = False,
    nonfinite: str = "raise",
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """What `dequantize(quantize(x, ...), dtype)` gives, without keeping codes (fake quantization).

    Args:
        x: float32, float16 or bfloat16 array (..., K).
        format: as in :func:`quantize`, like all options not listed here.
        dtype: element type of the result; None is that of `x`.
        recipe: see :func:`quantize`.
        scale_rule: see :func:`quantize`.
        amax: see :func:`quantize`.
        decode_scale: see :func:`quantize`.
        encode_scale: see :func:`quantize`.
        second_level: see :func:`quantize`.
        pad: see :func:`quantize`.
        nonfinite: see :func:`quantize`.
        backend: see :func:`quantize`.
        out: C-contiguous array of the shape of `x` and of `dtype` to write into.

    Returns:
        Array of the shape of `x` in its framework and on its device (or `out`).

    Raises:
        OptionError: as in :func:`quantize`.
        ShapeError: as in :func:`quantize`, or if `out` does not fit.
        DtypeError: as in :func:`quantize`.
        NonFiniteError: as in :func:`quantize`.
        BackendUnavailableError: as in :func:`quantize`.

    Example:
        >>> import numpy as np
        >>> x = np.full((1, 16), 5.1, np.float32)
        >>> float(quantize_dequantize(x, amax=6.0)[0, 0])
        5.142857074737549
    """
    raw = arrays.ingest(x)
    options = quantize_options(
        "quantize_dequantize",
        format,
        recipe,
        scale_rule,
        second_level,
        "linear",
        "low_first",
        pad,
        nonfinite,
        amax is not None,
        decode_scale is not None,
        encode_scale is not None,
    )
    out_dtype = one_of("dtype", dtype or raw.dtype, DTYPES)
    origin, shape = raw.origin, raw.data.shape
    given = given_second_level(options, amax, decode_scale, encode_scale, origin)
    scales = 1 if given is None else given.size
    call = quantize_call(options, shape, raw.dtype, origin.device, scales, backend)
    plan = call.plan
    with arrays.device_scope(origin):
        result = result_buffer(out, shape, out_dtype, origin)
        rows = rows_of(raw, plan.rows, plan.cols)
        second = _second_level_for(call, rows, raw.dtype, shape, given)
        if not call.is_empty:
            out_rows = in_rows(result, (plan.rows, plan.cols))
            call.engine.quantize_dequantize(plan, rows, raw.dtype, second, out_rows, out_dtype)
        return out if out is not None else arrays.emit(result, out_dtype, origin)
