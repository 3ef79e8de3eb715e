# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What quantization did to a tensor: error statistics from sums that add up over slabs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from fp4kit import arrays
from fp4kit.arrays.torch_rules import leave_uncompiled
from fp4kit.backend.interface import ErrorSums, Job, Request
from fp4kit.errors import DtypeError, ShapeError

from .backends import select
from .buffers import decoding_arrays, rows_of
from .quantize import dequantize
from .tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Error statistics of one tensor (or of several together).

    Attributes:
        elements: number of elements compared.
        mse: mean squared error.
        relative_rms: root mean squared error over the root mean square of the original, percent.
        sqnr: signal to quantization noise ratio, dB; infinite without error.
        max_abs_error: largest absolute error.
        cosine: cosine similarity of original and result; 1 if both are zero.
        saturated: share of codes of the largest finite magnitude; None without codes.
        zero_codes: share of codes of magnitude zero; None without codes.
        scale_underflow: share of blocks with non-zero elements whose scale became zero; None
            without codes.
        scale_subnormal: share of blocks whose scale is subnormal (E4M3 below 2^-6), or 2^-127
            under a non-zero block (E8M0); None without codes.
        bits_per_element: stored bits per element; None without codes.
    """

    elements: int
    mse: float
    relative_rms: float
    sqnr: float
    max_abs_error: float
    cosine: float
    saturated: float | None = None
    zero_codes: float | None = None
    scale_underflow: float | None = None
    scale_subnormal: float | None = None
    bits_per_element: float | None = None

    @classmethod
    def from_sums(cls, sums: ErrorSums, nbytes: int | None = None) -> ErrorStats:
        """Statistics from sums.

        Args:
            sums: sums of one slab, or of several added up.
            nbytes: bytes of codes and scales, for `bits_per_element`.
        """
        count = max(sums.elements, 1)
        mse = sums.sum_d2 / count
        sqnr = math.inf
        if sums.sum_d2 > 0:
            ratio = sums.sum_x2 / sums.sum_d2
            sqnr = 10 * math.log10(ratio) if ratio > 0 else -math.inf
        elif math.isnan(sums.sum_d2):
            sqnr = math.nan
        relative = math.sqrt(sums.sum_d2 / sums.sum_x2) if sums.sum_x2 > 0 else 0.0
        if sums.sum_x2 == 0 and sums.sum_d2 > 0:
            relative = math.inf
        norm = math.sqrt(sums.sum_x2) * math.sqrt(sums.sum_y2)
        cosine = sums.sum_xy / norm if norm != 0 else float(sums.sum_x2 == sums.sum_y2)
        coded = sums.blocks > 0
        return cls(
            elements=sums.elements,
            mse=mse,
            relative_rms=100 * relative,
            sqnr=sqnr,
            max_abs_error=sums.max_abs_error,
            cosine=cosine,
            saturated=sums.saturated / count if coded else None,
            zero_codes=sums.zero_codes / count if coded else None,
            scale_underflow=sums.scale_underflow / sums.blocks if coded else None,
            scale_subnormal=sums.scale_subnormal / sums.blocks if coded else None,
            bits_per_element=8 * nbytes / count if nbytes is not None else None,
        )

    def to_dict(self) -> dict[str, float | int | None]:
        """The statistics as plain numbers, None for infinite ones: JSON cannot hold those."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def error_sums(x: Any, q_or_y: Any, *, backend: str | None = None) -> ErrorSums:
    """The sums behind :func:`error_stats`; those of several slabs may be added with `+=`.

    Args:
        x: original, float32, float16 or bfloat16 (..., K).
        q_or_y: a :class:`QuantizedTensor` of `x`, or a dequantized array of its shape.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.

    Raises:
        ShapeError: if the shapes differ.
        DtypeError: if the two lie on different devices.
    """
    raw = arrays.ingest(x)
    shape = tuple(raw.data.shape)
    if isinstance(q_or_y, QuantizedTensor):
        if q_or_y.shape != shape:
            raise ShapeError(f"x has shape {shape}, the quantized tensor {q_or_y.shape}")
        if q_or_y.scheme.rht is not None:
            # Codes of rotated values say nothing about x: compare what they decode to.
            back = dequantize(q_or_y, undo_rht=True, backend=backend)
            return error_sums(x, back, backend=backend)
        plan, origin, packed, block_scale, second, _ = decoding_arrays(q_or_y)
        _same_device(raw.origin.device, origin.device)
        request = Request("error_stats", raw.origin.device, raw.dtype, plan.scheme)
        engine = select(request, backend)
        if not plan.rows or not plan.cols:
            return ErrorSums()
        with arrays.device_scope(raw.origin):
            rows = rows_of(raw, plan.rows, plan.cols)
            job = Job(plan, rows, raw.dtype, second, packed, block_scale)
            return engine.quantized_error_sums(job)
    other = arrays.ingest(q_or_y, "y")
    if tuple(other.data.shape) != shape:
        raise ShapeError(f"x has shape {shape}, y {tuple(other.data.shape)}")
    _same_device(raw.origin.device, other.origin.device)
    engine = select(Request("error_stats", raw.origin.device, raw.dtype), backend)
    size = prod(shape)
    if size == 0:
        return ErrorSums()
    with arrays.device_scope(raw.origin):
        return engine.error_sums(
            rows_of(raw, 1, size), raw.dtype, rows_of(other, 1, size), other.dtype
        )


def _same_device(first: str, second: str) -> None:
    if first != second:
        raise DtypeError(f"x lies on {first}, the result on {second}; move one of them first")


@leave_uncompiled
def error_stats(x: Any, q_or_y: Any, *, backend: str | None = None) -> ErrorStats:
    """Compares an array with what quantization made of it.

    Sums are accumulated in float64; on a GPU the call waits for them.

    Args:
        x: original, float32, float16 or bfloat16 (..., K).
        q_or_y: a :class:`QuantizedTensor` of `x` (decoded to float32 on the fly), or an array of
            the same shape.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.

    Returns:
        An :class:`ErrorStats`; code and scale shares are None if `q_or_y` is an array.

    Raises:
        ShapeError: if the shapes differ.
        DtypeError: for other element types, or arrays on different devices.

    Examples:
        >>> import numpy as np
        >>> x = np.full((1, 16), 6, np.float32)
        >>> from fp4kit import quantize
        >>> error_stats(x, quantize(x)).max_abs_error
        0.0
    """
    nbytes = q_or_y.nbytes if isinstance(q_or_y, QuantizedTensor) else None
    return ErrorStats.from_sums(error_sums(x, q_or_y, backend=backend), nbytes)
