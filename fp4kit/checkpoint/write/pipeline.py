# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Converting a diffusers pipeline: some of its components, each by itself; the rest is copied.

model_index.json is copied last: a directory without it is no pipeline, so that a result is one
only when it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any, Protocol

from fp4kit.checkpoint.read.other_files import STATE_DIR, Links, find_around
from fp4kit.checkpoint.read.weight_files import PIPELINE
from fp4kit.checkpoint.report import CheckpointReport
from fp4kit.errors import FileFormatError, OptionError

from .output import check_place, check_space, copy_file


class Run(Protocol):
    """Converts one component."""

    def __call__(self, name: str, *, resume: bool, force: bool) -> CheckpointReport:
        """Converts the component of that folder."""


class Pipeline:
    """A pipeline of which some components are converted and everything else is copied."""

    def __init__(self, path: Path, components: Iterable[str], *, follow_links: bool) -> None:
        """Looks at what lies around the components.

        Args:
            path: the pipeline.
            components: folders that are converted.
            follow_links: copy also what links out of the pipeline point to.
        """
        self._path = path
        self._components = list(components)
        links = Links(path, follow=follow_links)
        self._others = find_around(path, self._components, links)

    def plan(self, plan: Callable[[Path], CheckpointReport]) -> CheckpointReport:
        """What the conversion would do."""
        started = time.perf_counter()
        reports = {name: plan(self._path / name) for name in self._components}
        return self._merged(reports, None, started)

    def carry_out(
        self,
        target: Path,
        planned: CheckpointReport,
        run: Run,
        *,
        resume: bool,
        force: bool,
    ) -> CheckpointReport:
        """Converts the components and copies the rest.

        Args:
            target: directory to create.
            planned: the plan of all components: none is converted unless all can be.
            run: converts one.
            resume: finish what an earlier run began; components that it finished are made again.
            force: replace what fp4kit wrote there.

        Raises:
            OptionError: for an output that is not empty or lies in the input, or the other way
                round.
            FileFormatError: if there is nothing to resume.
            OutputError: if the output cannot be written.
        """
        started = time.perf_counter()
        begun = {name for name in self._components if (target / name / STATE_DIR).is_dir()}
        check_place(self._path, target)
        self._check_target(target, begun, resume=resume, force=force)
        check_space(target if target.is_dir() else target.absolute().parent, planned.disk_needed)
        target.mkdir(exist_ok=True)
        reports = {}
        for name in self._components:
            goes_on = resume and name in begun
            again = force or (resume and not goes_on)
            reports[name] = run(name, resume=goes_on, force=again)
        last = [name for name in self._others.copied if name == PIPELINE]
        for name in [*(name for name in self._others.copied if name != PIPELINE), *last]:
            copy_file(self._path / name, target / name)
        return self._merged(reports, target, started)

    def _check_target(self, target: Path, begun: set[str], *, resume: bool, force: bool) -> None:
        if resume and not begun:
            raise FileFormatError(
                f"{target}: holds no unfinished conversion; leave --resume out to start one"
            )
        if target.is_dir() and any(target.iterdir()) and not resume and not force:
            raise OptionError(
                f"{target}: is not empty; choose another directory, or pass --force to replace a "
                "result of fp4kit"
            )

    def _merged(
        self, reports: dict[str, CheckpointReport], target: Path | None, started: float
    ) -> CheckpointReport:
        """One report of all components, whose names begin with their folder."""
        first = next(iter(reports.values()))
        each = list(reports.items())
        return with_changes(
            first,
            source=str(self._path),
            target=None if target is None else str(target),
            seconds=time.perf_counter() - started,
            tensors=[
                with_changes(tensor, name=f"{folder}/{tensor.name}")
                for folder, report in each
                for tensor in report.tensors
            ],
            shards=_prefixed({folder: report.shards for folder, report in each}),
            groups={
                f"{folder}/{key}": [f"{folder}/{name}" for name in names]
                for folder, report in each
                for key, names in report.groups.items()
            },
            ignore=[f"{folder}/{name}" for folder, report in each for name in report.ignore],
            dropped=_prefixed({folder: report.dropped for folder, report in each}),
            copied=[
                *(f"{folder}/{name}" for folder, report in each for name in report.copied),
                *self._others.copied,
            ],
            left_out=[
                *(f"{folder}/{name}" for folder, report in each for name in report.left_out),
                *self._others.left_out,
            ],
            disk_needed=self._others.nbytes + sum(report.disk_needed for _, report in each),
            warnings=[f"{folder}: {text}" for folder, report in each for text in report.warnings],
        )


def _prefixed(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The entries of several dictionaries, with their folder in front of the keys."""
    return {
        f"{folder}/{key}": value for folder, part in parts.items() for key, value in part.items()
    }
