# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Reading .safetensors: a strict parser of its header, and its tensors.

The parser is a pure function that refuses everything that is not a header of tensors without holes
or overlaps, before any data is touched and before much memory is spent; each error is one line that
names the file and the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp4kit.errors import FileFormatError, brief
from fp4kit.io.containers import (
    DTYPES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    METADATA,
    TensorSpec,
)
from fp4kit.io.read.files import InputFile
from fp4kit.io.read.json_text import strict_json, unique
from fp4kit.io.read.source import FileSource, plain_tensor


class SafetensorsSource(FileSource):
    """A safetensors file."""

    concurrent = True

    def __init__(self, file: InputFile) -> None:
        super().__init__(file)
        header = read_header(file)
        self.metadata = header.metadata
        self.tensors = {name: plain_tensor(spec) for name, (spec, _) in header.tensors.items()}
        self._starts = {name: start for name, (_, start) in header.tensors.items()}

    def read(self, name: str, offset: int, out: memoryview) -> None:
        self._file.read_into(self._starts[name] + offset, out)


#: Values and keys of a header of so many tensors, and of its metadata.
_MAX_VALUES = 16 * MAX_TENSORS
#: Of a tensor: shapes stand in messages and tables.
MAX_DIMENSIONS = 1000
#: Largest size of a dimension, and position in a file.
_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class Header:
    """A parsed header.

    Attributes:
        tensors: specification and position in the file of each tensor, in file order.
        metadata: the `__metadata__` of the file, empty if it has none.
    """

    tensors: dict[str, tuple[TensorSpec, int]]
    metadata: dict[str, str]


class _Info(NamedTuple):
    """What a header says of a tensor: as objects of JSON, these take three times the memory."""

    dtype: Any
    shape: Any
    data_offsets: Any


_INFO = frozenset(_Info._fields)
#: The same text once, however many tensors have it.
_SHARED = {code: code for code in DTYPES}


def _make_object(pairs: list[tuple[str, Any]]) -> Any:
    """An object of a header; of one that looks like a tensor's only what counts."""
    found = unique(pairs)
    if found.keys() != _INFO:
        return found
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    return _Info(
        _SHARED.get(dtype, dtype) if isinstance(dtype, str) else dtype,
        tuple(shape) if isinstance(shape, list) else shape,
        tuple(offsets) if isinstance(offsets, list) else offsets,
    )


def _integers(value: object) -> bool:
    """Whether `value` is a sequence of sizes or positions (not booleans)."""
    return isinstance(value, (list, tuple)) and all(
        type(item) is int and 0 <= item <= _LIMIT for item in value
    )


def header_length(first: bytes, file_size: int, name: str) -> int:
    """The header's length from the first 8 bytes of a file.

    Raises:
        FileFormatError: if it cannot be one.
    """
    if file_size < 8 or len(first) < 8:
        what = "the file is empty" if file_size == 0 else f"too short ({file_size} bytes)"
        raise FileFormatError(f"{name}: not a safetensors file: {what}")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise FileFormatError(
            f"{name}: not a safetensors file, or damaged: its header would be {length} bytes long "
            f"(at most {MAX_HEADER_BYTES} are allowed)"
        )
    if length < 2:
        raise FileFormatError(f"{name}: damaged: a header of {length} bytes holds nothing")
    if 8 + length > file_size:
        raise FileFormatError(
            f"{name}: truncated: the header takes {8 + length} bytes, the file has {file_size}"
        )
    return length


def _metadata(value: object, name: str) -> dict[str, str]:
    """The checked `__metadata__` of a header; null and {} count as absent."""
    if value is None:
        return {}
    if isinstance(value, _Info) and not isinstance(value.data_offsets, str):
        raise FileFormatError(f"{name}: a tensor is named {METADATA}, which the format reserves")
    if isinstance(value, _Info):
        value = value._asdict()
    if not isinstance(value, dict):
        raise FileFormatError(f"{name}: {METADATA} must be an object of strings")
    if "data_offsets" in value and not isinstance(value["data_offsets"], str):
        raise FileFormatError(f"{name}: a tensor is named {METADATA}, which the format reserves")
    for key, item in value.items():
        if not isinstance(item, str):
            raise FileFormatError(
                f"{name}: metadata value of {brief(key)} is {type(item).__name__}, must be a string"
            )
    return value


def _info(value: object) -> _Info | None:
    """What an object of the header says of a tensor; more than that is ignored."""
    if isinstance(value, _Info):
        return value
    if not isinstance(value, dict) or not value.keys() >= _INFO:
        return None
    return _Info(value["dtype"], value["shape"], value["data_offsets"])


