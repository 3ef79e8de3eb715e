# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What became of a model that was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from fp4kit.checkpoint.read.json_files import listed

from .linear import Linear


@dataclass(frozen=True)
class LoadReport:
    """What :func:`fp4kit.torch.load` did.

    Attributes:
        replaced: names of the linear layers that hold quantized weights now.
        decoded: names of parameters that were stored as codes and are plain numbers now, since
            their module is no `torch.nn.Linear`, and the bytes that each holds.
        kept: names of the linear layers whose weights are stored in plain numbers.
        missing: names of tensors that are not stored and were left alone (`strict=False`).
        left: names of stored tensors that the model has no place for (`strict=False`).
        weight_nbytes: bytes of the quantized weights, scales included.
        weight_nbytes_bfloat16: what they would be in bfloat16.
        nbytes: bytes of all parameters and buffers of the model.
        nbytes_bfloat16: what they would be with every number in bfloat16.
        notes: what the checkpoint asks for and is not computed here.
    """

    replaced: tuple[str, ...]
    decoded: dict[str, int]
    kept: tuple[str, ...]
    missing: tuple[str, ...]
    left: tuple[str, ...]
    weight_nbytes: int
    weight_nbytes_bfloat16: int
    nbytes: int
    nbytes_bfloat16: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{len(self.replaced)} linear layers hold quantized weights: "
            f"{_size(self.weight_nbytes)}, in bfloat16 {_size(self.weight_nbytes_bfloat16)}; "
            f"{len(self.kept)} are plain",
            f"the whole model: {_size(self.nbytes)}, in bfloat16 {_size(self.nbytes_bfloat16)}",
        ]
        if self.decoded:
            lines.append(
                f"{len(self.decoded)} parameters of other modules were decoded: "
                f"{_size(sum(self.decoded.values()))}"
            )
        for names, what in ((self.missing, "are not stored"), (self.left, "have no place")):
            if names:
                lines.append(f"{len(names)} tensors {what}: {listed(list(names))}")
        return "\n".join((*lines, *self.notes))


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _tensors(model: nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """Every tensor of a model once, and whether it is a part of a quantized weight."""
    seen: set[int] = set()
    for module in model.modules():
        for held, coded in (
            (module._parameters, False),
            (module._buffers, isinstance(module, Linear)),
        ):
            for tensor in held.values():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor, coded


def sizes_of(model: nn.Module) -> dict[str, int]:
    """The bytes of a model, as the fields of a report."""
    coded = plain = wide = 0
    for tensor, is_coded in _tensors(model):
        if is_coded:
            coded += tensor.nbytes
        else:
            plain += tensor.nbytes
            wide += tensor.numel() * (2 if tensor.is_floating_point() else tensor.itemsize)
    # Layers of tied weights share their arrays.
    layers = {id(module.codes): module for module in model.modules() if isinstance(module, Linear)}
    decoded = sum(2 * prod(module.shape) for module in layers.values())
    return {
        "weight_nbytes": coded,
        "weight_nbytes_bfloat16": decoded,
        "nbytes": coded + plain,
        "nbytes_bfloat16": decoded + wide,
    }
