# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The tasks of a job on dask.distributed: a scheduler at an address, or a cluster of this machine.

dask gives the tasks of a worker that is gone to others. What a worker itself cannot help, a full
disk of its own, comes back as an error, and the task goes to another worker.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fp4kit.cpu.threads import THREADS_VARIABLE, thread_count
from fp4kit.errors import Fp4kitError, OptionError

from .executors import LOOK_SECONDS, Course
from .patience import tell
from .urls import EXTRA

LOCAL = re.compile(r"local:([1-9][0-9]{0,3})")
ADDRESS = re.compile(r"((tcp|tls|ucx|ws|wss)://)?[^/@?#\s]+:[0-9]+")
#: Seconds in which a scheduler must answer.
ANSWER_SECONDS = 30
#: Seconds without any worker after which the user is told.
QUIET_SECONDS = 15.0
#: Failures of a worker after which it gets no more tasks, if there are others.
WORKER_FAILURES = 2
#: dask's resource that stands for a GPU.
GPU = "GPU"


def check_address(scheduler: str) -> str:
    """The address of a scheduler, or `local:N`.

    Raises:
        OptionError: if it is neither, or dask.distributed is missing.
    """
    if not (LOCAL.fullmatch(scheduler) or ADDRESS.fullmatch(scheduler)):
        raise OptionError(
            f"scheduler={scheduler!r} is no address; give tcp://HOST:PORT, or local:N for N "
            "workers on this machine"
        )
    if importlib.util.find_spec("distributed") is None:
        raise OptionError(f"scheduler={scheduler!r} needs dask.distributed: {EXTRA}")
    return scheduler


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps dask's own tracebacks to itself: what they mean for the work is said in one line."""
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _client(scheduler: str) -> Iterator[Any]:
    """A client of a scheduler; a local cluster ends with it."""
    import distributed

    local = LOCAL.fullmatch(scheduler)
    if local is None:
        try:
            client = distributed.Client(scheduler, timeout=ANSWER_SECONDS, set_as_default=False)
        except (OSError, TimeoutError, asyncio.TimeoutError) as error:
            raise OptionError(f"scheduler {scheduler}: does not answer: {error}") from None
        with client:
            yield client
        return
    count = int(local[1])
    threads = max(thread_count() // count, 1)
    with (
        distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            dashboard_address=None,
            env={THREADS_VARIABLE: os.environ.get(THREADS_VARIABLE, str(threads))},
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


def _on_worker(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[str, Any, BaseException | None]:
    """A task: the worker's address, and the result or what was wrong."""
    from distributed import get_worker

    address = get_worker().address
    try:
        return address, function(*arguments), None
    except (Fp4kitError, OSError) as error:
        return address, None, error


class _Run:
    """The tasks of a job on one scheduler."""

    def __init__(self, client: Any, course: Course) -> None:
        self._client = client
        self._course = course
        self._running: dict[Any, int] = {}
        self._attempts: Counter[int] = Counter()
        self._failures: Counter[str] = Counter()
        self._quiet = time.monotonic()

    def run(self) -> None:
        """Gives out every task, and waits for the last."""
        try:
            for number in self._course.waiting:
                self._submit(number)
            while self._running:
                time.sleep(LOOK_SECONDS if not self._collect() else 0)
                self._course.look()
                self._check()
        finally:
            if self._client.status == "running":
                self._client.cancel(list(self._running), force=True)

    def _submit(self, number: int) -> None:
        work = self._course.work
        self._attempts[number] += 1
        workers = self._workers()
        bad = {name for name, count in self._failures.items() if count >= WORKER_FAILURES}
        good = [name for name in workers if name not in bad]
        restricted = {"workers": good, "allow_other_workers": False} if bad and good else {}
        gpus = work.device != "cpu" and any(GPU in offered for offered in workers.values())
        if work.device.startswith("cuda") and workers and not gpus:
            raise OptionError(
                f"no worker offers the resource {GPU}, which --device cuda asks for; start "
                f"workers with --resources {GPU}=1"
            )
        # What the dashboard shows; the rest of the key makes it one of its own.
        key = f"{work.kind}-{work.name(number)}-{self._attempts[number]}"
        future = self._client.submit(
            _on_worker,
            *work.call(number),
            key=f"{key}-{secrets.token_hex(8)}",
            resources={GPU: 1} if gpus else None,
            pure=False,
            **restricted,
        )
        self._running[future] = number

    def _workers(self) -> dict[str, dict[str, Any]]:
        """Address of every worker, and the resources that it offers."""
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        return {name: facts.get("resources") or {} for name, facts in workers.items()}

    def _collect(self) -> bool:
        """Takes what has ended; whether anything has."""
        ended = [future for future in self._running if future.done()]
        for future in ended:
            number = self._running.pop(future)
            if future.cancelled() or future.status == "lost":
                raise self._course.stopped("the scheduler is gone")
            if future.status == "error":
                self._died(number, future.exception())
                continue
            address, result, error = future.result()
            if error is None:
                self._course.done(number, result)
                continue
            self._failures[address] += 1
            self._course.failed(number, error, f" (it failed on {address})")
            self._submit(number)
        return bool(ended)

    def _died(self, number: int, error: BaseException) -> None:
        """A task that ended with an error of dask's: its worker was killed, or has no fp4kit."""
        if isinstance(error, ImportError):
            raise OptionError(f"a worker cannot import fp4kit: {error}; install it there")
        if isinstance(error, (Fp4kitError, OSError)) or type(error).__name__ == "KilledWorker":
            self._course.failed(number, OSError(str(error)))
            self._submit(number)
            return
        raise error

    def _check(self) -> None:
        """Looks whether the scheduler still answers and has workers.

        Raises:
            OutputError: if it is gone.
        """
        if self._client.status != "running":
            raise self._course.stopped("the scheduler is gone")
        if self._workers():
            self._quiet = time.monotonic()
        elif time.monotonic() - self._quiet > QUIET_SECONDS:
            self._quiet = time.monotonic()
            tell("The scheduler has no worker at the moment; the work goes on when one joins")


def run_on_dask(course: Course, scheduler: str) -> None:
    """Runs the tasks on dask.distributed.

    Args:
        course: what there is to do.
        scheduler: an address, or `local:N`.

    Raises:
        OptionError: if the scheduler does not answer, or workers make another plan.
        OutputError: if the scheduler is lost, saying what is missing.
    """
    check_address(scheduler)
    with _quiet(), _client(scheduler) as client:
        if client.dashboard_link and LOCAL.fullmatch(scheduler) is None:
            tell(f"Dashboard: {client.dashboard_link}")
        _Run(client, course).run()
