# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: a strict header parser, and an atomic streaming writer.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes with neither
holes nor overlaps. The parser is a pure function that refuses everything else before any data is
touched; each error is one line that names the file and the fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from fp4kit.errors import DtypeError, FileFormatError

from .files import AtomicFile, InputFile, Output
from .json_text import strict_json

#: The common readers refuse longer headers.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"


@dataclass(frozen=True)
class Dtype:
    """An element type of the format: the field's name for it, and its width."""

    name: str
    bits: int


#: Every element type of safetensors 0.8.
DTYPES = {
    "BOOL": Dtype("bool", 8),
    "U8": Dtype("uint8", 8),
    "I8": Dtype("int8", 8),
    "U16": Dtype("uint16", 16),
    "I16": Dtype("int16", 16),
    "U32": Dtype("uint32", 32),
    "I32": Dtype("int32", 32),
    "U64": Dtype("uint64", 64),
    "I64": Dtype("int64", 64),
    "F16": Dtype("float16", 16),
    "BF16": Dtype("bfloat16", 16),
    "F32": Dtype("float32", 32),
    "F64": Dtype("float64", 64),
    "C64": Dtype("complex64", 64),
    "F8_E4M3": Dtype("float8_e4m3fn", 8),
    "F8_E5M2": Dtype("float8_e5m2", 8),
    "F8_E8M0": Dtype("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": Dtype("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": Dtype("float8_e5m2fnuz", 8),
    "F6_E2M3": Dtype("float6_e2m3fn", 6),
    "F6_E3M2": Dtype("float6_e3m2fn", 6),
    "F4": Dtype("float4_e2m1fn", 4),
}
#: From the field's name back to the format's.
DTYPE_CODES = {dtype.name: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type (safetensors' name for it) and logical shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True)
class Header:
    """A parsed header.

    Attributes:
        tensors: specification and position in the file of each tensor, in file order.
        metadata: the `__metadata__` of the file, empty if it has none.
    """

    tensors: dict[str, tuple[TensorSpec, int]]
    metadata: dict[str, str]


def _integers(value: object, limit: int) -> bool:
    """Whether `value` is a list of integers (not booleans) from 0 to `limit`."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= limit for item in value
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
    if not isinstance(value, dict):
        raise FileFormatError(f"{name}: {METADATA} must be an object of strings")
    if "data_offsets" in value and not isinstance(value["data_offsets"], str):
        raise FileFormatError(f"{name}: a tensor is named {METADATA}, which the format reserves")
    for key, item in value.items():
        if not isinstance(item, str):
            raise FileFormatError(
                f"{name}: metadata value of {key!r} is {type(item).__name__}, must be a string"
            )
    return value


def _entry(key: str, info: object, name: str) -> tuple[TensorSpec, int, int]:
    """One checked tensor of a header: specification, first and last byte within the data."""
    where = f"{name}: tensor {key!r}:"
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise FileFormatError(f"{where} needs dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FileFormatError(f"{where} unknown dtype {dtype!r}")
    if not _integers(shape, 2**63 - 1):
        raise FileFormatError(f"{where} shape {str(shape)[:80]} is not a list of sizes")
    if not _integers(offsets, 2**63 - 1) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FileFormatError(f"{where} data_offsets {str(offsets)[:80]} are not [begin, end]")
    bits = DTYPES[dtype].bits
    total = bits
    for size in shape:
        # Readers multiply in 64 bits, so an overflow hidden behind a later 0 counts too.
        total *= max(size, 1)
        if total >= 2**63:
            raise FileFormatError(f"{where} shape {str(shape)[:80]} overflows 64 bits")
    if 0 in shape:
        total = 0
    if total % 8:
        raise FileFormatError(f"{where} {dtype} of shape {shape} does not fill whole bytes")
    if offsets[1] - offsets[0] != total // 8:
        raise FileFormatError(
            f"{where} {dtype} of shape {shape} takes {total // 8} bytes, data_offsets "
            f"{offsets} hold {offsets[1] - offsets[0]}"
        )
    return TensorSpec(key, dtype, tuple(shape)), offsets[0], offsets[1]


def parse_header(data: bytes, file_size: int, name: str) -> Header:
    """Parses and checks a header; a pure function of the file's first bytes and its size.

    Args:
        data: the file's first bytes, at least up to the end of the header.
        file_size: bytes of the whole file.
        name: the file's name, for messages.

    Returns:
        The header; every tensor's bytes lie inside the file, without overlap or hole.

    Raises:
        FileFormatError: for anything else, with the first fault found.
    """
    length = header_length(data, file_size, name)
    text = data[8 : 8 + length]
    if not text.startswith(b"{"):
        raise FileFormatError(f"{name}: not a safetensors file: its header is no JSON object")
    try:
        header = strict_json(text.decode())
    except ValueError as error:
        raise FileFormatError(f"{name}: damaged header: {error}") from None
    metadata = _metadata(header.pop(METADATA, None), name)
    entries = sorted(
        (_entry(key, info, name) for key, info in header.items()), key=lambda entry: entry[1:]
    )
    base, end, before = 8 + length, 0, "the header"
    for spec, begin, stop in entries:
        if begin != end:
            fault = "overlaps" if begin < end else f"leaves a hole of {begin - end} bytes after"
            raise FileFormatError(f"{name}: tensor {spec.name!r}: {fault} {before}")
        end, before = stop, f"tensor {spec.name!r}"
    if base + end > file_size:
        raise FileFormatError(
            f"{name}: truncated: the header describes {base + end} bytes, the file has {file_size}"
        )
    if base + end < file_size:
        raise FileFormatError(
            f"{name}: {file_size - base - end} trailing bytes after the last tensor"
        )
    tensors = {spec.name: (spec, base + begin) for spec, begin, _ in entries}
    return Header(tensors, metadata)


def read_header(file: InputFile) -> Header:
    """Reads and checks the header of an open file: exactly 8 + N bytes of it.

    Raises:
        FileFormatError: if it is malformed.
    """
    length = header_length(file.read(0, 8), file.size, str(file.path))
    return parse_header(file.read(0, 8 + length), file.size, str(file.path))


def build_header(
    tensors: Sequence[TensorSpec], metadata: Mapping[str, str], name: str
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file (length and header), and the position of each tensor.

    Tensors with wider elements come first, so that every one is aligned for its element type; the
    header is padded with spaces to a multiple of 8.

    Raises:
        FileFormatError: for the reserved name, a name used twice, or a header above the limit.
        DtypeError: for an element type the format does not have.
    """
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for spec in tensors:
        if spec.dtype not in DTYPES:
            raise DtypeError(f"{name}: tensor {spec.name!r}: safetensors has no {spec.dtype}")
    for spec in sorted(tensors, key=lambda spec: -DTYPES[spec.dtype].bits):
        if spec.name == METADATA:
            raise FileFormatError(f"{name}: a tensor cannot be named {METADATA}")
        if spec.name in offsets:
            raise FileFormatError(f"{name}: two tensors are named {spec.name!r}")
        offsets[spec.name] = end
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FileFormatError(
            f"{name}: the header of {len(tensors)} tensors would take {len(text)} bytes; readers "
            f"refuse more than {MAX_HEADER_BYTES}: split the tensors over several files (shards)"
        )
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: base + at for key, at in offsets.items()}


class SafetensorsWriter:
    """Writes a safetensors file piece by piece, atomically.

    Space for the header is reserved first and the header is written last: an unfinished file
    begins with zeros, which no reader accepts.
    """

    def __init__(
        self, target: Output | Path, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        self._target = target
        self._tensors = list(tensors)
        self._metadata = dict(metadata)
        self._header, self._offsets = build_header(tensors, metadata, str(target))
        self._left = {spec.name: spec.nbytes for spec in tensors}
        self._file = AtomicFile(target)

    def write(self, name: str, offset: int, data: Any) -> None:
        """Writes bytes of a tensor, beginning `offset` bytes into it; each byte exactly once."""
        self._left[name] -= len(data)
        self._file.write_at(self._offsets[name] + offset, data)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Writes the header and gives the file its name.

        Args:
            metadata: replaces the metadata given at first; it must take exactly as many bytes.
        """
        missing = {name: count for name, count in self._left.items() if count}
        assert not missing, f"bytes not written: {missing}"
        header = self._header
        if metadata is not None:
            header, _ = build_header(self._tensors, metadata, str(self._target))
            assert len(header) == len(self._header), "the header's length changed"
        self._file.write_at(0, header)
        self._file.commit()

    def __enter__(self) -> SafetensorsWriter:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)
