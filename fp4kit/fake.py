# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fake quantization: quantize and dequantize at once."""

from __future__ import annotations

from typing import Any

from . import arrays
from .buffers import given_second_level, in_rows, result_buffer, rows_of
from .formats import DTYPES, one_of
from .measure import second_level_for
from .planning import quantize_call, quantize_options


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
        second = second_level_for(call, rows, raw.dtype, shape, given)
        if not call.is_empty:
            out_rows = in_rows(result, (plan.rows, plan.cols))
            call.engine.quantize_dequantize(plan, rows, raw.dtype, second, out_rows, out_dtype)
        return out if out is not None else arrays.emit(result, out_dtype, origin)
