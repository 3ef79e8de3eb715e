# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The shards of a job as work for executors and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace as with_changes
from typing import Any

from fp4kit.checkpoint.read.json_files import listed
from fp4kit.io.write.files import OutputError

from .executors import Work
from .job import Job, Planned
from .patience import tell
from .receipts import Receipt, read_receipt
from .stores import place_of
from .tasks import run_task


def slim_task(job: Job, plan: str, number: int) -> Receipt:
    """A task whose receipt comes back without what became of each tensor: that is in the place."""
    return with_changes(run_task(job, plan, number), results={})


class ShardWork(Work):
    """The shards of a job, a task each."""

    def __init__(self, planned: Planned) -> None:
        self.kind, self.device = planned.job.operation, planned.job.device
        self._planned = planned

    def call(self, number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:  # noqa: D102
        return slim_task, (self._planned.job, self._planned.hash, number)

    def name(self, number: int) -> str:  # noqa: D102
        return self._planned.shards[number].name

    def size(self, number: int) -> int:  # noqa: D102
        return self._planned.source_bytes(number)

    def take(self, number: int, result: Receipt) -> None:  # noqa: D102
        if result.retries:
            tell(f"{result.shard}: {result.retries} requests were tried again", result.retries)

    def stopped(self, waiting: Iterable[int], why: str) -> OutputError:  # noqa: D102
        planned = self._planned
        place = place_of(planned.job.target)
        missing = [
            self.name(number)
            for number in waiting
            if read_receipt(place, planned.shards[number], planned.hash) is None
        ]
        return OutputError(
            f"{place.name}: {len(missing)} of {len(planned.shards)} shards are missing "
            f"({listed(missing)}): {why}; the same command with --resume makes them"
        )
