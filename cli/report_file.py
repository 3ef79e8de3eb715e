# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`--report FILE`: checked like any output before work, written after it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4kit.errors import OptionError
from fp4kit.io.write.files import AtomicFile, Output, OutputError

from .given import Given


@dataclass(frozen=True)
class ReportFile:
    """Where a report goes.

    Attributes:
        path: as given.
        replace: whether an older report may be replaced.
    """

    path: Path
    replace: bool

    def write(self, content: dict[str, Any]) -> None:
        """Writes a report as JSON: atomically, or in place if it is a device.

        Raises:
            OutputError: if it cannot be written.
        """
        self.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_text(self, text: str) -> None:
        """Writes a text: atomically, or in place if it is a device.

        Raises:
            OutputError: if it cannot be written.
        """
        data = text.encode()
        if not self.path.exists() or self.path.is_file():
            with AtomicFile(Output(self.path, replace=self.replace)) as file:
                file.write_at(0, data)
                file.commit()
            return
        try:
            with self.path.open("wb") as device:
                device.write(data)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from None


def check_report(given: Given, inputs: list[Path]) -> ReportFile | None:
    """The file of `--report`, see :func:`check_side_file`; None without one."""
    return check_side_file(given, given.report_file, inputs, "report")


def check_side_file(
    given: Given, path: Path | None, inputs: list[Path], what: str
) -> ReportFile | None:
    """Refuses a file beside the output that would destroy something, before any work.

    Args:
        given: options of the command, its output filled in if it has one.
        path: the file, None without one.
        inputs: files and directories that are read.
        what: what it is called, in messages and as the end of its option.

    Returns:
        Where it goes; None without one. A dry run replaces nothing but is reported.

    Raises:
        OptionError: if it is an input or the output, lies in one, or exists.
        OutputError: if it cannot be written.
    """
    force, dry_run = given.force, given.dry_run
    if path is None:
        return None
    final = Path(os.path.realpath(path))
    taken = [(held, "input") for held in inputs]
    taken += [] if given.target is None else [(given.target, "output")]
    for held, role in taken:
        whole = Path(os.path.realpath(held))
        if final == whole or whole in final.parents or _is_one_of(path, held):
            raise OptionError(
                f"{path}: the {what} would lie in the {role} {held} or replace it; choose another "
                f"name for --{what}"
            )
    if not final.parent.is_dir():
        raise OutputError(f"{path}: cannot be written: there is no directory {final.parent}")
    if path.exists() or path.is_symlink():
        _check_existing(path, what, force=force, dry_run=dry_run)
    elif not os.access(final.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: cannot be written: Permission denied")
    return ReportFile(path, replace=force and not dry_run)


def _check_existing(path: Path, what: str, *, force: bool, dry_run: bool) -> None:
    if not path.exists():
        raise OptionError(f"{path}: is a link to nothing; choose another name for --{what}")
    mode = path.stat().st_mode
    # What a shell passes as /dev/stdout or /dev/fd/63 may be a pipe that somebody reads.
    piped = stat.S_ISFIFO(mode) and path.is_relative_to("/dev")
    if stat.S_ISCHR(mode) or piped:
        if not os.access(path, os.W_OK):
            raise OutputError(f"{path}: cannot be written: Permission denied")
        return
    if not stat.S_ISREG(mode):
        raise OptionError(f"{path}: is not a regular file; choose another name for --{what}")
    if any(os.path.samestat(path.stat(), os.fstat(number)) for number in (1, 2)):
        raise OptionError(
            f"{path}: is the file that the command prints to; use --json, or choose another name "
            f"for --{what}"
        )
    if dry_run:
        raise OptionError(
            f"{path}: exists already; a dry run replaces nothing, choose another name for --{what}"
        )
    if not force:
        raise OptionError(f"{path}: exists already; pass --force to replace the {what}")


def _is_one_of(path: Path, given: Path) -> bool:
    """Whether an existing file is one of a directory's, by another name: a link leads to it."""
    if not path.is_file() or not given.is_dir():
        return path.is_file() and given.exists() and path.samefile(given)
    own = path.stat()
    return any(
        (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino) for found in _files_of(given)
    )


def _files_of(folder: Path) -> Iterator[os.stat_result]:
    """Facts of every file of a directory, where links lead; what cannot be read is left out."""
    for root, _, files in os.walk(folder):
        for name in files:
            file = Path(root) / name
            if file.is_file():
                yield file.stat()
