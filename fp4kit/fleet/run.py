# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A conversion by several workers, from the plan to the report."""

from __future__ import annotations

import re
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from dataclasses import replace as with_changes

from fp4kit.checkpoint.plan.checkpoint_plan import CheckpointPlan
from fp4kit.checkpoint.report import CheckpointReport, make_report
from fp4kit.checkpoint.write.shards import restore
from fp4kit.errors import OptionError
from fp4kit.io.stream.chunks import Progress

from .dask_scheduler import check_address, run_on_dask
from .executors import Course, run_here, run_on_executor
from .finish import finish_planned
from .job import Job, Planned, begin
from .places import Place, check_local
from .receipts import read_receipt
from .stores import place_of
from .tasks import using
from .urls import is_url

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


def convert(
    job: Job,
    workers: Workers = None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Carries a job out, or a part of it.

    Args:
        job: what is asked for.
        workers: None for this process, an executor of concurrent.futures, the address of a dask
            scheduler, `local:N`, or a part like `2/8`.
        resume: go on with what an earlier run began; a part always does.
        progress: called with (bytes done, bytes in all) of the source.

    Returns:
        The report of the whole; of a part, that of its tensors, and the result is unfinished until
        :func:`.finish.finish`.

    Raises:
        OptionError: for a target that holds something else, or another plan.
        OutputError: if shards could not be made, naming them.
    """
    part = check_workers(workers)
    if not is_url(job.target):
        check_local("" if is_url(job.source) else job.source, job.target)
    started = time.perf_counter()
    place = place_of(job.target)
    with using(job) as opened:
        planned = opened.planned
        begun = begin(place, planned)
        if begun and not resume and part is None:
            raise OptionError(
                f"{place.name}: holds an unfinished conversion; pass --resume to go on"
            )
        if resume and not begun:
            # Harmless: there was nothing, so that all is made.
            planned.plan.warnings.append(f"{place.name}: held nothing to resume; all was made")
        total = len(planned.shards)
        course = Course(planned, range(total) if part is None else part.tasks(total), progress)
        if isinstance(workers, Executor):
            run_on_executor(course, workers)
        elif isinstance(workers, str) and part is None:
            run_on_dask(course, workers)
        else:
            run_here(course)
        if part is None:
            report = finish_planned(planned, place)
        else:
            report = _part_report(planned, place, part)
    return with_changes(report, source=job.source, seconds=time.perf_counter() - started)


def _part_report(planned: Planned, place: Place, part: Part) -> CheckpointReport:
    """What became of the tensors of a part."""
    shards = [planned.shards[number] for number in part.tasks(len(planned.shards))]
    for shard in shards:
        receipt = read_receipt(place, shard, planned.hash)
        if receipt is not None:
            restore(shard, receipt.results)
    plan: CheckpointPlan = with_changes(planned.plan, shards=shards)
    return make_report(plan, place.name, 0, 0.0)
