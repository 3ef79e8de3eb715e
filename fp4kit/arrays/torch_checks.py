# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Torch tensors that hold no strided elements of their own are refused, with the fix."""

from __future__ import annotations

from typing import Any

from fp4kit.errors import DtypeError


def check_subclass(x: Any, torch: Any, what: str) -> None:
    """Refuses subclasses of torch's tensor whose elements do not lie in their own storage.

    Raises:
        DtypeError: with the fix.
    """
    kind = type(x)
    if torch.nn.parameter.is_lazy(x):
        raise DtypeError(f"{what} is an {kind.__name__}: it has no values yet; initialize it first")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise DtypeError(
            f"{what} is a {kind.__name__}, a torch tensor whose values are not its own storage (a "
            "fake, distributed, nested or quantized one); pass a plain tensor: x.full_tensor() or "
            "x.dequantize(), outside of tracing"
        )


def check_tensor(x: Any, torch: Any, what: str) -> None:
    """Refuses torch tensors that hold no strided elements of their own.

    Raises:
        DtypeError: with the fix.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise DtypeError(
            f"{what} is a tensor inside of torch.func (vmap, grad or the like), which holds no "
            "values; call fp4kit outside, on the whole batch"
        )
    fix = None
    if x.is_nested:
        fix = (
            "that is nested",
            "give its members one by one (x.unbind()), or quantize_grouped a buffer",
        )
    elif x.layout != torch.strided:
        fix = f"of layout {str(x.layout).removeprefix('torch.')}", "pass x.to_dense()"
    elif x.is_quantized:
        fix = f"that is quantized ({str(x.dtype).removeprefix('torch.')})", "pass x.dequantize()"
    if fix is not None:
        raise DtypeError(f"{what} is a torch tensor {fix[0]}; {fix[1]}")
    if x.device.type not in ("cpu", "cuda"):
        raise DtypeError(
            f"torch device {x.device} is not supported; move the tensor to cpu or cuda first"
        )
    count = x.numel()
    if count and not x.is_contiguous():
        count = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    end = (x.storage_offset() + count) * x.element_size()
    if count and x.untyped_storage().nbytes() < end:
        raise DtypeError(
            f"{what} is a torch tensor whose storage was freed or shrunk (as sharded training does "
            "between uses); gather it first"
        )
