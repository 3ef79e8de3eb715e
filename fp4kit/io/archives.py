# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The zip archive of an .npz: its directory and its members, in bounded memory.

Python's zipfile believes what an archive says; here everything that is used is checked first.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from typing import IO

from fp4kit.errors import FileFormatError, brief

from .files import InputFile
from .numpy_files import MAX_HEADER

#: Bytes of an archive's directory: half a million members with long names.
MAX_DIRECTORY = 1 << 26
#: Bytes of a member's name, `.npy` included, in a zip archive.
MAX_NAME = 65_535
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


def name_fault(name: str) -> str:
    """Why an archive cannot hold a tensor of that name so that it is found again, or ""."""
    parts = re.split(r"[/\\\\]", name)
    if "\0" in name:
        return "holds a NUL, where zip archives end a name"
    if len(name.encode()) + len(".npy") > MAX_NAME:
        return f"is longer than {MAX_NAME} bytes"
    if ".." in parts or (not parts[0] and len(parts) > 1) or re.match(r"[A-Za-z]:[/\\]", name):
        return "would leave the folder that the archive is unpacked in"
    return ""


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