def _data_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor.

    Raises:
        ValueError: if they are no whole number, or of more than 64 bits.
    """
    bits = total = DTYPES[dtype].bits
    for size in shape:
        # Readers multiply in 64 bits, so an overflow hidden behind a later 0 counts too.
        total *= max(size, 1)
        if total > _LIMIT:
            raise ValueError(f"shape {brief(list(shape))} overflows 64 bits")
    if 0 in shape:
        return 0
    if bits % 8 and total % 8:
        raise ValueError(f"{dtype} of shape {brief(list(shape))} does not fill whole bytes")
    return total // 8


def _entry(key: str, value: object) -> tuple[TensorSpec, int, int]:
    """One checked tensor of a header: specification, first and last byte within the data.

    Raises:
        ValueError: with the fault.
    """
    info = _info(value)
    if info is None:
        raise ValueError("needs dtype, shape and data_offsets")
    dtype, shape, offsets = info
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {brief(dtype)}")
    if isinstance(shape, (list, tuple)) and len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are read")
    if not _integers(shape):
        raise ValueError(f"shape {brief(shape)} is not a list of sizes")
    if not _integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets {brief(offsets)} are not [begin, end]")
    nbytes = _data_bytes(dtype, shape)
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(
            f"{dtype} of shape {brief(list(shape))} takes {nbytes} bytes, data_offsets "
            f"{list(offsets)} hold {offsets[1] - offsets[0]}"
        )
    return TensorSpec(key, dtype, tuple(shape)), offsets[0], offsets[1]


def _entries(header: dict[str, Any], name: str) -> list[tuple[TensorSpec, int, int]]:
    """Every tensor of a header in file order; the header is used up.

    Raises:
        FileFormatError: with the first fault found.
    """
    if len(header) > MAX_TENSORS:
        raise FileFormatError(
            f"{name}: holds {len(header)} tensors; at most {MAX_TENSORS} are read from one file: "
            "split it into shards"
        )
    entries = []
    while header:
        key, value = header.popitem()
        try:
            entries.append(_entry(key, value))
        except ValueError as error:
            raise FileFormatError(f"{name}: tensor {brief(key)}: {error}") from None
    # Empty tensors share their position: they keep the order of the header.
    entries.reverse()
    entries.sort(key=lambda entry: entry[1:])
    return entries


def parse_header(data: bytes, file_size: int, name: str) -> Header:
    """Parses and checks a header; a pure function of the file's first bytes and its size.

    Args:
        data: the file's first bytes, at least up to the end of the header.
        file_size: bytes of the whole file.
        name: the file's name, for messages.

    Returns:
        The header; every tensor's bytes lie inside the file, without overlap or hole.

    Raises:
        FileFormatError: for anything else, with a fault.
    """
    length = header_length(data, file_size, name)
    text = data[8 : 8 + length]
    if not text.startswith(b"{"):
        raise FileFormatError(f"{name}: not a safetensors file: its header is no JSON object")
    try:
        header = strict_json(text, max_values=_MAX_VALUES, make_object=_make_object)
    except ValueError as error:
        raise FileFormatError(f"{name}: damaged header: {error}") from None
    del text
    if isinstance(header, _Info):
        header = header._asdict()
    metadata = _metadata(header.pop(METADATA, None), name)
    base, end = 8 + length, 0
    before: str | TensorSpec = "the header"
    tensors: dict[str, tuple[TensorSpec, int]] = {}
    for spec, begin, stop in _entries(header, name):
        if begin != end:
            fault = "overlaps" if begin < end else f"leaves a hole of {begin - end} bytes after"
            where = before if isinstance(before, str) else f"tensor {brief(before.name)}"
            raise FileFormatError(f"{name}: tensor {brief(spec.name)}: {fault} {where}")
        end, before = stop, spec
        tensors[spec.name] = spec, base + begin
    if base + end > file_size:
        raise FileFormatError(
            f"{name}: truncated: the header describes {base + end} bytes, the file has {file_size}"
        )
    if base + end < file_size:
        raise FileFormatError(
            f"{name}: {file_size - base - end} trailing bytes after the last tensor"
        )
    return Header(tensors, metadata)


def read_header(file: InputFile) -> Header:
    """Reads and checks the header of an open file: exactly 8 + N bytes of it.

    Raises:
        FileFormatError: if it is malformed.
    """
    length = header_length(file.read(0, 8), file.size, str(file.path))
    return parse_header(file.read(0, 8 + length), file.size, str(file.path))
