# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Plain files: bounded reads, atomic writes, and the checks that come before any work."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from fp4kit.errors import FileFormatError, Fp4kitError, OptionError

SUFFIXES = (".safetensors", ".npy", ".npz")
#: Dirty pages are handed to the disk in pieces of this size while computing goes on, so that the
#: final fsync has little left to wait for.
WRITEBACK_BYTES = 16 << 20


class OutputError(Fp4kitError, OSError):
    """An output cannot be written; the message starts with its name and nothing was replaced."""


class InputFile:
    """A regular file read by position: no mapping, so that memory stays what the caller gives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise FileFormatError(f"{path}: is {kind}; give one .safetensors, .npy or .npz")
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes at `offset`.

        Raises:
            FileFormatError: if the file ends before that, or the disk fails.
        """
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done:]], offset + done)
            except OSError as error:
                raise FileFormatError(f"{self.path}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise FileFormatError(
                    f"{self.path}: truncated: ends at byte {offset + done}, {len(out) - done} more "
                    "were expected"
                )
            done += count

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes at `offset`, fewer at the end of the file."""
        data = bytearray(max(min(count, self.size - offset), 0))
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AtomicFile:
    """A file that exists under its name only once it is complete and on the disk.

    Use it as a context manager: leaving it without :meth:`commit` removes the temporary file and
    leaves an older file of the same name untouched.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        # A link is written through, so the temporary file must lie next to what it points to.
        self._final = Path(os.path.realpath(target))
        self._temp = self._final.with_name(
            f".{self._final.name[:40]}.{secrets.token_hex(4)}.fp4kit-tmp"
        )
        self._dirty = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(self._temp, flags, 0o666)
        except OSError as error:
            raise OutputError(f"{target}: cannot be written: {error.strerror}") from None

    @property
    def fd(self) -> int:
        """The file descriptor, open for reading and writing."""
        return self._fd

    def write_at(self, offset: int, data: Any) -> None:
        """Writes a C-contiguous one-dimensional buffer of bytes at a position."""
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], offset + done)
        self._dirty += done
        if self._dirty >= WRITEBACK_BYTES:
            self.start_writeback()

    def start_writeback(self) -> None:
        """Asks the kernel to begin writing dirty pages now; it does not wait."""
        self._dirty = 0
        # On Linux this starts asynchronous writeback; pages that are not yet clean stay cached.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """Flushes to the disk and gives the file its name, replacing an older one in one step."""
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(self._fd, stat.S_IMODE(self._final.stat().st_mode))
        os.fsync(self._fd)
        self._temp.replace(self._final)
        # The name itself must survive a power cut too; some file systems cannot sync directories.
        with contextlib.suppress(OSError):
            folder = os.open(self._final.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            self._temp.unlink()
        if isinstance(error, OSError) and not isinstance(error, Fp4kitError):
            reason = error.strerror or str(error)
            raise OutputError(f"{self.target}: cannot be written: {reason}") from error


def output_suffix(target: Path, allowed: Iterable[str]) -> str:
    """The suffix of an output in lower case.

    Raises:
        OptionError: if it is not one of `allowed`.
    """
    suffix = target.suffix.lower()
    if suffix not in allowed:
        raise OptionError(f"{target}: the output must end in {' or '.join(allowed)}")
    return suffix


def check_output(source: Path | None, target: Path, *, force: bool, nbytes: int) -> None:
    """Refuses an output that would destroy something or cannot fit, before any work.

    Raises:
        OptionError: if it is the input (also through links), a directory, or exists already.
        OutputError: if its directory is missing or the disk has too little space left.
    """
    folder = Path(os.path.realpath(target)).parent
    if not folder.is_dir():
        raise OutputError(f"{target}: cannot be written: there is no directory {folder}")
    if target.exists():
        if source is not None and target.samefile(source):
            raise OptionError(f"{target}: the output is the input itself; choose another name")
        if not target.is_file():
            raise OptionError(f"{target}: is not a regular file; choose another output name")
        if not force:
            raise OptionError(f"{target}: exists already; pass force (--force) to replace it")
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise OutputError(
            f"{target}: cannot be written: {nbytes} bytes are needed, {free} are free in {folder}"
        )


def sniff(head: bytes) -> str | None:
    """What the first bytes of a file say it is, in words, or None if they say nothing.

    Args:
        head: the first 16 bytes or more.
    """
    length = int.from_bytes(head[:8], "little")
    # First, as a header length can look like any other magic number.
    if len(head) > 8 and head[8:9] == b"{" and 2 <= length <= 100_000_000:
        return "safetensors"
    magics = (
        (b"\x93NUMPY", "npy"),
        (b"PK\x03\x04", "zip"),
        (b"PK\x05\x06", "zip"),
        (b"GGUF", "GGUF"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x1f\x8b", "gzip"),
        (b"version https://git-lfs", "Git LFS pointer"),
        (b"<!DOCTYPE", "HTML"),
        (b"<html", "HTML"),
    )
    for magic, kind in magics:
        if head.startswith(magic):
            return kind
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "pickle"
    return None


#: What to do about content under the wrong suffix.
ADVICE = {
    "safetensors": "rename it to .safetensors",
    "npy": "rename it to .npy",
    "zip": "rename it to .npz if numpy.savez wrote it; a torch .pt file must be saved again with "
    "safetensors",
    "pickle": "pickled data can run code when loaded and is never read; save it again with "
    "safetensors",
    "GGUF": "convert it to safetensors first",
    "HDF5": "convert it to safetensors first",
    "gzip": "decompress it first",
    "Git LFS pointer": "fetch the real file with git lfs pull",
    "HTML": "this is a web page; download the file itself",
}


def check_content(file: InputFile, expected: str) -> None:
    """Refuses a file whose first bytes are plainly something other than its suffix says.

    Args:
        file: the file.
        expected: what :func:`sniff` should say: `safetensors`, `npy` or `zip`.

    Raises:
        FileFormatError: naming what it holds and what to do.
    """
    kind = sniff(file.read(0, 64))
    if kind is not None and kind != expected:
        raise FileFormatError(
            f"{file.path}: holds {kind} data under the suffix {file.path.suffix}; {ADVICE[kind]}"
        )
