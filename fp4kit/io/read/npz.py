# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Reading .npz: its zip directory and members, in bounded memory.

Python's zipfile believes what an archive says; here everything that is used is checked first.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import zipfile
import zlib
from dataclasses import replace as with_changes
from math import prod
from typing import IO

from fp4kit.errors import FileFormatError, brief
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read.files import InputFile
from fp4kit.io.read.npy import (
    MAX_HEADER,
    RECORD_MEMBER,
    ArrayHeader,
    ArrayReader,
    array_tensor,
    check_order,
    parse_array_header,
    parse_record,
)
from fp4kit.io.read.source import FileSource, SourceTensor

#: Bytes of an archive's directory: half a million members with long names.
MAX_DIRECTORY = 1 << 26
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
#: What zipfile and its decompressors raise for damaged archives.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    UnicodeDecodeError,
)


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
        except _DAMAGED as error:
            raise FileFormatError(
                f"{self._name}: damaged zip member: {brief(str(error))}"
            ) from None
        except OSError as error:
            raise FileFormatError(f"{self._name}: cannot be read: {error}") from None

    def head(self) -> bytes:
        """The first 64 KiB, or all there are."""
        size = self._archive.getinfo(self._member).file_size
        data = bytearray(min(size, MAX_HEADER))
        self.read_into(0, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Frees the decompressor; a later read opens the member again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _directory_bytes(file: InputFile) -> int:
    """Bytes of the archive's directory as its end record says, 0 if there is none."""
    tail = file.read(max(file.size - 65_557, 0), 65_557)
    at = tail.rfind(b"PK\x05\x06")
    record = tail[at : at + 22]
    if at < 0 or len(record) < 22:
        return 0
    size = int.from_bytes(record[12:16], "little")
    locator = tail[max(at - 20, 0) : at]
    if size == 0xFFFFFFFF and locator.startswith(b"PK\x06\x07"):
        wide = file.read(int.from_bytes(locator[8:16], "little"), 56)
        size = int.from_bytes(wide[40:48], "little")
    return size


def open_archive(file: InputFile) -> zipfile.ZipFile:
    """Opens the zip archive of an .npz.

    Raises:
        FileFormatError: if it is none, or a torch checkpoint, or its directory is too large.
    """
    if _directory_bytes(file) > MAX_DIRECTORY:
        raise FileFormatError(
            f"{file.path}: the directory of the archive takes {_directory_bytes(file)} bytes, at "
            f"most {MAX_DIRECTORY} are read; save the arrays as .safetensors"
        )
    try:
        archive = zipfile.ZipFile(file.path)
    except (*_DAMAGED, ValueError, OSError, struct.error) as error:
        raise FileFormatError(f"{file.path}: not an .npz archive: {brief(str(error))}") from None
    names = archive.namelist()
    fault = ""
    if any(name.endswith("data.pkl") for name in names):
        fault = "a torch checkpoint, not an .npz; save it again with safetensors"
    elif len(set(names)) < len(names):
        fault = "damaged: two members have the same name"
    elif "" in names:
        fault = "damaged: a member has no name"
    elif any(info.compress_type not in _METHODS for info in archive.infolist()):
        # Others ask for memory as the archive says, up to 4 GB.
        fault = "compressed by a method that NumPy does not use; save it with numpy.savez"
    if fault:
        archive.close()
        raise FileFormatError(f"{file.path}: {fault}")
    return archive


#: Longest entry of a record of element types, but for the name: 64 sizes of 64 bits.
_RECORD_CHARACTERS = 2000


class NpzSource(FileSource):
    """An .npz archive; members that cannot become tensors are listed with the reason."""

    def __init__(self, file: InputFile, void_dtype: str | None) -> None:
        super().__init__(file)
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
            self.tensors[name] = array_tensor(name, header, None, void_dtype)
        for name, header in headers.items():
            tensor = array_tensor(name, header, recorded.get(name), void_dtype)
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

    def read(self, name: str, offset: int, out: memoryview) -> None:
        with self._lock:
            if name != self._open and self._open:
                self._streams[self._open][0].close()
            self._open = name
            reader = self._streams[name][1]
            assert reader is not None, f"{name} cannot be read"
            reader.read(offset, out)

    def close(self) -> None:
        with self._lock:
            for stream, _ in self._streams.values():
                stream.close()
            self._archive.close()
        super().close()
