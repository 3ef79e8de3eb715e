# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A conversion by several workers, from the plan to the report."""

from __future__ import annotations

import time
from dataclasses import replace as with_changes

from fp4kit.checkpoint.plan.checkpoint_plan import CheckpointPlan
from fp4kit.checkpoint.report import CheckpointReport, make_report
from fp4kit.checkpoint.write.shards import restore
from fp4kit.errors import OptionError
from fp4kit.io.stream.chunks import Progress

from .executors import Course
from .finish import finish_planned
from .job import Job, Planned, begin
from .places import Place, check_local
from .receipts import read_receipt
from .shards import ShardWork
from .stores import place_of
from .tasks import using
from .urls import is_url
from .workers import Part, Workers, check_workers, run


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
        numbers = range(total) if part is None else part.tasks(total)
        run(Course(ShardWork(planned), numbers, progress), workers)
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
