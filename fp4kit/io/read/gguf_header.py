# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file: metadata and tensors, parsed strictly and in bounded memory.

What is refused is what ggml refuses, and a file that ends before its tensors do, or after them.
Metadata is kept as its bytes, so that it can be carried over as it is; single values are read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from fp4kit.errors import FileFormatError, brief
from fp4kit.io.containers import MAX_HEADER_BYTES, MAX_TENSORS
from fp4kit.io.ggml import (
    ALIGNMENT_KEY,
    ARRAY,
    DEFAULT_ALIGNMENT,
    GGML_TYPES,
    MAGIC,
    MAX_DIMENSIONS,
    MAX_NAME,
    STRING,
    UINT32,
    VALUE_TYPES,
    VERSIONS,
    GgmlType,
    padded,
)
from fp4kit.io.read.files import InputFile

#: Entries of metadata; models have about fifty.
MAX_ENTRIES = 1 << 16
#: ggml counts elements in 63 bits.
_LIMIT = 2**63 - 1
#: Bytes of the file that are read at first; most headers need no more.
_FIRST_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One entry of the metadata.

    Attributes:
        key: its name.
        kind: number of its type.
        raw: key, type and value as they stand in the file.
        value: a number, a truth value or a text; of an array, how many values of what it has.
    """

    key: str
    kind: int
    raw: bytes
    value: Any


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        name: its name.
        type: its element type.
        shape: its shape, the last axis being the one that lies together.
        start: position of its first byte in the file.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) // self.type.elements * self.type.nbytes


@dataclass(frozen=True)
class GgufHeader:
    """A parsed header.

    Attributes:
        entries: the metadata by key, in file order.
        tensors: the tensors, in file order.
        alignment: bytes that the beginning of each tensor is a multiple of.
    """

    entries: dict[str, Entry]
    tensors: list[GgufTensor]
    alignment: int


class _HeaderError(Exception):
    """What is wrong with a header, without the name of the file."""


class _Reader:
    """The first bytes of a file, read as far as they are asked for."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._data = bytearray()
        self.at = 0

    def take(self, count: int) -> memoryview:
        """The next bytes."""
        end = self.at + count
        if end > len(self._data):
            self._fill(end)
        view = memoryview(self._data)[self.at : end]
        self.at = end
        return view

    def _fill(self, end: int) -> None:
        if end > self._file.size:
            raise _HeaderError("goes on beyond the end of the file, which is truncated")
        if end > MAX_HEADER_BYTES:
            raise _HeaderError(f"takes more than {MAX_HEADER_BYTES} bytes")
        wanted = min(max(2 * end, _FIRST_BYTES), MAX_HEADER_BYTES, self._file.size)
        # A new one: views of the old one may still be held.
        self._data = self._data + self._file.read(len(self._data), wanted - len(self._data))

    def number(self, code: str) -> Any:
        """The next number."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def left(self) -> int:
        """Bytes of the file after this."""
        return self._file.size - self.at

    def text(self, what: str) -> str:
        """The next text.

        Raises:
            _HeaderError: if it is longer than the file, or no UTF-8.
        """
        length = self.number("<Q")
        if length > self.left():
            raise _HeaderError(f"{what} would be {length} bytes long, beyond the end of the file")
        try:
            return bytes(self.take(length)).decode()
        except UnicodeDecodeError:
            raise _HeaderError(f"{what} is no UTF-8") from None

    def skip_texts(self, count: int) -> None:
        """Goes over texts; tokenizers have hundreds of thousands."""
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self.at + 8 > len(self._data):
                self._fill(self.at + 8)
            self.at += 8 + length_at(self._data, self.at)[0]
            if self.at > len(self._data):
                self._fill(self.at)

    def raw(self, first: int) -> bytes:
        """The bytes from a position to here."""
        return bytes(self._data[first : self.at])


def _skip_array(reader: _Reader) -> str:
    """Goes over an array; what it holds, in words.

    Raises:
        _HeaderError: for one that the file cannot hold.
    """
    kind, count = reader.number("<I"), reader.number("<Q")
    if kind == ARRAY:
        raise _HeaderError("is an array of arrays, which no reader knows")
    if kind != STRING and kind not in VALUE_TYPES:
        raise _HeaderError(f"is an array of type {kind}, which GGUF does not have")
    size = 8 if kind == STRING else VALUE_TYPES[kind].nbytes
    if count * size > reader.left():
        raise _HeaderError(f"is an array of {count} values, beyond the end of the file")
    if kind != STRING:
        reader.take(count * size)
        return f"{count} of {VALUE_TYPES[kind].name}"
    reader.skip_texts(count)
    return f"{count} of string"


def _value(reader: _Reader, kind: int) -> Any:
    """The value of an entry.

    Raises:
        _HeaderError: with the fault.
    """
    if kind == ARRAY:
        return _skip_array(reader)
    if kind == STRING:
        return reader.text("its text")
    if kind not in VALUE_TYPES:
        raise _HeaderError(f"has type {kind}, which GGUF does not have")
    return reader.number(VALUE_TYPES[kind].code)


def _entries(reader: _Reader, count: int) -> dict[str, Entry]:
    """The metadata.

    Raises:
        _HeaderError: with the first fault.
    """
    entries: dict[str, Entry] = {}
    for number in range(count):
        first = reader.at
        key = reader.text(f"the name of metadata entry {number}")
        if not key:
            raise _HeaderError(f"metadata entry {number} has no name")
        if key in entries:
            raise _HeaderError(f"metadata {brief(key)} appears twice")
        kind = reader.number("<I")
        try:
            value = _value(reader, kind)
        except _HeaderError as error:
            raise _HeaderError(f"metadata {brief(key)}: {error}") from None
        entries[key] = Entry(key, kind, reader.raw(first), value)
    return entries


def _alignment(entries: dict[str, Entry]) -> int:
    entry = entries.get(ALIGNMENT_KEY)
    if entry is None:
        return DEFAULT_ALIGNMENT
    if entry.kind != UINT32 or entry.value == 0 or entry.value & (entry.value - 1):
        raise _HeaderError(
            f"{ALIGNMENT_KEY} is {brief(entry.value)}, it must be a power of two as uint32"
        )
    return int(entry.value)


def _tensor(reader: _Reader, number: int) -> tuple[GgufTensor, int]:
    """One tensor without its place, and the offset that the header gives it.

    Raises:
        _HeaderError: with the fault.
    """
    name = reader.text(f"the name of tensor {number}")
    if len(name.encode()) >= MAX_NAME:
        raise _HeaderError(f"tensor {brief(name)}: its name is longer than {MAX_NAME - 1} bytes")
    where = f"tensor {brief(name)}"
    dims = reader.number("<I")
    if dims > MAX_DIMENSIONS:
        raise _HeaderError(f"{where}: has {dims} dimensions; at most {MAX_DIMENSIONS} are read")
    shape = tuple(reader.number("<Q") for _ in range(dims))[::-1]
    code, offset = reader.number("<I"), reader.number("<Q")
    if code not in GGML_TYPES:
        raise _HeaderError(
            f"{where}: its type {code} is not known here; the file may be newer than this fp4kit"
        )
    kind = GGML_TYPES[code]
    if prod(max(size, 1) for size in shape) * kind.nbytes > _LIMIT:
        raise _HeaderError(f"{where}: shape {brief(list(shape))} overflows 64 bits")
    if (shape[-1] if shape else 1) % kind.elements:
        raise _HeaderError(
            f"{where}: {kind.name} of shape {brief(list(shape))} does not fill whole blocks of "
            f"{kind.elements}"
        )
    return GgufTensor(name, kind, shape, 0), offset


def _tensors(reader: _Reader, count: int, alignment: int) -> list[GgufTensor]:
    """The tensors, which lie one after the other, each at a multiple of the alignment.

    Raises:
        _HeaderError: with the first fault.
    """
    found, names = [], set()
    for number in range(count):
        tensor, offset = _tensor(reader, number)
        if tensor.name in names:
            raise _HeaderError(f"two tensors are named {brief(tensor.name)}")
        names.add(tensor.name)
        found.append((tensor, offset))
    end = base = padded(reader.at, alignment)
    placed = []
    for tensor, offset in found:
        expected = base + padded(end - base, alignment)
        if base + offset != expected:
            raise _HeaderError(
                f"tensor {brief(tensor.name)}: begins at {offset}, {expected - base} is expected: "
                "tensors follow one another, without overlap or hole"
            )
        placed.append(GgufTensor(tensor.name, tensor.type, tensor.shape, expected))
        end = expected + tensor.nbytes
    return placed


def parse_header(file: InputFile) -> GgufHeader:
    """Reads and checks the header of an open file.

    Returns:
        The header; every tensor's bytes lie inside the file, without overlap or hole.

    Raises:
        FileFormatError: for anything else, with the first fault.
    """
    reader, path = _Reader(file), file.path
    if file.size < 24 or reader.take(4) != MAGIC:
        raise FileFormatError(f"{path}: not a GGUF file, or cut off at its beginning")
    version = reader.number("<I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        why = "it is big-endian" if swapped else f"version {version} of GGUF"
        raise FileFormatError(f"{path}: {why}; versions 2 and 3 are read, little-endian")
    tensors, entries = reader.number("<Q"), reader.number("<Q")
    for what, count, most in (("tensors", tensors, MAX_TENSORS), ("entries", entries, MAX_ENTRIES)):
        if count > most:
            raise FileFormatError(f"{path}: holds {count} {what}; at most {most} are read")
    try:
        metadata = _entries(reader, entries)
        alignment = _alignment(metadata)
        placed = _tensors(reader, tensors, alignment)
    except _HeaderError as error:
        raise FileFormatError(f"{path}: damaged header: {error}") from None
    _check_end(file, placed, alignment)
    return GgufHeader(metadata, placed, alignment)


def _check_end(file: InputFile, tensors: list[GgufTensor], alignment: int) -> None:
    """Refuses a file that ends before its last tensor, or long after it."""
    if not tensors:
        return
    end = tensors[-1].start + tensors[-1].nbytes
    if end > file.size:
        raise FileFormatError(
            f"{file.path}: truncated: its tensors end at byte {end}, the file has {file.size}"
        )
    if file.size > padded(end, alignment):
        raise FileFormatError(
            f"{file.path}: {file.size - end} trailing bytes after the last tensor"
        )
