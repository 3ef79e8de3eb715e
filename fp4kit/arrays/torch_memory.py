# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The memory of a contiguous torch tensor on a GPU, for what asks for little more than addresses.

To make a CuPy array takes as long as to launch some kernels.
"""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

_FLAGS = SimpleNamespace(c_contiguous=True)


class TorchMemory:
    """A C-contiguous array with the attributes of CuPy's that the products of a backend read.

    It keeps the tensor alive, and nothing reads or writes elements through it.

    Attributes:
        ptr: address of the first byte.
        shape: as of the tensor, or what it was reshaped to.
        dtype: NumPy's; of bfloat16 any of 16 bits.
        size: number of elements.
    """

    __slots__ = ("_owner", "dtype", "ptr", "shape", "size")

    flags = _FLAGS

    def __init__(self, owner: Any, dtype: np.dtype[Any]) -> None:
        self._owner, self.dtype = owner, dtype
        self.ptr: int = owner.data_ptr()
        self.shape: tuple[int, ...] = tuple(owner.shape)
        self.size: int = owner.numel()

    @property
    def data(self) -> TorchMemory:
        """What has the address, as CuPy's arrays have it."""
        return self

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from place to place of each axis."""
        return tuple(
            prod(self.shape[axis + 1 :]) * self.dtype.itemsize for axis in range(len(self.shape))
        )

    def reshape(self, shape: tuple[int, ...]) -> TorchMemory:
        """The same memory in another shape of as many elements."""
        if prod(shape) != self.size:
            raise ValueError(f"{self.size} elements do not fit the shape {shape}")
        other = object.__new__(TorchMemory)
        other._owner, other.dtype, other.ptr = self._owner, self.dtype, self.ptr
        other.shape, other.size = shape, self.size
        return other
