# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What an unfinished conversion knows about itself: fingerprint, finished shards, a lock.

The notes lie in the output directory until everything is written; shards get their names one by
one, config.json and the index come last. So a directory without the notes is complete, and one
with them is recognized by every fp4kit command. The notes name the files that belong to the
conversion: starting over removes these and nothing else.

A result that could not be resumed takes the place of an older one only when it is whole: it is
written, with its notes, in a directory of its own inside. At the end the notes move up, which marks
the outer directory while the files follow; a run that is killed meanwhile has left all that the
next one needs to complete it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fp4kit import __version__
from fp4kit.checkpoint.options import CommonOptions
from fp4kit.checkpoint.read.activations import read_amaxes
from fp4kit.checkpoint.read.directory import STATE_DIR, Checkpoint, read_json
from fp4kit.checkpoint.read.other_files import REPLACEMENT
from fp4kit.checkpoint.read.weight_files import INDEX_NAME
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.read.files import InputFile
from fp4kit.io.write.files import (
    TEMPORARY_SUFFIX,
    AtomicFile,
    Output,
    OutputError,
    remove_abandoned,
)

PLAN_FILE = "plan.json"
#: Key of the plan of a result that is about to replace an older one: files that it has no new of.
REPLACED = "replaced"
#: Key of the plan of a conversion that several workers share.
FLEET = "fleet"
LOCK_FILE = "lock"
#: Bytes that are read together for a checksum, in rows of COLUMNS words.
CHUNK = 1 << 22
COLUMNS = 4096


def write_json(path: Path, content: object, permissions: int = 0o666) -> None:
    """Writes a JSON file atomically, in the place of an older one."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with AtomicFile(Output(path, permissions, replace=True)) as file:
        file.write_at(0, text.encode())
        file.commit()


def changed_at(path: Path) -> int:
    """When a file of weights was written to last."""
    return path.stat().st_mtime_ns


def fingerprint(
    checkpoint: Checkpoint,
    options: CommonOptions,
    mark: Callable[[Path], object] = changed_at,
) -> dict[str, Any]:
    """Everything that the output's bytes depend on.

    Files of weights count by name, size, header and mark, JSON files by content.

    Args:
        checkpoint: the source.
        options: what is asked for.
        mark: what tells a file of weights from another one of the same size and header.
    """
    files = {}
    for path in checkpoint.weight_files():
        with InputFile(path) as file:
            length = int.from_bytes(file.read(0, 8), "little")
            header = hashlib.sha256(file.read(8, length)).hexdigest()
            files[path.name] = [file.size, mark(path), header]
    documents = [checkpoint.config, checkpoint.hf_quant_config]
    documents += [read_amaxes(path) for path in options.files]
    content = json.dumps(documents, sort_keys=True).encode()
    content += b"".join(path.read_bytes() for path in options.binary_files)
    return {
        "fp4kit": __version__,
        "files": files,
        "documents": hashlib.sha256(content).hexdigest(),
        # As JSON has it: tuples come back as lists.
        "options": json.loads(json.dumps(asdict(options))),
    }


def checksum(path: Path) -> str:
    """A checksum that finds damage to a finished file, not a forgery, at the speed of memory.

    SHA-256 of the sums of columns of words: hashing every byte would take longer than quantizing
    them does.
    """
    digest = hashlib.sha256()
    buffer = np.zeros(CHUNK, np.uint8)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer.data):
            buffer[count:] = 0
            words = buffer.view("<u8").reshape(-1, COLUMNS)
            digest.update(np.add.reduce(words, axis=0).tobytes())
            digest.update(count.to_bytes(8, "little"))
    return digest.hexdigest()


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What of a fingerprint has changed, in words."""
    options = before.get("options")
    older = options if isinstance(options, dict) else {}
    for key, value in now["options"].items():
        if older.get(key) != value:
            return f"option {key} was {older.get(key)!r}, is {value!r}"
    if before.get("fp4kit") != now["fp4kit"]:
        return f"it was begun by fp4kit {before.get('fp4kit')}, this is {now['fp4kit']}"
    return "the source has changed"


