# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A result in an object store: every object appears when its upload is complete, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.read.other_files import STATE_DIR
from fp4kit.checkpoint.read.weight_files import CONFIG
from fp4kit.checkpoint.write.output import check_space
from fp4kit.checkpoint.write.state import PLAN_FILE
from fp4kit.errors import OptionError
from fp4kit.io.write.files import Output, OutputError

from .mirror import opened
from .patience import Patience
from .places import LocalPlace, Place, scratch
from .remote_files import PIECE, mark_of
from .urls import READ_ONLY, check_url, file_system, is_url, protocol_of


class StorePlace(Place):
    """A prefix of an object store.

    A shard is written to the disk of the worker first, as its header is known last, and then
    uploaded in parts; the store makes an object of them at the end.
    """

    def __init__(self, url: str) -> None:
        self.name = check_url(url)
        if protocol_of(self.name) in READ_ONLY:
            raise OptionError(
                f"{self.name}: cannot be written to; give a path, or a URL of an object store"
            )
        self._fs: Any = file_system(self.name)
        self._root = self._fs._strip_protocol(self.name)
        self._patience = Patience()

    @property
    def retries(self) -> int:  # type: ignore[override]
        """How often something had to be tried again so far."""
        return self._patience.retries

    def _failure(self, reason: str) -> OutputError:
        return OutputError(f"{self.name}: cannot be written: {reason}")

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def create(self, needed: int) -> None:
        """Nothing: a prefix needs no making, and a store has space."""

    def read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                data: bytes = self._fs.cat_file(self._at(name))
            except FileNotFoundError:
                return None
            return data

        return self._patience.with_retries(read, self._failure)

    def write(self, name: str, data: bytes) -> None:
        self._patience.with_retries(lambda: self._fs.pipe_file(self._at(name), data), self._failure)

    def names(self) -> list[str]:
        def listed() -> list[str]:
            self._fs.invalidate_cache()  # other workers write, too
            try:
                return list(self._fs.find(self._root))
            except FileNotFoundError:
                return []

        found = self._patience.with_retries(listed, self._failure)
        return sorted(name.removeprefix(self._root).lstrip("/") for name in found)

    @contextmanager
    def written(self, name: str, permissions: int) -> Iterator[Output]:
        with scratch() as folder:
            path = folder / Path(name).name
            yield Output(path, permissions)
            self._upload(path, name)

    def _upload(self, path: Path, name: str) -> None:
        def upload() -> None:
            self._fs.put_file(str(path), self._at(name))

        self._patience.with_retries(upload, self._failure)
        mark, size = self.mark(name), path.stat().st_size
        if mark is None or mark[0] != size:
            has = "is not there" if mark is None else f"has {mark[0]}"
            raise self._failure(f"{name} {has} after {size} bytes were uploaded")

    def mark(self, name: str) -> tuple[int, str] | None:
        def look() -> tuple[int, str] | None:
            self._fs.invalidate_cache()
            try:
                facts = self._fs.info(self._at(name))
            except FileNotFoundError:
                return None
            return int(facts["size"]), mark_of(facts)

        return self._patience.with_retries(look, self._failure)

    def sha256(self, name: str) -> str:
        facts, digest = self.mark(name), hashlib.sha256()
        size = 0 if facts is None else facts[0]
        for at in range(0, size, PIECE):
            last = min(at + PIECE, size)
            piece = partial(self._fs.cat_file, self._at(name), at, last)
            digest.update(self._patience.with_retries(piece, self._failure))
        return digest.hexdigest()

    def remove_notes(self) -> None:
        prefix = f"{STATE_DIR}/"
        notes = [name for name in self.names() if name.startswith(prefix)]
        for name in sorted(notes, key=lambda name: name != f"{prefix}{PLAN_FILE}"):

            def remove(name: str = name) -> None:
                try:
                    self._fs.rm_file(self._at(name))
                except FileNotFoundError:
                    return

            self._patience.with_retries(remove, self._failure)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        with opened(self.name) as folder:
            yield folder

    @contextmanager
    def documents(self) -> Iterator[Path]:
        with scratch() as base:
            folder = base / "documents"
            folder.mkdir()
            check_space(folder, 0)
            yield folder
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            # Engines look for config.json: it comes last.
            for path in sorted(paths, key=lambda path: path == folder / CONFIG):
                self._upload(path, path.relative_to(folder).as_posix())


def place_of(target: str) -> Place:
    """The place that a path or URL names."""
    return StorePlace(target) if is_url(target) else LocalPlace(Path(target))
