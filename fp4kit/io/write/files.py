# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Output files: the checks that come before any work, and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4kit.errors import Fp4kitError, OptionError

#: Dirty pages are handed to the disk in pieces of this size while computing goes on, so that the
#: final fsync has little left to wait for.
WRITEBACK_BYTES = 16 << 20
TEMPORARY_SUFFIX = ".fp4kit-tmp"
#: An empty temporary file may be one whose process is just about to lock it.
NEWBORN_SECONDS = 5.0
#: What file systems without hard links answer.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class OutputError(Fp4kitError, OSError):
    """An output cannot be written; the message starts with its name and nothing was replaced."""


def permissions_of(*sources: Path) -> int:
    """Permission bits that a result made from some files may have: what all of them grant."""
    granted = 0o666
    for source in sources:
        granted &= source.stat().st_mode
    return granted


@dataclass(frozen=True)
class Output:
    """Where a result goes, after the checks that come before work.

    Attributes:
        path: file to write.
        permissions: its permission bits before the umask: a result is never more readable than
            what it was made from.
        replace: an older file of that name may be replaced; else one that appears while the result
            is written is left alone, and the result is given up.
    """

    path: Path
    permissions: int = 0o666
    replace: bool = False

    def __str__(self) -> str:
        return str(self.path)


def as_output(target: Output | Path) -> Output:
    """An output; a path alone is a file of fp4kit's own, which is replaced."""
    return target if isinstance(target, Output) else Output(target, replace=True)


def _temporary_prefix(final: Path) -> str:
    return f".{final.name[:40]}."


def remove_abandoned(files: Iterable[Path]) -> None:
    """Removes temporary files whose process was killed; those of living ones stay.

    Args:
        files: temporary files of :class:`AtomicFile`.
    """
    for path in files:
        with contextlib.suppress(OSError):  # somebody else's, or gone already
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # A living writer holds the lock, which it takes before it writes anything.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                facts = os.fstat(fd)
                if facts.st_size or time.time() - facts.st_mtime > NEWBORN_SECONDS:
                    path.unlink()
            finally:
                os.close(fd)


class AtomicFile:
    """A file that exists under its name only once it is complete and on the disk.

    Use it as a context manager: leaving it without :meth:`commit` removes the temporary file and
    leaves an older file of the same name untouched.
    """

    def __init__(self, target: Output | Path) -> None:
        """Opens a temporary file beside the target.

        Args:
            target: where the result goes; see :func:`as_output`.

        Raises:
            OutputError: if there can be none.
        """
        output = as_output(target)
        self.target = output.path
        self._output = output
        # A link is written through, so the temporary file must lie next to what it points to.
        self._final = Path(os.path.realpath(output.path))
        prefix = _temporary_prefix(self._final)
        remove_abandoned(self._final.parent.glob(f"{glob.escape(prefix)}*{TEMPORARY_SUFFIX}"))
        self._temp = self._final.with_name(f"{prefix}{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        self._dirty = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            # Its owner must be able to write it, whatever the source's permissions are.
            self._fd = os.open(self._temp, flags, output.permissions | stat.S_IRUSR | stat.S_IWUSR)
        except OSError as error:
            raise OutputError(f"{output}: cannot be written: {error.strerror}") from None
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An old one cannot be about to be locked: without its process it is abandoned.
            os.utime(self._fd, (0, 0))

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

    def truncate(self, size: int) -> None:
        """Has the file end at a position: what was never written before it is 0."""
        os.truncate(self._fd, size)

    def start_writeback(self) -> None:
        """Asks the kernel to begin writing dirty pages now; it does not wait."""
        self._dirty = 0
        # On Linux this starts asynchronous writeback; pages that are not yet clean stay cached.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """Flushes to the disk and gives the file its name in one step.

        Raises:
            OutputError: if a file of that name has appeared that may not be replaced.
        """
        if self._output.replace:
            with contextlib.suppress(FileNotFoundError):
                older = stat.S_IMODE(self._final.stat().st_mode)
                os.fchmod(self._fd, older & (self._output.permissions | stat.S_IRWXU))
        with contextlib.suppress(OSError):
            os.utime(self._fd)  # an empty file still has the time that it began with
        os.fsync(self._fd)
        if self._output.replace:
            self._temp.replace(self._final)
        else:
            self._take_name()
        # The name itself must survive a power cut too; some file systems cannot sync directories.
        with contextlib.suppress(OSError):
            folder = os.open(self._final.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _take_name(self) -> None:
        """Gives the file a name that nothing has yet: `rename` would replace what does."""
        try:
            self._link()
        except FileExistsError:
            raise OutputError(
                f"{self.target}: has appeared while this was at work and was left as it is; choose "
                "another name, or pass --force (Python: force=True) to replace it"
            ) from None

    def _link(self) -> None:
        try:
            os.link(self._temp, self._final)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without hard links (FAT, some network file systems) an empty file takes the name.
            os.close(os.open(self._final, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            self._temp.replace(self._final)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            self._temp.unlink()
        if isinstance(error, OSError) and not isinstance(error, Fp4kitError):
            reason = error.strerror or str(error)
            raise OutputError(f"{self.target}: cannot be written: {reason}") from error


class Writer(ABC):
    """Writes tensors to a file of one container, atomically. Use it as a context manager.

    Attributes:
        ordered: whether tensors must be written one after the other, each from its beginning on.
    """

    ordered = False

    def __init__(self, target: Output | Path) -> None:
        self._file = AtomicFile(target)

    @abstractmethod
    def write(self, name: str, offset: int, data: Any) -> None:
        """Writes bytes of a tensor, beginning `offset` bytes into it; each byte exactly once."""

    @abstractmethod
    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Completes the file and gives it its name.

        Args:
            metadata: replaces the metadata given at first, where the container has some; it must
                take exactly as many bytes.
        """

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._file.__exit__(kind, error, trace)


def output_suffix(target: Path, allowed: Iterable[str]) -> str:
    """The suffix of an output in lower case.

    Raises:
        OptionError: if it is not one of `allowed`.
    """
    suffix = target.suffix.lower()
    if suffix not in allowed:
        raise OptionError(f"{target}: the output must end in {' or '.join(allowed)}")
    return suffix


def check_output(source: Path | None, target: Path, *, force: bool, nbytes: int) -> Output:
    """Refuses an output that would destroy something or cannot fit, before any work.

    Args:
        source: the input, None without one.
        target: the file to write.
        force: an existing file may be replaced.
        nbytes: bytes that it will take.

    Returns:
        What :class:`AtomicFile` writes to.

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
            raise OptionError(
                f"{target}: exists already; pass --force (Python: force=True) to replace it"
            )
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise OutputError(
            f"{target}: cannot be written: {nbytes} bytes are needed, {free} are free in {folder}"
        )
    permissions = 0o666 if source is None else permissions_of(source)
    return Output(target, permissions, replace=force)
