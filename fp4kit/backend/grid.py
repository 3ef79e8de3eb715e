# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a backend for formats with float32 scales adds to the backend that it is made from.

Such a format has its own way of making codes and scales (see :mod:`fp4kit.reference.grid`), and
shares everything else: amaxes, checks, error sums of arrays. So each backend has a subclass for
them, which `api.backends` chooses by the scheme.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from .error_sums import ErrorSums, PendingSums
from .interface import Backend
from .jobs import Job, Prologue, RawArray


class GridBackend(Backend):
    """Put before a backend's class; `job.second` holds given scales, None where they are made."""

    @abstractmethod
    def _fill(self, job: Job) -> None:
        """Fills codes and scales; a scale of the whole tensor and those of columns are given."""

    def quantize(self, job: Job) -> None:  # noqa: D102
        plan = job.plan
        if job.second is None and (plan.has_one_scale or plan.is_columnwise):
            amax = self.plan_amax(plan, job.x, job.dtype)
            job = job._replace(second=self.second_level(amax, plan, job.dtype))
        self._fill(job)

    def quantize_both(self, rowwise: Job, columnwise: Job) -> None:  # noqa: D102
        self.quantize(rowwise)
        self.quantize(columnwise)

    def quantize_activated(self, prologue: Prologue, jobs: tuple[Job, ...]) -> bool:  # noqa: D102
        return False

    def quantize_dequantize(self, job: Job, out: RawArray, out_dtype: str) -> None:  # noqa: D102
        Backend.quantize_dequantize(self, job, out, out_dtype)

    def quantize_and_measure(self, job: Job) -> ErrorSums:  # noqa: D102
        return Backend.quantize_and_measure(self, job)

    def quantized_error_sums(self, job: Job) -> ErrorSums:  # noqa: D102
        plan = job.plan
        decoded = self.scratch((plan.rows, plan.cols), np.float32)
        self.dequantize(job, decoded, "float32")
        sums = self.error_sums(job.x, job.dtype, decoded, "float32")
        # Scales have the range of float32: none of them underflows where a number is left.
        magnitude = job.packed & 0x7F
        sums.saturated = int((magnitude == plan.format.element.max_code).sum())
        sums.zero_codes = int((magnitude == 0).sum())
        sums.blocks = int(job.block_scale.size)
        return sums

    def quantized_error_sums_async(self, job: Job) -> PendingSums:  # noqa: D102
        return Backend.quantized_error_sums_async(self, job)
