# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels are kept between runs, and why a folder is not used for that.

What is read from here is machine code and a pickle, so whoever can write here can run code as the
user. A folder counts only if nobody but its user (and root) can put anything into it, and a file
only if it carries the checksum of what was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fp4kit.errors import OptionError

CACHE_VARIABLE = "FP4KIT_CACHE_DIR"
DIGEST_BYTES = hashlib.sha256().digest_size
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: Windows has no owners and modes of this kind; its user folders are private.
HAS_OWNERS = hasattr(os, "geteuid")
#: No link is followed, and opening a pipe that somebody put here does not wait for a writer.
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL
READ_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True)
class KernelFolder:
    """Where kernels are kept.

    Attributes:
        path: an existing private folder, or None: then every process compiles afresh.
        reason: why there is none; "" if there is one.
    """

    path: Path | None
    reason: str = ""


def _source_hash() -> str:
    """A hash of all kernel sources: kernels call functions of several files."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    sources = (here.parent / "formats.py", *sorted((here.parent / "reference").glob("*.py")))
    for path in (*sorted(here.glob("*.py")), *sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _root() -> Path | str:
    """The user's cache folder, or why there is none.

    Raises:
        OptionError: if FP4KIT_CACHE_DIR is not absolute.
    """
    text = os.environ.get(CACHE_VARIABLE)
    if text:
        if not Path(text).is_absolute():
            raise OptionError(
                f"{CACHE_VARIABLE}={text!r} is not an absolute path; give one, or unset it"
            )
        return Path(text)
    text = os.environ.get("XDG_CACHE_HOME")
    if text and Path(text).is_absolute():  # its specification: relative paths are to be ignored
        return Path(text)
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises without HOME
    if os.environ.get("HOME") == "" or not home.is_absolute():
        return "no home folder is known"
    return home / ".cache"


def _make_private(path: Path) -> None:
    """Makes a folder, and those above it, that only this user may enter, whatever the umask."""
    for folder in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def _unsafe(path: Path, *, ours: bool) -> str:
    """Why others could change what lies at a path, or "".

    Args:
        path: existing file or folder; not followed if it is a link.
        ours: it must belong to this user, and the sticky bit is no excuse.
    """
    info = path.lstat()
    if not HAS_OWNERS:
        return ""
    if info.st_uid != os.geteuid() and (ours or info.st_uid != 0):
        return f"{path} belongs to another user"
    if stat.S_ISLNK(info.st_mode):
        return f"{path} is a link" if ours else ""
    sticky = bool(info.st_mode & stat.S_ISVTX) and not ours
    if info.st_mode & OTHERS_WRITE and not sticky:
        return f"others can write to {path} (chmod go-w changes that)"
    return ""


def _why_unusable(root: Path, folder: Path) -> str:
    """Makes `folder`, some levels below `root`; why others could put something there, or ""."""
    _make_private(root)
    real = root.resolve()
    above = dict.fromkeys((*reversed(root.parents), root, *reversed(real.parents), real))
    reason = next(filter(None, (_unsafe(part, ours=False) for part in above)), "")
    if reason:
        return reason
    _make_private(folder)
    below = [part for part in (*reversed(folder.parents), folder) if part not in above]
    return next(filter(None, (_unsafe(part, ours=True) for part in below)), "")


@cache
def _folder_below(root: Path) -> KernelFolder:
    folder = root / "fp4kit" / f"numba-{_source_hash()}"
    try:
        reason = _why_unusable(root, folder)
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(folder)
        reason = f"{where}: {error.strerror}"
    return KernelFolder(None, reason) if reason else KernelFolder(folder)


#: Why keeping kernels was given up in this process, by folder.
_given_up: dict[Path, str] = {}


def _folder() -> KernelFolder:
    root = _root()
    return KernelFolder(None, root) if isinstance(root, str) else _folder_below(root)


def kernel_folder() -> KernelFolder:
    """The folder for compiled kernels of this version of the sources, made if it is missing.

    `FP4KIT_CACHE_DIR` names its parent; otherwise that is the user's cache folder.

    Raises:
        OptionError: if FP4KIT_CACHE_DIR is not absolute.
    """
    folder = _folder()
    if folder.path in _given_up:
        return KernelFolder(None, _given_up[folder.path])
    return folder


def read(name: str) -> bytes | None:
    """What :func:`write` kept under a name; None if there is nothing, or anything is wrong with it.

    A damaged file is removed.
    """
    folder = _folder().path
    if folder is None:
        return None
    path = folder / name
    try:
        with os.fdopen(os.open(path, READ_FLAGS), "rb") as file:
            info = os.fstat(file.fileno())
            owned = not HAS_OWNERS or (
                info.st_uid == os.geteuid() and not info.st_mode & OTHERS_WRITE
            )
            content = file.read() if owned and stat.S_ISREG(info.st_mode) else b""
    except OSError:
        return None
    payload = content[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() == content[:DIGEST_BYTES]:
        return payload
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def write(name: str, payload: bytes) -> None:
    """Keeps a payload under a name; if that fails no more is tried in this process."""
    folder = kernel_folder().path
    if folder is None:
        return
    temporary = folder / f".{uuid.uuid4().hex}"
    try:
        with os.fdopen(os.open(temporary, WRITE_FLAGS, 0o600), "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        temporary.replace(folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        _given_up[folder] = f"{folder}: {error.strerror}"
        _tell()


#: Gets where kernels are kept when the first one is compiled, and again when that changes.
Listener = Callable[[KernelFolder], None]
_listener: Listener | None = None
_told: set[KernelFolder] = set()
_lock = threading.Lock()


def on_compile(listener: Listener | None) -> None:
    """Sets who is told, from the thread that compiles, before the first kernel is compiled."""
    global _listener
    _listener = listener
    _told.clear()


def compiling() -> None:
    """A kernel is about to be compiled."""
    if not _told:
        _tell()


def _tell() -> None:
    folder = kernel_folder()
    with _lock:
        if _listener is None or folder in _told:
            return
        _told.add(folder)
    _listener(folder)
