# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""One view of every input file: named tensors whose C-order bytes are read in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fp4kit.io.containers import DTYPES, TensorSpec

from .files import InputFile


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a file, whatever the container.

    Attributes:
        spec: name, element type and shape. The element type is "" if it cannot be read.
        dtype: the element type's usual name (`bfloat16`, `int64`), for humans.
        stored: bytes it takes in the file.
        note: why it cannot be read, or how it is read.
    """

    spec: TensorSpec
    dtype: str
    stored: int
    note: str = ""

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.spec.shape

    @property
    def format(self) -> None:
        """The block format of a quantized tensor: none."""

    def facts(self) -> dict[str, Any]:
        """How a quantized tensor is encoded: nothing to say."""
        return {}

    @property
    def readable(self) -> bool:
        """Whether its data can be read at all."""
        return self.spec.dtype != ""

    @property
    def row_bytes(self) -> int:
        """Bytes per index of the leading dimensions; 0 if its rows are not whole bytes."""
        bits = DTYPES[self.spec.dtype].bits * prod(self.spec.shape[-1:])
        return bits // 8 if bits % 8 == 0 else 0


@dataclass(frozen=True, slots=True)
class OpaqueTensor(SourceTensor):
    """A tensor in blocks of a type that is not decoded: its specification is that of its bytes.

    Attributes:
        logical: its shape.
    """

    logical: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in elements."""
        return self.logical


def plain_tensor(spec: TensorSpec, note: str = "") -> SourceTensor:
    """A tensor that is stored as its specification says."""
    return SourceTensor(spec, DTYPES[spec.dtype].name, spec.nbytes, note)


@dataclass(frozen=True, slots=True)
class Coded:
    """A quantized tensor that the container itself describes.

    Attributes:
        format: its block format.
        shape: its logical shape.
        packed: name under which its codes are read.
        scale: name under which its block scales are read.
        second: name of its second level, in decode direction; None if it is 1.
    """

    format: str
    shape: tuple[int, ...]
    packed: str
    scale: str
    second: str | None


class Source(ABC):
    """An open input file.

    Attributes:
        path: the file.
        metadata: the safetensors metadata, empty for other containers.
        tensors: every tensor, in file order.
        coded: quantized tensors that the container describes, by name; their parts are tensors.
        amaxes: tensors of the same number of rows and the same largest magnitude as others, which
            take less time to read, by the others' names.
        concurrent: whether any number of threads may read at once.
    """

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, SourceTensor]
    coded: Mapping[str, Coded] = MappingProxyType({})
    amaxes: Mapping[str, SourceTensor] = MappingProxyType({})
    concurrent = False

    @abstractmethod
    def read(self, name: str, offset: int, out: memoryview) -> None:
        """Fills `out` with C-order little-endian bytes of a tensor, from `offset` on."""

    def divisible(self, name: str) -> bool:
        """Whether a tensor read in many small pieces costs no more than in few large ones."""
        return self.concurrent

    def check_unchanged(self) -> None:  # noqa: B027 - what is no file of its own has nothing to say
        """Refuses a result whose source has changed since it was opened.

        Raises:
            FileFormatError: naming the file.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileSource(Source):
    """An open input file of one container."""

    def __init__(self, file: InputFile, metadata: dict[str, str] | None = None) -> None:
        self._file = file
        self.path = file.path
        self.metadata = metadata or {}
        self.tensors = {}

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        self._file.close()
