# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantize and dequantize arrays: validate, choose a backend, allocate, call, hand back."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fp4kit import arrays
from fp4kit.arrays.overlap import places
from fp4kit.backend.interface import NO_SEED
from fp4kit.formats import DTYPES, one_of

from .activated import ahead_of, measures_amax
from .backends import engine_for
from .buffers import (
    Reused,
    decoding_arrays,
    given_places,
    given_second_level,
    in_rows,
    output_buffers,
    result_buffer,
    rows_of,
)
from .measure import second_level_for
from .planning import quantize_call, quantize_options
from .quantize_variants import PLAIN_CHOICES, Choices, Directions, PlainChoices, quantize_variants
from .residual import ResidualTensor, dequantize_residual
from .rotation import undo_rotation
from .tensor import QuantizedTensor

if TYPE_CHECKING:
    from typing import Unpack

    from .option_types import QuantizeOptions


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
        target = (
            None
            if out is None
            else result_buffer(out, (1,), "float32", raw.origin, places(x=raw.data))
        )
        rows = rows_of(raw, *(shape if len(shape) == 2 else (1, prod(shape))))
        value = engine.amax(rows, raw.dtype, 1)
        if target is None:
            return arrays.emit(value, "float32", raw.origin)
        arrays.overwrite_scale(target, value)
        return out


@overload
def quantize(
    x: Any,
    format: str = "nvfp4",
    *,
    axis: Literal["row", "column"] = "row",
    **options: Unpack[QuantizeOptions],
) -> QuantizedTensor: ...


@overload
def quantize(
    x: Any,
    format: str = "nvfp4",
    *,
    axis: Literal["both"],
    **options: Unpack[QuantizeOptions],
) -> Directions: ...


