# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantized weights of torch tensors, opened once as long as these stay where they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp4kit import arrays
from fp4kit.arrays.frameworks import framework_of_type, loaded
from fp4kit.formats import SECOND_LEVEL_SCALES

from .prepared import PreparedTensor
from .tensor import QuantizedTensor


class TorchViews:
    """A quantized tensor of NumPy or CuPy arrays over the memory of torch tensors.

    fp4kit opens such a tensor once and remembers what it found. A torch tensor may be given other
    memory at any time, so that one of torch's is opened for every product, which takes longer than
    a small product itself.

    Attributes:
        tensor: the quantized tensor.
    """

    def __init__(self, weights: QuantizedTensor | PreparedTensor) -> None:
        held = weights._arrays()
        # The views keep the memory alive: nobody else is given the addresses.
        self._places = [(each, each.data_ptr(), each.numel()) for each in held.values()]
        self.tensor = replace(weights, **{name: _view(x, name) for name, x in held.items()})

    def are_valid(self) -> bool:
        """Whether the tensors lie where they did."""
        for tensor, address, count in self._places:
            if tensor.data_ptr() != address or tensor.numel() != count:
                return False
            if not tensor.is_contiguous():
                return False
        return True


def _view(tensor: Any, name: str) -> Any:
    what = "the second-level scale" if name in SECOND_LEVEL_SCALES else name
    ingest = arrays.ingest_bytes if tensor.element_size() == 1 else arrays.ingest
    return ingest(tensor, what).data


def _can_view(x: Any) -> bool:
    """Whether an array is a torch tensor that is read where it lies."""
    if framework_of_type(type(x)) != "torch":
        return False
    torch = loaded("torch")
    assert torch is not None
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout != torch.strided:
        return False
    plain = x.dtype in (torch.uint8, torch.float32) and not x.is_nested and not x.is_neg()
    return plain and x.is_contiguous() and x.numel() > 0


def of_lasting(weights: QuantizedTensor | PreparedTensor) -> QuantizedTensor | PreparedTensor:
    """Weights whose arrays are views of these, where those are torch's; else the same.

    Raises:
        DtypeError: for tensors whose memory cannot be read.
    """
    views: TorchViews | None = getattr(weights, "_views", None)
    if views is None or not views.are_valid():
        if not all(map(_can_view, weights._arrays().values())):
            return weights
        views = TorchViews(weights)
        object.__setattr__(weights, "_views", views)
    return views.tensor
