# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions that several workers share, or that read or write elsewhere than on this disk."""

from __future__ import annotations

import os
import time
from dataclasses import replace as with_changes
from pathlib import Path

from fp4kit.checkpoint.options import CommonOptions
from fp4kit.checkpoint.report import CheckpointReport, make_report
from fp4kit.errors import OptionError
from fp4kit.fleet.finish import finish
from fp4kit.fleet.job import Job, opened_job
from fp4kit.fleet.run import convert
from fp4kit.fleet.urls import is_url
from fp4kit.fleet.workers import Workers, check_workers
from fp4kit.io.stream.chunks import Progress

from .choices import StrPath, check_arguments
from .devices import check_device


def is_shared(source: StrPath, target: StrPath | None, workers: Workers) -> bool:
    """Whether a conversion is more than this process's, from a disk to a disk."""
    places = [os.fspath(place) for place in (source, target) if place is not None]
    return workers is not None or any(map(is_url, places))


def job_of(
    operation: str,
    source: StrPath,
    target: StrPath | None,
    options: CommonOptions,
    device: str = "cpu",
) -> Job:
    """What workers are to do.

    Raises:
        OptionError: without a target.
    """
    if target is None:
        raise OptionError("workers and URLs need a target: name the directory or URL to write")
    check_device(device)
    return Job(operation, absolute(source), absolute(target), options, device)


def absolute(place: StrPath) -> str:
    """A path or URL as workers find it, wherever they were started."""
    text = os.fspath(place)
    return text if is_url(text) else str(Path(text).absolute())


def run_shared(
    job: Job,
    workers: Workers,
    *,
    resume: bool,
    force: bool,
    dry_run: bool,
    progress: Progress | None,
) -> CheckpointReport:
    """Carries a job out, or plans it.

    Raises:
        OptionError: for `force`: what many write at once is not replaced.
    """
    check_workers(workers)
    if force:
        raise OptionError(
            f"{job.target}: several workers, and URLs, start with an empty place and replace "
            "nothing; leave force out, and remove what is there or choose another target"
        )
    if not dry_run:
        return convert(job, workers, resume=resume, progress=progress)
    started = time.perf_counter()
    with opened_job(job) as planned:
        others = planned.plan.source.checkpoint.others.nbytes
        report = make_report(planned.plan, None, others, time.perf_counter() - started)
    return with_changes(report, source=job.source)


def finish_checkpoint(
    target: StrPath, source: StrPath | None = None, *, progress: Progress | None = None
) -> CheckpointReport | None:
    """Completes a result whose parts are all written: `fp4kit finish`.

    Checks every shard against its receipt, writes index and JSON files, and verifies the whole. Any
    worker may do it, once or twice.

    Args:
        target: path or URL of the result, as the parts had it.
        source: where their source is from here, if it is elsewhere than for the first worker.
        progress: called with (bytes done, bytes in all) of the shards that are checked.

    Returns:
        The report of the whole conversion; None if it was finished before.

    Raises:
        OutputError: if shards are missing or damaged, naming them.
        FileFormatError: if there is nothing to finish, or the source cannot be read.
        OptionError: if the source, or the version of fp4kit, is another.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
        >>> model = {"model.layers.0.mlp.down_proj.weight": w}
        >>> _ = fp4kit.save(f"{folder}/model", model, config={"model_type": "llama"})
        >>> for part in ("1/2", "2/2"):
        ...     _ = fp4kit.quantize_checkpoint(f"{folder}/model", f"{folder}/out", workers=part)
        >>> report = fp4kit.finish_checkpoint(f"{folder}/out")
        >>> fp4kit.verify(f"{folder}/out").ok
        True
    """
    check_arguments(locals(), ("source",))
    return finish(os.fspath(target), None if source is None else os.fspath(source), progress)
