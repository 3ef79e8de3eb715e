# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A progress bar for work on files; on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import interrupts
from .output import on_terminal
from .text import printable

#: What the library calls with (bytes done, bytes in all).
Progress = Callable[[int, int], None]


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A progress callback that draws bytes, bytes per second and time left on stderr.

    Where that is no terminal it draws nothing. Either way it ends a command that a signal has
    asked to end.
    """
    if not on_terminal(sys.stderr):
        yield lambda done, total: interrupts.check()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("left", markup=False),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(printable(label), total=None)

        def advance(done: int, total: int) -> None:
            interrupts.check()
            bar.update(task, completed=done, total=total)

        yield advance
