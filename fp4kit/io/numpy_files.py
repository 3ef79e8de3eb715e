# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Reading the .npy and .npz containers: streaming, and never with pickle.

NumPy's files cannot name bfloat16, FP8 or FP4. fp4kit stores the bits of such a tensor as unsigned
integers and records the element type: in an .npz in the member `__fp4kit_dtypes__`, for an .npy in
`NAME.npy.json` next to it. Reading honours the record; without one, 2-byte void data (what
`numpy.save` makes of bfloat16) is refused unless the caller says what it is.
"""

from __future__ import annotations

import ast
import re
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from fp4kit.errors import FileFormatError

from .files import InputFile
from .json_text import strict_json
from .safetensors import DTYPE_CODES, TensorSpec

RECORD_MEMBER = "__fp4kit_dtypes__"
RECORD_VERSION = 1
_MAX_HEADER = 1 << 16
#: NumPy's type strings that have an equal in safetensors.
STORABLE = {
    "b1": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "u2": "U16",
    "i2": "I16",
    "u4": "U32",
    "i4": "I32",
    "u8": "U64",
    "i8": "I64",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "c8": "C64",
}


@dataclass(frozen=True)
class ArrayHeader:
    """The header of an .npy stream.

    Attributes:
        descr: NumPy's type string (or its repr, for structured types).
        shape: shape of the array.
        fortran: whether the first index runs fastest.
        offset: position of the first byte of data in the stream.
    """

    descr: str
    shape: tuple[int, ...]
    fortran: bool
    offset: int

    @property
    def itemsize(self) -> int:
        """Bytes per element, of the types that can be read."""
        return int(self.descr[2:])


class ByteStream(Protocol):
    """Something that is read by position."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes at `offset`."""


