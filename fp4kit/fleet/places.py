# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Where a result is written: whole files that are there or are not, wherever they lie.

Several workers write to one place at once. Nothing here relies on locks, or on who comes first:
everything that two workers may both write has the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp4kit.checkpoint.read.other_files import STATE_DIR
from fp4kit.checkpoint.write.output import check_place, check_space
from fp4kit.checkpoint.write.state import LOCK_FILE, PLAN_FILE
from fp4kit.errors import OptionError
from fp4kit.io.write.files import (
    NEWBORN_SECONDS,
    TEMPORARY_SUFFIX,
    AtomicFile,
    Output,
    OutputError,
)

#: Bytes that are hashed together.
PIECE = 16 << 20
#: Seconds for which the removal of notes is tried again while a late worker still writes there.
REMOVAL_SECONDS = 10.0


def sha256_of(path: Path) -> str:
    """SHA-256 of a file as it is on the disk."""
    digest, buffer = hashlib.sha256(), bytearray(PIECE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


class Place(ABC):
    """A directory of a result, or what stands for one in an object store.

    Attributes:
        name: how the user calls it.
        retries: how often something had to be tried again so far.
    """

    name: str
    retries = 0

    @abstractmethod
    def create(self, needed: int) -> None:
        """Makes sure that files can be written; `needed` is what the whole result takes."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The content of a small file, None without it."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Writes a small file, in the place of an older one."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every file, relative to the place; those that are being written are none."""

    @abstractmethod
    def written(self, name: str, permissions: int) -> contextlib.AbstractContextManager[Output]:
        """Where a task writes a large file; it is in the place once the block has ended."""

    @abstractmethod
    def mark(self, name: str) -> tuple[int, str] | None:
        """Size of a file and what the place says of its content ("" for nothing), None without."""

    @abstractmethod
    def sha256(self, name: str) -> str:
        """SHA-256 of a file as the place has it."""

    @abstractmethod
    def remove_notes(self) -> None:
        """Removes all notes, the plan first: without it the rest means nothing."""

    @abstractmethod
    def folder(self) -> contextlib.AbstractContextManager[Path]:
        """The place as a directory that can be read; its weights may be stand-ins."""

    @abstractmethod
    def documents(self) -> contextlib.AbstractContextManager[Path]:
        """A directory to write the other files to; they are in the place once the block ended."""


class LocalPlace(Place):
    """A directory of a file system, which several machines may share."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def create(self, needed: int) -> None:
        check_place(None, self._path)
        try:
            self._path.mkdir(exist_ok=True)
            (self._path / STATE_DIR).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{self.name}: cannot be written: {error.strerror}") from None
        check_space(self._path, needed)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OutputError(f"{self.name}: {name} cannot be read: {error.strerror}") from None

    def write(self, name: str, data: bytes) -> None:
        with AtomicFile(Output(self._path / name, replace=True)) as file:
            file.write_at(0, data)
            file.commit()

    def names(self) -> list[str]:
        return [
            path.relative_to(self._path).as_posix()
            for path in sorted(self._path.rglob("*"))
            if not path.is_dir() and not path.name.endswith(TEMPORARY_SUFFIX)
        ]

    @contextmanager
    def written(self, name: str, permissions: int) -> Iterator[Output]:
        yield Output(self._path / name, permissions, replace=True)

    def mark(self, name: str) -> tuple[int, str] | None:
        try:
            facts = (self._path / name).lstat()
        except FileNotFoundError:
            return None
        return (facts.st_size, "") if stat.S_ISREG(facts.st_mode) else None

    def sha256(self, name: str) -> str:
        return sha256_of(self._path / name)

    def remove_notes(self) -> None:
        notes = self._path / STATE_DIR
        until = time.monotonic() + REMOVAL_SECONDS
        while notes.is_dir():
            # The plan goes first: who finds none knows that another worker has come to the end.
            for path in sorted(notes.iterdir(), key=lambda path: path.name != PLAN_FILE):
                with contextlib.suppress(FileNotFoundError):  # another worker finishes as well
                    path.unlink()
            try:
                notes.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:  # a late worker has just left a receipt
                if time.monotonic() > until:
                    raise OutputError(
                        f"{notes}: cannot be removed: {error.strerror}; the result is whole but "
                        "for it: stop the workers that are left, and run fp4kit finish again"
                    ) from None
                time.sleep(0.05)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        yield self._path

    @contextmanager
    def documents(self) -> Iterator[Path]:
        yield self._path


#: What the name of a directory of :func:`scratch` begins with.
SCRATCH = "fp4kit-scratch-"


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for files of this process, on the disk that TMPDIR names.

    Those of processes that were killed are removed first.
    """
    parent = Path(os.path.realpath(tempfile.gettempdir()))
    try:
        folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent))
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OutputError(
            f"{parent}: cannot be written: {error.strerror}; set TMPDIR to a directory with space "
            "for three shards"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for other in parent.glob(f"{SCRATCH}*"):
            _remove_abandoned(other)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    """Removes a directory of a process that is gone: a living one holds its lock."""
    with contextlib.suppress(OSError):  # it is locked, or not ours, or just being made
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(lock).st_mtime > NEWBORN_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def check_local(source: str, target: str) -> None:
    """Refuses an output that lies in the input, or the other way round."""
    if source and Path(source).is_dir():
        check_place(Path(source), Path(target))
    elif source:
        raise OptionError(
            f"{source}: is a file; --part, --scheduler and URLs are for model directories"
        )
