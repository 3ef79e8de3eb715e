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
from typing import Any

from fp4kit.checkpoint.read.other_files import STATE_DIR, Links, find_around
from fp4kit.checkpoint.read.weight_files import PIPELINE
from fp4kit.checkpoint.report import CheckpointReport

from .output import check_place, check_space, check_start, copy_file


class DiffusersPipeline:
    """A pipeline of which some components are converted and everything else is copied."""

    def __init__(self, path: Path, components: Iterable[str], follow_links: bool) -> None:
        self._path = path
        self._components = list(components)
        self._others = find_around(path, self._components, Links(path, follow=follow_links))

    def plan(self, plan: Callable[[Path], CheckpointReport]) -> CheckpointReport:
        """What the conversion would do; `plan` plans one component."""
        started = time.perf_counter()
        reports = {name: plan(self._path / name) for name in self._components}
        return self._merged(reports, None, started)

    def carry_out(
        self,
        target: Path,
        planned: CheckpointReport,
        run: Callable[[str, bool, bool], CheckpointReport],
        resume: bool,
        force: bool,
    ) -> CheckpointReport:
        """Converts the components and copies the rest.

        Args:
            target: directory to create.
            planned: the plan of all components: none is converted unless all can be.
            run: converts the component of a folder, given `resume` and `force` for it.
            resume: finish what an earlier run began; components that it finished are made again.
            force: replace what fp4kit wrote there.
        """
        started = time.perf_counter()
        begun = {name for name in self._components if (target / name / STATE_DIR).is_dir()}
        check_place(self._path, target)
        if not (resume and begun):
            check_start(target, resume, force)
        check_space(target if target.is_dir() else target.absolute().parent, planned.disk_needed)
        target.mkdir(exist_ok=True)
        reports = {}
        for name in self._components:
            goes_on = resume and name in begun
            reports[name] = run(name, goes_on, force or (resume and not goes_on))
        for name in sorted(self._others.copied, key=lambda name: name == PIPELINE):
            copy_file(self._path / name, target / name)
        return self._merged(reports, target, started)

    def _merged(
        self, reports: dict[str, CheckpointReport], target: Path | None, started: float
    ) -> CheckpointReport:
        """One report of all components, whose names begin with their folder."""
        first = next(iter(reports.values()))
        each = list(reports.items())

        def prefixed(attribute: str) -> Any:
            """A list or dictionary of all reports, with their folder before names or keys."""
            if isinstance(getattr(first, attribute), dict):
                return {
                    f"{folder}/{key}": value
                    for folder, report in each
                    for key, value in getattr(report, attribute).items()
                }
            return [f"{folder}/{n}" for folder, report in each for n in getattr(report, attribute)]

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
            shards=prefixed("shards"),
            groups={
                f"{folder}/{key}": [f"{folder}/{name}" for name in names]
                for folder, report in each
                for key, names in report.groups.items()
            },
            ignore=prefixed("ignore"),
            dropped=prefixed("dropped"),
            copied=[*prefixed("copied"), *self._others.copied],
            left_out=[*prefixed("left_out"), *self._others.left_out],
            disk_needed=self._others.nbytes + sum(report.disk_needed for _, report in each),
            warnings=[f"{folder}: {text}" for folder, report in each for text in report.warnings],
        )