def parse_array_header(data: bytes, name: str) -> ArrayHeader:
    """Parses the header of an .npy stream; a pure function of its first bytes.

    Args:
        data: first bytes of the stream, 64 KiB or all there are.
        name: file (and member), for messages.

    Raises:
        FileFormatError: if it is malformed.
    """
    if len(data) < 10 or not data.startswith(b"\x93NUMPY"):
        raise FileFormatError(f"{name}: not an .npy file: it does not begin with \\x93NUMPY")
    major = data[6]
    if major not in (1, 2, 3):
        raise FileFormatError(f"{name}: .npy version {major} is not known (1, 2 or 3)")
    start = 10 if major == 1 else 12
    end = start + int.from_bytes(data[8:start], "little")
    if end > len(data):
        raise FileFormatError(f"{name}: truncated: its header would take {end} bytes")
    try:
        header = ast.literal_eval(data[start:end].decode("utf-8" if major == 3 else "latin-1"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise FileFormatError(f"{name}: damaged .npy header") from None
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise FileFormatError(f"{name}: damaged .npy header: needs descr, fortran_order and shape")
    descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
    sizes_ok = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes_ok or not isinstance(fortran, bool):
        raise FileFormatError(f"{name}: damaged .npy header: shape or fortran_order is wrong")
    if prod(max(size, 1) for size in shape) >= 2**59:
        raise FileFormatError(f"{name}: shape {str(shape)[:80]} overflows 64 bits")
    text = descr if isinstance(descr, str) else repr(descr)
    if re.fullmatch(r"[biufcV]\d+", text):
        text = "|" + text
    return ArrayHeader(text, shape, fortran, end)


def element_type(header: ArrayHeader, void_dtype: str | None) -> tuple[str | None, str]:
    """The safetensors name of an array's element type, or None and the reason why it has none.

    Args:
        header: the array's header.
        void_dtype: what 2-byte void data is, None if the caller did not say.
    """
    match = re.fullmatch(r"[<>|=]([biufcV])(\d+)", header.descr)
    kind = match[1] + match[2] if match else header.descr.lstrip("<>|=")
    if kind in STORABLE:
        return STORABLE[kind], ""
    if kind == "V2":
        if void_dtype == "bfloat16":
            return "BF16", ""
        return None, (
            "2-byte void data has lost its type (numpy.save does that to bfloat16); if it is "
            'bfloat16, say so with void_dtype="bfloat16" (--void-dtype bfloat16)'
        )
    if kind == "V1":
        return "U8", "1-byte void data (FP8 or FP4 saved by NumPy), kept as bytes"
    if kind == "f1":
        return None, "float8_e5m2 as numpy.save writes it is not valid; save x.view('uint8')"
    if kind.startswith("O"):
        return None, "an object array can only be read with pickle, which may run code"
    if kind.startswith(("U", "S")):
        return None, "text is not a tensor"
    return None, f"safetensors has no element type {header.descr[:40]}"


class ArrayReader:
    """Reads the C-order little-endian bytes of one stored array, whatever order it is stored in."""

    def __init__(self, header: ArrayHeader, stream: ByteStream) -> None:
        self._header = header
        self._stream = stream
        size = header.itemsize
        # Complex numbers are two halves, each in its own byte order.
        self._swap = size // 2 if header.descr[1] == "c" else size
        self._swapped = header.descr[0] == ">" and self._swap > 1
        long_axes = [n for n in header.shape if n > 1]
        self._transposed = header.fortran and len(long_axes) > 1 and 0 not in header.shape
        self._whole: Any = None

    def read(self, offset: int, out: memoryview) -> None:
        """Fills `out` from `offset` on; both must be multiples of a row for Fortran order."""
        if self._transposed:
            self._read_transposed(offset, out)
        else:
            self._stream.read_into(self._header.offset + offset, out)
        if self._swapped:
            np.frombuffer(out, f"u{self._swap}").byteswap(inplace=True)

    def _read_transposed(self, offset: int, out: memoryview) -> None:
        shape, size = self._header.shape, self._header.itemsize
        kind = f"V{size}"
        if len(shape) == 2:
            rows, cols = shape
            first, count = offset // (cols * size), len(out) // (cols * size)
            stored = np.empty((cols, count), kind)
            if count == rows:
                view = stored.view(np.uint8).reshape(-1).data
                self._stream.read_into(self._header.offset, view)
            else:
                for col, run in enumerate(stored.view(np.uint8).reshape(cols, count * size)):
                    at = self._header.offset + (col * rows + first) * size
                    self._stream.read_into(at, run.data)
            np.frombuffer(out, kind).reshape(count, cols)[...] = stored.T
            return
        # More dimensions scatter every row over the file: such an array is read whole, once.
        if self._whole is None:
            everything = np.empty(prod(shape), kind)
            self._stream.read_into(self._header.offset, everything.view(np.uint8).data)
            self._whole = everything.reshape(shape[::-1]).T.copy(order="C").reshape(-1)
        whole = self._whole.view(np.uint8)
        np.frombuffer(out, np.uint8)[...] = whole[offset : offset + len(out)]
        if offset + len(out) == whole.size:
            self._whole = None


def parse_record(text: str, name: str) -> dict[str, TensorSpec]:
    """The recorded element types and shapes, by tensor name.

    Raises:
        FileFormatError: if the record is malformed.
    """
    try:
        record = strict_json(text)
        if record["version"] != RECORD_VERSION:
            raise ValueError(f"version {record['version']!r} is not known")
        found = {}
        for key, info in record["tensors"].items():
            shape = tuple(info["shape"])
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"shape {shape}")
            found[key] = TensorSpec(key, DTYPE_CODES[info["dtype"]], shape)
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{name}: damaged record of element types: {error!s}") from None


def apply_record(
    header: ArrayHeader, dtype: str | None, recorded: TensorSpec | None
) -> TensorSpec | None:
    """The recorded specification if the stored array can hold it, else None."""
    if recorded is None or dtype is None or dtype[0] != "U":
        return None
    stored = prod(header.shape) * header.itemsize
    return recorded if stored == recorded.nbytes and not header.fortran else None


def sidecar(path: Path) -> Path:
    """Where the element type of an .npy file is recorded."""
    return path.with_name(path.name + ".json")


class MemberStream:
    """A zip member read by position; reading forward never decompresses anything twice."""

    def __init__(self, archive: zipfile.ZipFile, member: str, name: str) -> None:
        self._archive = archive
        self._member = member
        self._name = name
        self._stream: IO[bytes] | None = None

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes at `offset` of the decompressed member.

        Raises:
            FileFormatError: if the member is damaged, encrypted or ends before that.
        """
        try:
            if self._stream is None:
                self._stream = self._archive.open(self._member)
            if self._stream.tell() != offset:
                self._stream.seek(offset)
            done = 0
            while done < len(out):
                piece = self._stream.read(min(len(out) - done, 1 << 22))
                if not piece:
                    raise FileFormatError(f"{self._name}: truncated")
                out[done : done + len(piece)] = piece
                done += len(piece)
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise FileFormatError(f"{self._name}: damaged zip member: {error}") from None
        except OSError as error:
            raise FileFormatError(f"{self._name}: cannot be read: {error}") from None

    def head(self) -> bytes:
        """The first 64 KiB, or all there are."""
        size = self._archive.getinfo(self._member).file_size
        data = bytearray(min(size, _MAX_HEADER))
        self.read_into(0, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Frees the decompressor; a later read opens the member again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def open_archive(file: InputFile) -> zipfile.ZipFile:
    """Opens the zip archive of an .npz.

    Raises:
        FileFormatError: if it is none, or a torch checkpoint.
    """
    try:
        archive = zipfile.ZipFile(file.path)
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise FileFormatError(f"{file.path}: not an .npz archive: {error}") from None
    names = archive.namelist()
    fault = ""
    if any(name.endswith("data.pkl") for name in names):
        fault = "a torch checkpoint, not an .npz; save it again with safetensors"
    elif len(set(names)) < len(names):
        fault = "damaged: two members have the same name"
    if fault:
        archive.close()
        raise FileFormatError(f"{file.path}: {fault}")
    return archive
