# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The product with a quantized weight, and the gradients of all that is not quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import fp4kit
from fp4kit import PreparedTensor, QuantizedTensor
from fp4kit.arrays.torch_rules import leave_uncompiled
from fp4kit.errors import DtypeError
from fp4kit.formats import GRID_BLOCK

from .arrays import as_tensor

if TYPE_CHECKING:
    from fp4kit.api.options import Backend

#: Bytes of a weight that are decoded at a time for the gradient: temporary memory stays below.
SLAB_BYTES = 64 << 20


class Call(NamedTuple):
    """What a product is called with beside its tensors.

    Attributes:
        weight: the weight.
        out_dtype: element type of the result, or None.
        alpha: factor.
        backend: what computes, or None.
    """

    weight: Any
    out_dtype: Any
    alpha: float
    backend: str | None

    def run(
        self, a: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor | None
    ) -> torch.Tensor:
        """The product, without gradients."""
        result: torch.Tensor = fp4kit.matmul(
            a.contiguous(),  # a copy would be torch's own, also in its graphs
            self.weight,
            out_dtype=self.out_dtype,
            bias=bias,
            c=c,
            alpha=self.alpha,
            backend=self.backend,
        )
        return result


def _slabs(weight: Any, dtype: torch.dtype, backend: str | None) -> Iterator[torch.Tensor]:
    """Decoded parts of a weight as (N, part of K), which together are all of it."""
    if isinstance(weight, PreparedTensor):
        weight = weight.restore(backend=backend)
    turned = isinstance(weight, QuantizedTensor) and weight.scheme.direction == "columnwise"
    depth = weight.shape[0] if turned else weight.shape[-1]
    step = depth
    if isinstance(weight, QuantizedTensor):
        # Every block, tile of scales and grid of scales begins at a multiple of this.
        outputs = max(weight.size // max(depth, 1), 1)
        step = max(SLAB_BYTES // (outputs * dtype.itemsize) // GRID_BLOCK, 1) * GRID_BLOCK
        if step < depth and weight.scheme.scale_layout != "linear":
            weight = _linear(weight)
    for begin in range(0, depth, max(step, 1)):
        end = min(begin + step, depth)
        part = weight
        if (begin, end) != (0, depth):
            part = weight[begin:end] if turned else weight[:, begin:end]
        values = as_tensor(part.dequantize(dtype, backend=backend))
        yield values.T if turned else values


def _linear(q: QuantizedTensor) -> QuantizedTensor:
    """The tensor with linear scales: others cannot be cut along the blocks."""
    plan = q.plan()
    scales = as_tensor(q.block_scale)
    scales = fp4kit.unswizzle(scales, (plan.vectors, plan.blocks), plan.scale_layout)
    if plan.is_columnwise and not plan.transposes:
        scales = scales.T.contiguous()
    return replace(q, block_scale=scales, scheme=q.scheme.replace(scale_layout="linear"))


class _Product(torch.autograd.Function):
    """`a` times a weight; gradients of a, bias and c."""

    @staticmethod
    def forward(
        a: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        return call.run(a, bias, c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        a, bias, c, ctx.call = inputs
        ctx.dtypes = [None if one is None else one.dtype for one in (a, bias, c)]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        da = dbias = dc = None
        if ctx.needs_input_grad[0]:
            slabs = _slabs(call.weight, dy.dtype, call.backend)
            parts = [dy @ values for values in slabs]
            if parts:
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
                da = (whole if call.alpha == 1 else whole * call.alpha).to(ctx.dtypes[0])
            else:
                da = dy.new_zeros((*dy.shape[:-1], 0), dtype=ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dbias = dy.reshape(-1, dy.shape[-1]).sum(0).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            dc = dy.to(ctx.dtypes[2])
        return da, dbias, dc, None


@leave_uncompiled
def matmul(
    a: torch.Tensor,
    b: Any,
    *,
    out_dtype: Any = None,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """:func:`fp4kit.matmul` with the gradients of `a`, `bias` and `c`.

    The gradient of `a` is that of the result times the decoded weight, decoded to its element type
    and in parts of at most 64 MiB. The weight has none: it is made of codes. Functions under
    torch.compile may call it: their graph breaks there.

    Args:
        a: float32, float16 or bfloat16 tensor (..., M, K).
        b: see :func:`fp4kit.matmul`, like what follows.
        out_dtype: see above.
        bias: see above.
        c: see above.
        alpha: see above.
        backend: see above; it also decodes the weight for the gradient.

    Returns:
        Tensor (..., M, N) on the device of `a`.

    Raises:
        DtypeError: if `a` is no torch tensor, and as :func:`fp4kit.matmul`.
        OptionError: as :func:`fp4kit.matmul`.
        ShapeError: as :func:`fp4kit.matmul`.
        BackendUnavailableError: as :func:`fp4kit.matmul`.

    Example:
        >>> import torch, fp4kit
        >>> weight = fp4kit.quantize(torch.eye(16) * 6)
        >>> x = torch.ones(2, 16, requires_grad=True)
        >>> matmul(x, weight).sum().backward()
        >>> x.grad.unique().tolist()
        [6.0]
    """
    if not isinstance(a, torch.Tensor):
        raise DtypeError(
            f"a is a {type(a).__name__}; fp4kit.torch.matmul takes a torch tensor, fp4kit.matmul "
            "arrays of any framework and quantized tensors"
        )
    return multiply(a, Call(b, out_dtype, alpha, backend), bias, c)


@leave_uncompiled
def multiply(
    a: torch.Tensor, call: Call, bias: torch.Tensor | None, c: torch.Tensor | None = None
) -> torch.Tensor:
    """A product, with gradients where something needs one."""
    given = (a, bias, c)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        result: torch.Tensor = _Product.apply(a, bias, c, call)
        return result
    return call.run(a, bias, c)
