# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products with quantized tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fp4kit import arrays
from fp4kit.arrays.dtypes import dtype_name
from fp4kit.arrays.overlap import Place, is_same, place_of
from fp4kit.arrays.torch_rules import leave_uncompiled, refuse_gradient
from fp4kit.backend.matmul import MatmulJob
from fp4kit.errors import OptionError, ShapeError, brief

from .backends import engine_for
from .buffers import in_rows, result_of
from .matmul_operands import (
    Opened,
    addend,
    check_depth,
    check_residual,
    check_rotation,
    expanded,
    open_float,
    open_quantized,
    open_residual,
    same_device,
    weights_beside,
)
from .prepared import PreparedTensor
from .residual import ResidualTensor
from .tensor import QuantizedTensor


@leave_uncompiled
def matmul(
    a: Any,
    b: Any,
    *,
    out_dtype: Any = None,
    bias: Any = None,
    c: Any = None,
    alpha: float = 1.0,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """Multiplies with a quantized tensor, without decoding it to memory first.

    Blocks run along the axis that is summed. So a rowwise tensor is (rows, K) and stands for its
    transpose on the right: `matmul(x, w)` of x (..., M, K) and w (N, K) is x @ w.T, (..., M, N). A
    columnwise tensor is (K, rows): `matmul(dy, w)` of dy (M, N) and the columnwise w (N, K) is
    dy @ w, (M, K); of the columnwise dy (M, N) and the columnwise x (M, K) it is dy.T @ x, (N, K).
    These are the forward product and the two gradients of a linear layer.

    What is computed, in binary32: the sum over each block of the codes of a times those of b,
    times the block scales, added up over all blocks; times a factor, ((second_a[i] * second_b[j]) /
    d) * alpha, each step rounded; plus bias[j]; plus c[i, j]; and one rounding to `out_dtype`.
    `second` are the second-level scales as factors (1 where there are none): a decode scale itself,
    1 / an encode scale, or an amax, for which d is 2688 (1536 under e4m3_max=256), or the product
    of both. These are the numbers of Transformer Engine's reference product; its pull request 3045
    rounds twice where this rounds once.

    The reference adds in the order of k, as Transformer Engine's does, other backends in another,
    fixed order: codes times block scales are exact in bfloat16, so tensor cores lose nothing else.
    The error against exact arithmetic is at most (K + 8) 2^-23 sum |a| |b| on a GPU, half of it on
    a CPU, and half a unit in the last place of the result. Equal calls give equal bytes on one
    device. Sums of no elements are 0. NaN and infinity propagate. Codes times block scales beyond
    binary32 (mxfp4 and mxfp8 with scales of 2^125 and more) may count as infinite.

    Args:
        a: float32, float16 or bfloat16 array (..., M, K); or a quantized tensor of any format, not
            always that of b.
        b: a :class:`QuantizedTensor` of two axes, (N, K) rowwise or (K, N) columnwise, of any
            format, recipe, scale layout and nibble order; a :class:`PreparedTensor` of such, which
            products of few rows read faster; or a :class:`ResidualTensor` (N, K).
            With a ResidualTensor a, one has mode `activation` and the other `weight`, and on a GPU
            nobody looks whether their orders are alike.
        out_dtype: `float32`, `float16` or `bfloat16`, by name or as a dtype of any framework. None
            is the element type of a, or the one that was quantized.
        bias: array (N,) to add, of any of these types.
        c: array of the result's shape to add, of any of these types; `out` itself accumulates.
        alpha: factor of the product.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous array of the result's shape and type to write into.

    Returns:
        Array (..., M, N) in the framework and on the device of a (or `out`).

    Raises:
        OptionError: for operands that cannot be multiplied: none of them quantized, one of them
            rotated and the other not, residual channels that do not belong together.
        ShapeError: for shapes that do not fit each other.
        DtypeError: for other element types, arrays on another device, and torch tensors that
            require a gradient (:mod:`fp4kit.torch` has one).
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import quantize
        >>> w = quantize(np.eye(16, dtype=np.float32) * 6)
        >>> matmul(np.arange(16, dtype=np.float32), w)[:4].round(3).tolist()
        [0.0, 6.0, 12.0, 18.0]
    """
    for value, what in ((a, "a"), (bias, "bias"), (c, "c")):
        if value is not None:
            refuse_gradient(value, "matmul", what)
    first, second = open_operands(a, b)
    factor = factor_of(alpha)
    origin = first.origin
    name = first.dtype if out_dtype is None else dtype_name(out_dtype, "out_dtype")
    engine = engine_for("matmul", origin.device, first.dtype, second.scheme, backend)
    shape = (*first.lead, *second.lead)
    rows, cols = first.operand.rows, second.operand.rows
    with arrays.device_scope(origin):
        read = (*first.read, *second.read)
        biases, sums = (None, "float32"), (None, "float32")
        if bias is not None:
            *biases, place = addend(  # type: ignore[assignment]
                bias, "bias", second.lead, origin, light=True
            )
            read = (*read, place)
        if c is not None:
            *sums, place = addend(c, "c", shape, origin, light=True)  # type: ignore[assignment]
            if not _is_out(place, out, sums[1] == name):
                read = (*read, place)
            sums = (in_rows(sums[0], (rows, cols)), sums[1])
        result, returned = result_of(out, shape, name, origin, read, light=True)
        if prod(shape):
            into = in_rows(result, (rows, cols))
            job = MatmulJob(first.operand, second.operand, into, name, factor, *biases, *sums)
            engine.matmul(job)
        return arrays.emit(result, name, origin) if returned is None else returned


def open_operands(a: Any, b: Any) -> tuple[Opened, Opened]:
    """Both operands, which fit each other.

    Raises:
        OptionError: for operands that cannot be multiplied.
        ShapeError: for shapes that do not fit.
        DtypeError: for operands on two devices.
    """
    if isinstance(a, PreparedTensor):
        raise OptionError(
            "a is prepared, which weights on the right are; pass it as b, or a.restore()"
        )
    if isinstance(a, ResidualTensor) and isinstance(b, ResidualTensor):
        check_residual(a, b)
        first, second = open_residual(a), open_residual(b)
    elif isinstance(b, ResidualTensor):
        if isinstance(a, QuantizedTensor):
            raise OptionError(
                "b has residual channels and a has not: quantize both with quantize_residual, one "
                "with mode='activation' and the other with mode='weight'"
            )
        second = open_residual(b)
        first = open_float(a, "a")
        same_device(first.origin, second.origin, ("a", "b"))
        first = expanded(first, b, "a")
    elif not isinstance(b, (QuantizedTensor, PreparedTensor)):
        raise OptionError(
            f"b is a {type(b).__name__}; it must be a QuantizedTensor that fp4kit.quantize "
            "returned (one direction of a pair; matmul_grouped takes groups)"
        )
    elif isinstance(a, ResidualTensor):
        raise OptionError(
            "a has residual channels and b has not: quantize b with quantize_residual(b, "
            f"{a.residual_channels}, mode={'weight' if a.mode == 'activation' else 'activation'!r})"
        )
    else:
        quantized = isinstance(a, QuantizedTensor)
        first = open_quantized(a) if quantized else open_float(a, "a", light=True)
        second = weights_beside(b, first.origin)
        check_rotation(first.scheme, second.scheme)
    if len(second.lead) > 1:
        raise ShapeError(
            f"b has shape {tuple(b.shape)}; it must have two axes: take one of it, as b[0], or "
            "fp4kit.matmul_grouped"
        )
    check_depth(first.operand.depth, second.operand.depth, "a", "b")
    same_device(first.origin, second.origin, ("a", "b"))
    return first, second


def factor_of(alpha: Any) -> float:
    """`alpha` as a binary32 number.

    Raises:
        OptionError: if it is no number.
    """
    if type(alpha) is float and alpha == 1.0:
        return alpha
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float, np.number)):
        raise OptionError(f"alpha={brief(alpha)} is no number; pass a float")
    with np.errstate(over="ignore"):
        return float(np.float32(alpha))


def _is_out(place: Place, out: Any, alike: bool) -> bool:
    """Whether what is added is the result itself, element by element."""
    if out is None or not alike:
        return False
    return is_same(place, place_of("out", arrays.ingest(out, "out").data))
