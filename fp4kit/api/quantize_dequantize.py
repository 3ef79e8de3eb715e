# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fake quantization: quantize and dequantize at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fp4kit import arrays
from fp4kit.arrays.dtypes import dtype_name
from fp4kit.arrays.overlap import is_same, place_of, places
from fp4kit.arrays.torch_rules import leave_uncompiled, refuse_gradient
from fp4kit.backend.interface import Job
from fp4kit.errors import OptionError
from fp4kit.formats import flag
from fp4kit.scheme import Scheme, as_scheme

from .buffers import in_rows, result_buffer, rows_of
from .calls import call_data
from .measure import checked
from .pipeline import planned, second_levels, used_second
from .rotation import undo_rotation

if TYPE_CHECKING:
    from typing import Unpack

    from fp4kit.options import Format, SchemeFields

    from .options import Backend, Nonfinite


@leave_uncompiled
def quantize_dequantize(
    x: Any,
    scheme: Scheme | Format = "nvfp4",
    *,
    dtype: Any = None,
    amax: Any = None,
    decode_scale: Any = None,
    encode_scale: Any = None,
    seed: int | None = None,
    subsequence: int = 0,
    nonfinite: Nonfinite = "raise",
    undo_rht: bool = False,
    backend: Backend | None = None,
    out: Any = None,
    **fields: Unpack[SchemeFields],
) -> Any:
    """What `dequantize(quantize(x, ...), dtype)` gives, without keeping codes (fake quantization).

    Plain calls that keep the type are one kernel; others pass through codes in between.

    Args:
        x: float32, float16 or bfloat16 array (..., K).
        scheme: as in :func:`quantize`, of one direction; where codes and scales would be stored
            does not matter here.
        dtype: element type of the result; None is that of `x`.
        amax: see :func:`quantize`.
        decode_scale: see :func:`quantize`.
        encode_scale: see :func:`quantize`.
        seed: see :func:`quantize`.
        subsequence: see :func:`quantize`.
        nonfinite: see :func:`quantize`.
        undo_rht: rotate the values back, as in :func:`dequantize`.
        backend: see :func:`quantize`.
        out: C-contiguous array of the shape of `x` and of `dtype` to write into; `x` itself may
            be overwritten, as a whole and in its own type.
        **fields: fields of a :class:`fp4kit.Scheme`.

    Returns:
        Array of the shape of `x` in its framework and on its device (or `out`).

    Raises:
        OptionError: as in :func:`quantize`.
        ShapeError: as in :func:`quantize`, or if `out` does not fit.
        DtypeError: for a torch tensor that requires a gradient (:mod:`fp4kit.torch` has one), and
            as in :func:`quantize`.
        NonFiniteError: as in :func:`quantize`.
        BackendUnavailableError: as in :func:`quantize`.

    Examples:
        >>> import numpy as np
        >>> x = np.full((1, 16), 5.1, np.float32)
        >>> float(quantize_dequantize(x, amax=6.0)[0, 0])
        5.142857074737549
    """
    wanted = as_scheme(scheme, fields)
    flag("undo_rht", undo_rht)
    if wanted.direction == "both" or wanted.activation is not None:
        raise OptionError(
            "quantize_dequantize takes one direction, rowwise or columnwise, and no activation; "
            "use quantize for others"
        )
    if (wanted.scale_layout, wanted.nibble_order) != ("linear", "low_first"):
        wanted = wanted.replace(scale_layout="linear", nibble_order="low_first")
    scales = (amax, decode_scale, encode_scale)
    data = call_data(wanted, scales, seed, subsequence, nonfinite, backend)
    raw = arrays.ingest(x)
    refuse_gradient(x, "quantize_dequantize")
    out_dtype = raw.dtype if dtype is None else dtype_name(dtype)
    (one,) = planned("quantize_dequantize", wanted, raw, raw.data.shape, data)
    call, given = one
    plan, engine, origin = call.plan, call.engine, raw.origin
    with arrays.device_scope(origin):
        read = places(x=raw.data)
        if given is not None and data.given.name is not None:
            read = (*read, place_of(data.given.name, given))
        if out is not None and out_dtype == raw.dtype:
            # In place is fine: blocks, or codes of all of them, are read before they are written.
            whole = place_of("out", arrays.ingest(out, "out").data)
            read = tuple(one for one in read if one.name != "x" or not is_same(one, whole))
        result = result_buffer(out, raw.data.shape, out_dtype, origin, read)
        rows = rows_of(raw, plan.rows, plan.cols)
        if data.refuses and not call.is_empty:
            raw = checked(engine, rows, raw)
        (second,) = second_levels([one], data.given.name, rows, raw)
        if not call.is_empty:
            used = used_second(plan, second, origin)
            out_rows = in_rows(result, (plan.rows, plan.cols))
            job = Job(plan, rows, raw.dtype, used, None, None, data.seed)
            run = partial(engine.quantize_dequantize, job)
            if undo_rht and plan.scheme.rht is not None:
                undo_rotation(engine, plan.scheme, run, out_rows, out_dtype)
            else:
                run(out_rows, out_dtype)
        return out if out is not None else arrays.emit(result, out_dtype, origin)
