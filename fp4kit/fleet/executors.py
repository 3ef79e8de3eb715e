# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Who runs the tasks of a job: this process, or any executor of concurrent.futures."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import replace as with_changes

from fp4kit.checkpoint.read.json_files import listed
from fp4kit.errors import Fp4kitError, NonFiniteError, OptionError
from fp4kit.io.stream.chunks import Progress, Tally
from fp4kit.io.write.files import OutputError

from .job import Job, Planned
from .patience import tell
from .receipts import Receipt, read_receipt
from .stores import place_of
from .tasks import run_task

#: Times that a task is given to a worker.
ATTEMPTS = 4
#: Faults of what was asked for, or of the data: another worker would meet them, too.
LASTING = (OptionError, NonFiniteError)
#: Seconds between looks at whether the user wants to stop.
LOOK_SECONDS = 0.5


def slim_task(job: Job, plan: str, number: int) -> Receipt:
    """A task whose receipt comes back without what became of each tensor: that is in the place."""
    return with_changes(run_task(job, plan, number), results={})


class Course:
    """How far the tasks of a job are, and how often each has failed.

    Attributes:
        waiting: tasks that are not done.
    """

    def __init__(self, planned: Planned, numbers: Sequence[int], progress: Progress | None) -> None:
        """Begins with nothing done."""
        self.planned = planned
        self.waiting = dict.fromkeys(numbers)
        self._tally = Tally(progress, sum(map(planned.source_bytes, numbers)))
        self._failures = dict.fromkeys(numbers, 0)

    def name(self, number: int) -> str:
        """The file that a task writes."""
        return self.planned.shards[number].name

    def look(self) -> None:
        """Reports progress without any, so that a signal is noticed."""
        self._tally.add(0)

    def done(self, number: int, receipt: Receipt) -> None:
        """A task has ended well."""
        del self.waiting[number]
        if receipt.retries:
            tell(f"{receipt.shard}: {receipt.retries} requests were tried again", receipt.retries)
        self._tally.add(self.planned.source_bytes(number))

    def failed(self, number: int, error: BaseException, where: str = "") -> None:
        """A task has failed; returns if it is worth another attempt.

        Raises:
            Fp4kitError: if it is not, saying what is missing.
        """
        if isinstance(error, LASTING) or not isinstance(error, (Fp4kitError, OSError)):
            raise error
        self._failures[number] += 1
        if self._failures[number] >= ATTEMPTS:
            raise self.stopped(f"{self.name(number)} failed {ATTEMPTS} times: {error}")
        tell(f"{self.name(number)} is tried again{where}: {error}", 1)

    def stopped(self, why: str) -> OutputError:
        """The error of a run that ends with some shards missing."""
        planned = self.planned
        place = place_of(planned.job.target)
        missing = [
            self.name(number)
            for number in self.waiting
            if read_receipt(place, planned.shards[number], planned.hash) is None
        ]
        return OutputError(
            f"{place.name}: {len(missing)} of {len(planned.shards)} shards are missing "
            f"({listed(missing)}): {why}; the same command with --resume makes them"
        )


def run_here(course: Course) -> None:
    """Runs the tasks in this process, one after the other."""
    for number in list(course.waiting):
        while number in course.waiting:
            try:
                receipt = slim_task(course.planned.job, course.planned.hash, number)
            except (Fp4kitError, OSError) as error:
                course.failed(number, error)
            else:
                course.done(number, receipt)


def run_on_executor(course: Course, executor: Executor) -> None:
    """Runs the tasks on an executor of concurrent.futures, whatever is behind it.

    Raises:
        OutputError: if the executor breaks, as when a process of it is killed.
    """
    planned = course.planned

    def submit(number: int) -> Future[Receipt]:
        return executor.submit(slim_task, planned.job, planned.hash, number)

    running: dict[Future[Receipt], int] = {}
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
