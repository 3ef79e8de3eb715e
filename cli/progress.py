# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A progress bar for work on files; on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fp4kit.cpu.kernel_cache import CACHE_VARIABLE, KernelFolder, on_compile
from fp4kit.fleet.patience import Listener, on_retry

from . import interrupts
from .output import on_terminal, say
from .text import printable

#: What the library calls with (bytes done, bytes in all).
Progress = Callable[[int, int], None]


@contextmanager
def progress_bar(label: str, *, idle: bool = False) -> Iterator[Progress]:
    """A progress callback that draws bytes, bytes per second and time left on stderr.

    Where that is no terminal, or nothing is going to be done (`idle`), it draws nothing. Either way
    it ends a command that a signal has asked to end. Meanwhile the user is told when kernels are
    compiled, and when work is tried again, which the bar counts.
    """
    try:
        with _bar(label, idle) as (progress, tell):
            on_compile(lambda folder: tell(_compiling(folder), 0))
            on_retry(tell)
            yield progress
    finally:
        on_compile(None)
        on_retry(None)


def _compiling(folder: KernelFolder) -> str:
    """What to say when a run takes some seconds more than later ones."""
    if folder.path is not None:
        return (
            "Compiling kernels for this processor (only the first time that they are needed); "
            f"they are kept in {folder.path}"
        )
    return (
        f"Warning: compiled kernels are not kept ({folder.reason}), so every run compiles them "
        f"anew; set {CACHE_VARIABLE} to a folder that only you can write to"
    )


@contextmanager
def _bar(label: str, idle: bool) -> Iterator[tuple[Progress, Listener]]:
    """The bar itself, and what prints a line above it and counts retries."""
    if idle or not on_terminal(sys.stderr):
        yield lambda done, total: interrupts.check(), lambda message, retries: say(message)
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
    from rich.text import Text

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
        task, again = bar.add_task(printable(label), total=None), 0

        def advance(done: int, total: int) -> None:
            interrupts.check()
            bar.update(task, completed=done, total=total)

        def tell(message: str, retries: int) -> None:
            nonlocal again
            bar.console.print(Text(printable(message)), soft_wrap=True)
            again += retries
            if again:
                bar.update(task, description=f"{printable(label)} ({again} retries)")

        yield advance, tell
