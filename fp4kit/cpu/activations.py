# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""numba kernels of :mod:`fp4kit.reference.activations`: the same operations by element."""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from fp4kit.reference import activations
from fp4kit.reference.activations import (
    EXP_LIMIT,
    GELU_3B,
    GELU_A,
    GELU_B,
    GELU_LIMIT,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    ONE,
    POLYNOMIAL,
    ROUND,
    SUM_ROWS,
)

from .jit import jit, jit_inner, jit_of
from .tiles import index, widen
from .variant_decode import narrow
from .words import bits_float, f32, float_bits, u32

GELU, SILU, RELU, SWIGLU, DGELU, DSILU, DRELU = range(len(activations.ACTIVATIONS))
P0, P1, P2, P3, P4, P5 = POLYNOMIAL
ROUND_BITS = np.int32(ROUND.view(np.int32))


@jit_inner
def held_within(value, limit):
    """A value cut off at plus or minus a limit; NaN stays."""
    if value > limit:
        return limit
    if value < -limit:
        return -limit
    return value


@jit_inner
def exponential(t):
    """`activations.exponential`."""
    t = held_within(t, EXP_LIMIT)
    shifted = t * LOG2_E + ROUND
    n = shifted - ROUND
    r = t - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    p = p * (r * r) + r + ONE
    whole = np.int32(np.int32(float_bits(shifted)) - ROUND_BITS)
    half = np.int32(whole >> 1)
    p = p * bits_float(u32(np.int32(half + 127)) << u32(23))
    return p * bits_float(u32(np.int32(whole - half + 127)) << u32(23))


@jit_inner
def logistic(t):
    """`activations.logistic`."""
    return ONE / (ONE + exponential(-t))


@jit_inner
def gelu(x):
    """Gelu of one value."""
    held = held_within(x, GELU_LIMIT)
    return x * logistic(held * (GELU_A + GELU_B * (held * held)))


@jit_inner
def gelu_gradient(z, gradient):
    """The derivative of gelu at `z`, times a gradient."""
    held = held_within(z, GELU_LIMIT)
    square = held * held
    s = logistic(held * (GELU_A + GELU_B * square))
    return (s + (held * (s * (ONE - s))) * (GELU_A + GELU_3B * square)) * gradient


@jit_of()
def activate_range(name, x, z, begin, end, cols, out):
    """Rows begin..end of `out` (cols columns, flat): see `Operations.activate`."""
    first, last = index(begin * cols), index(end * cols)
    if name == GELU:
        for i in range(first, last):
            out[i] = narrow(gelu(widen(x[i])), out[i])
    elif name == SILU:
        for i in range(first, last):
            value = widen(x[i])
            out[i] = narrow(value * logistic(value), out[i])
    elif name == RELU:
        for i in range(first, last):
            value = widen(x[i])
            out[i] = narrow(f32(0) if value <= f32(0) else value, out[i])
    elif name == SWIGLU:
        for r in range(index(begin), index(end)):
            source, target = r * index(2 * cols), r * index(cols)
            for c in range(index(cols)):
                value, factor = widen(x[source + c]), widen(x[source + index(cols) + c])
                out[target + c] = narrow(value * logistic(value) * factor, out[target + c])
    elif name == DGELU:
        for i in range(first, last):
            out[i] = narrow(gelu_gradient(widen(z[i]), widen(x[i])), out[i])
    elif name == DSILU:
        for i in range(first, last):
            value = widen(z[i])
            s = logistic(value)
            out[i] = narrow(s * (ONE + value * (ONE - s)) * widen(x[i]), out[i])
    else:
        for i in range(first, last):
            out[i] = narrow(widen(x[i]) if widen(z[i]) > f32(0) else f32(0), out[i])


@jit
def sum_groups(x, rows, cols, begin, end, out):
    """Rows begin..end of the next level of column sums: each of up to 32 rows of `x`."""
    for group in range(index(begin), index(end)):
        target = group * index(cols)
        first = group * index(SUM_ROWS)
        last = min(first + index(SUM_ROWS), index(rows))
        for c in range(index(cols)):
            out[target + c] = widen(x[first * index(cols) + c])
        for r in range(first + index(1), last):
            source = r * index(cols)
            for c in range(index(cols)):
                out[target + c] = out[target + c] + widen(x[source + c])
