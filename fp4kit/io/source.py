# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""One view of every input file: named tensors whose C-order bytes are read in pieces."""

from __future__ import annotations

import contextlib
import threading
import zipfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from dataclasses import replace as with_changes
from math import prod
from pathlib import Path

from fp4kit.errors import DtypeError, FileFormatError, OptionError, shortened

from .archives import MemberStream, open_archive
from .files import SUFFIXES, InputFile, check_content
from .numpy_files import (
    RECORD_MEMBER,
    ArrayHeader,
    ArrayReader,
    apply_record,
    check_order,
    element_type,
    parse_array_header,
    parse_record,
    sidecar,
    sidecar_text,
)
from .safetensors import DTYPES, TensorSpec
from .safetensors_header import read_header

#: Longest entry of a record of element types, but for the name: 64 sizes of 64 bits.
_RECORD_CHARACTERS = 2000


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
    def readable(self) -> bool:
        """Whether its data can be read at all."""
        return self.spec.dtype != ""

    @property
    def row_bytes(self) -> int:
        """Bytes per index of the leading dimensions; 0 if its rows are not whole bytes."""
        bits = DTYPES[self.spec.dtype].bits * prod(self.spec.shape[-1:])
        return bits // 8 if bits % 8 == 0 else 0


def _plain(spec: TensorSpec, note: str = "") -> SourceTensor:
    return SourceTensor(spec, DTYPES[spec.dtype].name, spec.nbytes, note)


class Source(ABC):
    """An open input file.

    Attributes:
        path: the file.
        metadata: the safetensors metadata, empty for other containers.
        tensors: every tensor, in file order.
        concurrent: whether any number of threads may read at once.
    """

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, SourceTensor]
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


class SafetensorsSource(Source):
    """A safetensors file."""

    concurrent = True

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self.path = file.path
        header = read_header(file)
        self.metadata = header.metadata
        self.tensors = {name: _plain(spec) for name, (spec, _) in header.tensors.items()}
        self._starts = {name: start for name, (_, start) in header.tensors.items()}

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        self._file.read_into(self._starts[name] + offset, out)

    def check_unchanged(self) -> None:  # noqa: D102
        self._file.check_unchanged()

    def close(self) -> None:  # noqa: D102
        self._file.close()


def _array_tensor(
    name: str, header: ArrayHeader, recorded: TensorSpec | None, void_dtype: str | None
) -> SourceTensor:
    """What an array is as a tensor."""
    dtype, note = element_type(header, void_dtype)
    spec = apply_record(header, dtype, recorded)
    if spec is not None:
        return _plain(TensorSpec(name, spec.dtype, spec.shape))
    if dtype is None:
        shown = shortened(header.descr, 40)
        shown = shown if shown.isprintable() else repr(shown)
        return SourceTensor(TensorSpec(name, "", header.shape), shown, 0, note)
    return _plain(TensorSpec(name, dtype, header.shape), note)


class NpySource(Source):
    """An .npy file; its one tensor is called as the file is."""

    def __init__(self, file: InputFile, void_dtype: str | None) -> None:
        self._file = file
        self.path = file.path
        self.metadata = {}
        header = parse_array_header(file.read(0, 1 << 16), str(file.path))
        recorded = None
        side = sidecar(file.path)
        text = sidecar_text(side)
        # Another program's JSON may have this name; only a record of ours counts.
        if '"tensors"' in text:
            recorded = next(iter(parse_record(text, str(side)).values()), None)
        tensor = _array_tensor(file.path.stem, header, recorded, void_dtype)
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

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        with self._lock:
            self._reader.read(offset, out)

    def check_unchanged(self) -> None:  # noqa: D102
        self._file.check_unchanged()

    def close(self) -> None:  # noqa: D102
        self._file.close()


