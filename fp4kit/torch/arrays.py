# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays and quantized tensors of other frameworks as torch tensors, without a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

#: torch's names of the element types that NumPy has only through ml_dtypes.
_FOREIGN = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}


def as_tensor(array: Any) -> torch.Tensor:
    """A torch tensor of the same memory: itself, or that of an array of another framework."""
    if isinstance(array, torch.Tensor):
        return array
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if not array.flags.writeable:
        array = array.copy()  # torch has no read-only tensors
    name = array.dtype.name
    if name not in _FOREIGN:
        return torch.from_numpy(array)
    bits: Any = np.uint16 if array.dtype.itemsize == 2 else np.uint8
    return torch.from_numpy(array.view(bits)).view(_FOREIGN[name])


def of_torch(weight: Any) -> Any:
    """A quantized tensor whose arrays are torch's; itself if they are."""
    held = weight._arrays()
    moved = {name: as_tensor(value) for name, value in held.items()}
    if all(moved[name] is held[name] for name in moved):
        return weight
    return replace(weight, **moved)
