# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A backend on a device, as file operations use it: the place that copies chunks there and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit import arrays
from fp4kit.api.backends import select
from fp4kit.arrays.frameworks import Origin
from fp4kit.backend.interface import Backend, ErrorSums, PendingSums, Plan, Request
from fp4kit.backend.jobs import Job
from fp4kit.scheme import Scheme

from .chunks import Bytes, rows_view, scales_view

Second = NDArray[np.float32] | None


class DeviceBackend:
    """The kernels of a device, and what brings host chunks to it.

    Attributes:
        kernels: the backend.
        origin: framework and device of its arrays.
        on_gpu: whether that is a GPU.
    """

    kernels: Backend

    def __init__(
        self, device: str, dtypes: Iterable[str], operation: str, plans: Iterable[Plan]
    ) -> None:
        """Asks the backend about everything that will occur.

        Raises:
            BackendUnavailableError: with the reason, before any work.
        """
        number = "cuda:0" if device == "cuda" else device
        schemes: set[Scheme | None] = {plan.scheme for plan in plans}
        # What is quantized is measured as well.
        operations = ("error_stats", operation) if operation == "quantize" else (operation,)
        self._serving: dict[bool, Backend] = {}
        for dtype in set(dtypes) or {"float32"}:
            for scheme in schemes or {None}:
                for asked in operations:
                    self.kernels = select(Request(asked, number, dtype, scheme), None)
                    if scheme is not None:
                        self._serving[scheme.spec.has_scale_grid] = self.kernels
        self.origin = Origin("numpy" if device == "cpu" else "cupy", number)
        self.on_gpu = self.origin.device_kind == "cuda"

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Makes the device current."""
        return arrays.device_scope(self.origin)

    def serving(self, plan: Plan) -> Backend:
        """The backend of a plan's format; `kernels` is that of any."""
        return self._serving.get(plan.format.has_scale_grid, self.kernels)

    def put(self, host: Any) -> Any:
        """A host array on the device; itself on the CPU, and None if it is that."""
        if host is None:
            return None
        with self.scope():
            return arrays.array_module(self.origin).asarray(host)

    def count_nonfinite(self, x: Bytes, dtype: str) -> tuple[int, int, int]:
        """NaN count, infinity count and flat index of the first of either in a chunk, or -1."""
        with self.scope():
            return self.kernels.count_nonfinite(self.put(rows_view(x, dtype, 1, -1)), dtype)

    def quantize(self, job: Job) -> PendingSums:
        """Quantizes rows on the device, and measures their errors."""
        kernels = self.serving(job.plan)
        if self.on_gpu:
            assert job.weights is None, "moments are for the CPU, which callers have refused"
            kernels.quantize(job)
            return kernels.quantized_error_sums_async(job)
        sums = kernels.quantize_and_measure(job)
        return PendingSums(lambda: sums)

    def dequantize(
        self, plan: Plan, packed: Bytes, scale: Bytes, second: Second, out: Bytes, dtype: str
    ) -> None:
        """Decodes codes and scales on the CPU into a buffer of element type `dtype`."""
        codes, scales = packed.reshape(plan.packed_shape), scales_view(scale, plan)
        job = Job(plan, None, dtype, second, codes, scales)
        self.serving(plan).dequantize(job, rows_view(out, dtype, plan.rows, plan.cols), dtype)

    def sums(self, x: Bytes, x_dtype: str, y: Bytes, y_dtype: str) -> ErrorSums:
        """Error sums of two runs of floats on the host."""
        with self.scope():
            first, second = (
                self.put(rows_view(data, dtype, 1, -1))
                for data, dtype in ((x, x_dtype), (y, y_dtype))
            )
            return self.kernels.error_sums(first, x_dtype, second, y_dtype)

    def quantized_sums(
        self, plan: Plan, x: Bytes, dtype: str, packed: Bytes, scale: Bytes, second: Second
    ) -> ErrorSums:
        """Error sums of rows on the host and their codes."""
        with self.scope():
            job = Job(
                plan,
                self.put(rows_view(x, dtype, plan.rows, plan.cols)),
                dtype,
                self.put(second),
                self.put(packed.reshape(plan.packed_shape)),
                self.put(scales_view(scale, plan)),
            )
            return self.serving(plan).quantized_error_sums(job)
