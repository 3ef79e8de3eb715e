# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fake quantization: quantize and dequantize at once."""

from __future__ import annotations

from functools import partial
from typing import Any

from fp4kit import arrays
from fp4kit.arrays.overlap import is_same, place_of, places
from fp4kit.formats import DTYPES, one_of
from fp4kit.variant import AXES

from .buffers import given_places, in_rows, result_buffer, rows_of
from .measure import scanned_amax
from .quantize_variants import (
    Choices,
    Direction,
    PlainChoices,
    plans_of,
    second_levels,
    seed_of,
    used_second,
)
from .rotation import undo_rotation


def quantize_dequantize(
    x: Any,
    format: str = "nvfp4",
    *,
    dtype: str | None = None,
    axis: str = "row",
    recipe: str = "te",
    scale_rule: str | None = None,
    amax: Any = None,
    decode_scale: Any = None,
    encode_scale: Any = None,
    second_level: bool = True,
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
    rht_rounding: str | None = None,
    undo_hadamard: bool = False,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """What `dequantize(quantize(x, ...), dtype)` gives, without keeping codes (fake quantization).

    Plain calls that keep the type are one kernel; others pass through codes in between.

    Args:
        x: float32, float16 or bfloat16 array (..., K).
        format: as in :func:`quantize`, like all options not listed here.
        dtype: element type of the result; None is that of `x`.
        axis: `row` or `column`.
        recipe: see :func:`quantize`.
        scale_rule: see :func:`quantize`.
        amax: see :func:`quantize`.
        decode_scale: see :func:`quantize`.
        encode_scale: see :func:`quantize`.
        second_level: see :func:`quantize`.
        pad: see :func:`quantize`.
        nonfinite: see :func:`quantize`.
        block: see :func:`quantize`.
        scale_search: see :func:`quantize`.
        error: see :func:`quantize`.
        e4m3_max: see :func:`quantize`.
        rounding: see :func:`quantize`.
        seed: see :func:`quantize`.
        stream: see :func:`quantize`.
        hadamard: see :func:`quantize`.
        rht_rounding: see :func:`quantize`.
        undo_hadamard: rotate the values back, as in :func:`dequantize`.
        backend: see :func:`quantize`.
        out: C-contiguous array of the shape of `x` and of `dtype` to write into; `x` itself may
            be overwritten, as a whole and in its own type.

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
    out_dtype = one_of("dtype", dtype or raw.dtype, DTYPES)
    choices = Choices(
        one_of("axis", axis, AXES), block, scale_search, error, e4m3_max, rounding, seed, stream,
        hadamard, None, rht_rounding,
    )  # fmt: skip
    plain = PlainChoices(
        format, recipe, scale_rule, second_level, "linear", "low_first", pad, nonfinite
    )
    ((call, given),) = plans_of(
        "quantize_dequantize",
        raw,
        tuple(raw.data.shape),
        plain,
        choices,
        amax,
        decode_scale,
        encode_scale,
        backend,
    )
    random = seed_of(choices)
    plan, engine, origin, shape = call.plan, call.engine, raw.origin, raw.data.shape
    with arrays.device_scope(origin):
        read = places(x=raw.data) + given_places(call.options, given)
        if out is not None and out_dtype == raw.dtype:
            # In place is fine: blocks, or codes of all of them, are read before they are written.
            whole = place_of("out", arrays.ingest(out, "out").data)
            read = tuple(one for one in read if one.name != "x" or not is_same(one, whole))
        result = result_buffer(out, shape, out_dtype, origin, read)
        rows = rows_of(raw, plan.rows, plan.cols)
        scanned = scanned_amax(call, rows, raw)
        run_of = [Direction(call, None, None, given, None)]
        (second,) = second_levels(run_of, rows, raw.dtype, scanned)
        if not call.is_empty:
            used = used_second(call, second, origin)
            out_rows = in_rows(result, (plan.rows, plan.cols))
            run = partial(engine.quantize_dequantize, plan, rows, raw.dtype, used, seed=random)
            if undo_hadamard and plan.variant is not None and plan.variant.hadamard is not None:
                undo_rotation(engine, plan.variant, run, out_rows, out_dtype)
            else:
                run(out_rows, out_dtype)
        return out if out is not None else arrays.emit(result, out_dtype, origin)
