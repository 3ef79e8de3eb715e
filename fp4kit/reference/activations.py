# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations before quantization and column sums, in NumPy: the ground truth.

Computed in binary32, one rounding per operation and without library functions, so that every
backend gives the same bits: the exponential is Cody and Waite's reduction with the polynomial of
the Cephes library (`expf`), and gelu is the tanh form that Transformer Engine uses, written with
the logistic function: 0.5 * (1 + tanh(z)) = logistic(2 z).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4kit.options import ACTIVATIONS as ACTIVATIONS

Floats = NDArray[np.float32]
F32 = np.float32
#: Those that take the incoming gradient, and the input of the activation beside it.
DERIVATIVES = ("dgelu", "dsilu", "drelu")

ONE = F32(1)
LOG2_E = F32(1.4426950408889634)
#: Adding this rounds to an integer, which then stands in the low bits.
ROUND = F32(1.5 * 2**23)
#: ln 2 in two parts, the first exact in few bits.
LN2_HIGH, LN2_LOW = F32(0.693359375), F32(-2.12194440e-4)
POLYNOMIAL = tuple(
    map(
        F32,
        (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ),
    )
)
#: Beyond, the exponential is 0 or infinite anyway.
EXP_LIMIT = F32(150)
#: 2 sqrt(2/pi), that times 0.044715, and three times that: gelu(x) = x logistic(x (A + B x^2)).
GELU_A, GELU_B, GELU_3B = F32(1.5957691216057308), F32(0.07135481282718), F32(0.21406443848154)
#: Beyond, gelu's logistic is 0 or 1 exactly.
GELU_LIMIT = F32(20)
#: Rows that one partial sum of `column_sums` adds up.
SUM_ROWS = 32


def exponential(t: Floats) -> Floats:
    """e^t in binary32, by the operations below; NaN stays."""
    t = np.where(t > EXP_LIMIT, EXP_LIMIT, np.where(t < -EXP_LIMIT, -EXP_LIMIT, t))
    shifted = t * LOG2_E + ROUND
    n = shifted - ROUND
    r = t - n * LN2_HIGH
    r = r - n * LN2_LOW
    p: Floats = np.full_like(r, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = p * r + coefficient
    p = p * (r * r)
    p = p + r
    p = p + ONE
    # 2^n in two factors, because n may leave the range of exponents.
    whole = shifted.view(np.int32) - ROUND.view(np.int32)
    half = whole >> 1
    for power in (half, whole - half):
        p = p * ((power + 127) << 23).view(np.float32)
    return p


def logistic(t: Floats) -> Floats:
    """1 / (1 + e^-t)."""
    result: Floats = ONE / (ONE + exponential(-t))
    return result


def gelu_argument(x: Floats) -> tuple[Floats, Floats]:
    """(x held within the limit, x * (A + B x^2) of it)."""
    held: Floats = np.where(x > GELU_LIMIT, GELU_LIMIT, np.where(x < -GELU_LIMIT, -GELU_LIMIT, x))
    return held, held * (GELU_A + GELU_B * (held * held))


def activation(name: str, x: Floats, other: Floats | None) -> Floats:
    """An activation of float32 values, or a derivative at `other` times `x`.

    Args:
        name: one of ACTIVATIONS.
        x: (..., n); for swiglu (..., 2 n): what is activated, then what it is multiplied with.
        other: for derivatives, the input of the activation.
    """
    if name == "relu":
        return np.where(x <= 0, F32(0), x)
    if name == "silu":
        return x * logistic(x)
    if name == "swiglu":
        half = x.shape[-1] // 2
        return (x[..., :half] * logistic(x[..., :half])) * x[..., half:]
    if name == "gelu":
        return x * logistic(gelu_argument(x)[1])
    assert other is not None
    if name == "drelu":
        return np.where(other > 0, x, F32(0))
    if name == "dsilu":
        return silu_slope(other) * x
    return gelu_slope(other) * x


def silu_slope(z: Floats) -> Floats:
    """The derivative of silu."""
    s = logistic(z)
    return np.multiply(s, ONE + z * (ONE - s), dtype=np.float32)


def gelu_slope(z: Floats) -> Floats:
    """The derivative of gelu."""
    held, argument = gelu_argument(z)
    s = logistic(argument)
    slope: Floats = s + (held * (s * (ONE - s))) * (GELU_A + GELU_3B * (held * held))
    return slope


def column_sums(values: Floats) -> Floats:
    """Sums over the rows of float32 (rows, cols), in a fixed order.

    Groups of 32 consecutive rows are added up in order, then 32 of these sums each, and so on.
    """
    while len(values) > 1:
        groups = [values[i : i + SUM_ROWS] for i in range(0, len(values), SUM_ROWS)]
        values = np.stack([_in_order(group) for group in groups])
    sums: Floats = values[0] if len(values) else np.zeros(values.shape[1], np.float32)
    return sums


def _in_order(rows: Floats) -> Floats:
    total: Floats = rows[0]
    for row in rows[1:]:
        total = total + row
    return total
