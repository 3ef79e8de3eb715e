# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Who does the work, by what was given."""

from __future__ import annotations

import re
from concurrent.futures import Executor
from dataclasses import dataclass

from fp4kit.errors import OptionError

from .dask_scheduler import check_address, run_on_dask
from .executors import Course, run_here, run_on_executor

#: Who does the work: nobody but this process, an executor, a scheduler by its address, or a part.
Workers = Executor | str | None
_PART = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


@dataclass(frozen=True)
class Part:
    """A share of the tasks.

    Attributes:
        number: which, from 1 on.
        count: of how many.
    """

    number: int
    count: int

    @classmethod
    def of(cls, text: str) -> Part | None:
        """A part as the command line writes it, `2/8`; None for a text of another form.

        Raises:
            OptionError: if there is no such part.
        """
        match = _PART.fullmatch(text)
        if match is None:
            return None
        number, count = int(match[1]), int(match[2])
        if not 1 <= number <= count:
            raise OptionError(f"part {text!r} does not exist; parts go from 1/N to N/N")
        return cls(number, count)

    def tasks(self, total: int) -> list[int]:
        """Its tasks out of some; every task is in one part."""
        return list(range(self.number - 1, total, self.count))


def check_workers(workers: Workers) -> Part | None:
    """The part that is asked for, if it is one.

    Raises:
        OptionError: if nobody is meant by it.
    """
    if workers is None or isinstance(workers, Executor):
        return None
    if not isinstance(workers, str):
        raise OptionError(
            f"workers={type(workers).__name__} is no executor of concurrent.futures, address of a "
            "scheduler, local:N, or part like 2/8"
        )
    part = Part.of(workers)
    if part is None:
        check_address(workers)
    return part


def run(course: Course, workers: Workers) -> None:
    """Has workers do what there is to do; a part does its own tasks here."""
    if isinstance(workers, Executor):
        run_on_executor(course, workers)
    elif isinstance(workers, str) and Part.of(workers) is None:
        run_on_dask(course, workers)
    else:
        run_here(course)
