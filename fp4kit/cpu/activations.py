# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and column sums: :mod:`fp4kit.reference.activations`, element by element."""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fp4kit.backend.jobs import Prologue
from fp4kit.options import ACTIVATIONS
from fp4kit.reference import codecs
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

from .buffers import aligned_output, read_only
from .elements import bits_float, elements, f32, float_bits, index, narrow, u32, widen
from .jit import jit, jit_inner, jit_of, jit_part
from .threads import run

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


# Each activation takes an element and the other operand: the second half of the row for swiglu, the
# input of the forward activation for derivatives, the element itself elsewhere.


@jit_part
def gelu(x, other):
    """X * logistic of gelu's polynomial."""
    held = held_within(x, GELU_LIMIT)
    return x * logistic(held * (GELU_A + GELU_B * (held * held)))


@jit_part
def silu(x, other):
    """X * logistic(x)."""
    return x * logistic(x)


@jit_part
def relu(x, other):
    """max(x, 0), NaN staying."""
    return f32(0) if x <= f32(0) else x


@jit_part
def swiglu(x, other):
    """silu(x) * other."""
    return x * logistic(x) * other


@jit_part
def dgelu(x, other):
    """The derivative of gelu at `other`, times x."""
    held = held_within(other, GELU_LIMIT)
    square = held * held
    s = logistic(held * (GELU_A + GELU_B * square))
    return (s + (held * (s * (ONE - s))) * (GELU_A + GELU_3B * square)) * x


@jit_part
def dsilu(x, other):
    """The derivative of silu at `other`, times x."""
    s = logistic(other)
    return s * (ONE + other * (ONE - s)) * x


@jit_part
def drelu(x, other):
    """The derivative of relu at `other`, times x."""
    return x if other > f32(0) else f32(0)


FUNCTIONS = dict(zip(ACTIVATIONS, (gelu, silu, relu, swiglu, dgelu, dsilu, drelu), strict=True))


@cache
def activator(name: str) -> Any:
    """The kernel of an activation."""
    function = FUNCTIONS[name]

    @jit_of(function)
    def activate_range(x, other, begin, end, cols, stride, out):
        """Rows begin..end of `cols` columns; those of the operands are `stride` elements apart."""
        for row in range(index(begin), index(end)):
            source, target = row * index(stride), row * index(cols)
            for c in range(index(cols)):
                result = function(widen(x[source + c]), widen(other[source + c]))
                out[target + c] = narrow(result, out[target + c])

    return activate_range


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


def activate(prologue: Prologue, out: np.ndarray) -> None:
    """`Operations.activate`."""
    assert prologue.activation is not None
    x, dtype = read_only(elements(prologue.x, prologue.dtype)), prologue.dtype
    other, (rows, cols) = x, out.shape
    stride = len(x) // max(rows, 1)
    if prologue.other is not None:
        other = read_only(elements(prologue.other, dtype))
    elif stride > cols:
        other = x[cols:]
    kernel = activator(prologue.activation)
    with aligned_output(out) as whole:
        result = elements(whole, dtype)
        run(lambda b, e: kernel(x, other, b, e, cols, stride, result), rows, cols)


def column_sums(x: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """`Operations.column_sums`."""
    (rows, cols), level = x.shape, elements(x, dtype)
    while True:
        groups = -(-rows // SUM_ROWS)
        sums = np.empty(groups * cols, np.float32)
        _sum_level(read_only(level), rows, cols, sums)
        level, rows = sums, groups
        if rows == 1:
            break
    out[...] = codecs.from_float32(level, "float32")


def _sum_level(level: np.ndarray, rows: int, cols: int, sums: np.ndarray) -> None:
    run(
        lambda begin, end: sum_groups(level, rows, cols, begin, end, sums),
        -(-rows // SUM_ROWS),
        SUM_ROWS * cols,
    )
