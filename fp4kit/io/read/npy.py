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
import threading
import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fp4kit.errors import DtypeError, FileFormatError, brief, shortened
from fp4kit.io.containers import DTYPE_CODES, TensorSpec
from fp4kit.io.read.files import InputFile
from fp4kit.io.read.json_text import strict_json
from fp4kit.io.read.source import FileSource, SourceTensor, plain_tensor

RECORD_MEMBER = "__fp4kit_dtypes__"
RECORD_VERSION = 1
#: Bytes of an .npy stream that hold its header.
MAX_HEADER = 1 << 16
#: Of an array, in NumPy 2.
MAX_DIMENSIONS = 64
#: Bytes of a record beside an .npy: its tensor's name may be long.
MAX_SIDECAR = 1 << 26
#: Largest array whose elements are brought into C order in memory.
MAX_REORDERED = 1 << 28
#: Bytes that are read at once for a part of a row that is scattered over the file.
_PIECE = 1 << 20
_SIZE_LIMIT = 2**63
_DESCR = re.compile(r"[<>|=]?([biufcV])([1-9]\d{0,17})")
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in its strings
            header = ast.literal_eval(data[start:end].decode("utf-8" if major == 3 else "latin-1"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise FileFormatError(f"{name}: damaged .npy header") from None
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise FileFormatError(f"{name}: damaged .npy header: needs descr, fortran_order and shape")
    descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
    sizes_ok = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes_ok or not isinstance(fortran, bool):
        raise FileFormatError(f"{name}: damaged .npy header: shape or fortran_order is wrong")
    if len(shape) > MAX_DIMENSIONS:
        raise FileFormatError(
            f"{name}: has {len(shape)} dimensions; NumPy reads at most {MAX_DIMENSIONS}"
        )
    # Sizes first: text of numbers with thousands of digits is refused by Python itself.
    if any(size >= _SIZE_LIMIT for size in shape) or prod(max(n, 1) for n in shape) >= 2**59:
        raise FileFormatError(f"{name}: its shape overflows 64 bits")
    return ArrayHeader(_type_string(descr, name), shape, fortran, end)


def _type_string(descr: object, name: str) -> str:
    """NumPy's type string with its byte order, or the repr of what is none."""
    try:
        text = descr if isinstance(descr, str) else repr(descr)
    except ValueError:  # a number of thousands of digits again
        raise FileFormatError(f"{name}: damaged .npy header: descr is no element type") from None
    return "|" + text if _DESCR.fullmatch(text) and text[0] not in "<>|=" else text


def element_type(header: ArrayHeader, void_dtype: str | None) -> tuple[str | None, str]:
    """The safetensors name of an array's element type, or None and the reason why it has none.

    Args:
        header: the array's header.
        void_dtype: what 2-byte void data is, None if the caller did not say.
    """
    match = _DESCR.fullmatch(header.descr)
    kind = match[1] + match[2] if match else ""
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
    if re.fullmatch(r"[<>|=]?O\d*", header.descr):
        return None, "an object array can only be read with pickle, which may run code"
    if re.fullmatch(r"[<>|=]?[US]\d+", header.descr):
        return None, "text is not a tensor"
    return None, f"safetensors has no element type {brief(header.descr, 40)}"


def check_order(header: ArrayHeader, name: str, *, streamed: bool) -> None:
    """Refuses an array whose elements could only be brought into C order in too much memory.

    Args:
        header: of an array that can be read.
        name: file (and member), for messages.
        streamed: whether reading backwards reads everything again, as in an archive.

    Raises:
        FileFormatError: with the size and what to do.
    """
    nbytes = prod(header.shape) * header.itemsize
    planes = len([n for n in header.shape if n > 1])
    if header.fortran and planes > (1 if streamed else 2) and nbytes > MAX_REORDERED:
        raise FileFormatError(
            f"{name}: takes {nbytes} bytes in Fortran order, of which at most {MAX_REORDERED} are "
            "reordered in memory; save it again in C order: numpy.ascontiguousarray(x)"
        )


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
        """Fills `out` from `offset` on; both must be multiples of an element."""
        if not self._transposed:
            self._stream.read_into(self._header.offset + offset, out)
        elif len(self._header.shape) == 2:
            self._read_matrix(offset, out)
        else:
            self._read_reordered(offset, out)
        if self._swapped:
            np.frombuffer(out, f"u{self._swap}").byteswap(inplace=True)

    def _read_matrix(self, offset: int, out: memoryview) -> None:
        """Elements of a matrix: the end of a row, whole rows, and the beginning of one."""
        size, cols = self._header.itemsize, self._header.shape[1]
        at, end = offset // size, (offset + len(out)) // size
        while at < end:
            row, col = divmod(at, cols)
            whole = (end - at) // cols if col == 0 else 0
            count = whole * cols or min(cols - col, end - at)
            begin = at * size - offset
            part = np.frombuffer(out[begin : begin + count * size], f"V{size}")
            if whole:
                self._read_rows(row, part.reshape(whole, cols))
            else:
                self._read_piece(row, col, part)
            at += count

    def _read_rows(self, first: int, part: Any) -> None:
        """Whole rows: a run of every column, or all there is."""
        (rows, cols), size = self._header.shape, self._header.itemsize
        count = len(part)
        stored = np.empty((cols, count), part.dtype)
        runs = stored.view(np.uint8).reshape(cols, count * size)
        if count == rows:
            runs = runs.reshape(1, -1)
        for col, run in enumerate(runs):
            self._stream.read_into(self._header.offset + (col * rows + first) * size, run.data)
        part[...] = stored.T

    def _read_piece(self, row: int, first: int, part: Any) -> None:
        """Some elements of a row: of whole columns where several fit, else one by one."""
        rows, size = self._header.shape[0], self._header.itemsize
        step = max(_PIECE // (rows * size), 1)
        height, above = (rows, row) if step > 1 else (1, 0)
        for done in range(0, len(part), step):
            stored = np.empty((min(step, len(part) - done), height), part.dtype)
            at = (first + done) * rows + row - above
            data = stored.view(np.uint8).reshape(-1).data
            self._stream.read_into(self._header.offset + at * size, data)
            part[done : done + step] = stored[:, above]

    def _read_reordered(self, offset: int, out: memoryview) -> None:
        """More dimensions scatter every row over the file: such an array is read whole, once."""
        shape = self._header.shape
        if self._whole is None:
            everything = np.empty(prod(shape), f"V{self._header.itemsize}")
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
                raise ValueError(f"shape {brief(shape)}")
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


def sidecar_text(path: Path) -> str:
    """The content of a file beside an .npy, "" if it is none, cannot be read or is no record's."""
    try:
        # Opening a pipe would wait for its other end.
        if not path.is_file() or path.stat().st_size > MAX_SIDECAR:
            return ""
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def sidecar(path: Path) -> Path:
    """Where the element type of an .npy file is recorded."""
    return path.with_name(path.name + ".json")


def array_tensor(
    name: str, header: ArrayHeader, recorded: TensorSpec | None, void_dtype: str | None
) -> SourceTensor:
    """What an array is as a tensor."""
    dtype, note = element_type(header, void_dtype)
    spec = apply_record(header, dtype, recorded)
    if spec is not None:
        return plain_tensor(TensorSpec(name, spec.dtype, spec.shape))
    if dtype is None:
        shown = shortened(header.descr, 40)
        shown = shown if shown.isprintable() else repr(shown)
        return SourceTensor(TensorSpec(name, "", header.shape), shown, 0, note)
    return plain_tensor(TensorSpec(name, dtype, header.shape), note)


class NpySource(FileSource):
    """An .npy file; its one tensor is called as the file is."""

    def __init__(self, file: InputFile, void_dtype: str | None) -> None:
        super().__init__(file)
        header = parse_array_header(file.read(0, 1 << 16), str(file.path))
        recorded = None
        side = sidecar(file.path)
        text = sidecar_text(side)
        # Another program's JSON may have this name; only a record of ours counts.
        if '"tensors"' in text:
            recorded = next(iter(parse_record(text, str(side)).values()), None)
        tensor = array_tensor(file.path.stem, header, recorded, void_dtype)
        if not tensor.readable:
            raise DtypeError(f"{file.path}: {tensor.dtype}: {tensor.note}")
        expected = header.offset + prod(header.shape) * header.itemsize
        if file.size != expected:
            fault = "truncated" if file.size < expected else "trailing bytes"
            raise FileFormatError(
                f"{file.path}: {fault}: the header describes {expected} bytes, the file has "
                f"{file.size}"
            )
        check_order(header, str(file.path), streamed=False)
        self.tensors = {tensor.name: tensor}
        self._reader = ArrayReader(header, file)
        self._lock = threading.Lock()

    def read(self, name: str, offset: int, out: memoryview) -> None:
        with self._lock:
            self._reader.read(offset, out)
