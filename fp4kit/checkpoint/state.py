# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What an unfinished conversion knows about itself: fingerprint, finished shards, a lock.

The notes lie in the output directory until everything is written; shards get their names one by
one, config.json and the index come last. So a directory without the notes is complete, and one
with them is recognized by every fp4kit command.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp4kit import __version__
from fp4kit.errors import OptionError
from fp4kit.io.files import AtomicFile, OutputError

from .directory import CONFIG, HF_QUANT_CONFIG, INDEX_SUFFIX, STATE_DIR, Checkpoint, read_json
from .options import Options

PLAN_FILE = "plan.json"
LOCK_FILE = "lock"


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file atomically."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with AtomicFile(path) as file:
        file.write_at(0, text.encode())
        file.commit()


def fingerprint(checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    """Everything that the output's bytes depend on.

    Files of weights count by name, size, time of change and header, JSON files by content.
    """
    files = {}
    for path in checkpoint.weight_files():
        facts = path.stat()
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = hashlib.sha256(file.read(length)).hexdigest()
        files[path.name] = [facts.st_size, facts.st_mtime_ns, header]
    documents = [checkpoint.config, checkpoint.hf_quant_config]
    documents += [read_json(path) for path in options.files]
    content = json.dumps(documents, sort_keys=True).encode()
    return {
        "fp4kit": __version__,
        "files": files,
        "documents": hashlib.sha256(content).hexdigest(),
        # As JSON has it: tuples come back as lists.
        "options": json.loads(json.dumps(asdict(options))),
    }


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What of a fingerprint has changed, in words."""
    for key, value in now["options"].items():
        if before.get("options", {}).get(key) != value:
            return f"option {key} was {before.get('options', {}).get(key)!r}, is {value!r}"
    if before.get("fp4kit") != now["fp4kit"]:
        return f"it was begun by fp4kit {before.get('fp4kit')}, this is {now['fp4kit']}"
    return "the source has changed"


class State:
    """The notes of a conversion; use it as a context manager, which holds the lock."""

    def __init__(self, target: Path) -> None:
        """Names the notes of an output directory; nothing is touched yet."""
        self.target = target
        self.folder = target / STATE_DIR
        self._lock = -1

    @property
    def exists(self) -> bool:
        """Whether an earlier run left notes."""
        return self.folder.is_dir()

    def __enter__(self) -> State:
        """Creates the notes' directory and locks it.

        Raises:
            OutputError: if that is not possible, or another process works there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
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

    def begin(self, wanted: dict[str, Any], *, resume: bool) -> None:
        """Starts over, or checks that what an earlier run left can be continued.

        A run that was killed before it noted anything has left nothing to continue, so that it is
        started over in any case.

        Raises:
            OptionError: if it was begun from another source or with other options.
        """
        plan = self.folder / PLAN_FILE
        if resume and plan.is_file():
            before = read_json(plan)
            if before != wanted:
                raise OptionError(
                    f"{self.target}: cannot be resumed: {_difference(before, wanted)}; start over "
                    "with --force"
                )
        else:
            # What a run with other options left must not stay beside the new shards.
            for path in (*self.folder.glob("*.json"), *self._generated()):
                path.unlink()
            write_json(plan, wanted)
        for left in self.target.rglob(".*.fp4kit-tmp"):  # of a run that was killed
            left.unlink()

    def _generated(self) -> Iterator[Path]:
        """What an earlier run wrote and this one may not: other layouts have other files."""
        yield from self.target.glob("*.safetensors")
        yield from self.target.glob(f"*{INDEX_SUFFIX}")
        for name in (CONFIG, HF_QUANT_CONFIG):
            if (self.target / name).is_file():
                yield self.target / name

    def done(self, shard: str) -> dict[str, Any] | None:
        """The results of a shard that an earlier run finished, or None."""
        path = self.folder / f"{shard}.json"
        return read_json(path) if path.is_file() and (self.target / shard).is_file() else None

    def record(self, shard: str, results: dict[str, Any]) -> None:
        """Notes that a shard is on the disk."""
        write_json(self.folder / f"{shard}.json", results)

    def finish(self) -> None:
        """Removes the notes: the directory is complete."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):
            folder = os.open(self.target, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
