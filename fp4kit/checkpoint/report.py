# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint operation did or would do: plain data, shared with the CLI."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fp4kit import __version__
from fp4kit.io.report import FileReport, overflow_warnings

from .plan.checkpoint_plan import CheckpointPlan


@dataclass(frozen=True)
class CheckpointReport(FileReport):
    """All tensors of a checkpoint operation, and the files around them.

    Attributes:
        shards: weight file to the bytes of its tensors.
        groups: fusion group to the members that share a second-level scale.
        ignore: modules of linear weights that are not quantized.
        dropped: stored tensors that appear nowhere in the output, and why.
        copied: other files that are carried along.
        left_out: weights in another form and what belongs to them, which are not.
        disk_needed: bytes that the output takes.
        versions: of fp4kit, Python and NumPy.
    """

    shards: dict[str, int] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    copied: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    disk_needed: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def extra(self) -> dict[str, Any]:
        """The members beyond those of a file's report."""
        names = set(self.__dataclass_fields__) - set(FileReport.__dataclass_fields__)
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name in names}


def make_report(
    plan: CheckpointPlan, target: str | None, others: int, seconds: float
) -> CheckpointReport:
    """The report of a plan, or of what became of it."""
    checkpoint = plan.source.checkpoint
    warnings = [*checkpoint.warnings, *plan.warnings]
    flushed = sum(
        work.sums.scale_subnormal
        for work in plan.works
        if work.entry is not None and work.entry.plan.format.scale_type == "e4m3"
    )
    if target is not None and flushed:
        warnings.append(
            f"{flushed} block scales are below 2^-6: weight-only Marlin kernels may flush them to 0"
        )
    tensors = [work.report(measured=target is not None) for work in plan.works]
    warnings += overflow_warnings(tensors)
    return CheckpointReport(
        source=str(checkpoint.path),
        target=target,
        tensors=tensors,
        options=asdict(plan.options),
        seconds=seconds,
        shards={shard.name: sum(spec.nbytes for spec in shard.specs) for shard in plan.shards},
        groups=plan.groups,
        ignore=list(plan.summary.ignore),
        dropped=plan.dropped,
        copied=list(checkpoint.others.copied),
        left_out=list(checkpoint.others.left_out),
        disk_needed=plan.nbytes + others,
        warnings=warnings,
        versions={
            "fp4kit": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    )
