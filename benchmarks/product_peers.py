# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of other packages with the same weights: cuBLAS, torch, humming."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from product_timing import calls_for, copies_of, graph_us, in_turn, torch_graph_us

from fp4kit.cuda import blas

BF16 = np.dtype(ml_dtypes.bfloat16)
#: Layers of humming are slow to make: as many as do not fit the cache twice.
HUMMING_COPIES, HUMMING_BYTES = 12, 120 << 20


class Library:
    """cuBLAS with bfloat16 weights in memory, through the binding that fp4kit has."""

    def __init__(self) -> None:
        self._workspace = cupy.empty(blas.WORKSPACE_BYTES, np.uint8)

    def multiply(self, x: Any, w: Any, out: Any) -> None:
        """Multiplies x w^T on the current stream."""
        stream = cupy.cuda.get_current_stream().ptr
        gemm = blas.Gemm(int(x.device.id), stream, self._workspace.data.ptr)
        matrices = [blas.Matrix(one.data.ptr, "bfloat16", one.shape[1]) for one in (x, w, out)]
        gemm.multiply(*matrices, blas.Shape(*out.shape, x.shape[1]), 0)

    def us(self, x: Any, weights: list[Any], out: Any) -> float:
        """Microseconds of a product, cold weights."""
        estimate = 2e-6 * out.size * x.shape[1] / 600 + weights[0].nbytes / 4e6
        count = calls_for(len(weights), estimate)
        return graph_us(in_turn(lambda w: self.multiply(x, w, out), weights, count))


def float_weights(w: Any) -> list[Any]:
    """Copies of bfloat16 weights."""
    return [w, *(w.copy() for _ in range(copies_of(w.nbytes) - 1))]


def _torch(array: Any) -> Any:
    """A torch view of a CuPy array; bfloat16 travels as bits."""
    import torch

    if array.dtype == BF16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def torch_us(x: Any, weights: list[Any], out: Any) -> float:
    """Microseconds of torch's product of bfloat16."""
    import torch

    a, y = _torch(x), _torch(out)
    turned = [_torch(w).t() for w in weights]
    calls = in_turn(lambda w: torch.mm(a, w, out=y), turned, max(len(turned), 8))
    return torch_graph_us(calls)


class Humming:
    """Layers of humming-kernels with the codes and scales of modelopt's recipe."""

    def __init__(self, q: Any) -> None:
        """Prepares layers of one tensor's weights."""
        import torch
        from humming.layer import HummingLayer

        rows, cols = q.shape
        name, level = q.second_level
        assert name == "decode_scale"
        tensors = {
            "weight": _torch(q.packed),
            "weight_scale": _torch(q.block_scale).view(torch.float8_e4m3fn),
            "weight_scale_2": _torch(level).reshape(1),
        }
        count = max(2, min(HUMMING_COPIES, -(-HUMMING_BYTES // q.packed.nbytes)))
        self._layers = []
        for _ in range(count):
            layer = HummingLayer(
                shape_n=rows,
                shape_k=cols,
                weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
                torch_dtype=torch.bfloat16,
            ).cuda()
            layer.load_from_tensors({key: value.clone() for key, value in tensors.items()})
            layer.transform()
            self._layers.append(layer)

    def multiply(self, x: Any) -> Any:
        """The product as a CuPy array."""
        import torch

        y = self._layers[0](_torch(x))
        torch.cuda.synchronize()
        return cupy.from_dlpack(y.view(torch.int16)).view(BF16)

    def us(self, x: Any) -> float:
        """Microseconds of a product."""
        a, count = _torch(x), max(len(self._layers), 8)
        return torch_graph_us(in_turn(lambda layer: layer(a), self._layers, count))


def missing(name: str) -> str | None:
    """Why a peer cannot be measured, or None."""
    if find_spec(name) is None:
        return "is not installed"
    if name in ("torch", "humming"):
        import torch

        if not torch.cuda.is_available():
            return f"torch {torch.__version__} cannot use the GPU"
    return None