def quantize(
    x: Any,
    format: str = "nvfp4",
    *,
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
    out: QuantizedTensor | Directions | None = None,
) -> QuantizedTensor | Directions:
    """Quantizes an array in blocks along its last axis, its rows, or both.

    Formats and MX scale rules follow the OCP Microscaling specification 1.0; NVFP4 recipes
    reproduce the order of operations of the project they are named after (see
    :mod:`fp4kit.reference.scaling`), so that the bytes equal that project's.

    Args:
        x: float32, float16 or bfloat16 array (..., K) of any strides: NumPy, CuPy, torch, JAX, or
            anything with DLPack (without an array-API namespace, results are NumPy or CuPy ones).
        format: `nvfp4`, `mxfp4`, `mxfp8` (E4M3 elements) or `mxfp8_e5m2`.
        axis: `row` (blocks along the last axis), `column` (along the rows, all leading dimensions
            flattened to M of them) or `both`. Columnwise FP4 is the quantized transpose, codes
            (K, M/2); columnwise mxfp8 keeps the order of the data, codes (M, K).
        recipe: for nvfp4: `te`, `nvfuser`, `torchao`, `modelopt`, `compressed-tensors`, `comfy`.
        scale_rule: for MX formats: `floor`, `ceil`, `even` or `rceil`; None is `even` for mxfp4
            and `rceil` for mxfp8.
        amax: largest magnitude that the second-level scale is made from: a float, or a float32
            array on the input's device with one value, or one per equal group of leading rows
            (experts). None measures it; `row_scaled` measures one per row (per column for
            columnwise codes), `per_token` too, with Transformer Engine pull request 3045's
            formulas. axis="both" takes one value for both or a pair.
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
        block: `1d`, or `2d` for one scale per square tile (16x16, 32x32 for MX formats), so that
            both directions hold the same values.
        scale_search: for recipe te: `four_over_six` or `sweep` choose each block's scale by the
            error it leaves (see :mod:`fp4kit.reference.scale_search`).
        error: what a search compares: `mse` (the default), `mae`, or `mse_scaled` and
            `mae_scaled` before the second-level scale (Transformer Engine's fast path).
        e4m3_max: with a search: largest block scale, 448, or 256 to leave it room upwards. It
            changes the second-level scale, so decoding needs it; it is kept in the result.
        rounding: `nearest`, or `stochastic` for E2M1: up or down by the distance to either
            neighbour (see :mod:`fp4kit.reference.philox`); scales are the same.
        seed: for stochastic rounding: 0 to 2^64 - 1. Equal seeds, streams and arrays give equal
            bytes on every backend.
        stream: for stochastic rounding: 0 to 2^32 - 1; give each tensor of a step its own.
        hadamard: rotate groups of 16 along the quantized axis first: True for Transformer Engine's
            sign mask 0xD7E8, or a mask (0: no signs). See :func:`fp4kit.hadamard_transform`.
        hadamard_axis: which direction of axis="both" to rotate: `column` (the default), `row` or
            `both`.
        rht_rounding: `bf16` (the default) rounds rotated values to bfloat16, `none` does not.
        activation: quantize `gelu` (tanh form), `silu`, `relu` or `swiglu` of x (whose last axis
            holds what is activated, then the factors), computed in float32 and rounded to the type
            of x; or the gradient `dgelu`, `dsilu` or `drelu` at activation_input, times x.
        activation_input: for gradients: what the forward pass activated, of the shape of x.
        dbias: float32 array (K,) on the device of x to write the column sums of what is quantized
            into.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the input's device.
        out: a result of an equal call whose arrays are overwritten and returned.

    Returns:
        A :class:`QuantizedTensor` whose arrays are in the framework and on the device of `x`;
        for axis="both" a :class:`Directions` of two, `rowwise` and `columnwise`.

    Raises:
        OptionError: for unknown or contradictory options.
        ShapeError: if K (or M, columnwise) is not a multiple of the block size and `pad` is False.
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
    read = () if out is None else places(x=raw.data)
    choices = (
        axis, block, scale_search, error, e4m3_max, rounding, seed, stream, hadamard,
        hadamard_axis, rht_rounding,
    )  # fmt: skip
    is_plain = choices == PLAIN_CHOICES and not isinstance(amax, str)
    ahead = None
    if activation is not None or activation_input is not None or dbias is not None:
        ahead = ahead_of(raw, activation, activation_input, dbias)
        read = () if out is None else read + ahead.places
        refuses = nonfinite != "propagate"
        measures = second_level and measures_amax(format, amax, decode_scale, encode_scale)
        if refuses or measures or isinstance(amax, str):
            # The result is looked at before it is quantized.
            raw, ahead = ahead.run(refuses, measures, backend), None
    if not is_plain:
        plain = PlainChoices(
            format, recipe, scale_rule, second_level, scale_layout, nibble_order, pad, nonfinite
        )
        return quantize_variants(
            raw,
            ahead,
            plain,
            Choices(*choices),
            amax,
            decode_scale,
            encode_scale,
            backend,
            Reused(out, read),
        )
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
    dtype, origin = raw.dtype, raw.origin
    shape = raw.data.shape if ahead is None else ahead.shape
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
            assert not isinstance(out, Directions)
            read += given_places(options, given)
            target = output_buffers(out, call, shape, origin, read)
            packed, block_scale, kept_second = target.packed, target.block_scale, target.second
        targets = in_rows(packed, plan.packed_shape), in_rows(block_scale, plan.scale_shape)
        rows = None if ahead is not None else rows_of(raw, plan.rows, plan.cols)
        second = second_level_for(call, rows, raw, given)
        if ahead is not None and not ahead.fused([call], [second], [targets], NO_SEED):
            rows = rows_of(ahead.run(False, False, backend), plan.rows, plan.cols)
        if rows is not None and not call.is_empty:
            call.engine.quantize(plan, rows, dtype, second, *targets)
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
    q: QuantizedTensor | ResidualTensor,
    dtype: str = "float32",
    *,
    undo_hadamard: bool = False,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """Decodes a quantized tensor.

    Each element is the exact product of code, block scale and second level in binary32 under the
    recipe's order of operations, rounded once to `dtype` (two published amax corner cases are
    corrected: see :func:`fp4kit.reference.scaling.nvfp4_decode_factors`).

    Args:
        q: codes and scales of any format, layout, nibble order and variant.
        dtype: `float32`, `float16` or `bfloat16`.
        undo_hadamard: rotate the values of a rotated tensor back (from float32); otherwise they
            stay rotated.
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
    if isinstance(q, ResidualTensor):
        return dequantize_residual(q, dtype, backend=backend, out=out)
    one_of("dtype", dtype, DTYPES)
    plan, origin, packed, block_scale, second, read = decoding_arrays(q)
    engine = engine_for(
        "dequantize", origin.device, dtype, q.format, q.recipe, backend, plan.variant
    )
    with arrays.device_scope(origin):
        result = result_buffer(out, q.shape, dtype, origin, read)
        if plan.rows and plan.cols:
            rows = in_rows(result, (plan.rows, plan.cols))
            if undo_hadamard and q.variant is not None and q.variant.hadamard is not None:
                decode = partial(engine.dequantize, plan, packed, block_scale, second)
                undo_rotation(engine, q.variant, decode, rows, dtype)
            else:
                engine.dequantize(plan, packed, block_scale, second, rows, dtype)
        return out if out is not None else arrays.emit(result, dtype, origin)
