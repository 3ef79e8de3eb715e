# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Writing .gguf atomically, in one file or in the shards that a model is cut into.

Codes and block scales of a quantized tensor come one after the other for the same rows; they are
joined to ggml's blocks here. Shards get their names from the last to the first, which is the one
that readers open: it is there once all others are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fp4kit.cpu.ggml_blocks import join_blocks
from fp4kit.errors import FileFormatError, brief
from fp4kit.io.ggml import (
    LAYOUTS_BY_TYPE,
    MAGIC,
    MAX_DIMENSIONS,
    MAX_NAME,
    STRING,
    VALUE_TYPES,
    VERSION,
    BlockLayout,
    GgmlType,
    padded,
)

from .files import AtomicFile, Output, Writer


@dataclass(frozen=True)
class GgufOutput:
    """A tensor that is written.

    Attributes:
        name: its name.
        type: its element type.
        shape: its shape.
        packed: name under which the codes come, of a type whose blocks are made here; else "".
        scale: name under which the block scales come.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    packed: str = ""
    scale: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) // self.type.elements * self.type.nbytes


@dataclass(frozen=True)
class GgufFile:
    """One file that is written.

    Attributes:
        output: where it goes.
        entries: its metadata, each entry as the bytes that stand in the file.
        alignment: bytes that each tensor begins at a multiple of.
        tensors: its tensors, in order.
    """

    output: Output
    entries: Sequence[bytes]
    alignment: int
    tensors: Sequence[GgufOutput]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, with what lies between them."""
        return sum(padded(tensor.nbytes, self.alignment) for tensor in self.tensors)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry_bytes(key: str, kind: int, value: Any) -> bytes:
    """An entry of the metadata as it stands in a file.

    Args:
        key: its name.
        kind: number of its type: a text, or a number.
        value: its value.
    """
    content = _text(value) if kind == STRING else struct.pack(VALUE_TYPES[kind].code, value)
    return _text(key) + struct.pack("<I", kind) + content


def _tensor_bytes(tensor: GgufOutput, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
    return _text(tensor.name) + dims + struct.pack("<IQ", tensor.type.number, offset)


def build_header(file: GgufFile) -> tuple[bytes, list[int]]:
    """The first bytes of a file, and the position of each tensor.

    Raises:
        FileFormatError: for a name that ggml does not take, or one that is used twice.
    """
    names: set[str] = set()
    infos, offsets, end = [], [], 0
    for tensor in file.tensors:
        if len(tensor.name.encode()) >= MAX_NAME or len(tensor.shape) > MAX_DIMENSIONS:
            raise FileFormatError(
                f"{file.output}: tensor {brief(tensor.name)} of {len(tensor.shape)} dimensions: "
                f"ggml takes names of up to {MAX_NAME - 1} bytes and {MAX_DIMENSIONS} dimensions"
            )
        if tensor.name in names:
            raise FileFormatError(f"{file.output}: two tensors are named {brief(tensor.name)}")
        names.add(tensor.name)
        offsets.append(end)
        infos.append(_tensor_bytes(tensor, end))
        end += padded(tensor.nbytes, file.alignment)
    counts = struct.pack("<IQQ", VERSION, len(file.tensors), len(file.entries))
    data = b"".join([MAGIC, counts, *file.entries, *infos])
    data += bytes(padded(len(data), file.alignment) - len(data))
    return data, [len(data) + offset for offset in offsets]


@dataclass
class _Blocks:
    """A tensor whose blocks are made of codes and scales.

    Attributes:
        tensor: the tensor.
        file: where it goes.
        start: its position there.
        layout: how its blocks are made.
        codes: the codes that wait for their scales, and the block that they begin at.
    """

    tensor: GgufOutput
    file: AtomicFile
    start: int
    layout: BlockLayout
    codes: tuple[int, Any] | None = None

    def take_codes(self, offset: int, data: Any) -> None:
        """Keeps codes until their scales come."""
        assert self.codes is None, "codes and scales of the same rows come one after the other"
        self.codes = offset // self.layout.code_bytes, data

    def take_scales(self, offset: int, data: Any) -> None:
        """Writes the blocks of the codes before and of their scales."""
        assert self.codes is not None
        (first, codes), self.codes = self.codes, None
        packed, scales = np.frombuffer(codes, np.uint8), np.frombuffer(data, np.uint8)
        assert first == offset // self.layout.scales
        assert len(packed) == len(scales) * self.layout.half
        count = len(scales) // self.layout.scales
        out = np.empty(count * self.layout.type.nbytes, np.uint8)
        join_blocks(packed, scales, self.layout.scales, out)
        self.file.write_at(self.start + first * self.layout.type.nbytes, out)


class GgufWriter(Writer):
    """Writes one or several GGUF files piece by piece, atomically."""

    def __init__(self, files: Iterable[GgufFile]) -> None:
        """Opens temporary files.

        Args:
            files: what is written, the one that readers open first.

        Raises:
            FileFormatError: for names that cannot be written.
            OutputError: if a file cannot be made.
        """
        listed = [(file, *build_header(file)) for file in files]
        self._plain: dict[str, tuple[AtomicFile, int]] = {}
        self._codes: dict[str, _Blocks] = {}
        self._scales: dict[str, _Blocks] = {}
        self._left: dict[str, int] = {}
        self._headers: list[tuple[AtomicFile, bytes, int]] = []
        with ExitStack() as stack:
            for file, header, starts in listed:
                target = stack.enter_context(AtomicFile(file.output))
                self._headers.append((target, header, len(header) + file.nbytes))
                for tensor, start in zip(file.tensors, starts, strict=True):
                    self._add(tensor, target, start)
            self._stack = stack.pop_all()

    def _add(self, tensor: GgufOutput, file: AtomicFile, start: int) -> None:
        if not tensor.packed:
            self._plain[tensor.name] = file, start
            self._left[tensor.name] = tensor.nbytes
            return
        layout = LAYOUTS_BY_TYPE[tensor.type.number]
        blocks = _Blocks(tensor, file, start, layout)
        self._codes[tensor.packed] = self._scales[tensor.scale] = blocks
        count = prod(tensor.shape) // tensor.type.elements
        self._left[tensor.packed] = count * layout.code_bytes
        self._left[tensor.scale] = count * layout.scales

    def write(self, name: str, offset: int, data: Any) -> None:
        if not len(data):
            return
        self._left[name] -= len(data)
        if name in self._codes:
            self._codes[name].take_codes(offset, data)
        elif name in self._scales:
            self._scales[name].take_scales(offset, data)
        else:
            file, start = self._plain[name]
            file.write_at(start + offset, data)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Completes the files and gives them their names, the first one last."""
        missing = {name: count for name, count in self._left.items() if count}
        assert not missing, f"bytes not written: {missing}"
        for file, header, size in self._headers:
            file.truncate(size)
            file.write_at(0, header)
        for file, _, _ in reversed(self._headers):
            file.commit()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
