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
from typing import TypeVar

from fp4kit.errors import OptionError

THREADS_VARIABLE = "FP4KIT_NUM_THREADS"
#: Elements below which a second thread costs more than it brings.
SMALL = 1 << 16
#: Elements per unit of work; fixed, so that sums do not depend on the number of threads.
CHUNK = 1 << 18

Result = TypeVar("Result")


def thread_count() -> int:
    """Threads to use: FP4KIT_NUM_THREADS, or the cores this process may run on."""
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if not text.isdigit() or int(text) == 0:
        raise OptionError(f"{THREADS_VARIABLE}={text!r} is not a positive number of threads")
    return int(text)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fp4kit")


# A forked child inherits the pool's bookkeeping but none of its threads: start afresh there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)


def run(work: Callable[[int, int], Result], count: int, size: int) -> list[Result]:
    """Calls work(begin, end) over 0..count in chunks, on all cores if it is worth it.

    Args:
        work: releases the GIL; may run in several threads at once.
        count: units in all (blocks, rows).
        size: elements in a unit.

    Returns:
        The results, in order.
    """
    step = max(CHUNK // max(size, 1), 1)
    ranges = [(begin, min(begin + step, count)) for begin in range(0, count, step)]
    threads = thread_count()
    if len(ranges) == 1 or threads == 1 or count * size < SMALL:
        return [work(begin, end) for begin, end in ranges]
    return list(_pool(threads).map(lambda pair: work(*pair), ranges))