class NpzSource(Source):
    """An .npz archive; members that cannot become tensors are listed with the reason."""

    def __init__(self, file: InputFile, void_dtype: str | None) -> None:
        self._file = file
        self.path = file.path
        self.metadata = {}
        self.tensors = {}
        self._streams: dict[str, tuple[MemberStream, ArrayReader | None]] = {}
        self._open = ""
        # The archive has one position, and a tensor may be looked at while the next one is read.
        self._lock = threading.Lock()
        self._archive = open_archive(file)
        try:
            self._list(self._archive, void_dtype)
        except BaseException:
            self._archive.close()
            raise

    def _list(self, archive: zipfile.ZipFile, void_dtype: str | None) -> None:
        recorded: dict[str, TensorSpec] = {}
        headers: dict[str, ArrayHeader] = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            where = f"{self.path}: member {info.filename!r}"
            if info.is_dir():
                continue
            if name == info.filename:
                spec = TensorSpec(name, "", ())
                self.tensors[name] = SourceTensor(spec, "file", info.file_size, "not an .npy array")
                continue
            with contextlib.closing(MemberStream(archive, info.filename, where)) as stream:
                header = parse_array_header(stream.head(), where)
                if name == RECORD_MEMBER:
                    recorded = self._record(stream, header, info.file_size, where)
                    continue
            headers[name] = header
            self._streams[name] = (stream, None)
            # Holds the place in file order until the record is known.
            self.tensors[name] = _array_tensor(name, header, None, void_dtype)
        for name, header in headers.items():
            tensor = _array_tensor(name, header, recorded.get(name), void_dtype)
            size = archive.getinfo(f"{name}.npy").file_size
            if not tensor.readable:
                self.tensors[name] = with_changes(tensor, stored=size - header.offset)
                continue
            self.tensors[name] = tensor
            stream = self._streams[name][0]
            expected = header.offset + prod(header.shape) * header.itemsize
            if size != expected:
                raise FileFormatError(
                    f"{self.path}: member {name + '.npy'!r}: "
                    f"{'truncated' if size < expected else 'trailing bytes'}: its header describes "
                    f"{expected} bytes, it has {size}"
                )
            check_order(header, f"{self.path}: member {name + '.npy'!r}", streamed=True)
            self._streams[name] = (stream, ArrayReader(header, stream))

    def _record(
        self, stream: MemberStream, header: ArrayHeader, size: int, where: str
    ) -> dict[str, TensorSpec]:
        members = self._archive.infolist()
        # JSON may escape each character of a name as six, and NumPy takes four bytes for each.
        names = sum(len(info.filename) for info in members)
        if not header.descr.startswith("<U"):
            raise FileFormatError(f"{where}: damaged record of element types")
        if size > 4 * (6 * names + _RECORD_CHARACTERS * len(members)):
            raise FileFormatError(
                f"{where}: damaged record of element types: {size} bytes are too many for "
                f"{len(members)} members"
            )
        data = bytearray(max(size - header.offset, 0))
        stream.read_into(header.offset, memoryview(data))
        try:
            text = bytes(data).decode("utf-32-le").rstrip("\0")
        except UnicodeDecodeError:
            raise FileFormatError(f"{where}: damaged record of element types") from None
        return parse_record(text, where)

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        with self._lock:
            if name != self._open and self._open:
                self._streams[self._open][0].close()
            self._open = name
            reader = self._streams[name][1]
            assert reader is not None, f"{name} cannot be read"
            reader.read(offset, out)

    def check_unchanged(self) -> None:  # noqa: D102
        self._file.check_unchanged()

    def close(self) -> None:  # noqa: D102
        with self._lock:
            for stream, _ in self._streams.values():
                stream.close()
            self._archive.close()
        self._file.close()


def open_source(path: Path, void_dtype: str | None = None) -> Source:
    """Opens an input file by its suffix, after checking that its content is no other kind.

    Args:
        path: a .safetensors, .npy or .npz file.
        void_dtype: what 2-byte void data of NumPy's files is (`bfloat16`), None to refuse it.

    Raises:
        OptionError: for another suffix or an unknown `void_dtype`.
        FileFormatError: if the file is malformed, before any tensor is read.
        DtypeError: if an .npy holds something that is no tensor.
    """
    if void_dtype not in (None, "bfloat16"):
        raise OptionError(f"void_dtype={void_dtype!r} is not known; choose bfloat16")
    if path.is_dir():
        raise OptionError(
            f"{path}: is a directory; give one of its files (quantize, dequantize, convert, verify "
            "and inspect take whole model directories)"
        )
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise OptionError(f"{path}: unknown kind of file; inputs end in {', '.join(SUFFIXES)}")
    file = InputFile(path)
    try:
        check_content(file, {".safetensors": "safetensors", ".npy": "npy", ".npz": "zip"}[suffix])
        if suffix == ".safetensors":
            return SafetensorsSource(file)
        return NpySource(file, void_dtype) if suffix == ".npy" else NpzSource(file, void_dtype)
    except BaseException:
        file.close()
        raise
