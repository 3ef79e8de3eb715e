# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantize and dequantize arrays: validate, choose a backend, allocate, call, hand back."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, overload

from fp4kit import arrays
from fp4kit.arrays.dtypes import dtype_name
from fp4kit.arrays.overlap import places
from fp4kit.arrays.torch_rules import leave_uncompiled
from fp4kit.backend.interface import Job
from fp4kit.formats import flag
from fp4kit.options import Direction, Format
from fp4kit.scheme import Scheme, as_scheme

from . import pipeline
from .backends import engine_for
from .buffers import decoding_arrays, in_rows, result_buffer, rows_of
from .calls import call_data
from .pipeline import Reused
from .prologue import prologue_of
from .repeat import last_call
from .residual import ResidualTensor, dequantize_residual
from .rotation import undo_rotation
from .tensor import DirectionPair, QuantizedTensor

if TYPE_CHECKING:
    from typing import Unpack

    from .options import CallData, CallOptions


@leave_uncompiled
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

    Examples:
        >>> import numpy as np
        >>> amax(np.array([[1.0, -3.0]], np.float32))
        array([3.], dtype=float32)
    """
    raw = arrays.ingest(x)
    engine = engine_for("amax", raw.origin.device, raw.dtype, None, backend)
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
    x: Any, scheme: Format = "nvfp4", *, direction: Literal["both"], **options: Unpack[CallOptions]
) -> DirectionPair: ...


@overload
def quantize(
    x: Any, scheme: Format = "nvfp4", *, direction: Direction = ..., **options: Unpack[CallOptions]
) -> QuantizedTensor: ...


# A Scheme's direction is not part of its type: what it gives is left to the reader.
@overload
def quantize(x: Any, scheme: Scheme, **options: Unpack[CallData]) -> Any: ...


@leave_uncompiled
def quantize(
    x: Any,
    scheme: Scheme | str = "nvfp4",
    *,
    amax: Any = None,
    decode_scale: Any = None,
    encode_scale: Any = None,
    seed: int | None = None,
    subsequence: int = 0,
    activation_input: Any = None,
    dbias: Any = None,
    nonfinite: str = "raise",
    backend: str | None = None,
    out: QuantizedTensor | DirectionPair | None = None,
    **fields: Any,
) -> QuantizedTensor | DirectionPair:
    """Quantizes an array in blocks along its last axis, its rows, or both.

    `quantize(x, "nvfp4", recipe="torchao")` and `quantize(x, Scheme("nvfp4", recipe="torchao"))`
    are the same. Formats and MX scale rules follow the OCP Microscaling specification 1.0; NVFP4
    recipes reproduce the order of operations of the project they are named after, so that the
    bytes equal that project's.

    Args:
        x: float32, float16 or bfloat16 array (..., K) of any strides: NumPy, CuPy, torch, JAX, or
            anything with DLPack (without an array-API namespace, results are NumPy or CuPy ones).
            What requires a gradient is read as it is: codes have none.
        scheme: a :class:`fp4kit.Scheme`, or the name of a format; then `fields` may follow.
        amax: largest magnitude that the second-level scale is made from: a float, or a float32
            array on the input's device with one value, or one per equal group of leading rows
            (experts). None measures it. direction="both" takes one value for both or a pair.
        decode_scale: instead of amax, the second-level scale amax/2688 itself (torchao, modelopt,
            comfy).
        encode_scale: instead of amax, the second-level scale 2688/amax itself (nvfuser,
            compressed-tensors).
        seed: for stochastic rounding: 0 to 2^64 - 1. Equal seeds, subsequences and arrays give
            equal bytes on every backend.
        subsequence: for stochastic rounding: 0 to 2^32 - 1; give each tensor of a step its own.
        activation_input: for gradients of activations: what the forward pass activated, of the
            shape of x.
        dbias: float32 array (K,) on the device of x to write the column sums of what is quantized
            into.
        nonfinite: `raise` (the default) refuses NaN and infinity; on a GPU it has to wait for the
            stream to know, so it cannot be captured in a CUDA graph. `propagate` skips the check:
            amax ignores NaN, NaN becomes the element's NaN code (+6 for E2M1), infinity saturates.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the input's device.
        out: a result of an equal call whose arrays are overwritten and returned.
        **fields: fields of a :class:`fp4kit.Scheme`.

    Returns:
        A :class:`QuantizedTensor` whose arrays are in the framework and on the device of `x`;
        for direction="both" a :class:`DirectionPair`, `rowwise` and `columnwise`.

    Raises:
        OptionError: for unknown or contradictory options.
        ShapeError: if K (or M, columnwise) is not a multiple of the block size and `pad` is False.
        DtypeError: for other element types, or a scale on another device.
        NonFiniteError: under `nonfinite="raise"`, with the counts and the first index.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> q = quantize(np.linspace(-6, 6, 32, dtype=np.float32).reshape(2, 16))
        >>> q.packed.shape, q.block_scale.shape, float(q.amax[0])
        ((2, 8), (2, 1), 6.0)
    """
    arguments = (
        scheme, amax, decode_scale, encode_scale, seed, subsequence, activation_input, dbias,
        nonfinite, backend,
    )  # fmt: skip
    if out is not None and not fields:
        known = last_call(out)
        if known is not None and known.run(x, arguments):
            return out
    wanted = as_scheme(scheme, fields)
    scales = (amax, decode_scale, encode_scale)
    data = call_data(wanted, scales, seed, subsequence, nonfinite, backend)
    raw = arrays.ingest(x)
    prologue = None
    if wanted.activation is not None or activation_input is not None or dbias is not None:
        prologue = prologue_of(raw, wanted.activation, activation_input, dbias)
    return pipeline.quantize(raw, wanted, data, prologue, Reused(out, x, arguments))


@leave_uncompiled
def dequantize(
    q: QuantizedTensor | ResidualTensor,
    dtype: Any = "float32",
    *,
    undo_rht: bool = False,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """Decodes a quantized tensor.

    Each element is the exact product of code, block scale and second level in binary32 under the
    recipe's order of operations, rounded once to `dtype` (two published amax corner cases are
    corrected: see :func:`fp4kit.reference.scaling.nvfp4_decode_factors`).

    Args:
        q: codes and scales of any format, layout, nibble order and variant.
        dtype: `float32`, `float16` or `bfloat16`, by name or as a dtype of NumPy, ml_dtypes, torch
            or JAX.
        undo_rht: rotate the values of a rotated tensor back (from float32); otherwise they
            stay rotated.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous array of `q.shape` and `dtype` to write into.

    Returns:
        Array of shape `q.shape` in the framework and on the device of `q.packed` (or `out`).

    Raises:
        OptionError: for an unknown dtype.
        ShapeError: if `out` does not fit.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> q = quantize(np.full((1, 16), 6, np.float32))
        >>> float(dequantize(q)[0, 0])
        6.0
    """
    if isinstance(q, ResidualTensor):
        return dequantize_residual(q, dtype, backend=backend, out=out)
    dtype, undo_rht = dtype_name(dtype), flag("undo_rht", undo_rht)
    plan, origin, packed, block_scale, second, read = decoding_arrays(q)
    engine = engine_for("dequantize", origin.device, dtype, plan.scheme, backend)
    with arrays.device_scope(origin):
        result = result_buffer(out, q.shape, dtype, origin, read)
        if plan.rows and plan.cols:
            rows = in_rows(result, (plan.rows, plan.cols))
            job = Job(plan, None, dtype, second, packed, block_scale)
            if undo_rht and q.scheme.rht is not None:
                undo_rotation(engine, q.scheme, partial(engine.dequantize, job), rows, dtype)
            else:
                engine.dequantize(job, rows, dtype)
        return out if out is not None else arrays.emit(result, dtype, origin)
