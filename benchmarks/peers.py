# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What other packages do on a GPU, as cases for `fp4kit.bench`: torch, torchao, comfy-kitchen."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from fp4kit import bench


def installed(name: str) -> bool:
    """Whether a package can be imported here."""
    return importlib.util.find_spec(name) is not None


def compiler_reason(device: str) -> str | None:
    """Why `torch.compile` cannot work for a device here, None if it does.

    Triton and inductor need a C++ compiler, and say so in exceptions of many kinds.
    """
    import torch

    try:
        torch.compile(lambda t: t * 2 + 1)(torch.ones(64, device=device))
    except Exception as problem:
        first = str(problem).strip().split("\n")[0]
        return f"torch.compile does not work here: {type(problem).__name__}: {first}"
    return None


def peer_cases(rows: int, columns: int) -> Iterator[bench.Case]:
    """NVFP4 of bfloat16 and back with a known amax, by everyone who is installed."""
    if not installed("torch"):
        return
    import torch

    torch.manual_seed(0)
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    moved = x.numel() * 2 + x.numel() // 2 + x.numel() // 16
    scale = (x.abs().max().float() / 2688).reshape(())
    target = torch.empty_like(x)
    yield bench.Case("torch copy", 2 * x.numel() * 2, lambda: target.copy_(x))
    yield bench.Case("torch eager amax", x.numel() * 2, lambda: x.abs().amax())
    if installed("torchao"):
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize

        quantize = torch.compile(lambda t, s: nvfp4_quantize(t, 16, s))
        decode = torch.compile(lambda t: t.dequantize(torch.bfloat16))
        q = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
        yield bench.Case("torchao eager quantize", moved, lambda: nvfp4_quantize(x, 16, scale))
        yield bench.Case("torchao compiled quantize", moved, lambda: quantize(x, scale))
        yield bench.Case("torchao compiled dequantize", moved, lambda: decode(q))
    if installed("comfy_kitchen"):
        import comfy_kitchen

        codes, scales = comfy_kitchen.quantize_nvfp4(x, scale)
        yield bench.Case(
            "comfy-kitchen quantize", moved, lambda: comfy_kitchen.quantize_nvfp4(x, scale)
        )
        yield bench.Case(
            "comfy-kitchen dequantize",
            moved,
            lambda: comfy_kitchen.dequantize_nvfp4(codes, scale, scales, torch.bfloat16),
        )
