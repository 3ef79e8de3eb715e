# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A progress bar for work on files; on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fp4kit.backends.kernel_cache import CACHE_VARIABLE, KernelFolder, on_compile

from . import interrupts
from .output import on_terminal, say
from .text import printable

#: What the library calls with (bytes done, bytes in all).
Progress = Callable[[int, int], None]


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A progress callback that draws bytes, bytes per second and time left on stderr.

    Where that is no terminal it draws nothing. Either way it ends a command that a signal has
    asked to end. Meanwhile the user is told when kernels are compiled.
    """
    on_compile(_say_compiling)
    try:
        with _bar(label) as progress:
            yield progress
    finally:
        on_compile(None)


def _say_compiling(folder: KernelFolder) -> None:
    """The first run on a machine takes some seconds more."""
    if folder.path is not None:
        say(f"Compiling kernels for this processor, once; they are kept in {folder.path}")
        return
    say(
        f"Warning: compiled kernels are not kept ({folder.reason}), so every run compiles them "
        f"anew; set {CACHE_VARIABLE} to a folder that is yours alone"
    )


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    """The bar itself."""
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
