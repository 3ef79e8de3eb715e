# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Who runs tasks: this process, or any executor of concurrent.futures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from typing import Any

from fp4kit.errors import Fp4kitError, NonFiniteError, OptionError
from fp4kit.io.stream.chunks import Progress, Tally
from fp4kit.io.write.files import OutputError

from .patience import tell

#: Times that a task is given to a worker.
ATTEMPTS = 4
#: Faults of what was asked for, or of the data: another worker would meet them, too.
LASTING = (OptionError, NonFiniteError)
#: Seconds between looks at whether the user wants to stop.
LOOK_SECONDS = 0.5


class Work(ABC):
    """What there is to do, in tasks that any worker may run.

    Attributes:
        kind: what the tasks do, one word.
        device: where each worker computes, as `--device` says it.
    """

    kind: str
    device: str

    @abstractmethod
    def call(self, number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function of a task, which every worker can import, and its arguments."""

    @abstractmethod
    def name(self, number: int) -> str:
        """What a task is called."""

    @abstractmethod
    def size(self, number: int) -> int:
        """Bytes of the source that a task reads, in which progress is counted."""

    @abstractmethod
    def take(self, number: int, result: Any) -> None:
        """Keeps the result of a task."""

    @abstractmethod
    def stopped(self, waiting: Iterable[int], why: str) -> OutputError:
        """The error of a run that ends while some tasks are not known to be done."""


class Course:
    """How far some work is, and how often each task has failed.

    Attributes:
        work: what there is to do.
        waiting: tasks that are not done.
    """

    def __init__(self, work: Work, numbers: Iterable[int], progress: Progress | None) -> None:
        """Begins with nothing done."""
        self.work = work
        self.waiting = dict.fromkeys(numbers)
        self._tally = Tally(progress, sum(map(work.size, self.waiting)))
        self._failures = dict.fromkeys(self.waiting, 0)

    def look(self) -> None:
        """Reports progress without any, so that a signal is noticed."""
        self._tally.add(0)

    def done(self, number: int, result: Any) -> None:
        """A task has ended well."""
        del self.waiting[number]
        self.work.take(number, result)
        self._tally.add(self.work.size(number))

    def failed(self, number: int, error: BaseException, where: str = "") -> None:
        """A task has failed; returns if it is worth another attempt.

        Raises:
            Fp4kitError: if it is not, saying what is missing.
        """
        if isinstance(error, LASTING) or not isinstance(error, (Fp4kitError, OSError)):
            raise error
        self._failures[number] += 1
        name = self.work.name(number)
        if self._failures[number] >= ATTEMPTS:
            raise self.stopped(f"{name} failed {ATTEMPTS} times: {error}")
        tell(f"{name} is tried again{where}: {error}", 1)

    def stopped(self, why: str) -> OutputError:
        """The error of a run that ends with some tasks missing."""
        return self.work.stopped(self.waiting, why)


def run_here(course: Course) -> None:
    """Runs the tasks in this process, one after the other."""
    for number in list(course.waiting):
        while number in course.waiting:
            function, arguments = course.work.call(number)
            try:
                result = function(*arguments)
            except (Fp4kitError, OSError) as error:
                course.failed(number, error)
            else:
                course.done(number, result)


def run_on_executor(course: Course, executor: Executor) -> None:
    """Runs the tasks on an executor of concurrent.futures, whatever is behind it.

    Raises:
        OutputError: if the executor breaks, as when a process of it is killed.
    """

    def submit(number: int) -> Future[Any]:
        function, arguments = course.work.call(number)
        return executor.submit(function, *arguments)

    running: dict[Future[Any], int] = {}
    try:
        running = {submit(number): number for number in course.waiting}
        while running:
            ended, _ = wait(running, LOOK_SECONDS, FIRST_COMPLETED)
            course.look()
            for future in ended:
                number, error = running.pop(future), future.exception()
                if error is None:
                    course.done(number, future.result())
                    continue
                if isinstance(error, BrokenExecutor):
                    raise error
                course.failed(number, error)
                running[submit(number)] = number
    except BrokenExecutor as error:
        raise course.stopped(f"the workers are gone: {error}") from None
    finally:
        for future in running:
            future.cancel()
