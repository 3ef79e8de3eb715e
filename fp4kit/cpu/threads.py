# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Runs kernels on ranges over all cores.

Ranges are cut by Python threads rather than by numba's parallel loops: the kernels release the
GIL, compile several times faster that way, and any number of callers may run at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from fp4kit.errors import OptionError
from fp4kit.float_mode import by_ieee

THREADS_VARIABLE = "FP4KIT_NUM_THREADS"
#: Fewest elements in a task: below, handing it to a thread costs more than it brings.
SMALL = 1 << 17
#: Elements per task where results are sums: fixed, so that they do not depend on the threads, and
#: few enough to stay in a processor's own cache while they are quantized and then measured.
SUM_CHUNK = 1 << 18
#: Tasks per thread otherwise: few, because every hand-over waits for the interpreter lock, but
#: enough for a thread that lost time to the rest of the machine.
TASKS_PER_THREAD = 4
#: Elements of a task that a hand-over is little beside: smaller ones are made only to give every
#: thread some work.
LARGE = 1 << 20

Result = TypeVar("Result")
#: How work is spread over threads: :func:`run`, or :func:`alone` in what a thread runs already.
Run = Callable[[Callable[[int, int], Any], int, int], list[Any]]


@cache
def most_threads() -> int:
    """Threads that may be asked for: twice the processors, but 64 on any machine."""
    return max(64, 2 * (os.cpu_count() or 1))


def thread_count() -> int:
    """Threads to use: FP4KIT_NUM_THREADS, or the cores this process may run on.

    Raises:
        OptionError: if the variable is no number from 1 to :func:`most_threads`.
    """
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if not text.isdigit() or int(text) == 0:
        raise OptionError(f"{THREADS_VARIABLE}={text!r} is not a positive number of threads")
    if len(text) > 9 or int(text) > most_threads():
        raise OptionError(
            f"{THREADS_VARIABLE}={text[:20]!r} is too many threads; at most {most_threads()} here"
        )
    return int(text)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fp4kit")


# A forked child inherits the pool's bookkeeping but none of its threads: start afresh there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def run(
    work: Callable[[int, int], Result], count: int, size: int, *, sums: bool = False
) -> list[Result]:
    """Calls work(begin, end) over 0..count in pieces, on all cores if it is worth it.

    Args:
        work: releases the GIL; may run in several threads at once, which compute by IEEE 754; so
            does this one if it is to (see :mod:`fp4kit.float_mode`).
        count: units in all (blocks, rows).
        size: elements in a unit.
        sums: cut pieces of a fixed size, so that sums over them are reproducible.

    Returns:
        The results, in order.
    """
    threads = thread_count()
    of_thread = count * size // threads
    per_task = max(of_thread // TASKS_PER_THREAD, min(of_thread, LARGE), SMALL)
    step = max((SUM_CHUNK if sums else per_task) // max(size, 1), 1)
    ranges = [(begin, min(begin + step, count)) for begin in range(0, count, step)]
    if len(ranges) <= 1 or threads == 1:
        return [work(begin, end) for begin, end in ranges]
    # Threads of the pool are in the mode of whichever thread started them.
    piece = by_ieee(work)
    return list(_pool(threads).map(lambda pair: piece(*pair), ranges))


def alone(work: Callable[[int, int], Result], count: int, size: int) -> list[Result]:
    """Calls work(0, count): :func:`run` for what is a piece of other work."""
    return [work(0, count)]