class State:
    """The notes of a conversion; use it as a context manager, which holds the lock."""

    def __init__(self, target: Path, permissions: int = 0o777) -> None:
        """Names the notes of an output directory; nothing is touched yet."""
        self.target = target
        self.folder = target / STATE_DIR
        self.resumed = False
        self._permissions = permissions
        self._finished: dict[str, dict[str, Any]] = {}
        self._lock = -1

    @property
    def exists(self) -> bool:
        """Whether an earlier run left notes."""
        try:
            mode = self.folder.lstat().st_mode
        except OSError:
            return False
        if not stat.S_ISDIR(mode):
            raise OptionError(
                f"{self.folder}: is no directory of fp4kit's notes; remove it, or choose another "
                "output"
            )
        return True

    @property
    def planned(self) -> bool:
        """Whether the notes say what is to be written."""
        return (self.folder / PLAN_FILE).is_file()

    @property
    def replacing(self) -> bool:
        """Whether a whole result was about to take the place of an older one."""
        return self.exists and self.planned and REPLACED in read_json(self.folder / PLAN_FILE)

    def __enter__(self) -> State:
        """Creates the notes' directory and locks it."""
        try:
            self.target.mkdir(mode=self._permissions, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(self.folder / LOCK_FILE, flags, 0o600)
        except OSError as error:
            raise OutputError(f"{self.target}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise OutputError(
                f"{self.target}: another fp4kit process is writing there; wait for it"
            ) from None
        if os.fstat(self._lock).st_nlink == 0:
            os.close(self._lock)
            raise OutputError(
                f"{self.target}: another fp4kit process has finished there just now; look at its "
                "result"
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the lock back; the notes stay unless :meth:`finish` removed them."""
        os.close(self._lock)

    def begin(
        self,
        wanted: dict[str, Any],
        files: Iterable[str],
        *,
        resume: bool,
        replaced: Iterable[str] = (),
    ) -> None:
        """Starts over, or checks that what an earlier run left can be continued.

        A run that was killed before it noted anything has left nothing to continue, so that it is
        started over in any case.

        Args:
            wanted: fingerprint of the source and the options.
            files: every file that the conversion writes, relative to the directory.
            resume: continue.
            replaced: files of an earlier, finished result that this one takes the place of.
        """
        plan = self.folder / PLAN_FILE
        before = read_json(plan) if plan.is_file() else {}
        noted = before.pop("planned", None)
        earlier = noted if isinstance(noted, list) else []
        if resume and before:
            if FLEET in before:
                raise OptionError(
                    f"{self.target}: was begun with --part or --scheduler; go on with that, then "
                    "fp4kit finish"
                )
            if before != wanted:
                raise OptionError(
                    f"{self.target}: cannot be resumed: {_difference(before, wanted)}; start over "
                    "with --force"
                )
            self.resumed = True
        else:
            removed = [*map(str, earlier), *replaced]
            if removed:  # noted first: a run that is killed meanwhile must be able to go on
                write_json(plan, {"planned": removed})
            self._remove(removed)
            planned = list(files)
            # A second index would make the result one that no engine opens.
            names = (path.name for path in self.target.iterdir())
            self._check_free([*planned, *filter(INDEX_NAME.fullmatch, names)])
            for path in self.folder.glob("*.json"):
                path.unlink()
            write_json(plan, {**wanted, "planned": planned})
        remove_abandoned(self.target.rglob(f".*{TEMPORARY_SUFFIX}"))

    def _remove(self, names: Iterable[str]) -> None:
        """Removes files of an earlier run: what it named and wrote, and nothing else."""
        for name in names:
            path = self._written(name)
            if path is not None:
                path.unlink()

    def _written(self, name: str) -> Path | None:
        """Where a file is that an earlier run named, None without it."""
        relative = PurePosixPath(name)
        path = self.target / relative
        if relative.is_absolute() or ".." in relative.parts or not os.path.lexists(path):
            return None
        if not stat.S_ISREG(path.lstat().st_mode) or not _within(path, self.target):
            raise OutputError(
                f"{path}: is a link or no file, and was not written by fp4kit; remove it, or "
                "choose another output"
            )
        return path

    def _check_free(self, names: Iterable[str]) -> None:
        """Refuses to write over what somebody else has put there, also since it was looked at."""
        for name in names:
            if os.path.lexists(self.target / name):
                raise OutputError(
                    f"{self.target}: holds {name!r}, which this conversion did not write; remove "
                    "it, or choose another output"
                )

    def done(self, shard: str) -> dict[str, Any] | None:
        """The results of a shard that an earlier run finished and that is still what it wrote."""
        if shard in self._finished:
            return self._finished[shard]
        note, path = self.folder / f"{shard}.json", self.target / shard
        if not self.resumed or not note.is_file() or not path.is_file() or path.is_symlink():
            return None
        try:
            noted = read_json(note)
        except FileFormatError:  # the shard is converted again
            return None
        results = noted.get("results")
        if not isinstance(results, dict) or noted.get("checksum") != checksum(path):
            return None
        self._finished[shard] = results
        return results

    def record(self, shard: str, results: dict[str, Any]) -> None:
        """Notes that a shard is on the disk."""
        content = {"checksum": checksum(self.target / shard), "results": results}
        write_json(self.folder / f"{shard}.json", content)

    def abandon(self, files: Iterable[str]) -> None:
        """Removes the files of a conversion that failed, its notes, and an empty directory."""
        self._remove(files)
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):  # there is something else in it
            self.target.rmdir()

    def prepare_replacement(self, older: Iterable[str]) -> None:
        """Notes that what was written is whole, and what of the directory above it replaces.

        Args:
            older: files of the older result, relative to the directory above.

        Raises:
            OutputError: if something has appeared there meanwhile.
        """
        outer = State(self.target.parent)
        new = [path.name for path in self.target.iterdir() if path.is_file()]
        replaced = [name for name in older if outer._written(name) is not None]
        indexes = (path.name for path in outer.target.iterdir() if INDEX_NAME.fullmatch(path.name))
        outer._check_free(name for name in [*new, *indexes] if name not in replaced)
        content = {
            "planned": [*replaced, *new, *(f"{REPLACEMENT}/{name}" for name in new)],
            REPLACED: [name for name in replaced if name not in new],
        }
        write_json(self.folder / PLAN_FILE, content)

    def replace(self) -> None:
        """Moves a whole result up, in the place of the older one; the lock goes with it."""
        outer = State(self.target.parent)
        try:
            self.folder.rename(outer.folder)
        except OSError as error:
            raise OutputError(f"{outer.target}: cannot be written: {error.strerror}") from None
        try:
            outer.complete_replacement()
        except KeyboardInterrupt:  # the result is there already, and the older one no more
            if outer.exists:
                outer.complete_replacement()
            raise

    def complete_replacement(self) -> None:
        """Moves what is not yet in its place, and removes the notes; it can be run again."""
        if self.replacing:
            replaced = read_json(self.folder / PLAN_FILE)[REPLACED]
            self._remove(map(str, replaced if isinstance(replaced, list) else []))
        written = self.target / REPLACEMENT
        for each in sorted(written.glob("*")):
            path = self._written(f"{REPLACEMENT}/{each.name}")
            if path is not None:
                path.replace(self.target / each.name)
        with contextlib.suppress(FileNotFoundError):
            written.rmdir()
        self.finish()

    def finish(self) -> None:
        """Removes the notes: the directory is complete."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):
            folder = os.open(self.target, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _within(path: Path, folder: Path) -> bool:
    """Whether no link on the way to a file leads out of a folder."""
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents
