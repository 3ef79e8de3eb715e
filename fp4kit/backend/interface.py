# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a backend must offer.

Arrays here are raw: C-contiguous NumPy or CuPy arrays of float32, float16, or uint16 holding
bfloat16 bits. Allocation, contiguity, frameworks and validation are the caller's work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from fp4kit.group_shapes import GroupShapes
from fp4kit.plan import Plan as Plan
from fp4kit.plan import Request as Request

from . import groups
from .error_sums import ErrorSums as ErrorSums
from .error_sums import PendingSums as PendingSums
from .groups import GroupedPlan
from .jobs import NO_SEED as NO_SEED
from .jobs import Job as Job
from .jobs import Prologue as Prologue
from .jobs import RawArray as RawArray
from .jobs import Rotation as Rotation
from .jobs import Seed as Seed
from .matmul import MatmulJob
from .operations import Operations


class Backend(Operations, ABC):
    """One implementation of every operation. All give the same bytes."""

    name: str

    @abstractmethod
    def unavailable_reason(self) -> str | None:
        """Why this machine cannot run it, or None. Cheap after the first call."""

    @abstractmethod
    def refusal(self, request: Request) -> str | None:
        """Why it cannot serve this request, or None."""

    @abstractmethod
    def details(self) -> dict[str, str]:
        """Versions and devices, for humans."""

    def devices(self) -> list[str]:
        """The devices of this machine that it can compute on; it must be available."""
        return ["cpu"]

    @abstractmethod
    def amax(self, x: RawArray, dtype: str, groups: int) -> RawArray:
        """Largest magnitude, NaN ignored.

        Args:
            x: (rows, cols).
            dtype: element type of `x`.
            groups: number of equal groups of consecutive rows, each with its own result.

        Returns:
            float32 (groups,) on the device of `x`; 0 for an empty group.
        """

    @abstractmethod
    def scan(self, x: RawArray, dtype: str) -> tuple[RawArray, bool]:
        """(float32 (1,) amax with NaN ignored, whether all elements are finite) in one pass.

        The second needs the host: on a GPU this call waits for the stream.
        """

    @abstractmethod
    def count_nonfinite(self, x: RawArray, dtype: str) -> tuple[int, int, int]:
        """(NaN count, infinity count, flat index of the first of either or -1), on the host."""

    @abstractmethod
    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        """float32 (n,) second-level scale that the recipe keeps, from float32 (n,) amax."""

    @abstractmethod
    def convert_second_level(self, value: RawArray, source: str, target: str) -> RawArray:
        """`scaling.convert_second_level` on the device of `value`, float32 (n,)."""

    @abstractmethod
    def quantize(self, job: Job) -> None:
        """Fills `packed` and `block_scale` of a job."""

    def ready(self, jobs: tuple[Job, ...], *, measured: bool) -> Callable[[int], None] | None:
        """What does jobs again for an array at another address, of the same alignment.

        Args:
            jobs: of one direction, or of the rows and the columns.
            measured: as :meth:`quantize_measured`, into the job's `second`; otherwise as
                :meth:`quantize` or :meth:`quantize_both`.

        Returns:
            A function of the address, which launches on the current device and stream; None if the
            backend is not faster that way.
        """
        return None

    @abstractmethod
    def plan_amax(self, plan: Plan, x: RawArray, dtype: str) -> RawArray:
        """The amaxes that a plan's second-level scales are made from, NaN ignored.

        Returns:
            float32 (plan.scales,): of each plan.rows_per_scale vectors, after the rotation and its
            rounding if the plan has one; 0 for an empty array.
        """

    def quantize_measured(self, job: Job) -> RawArray | None:
        """:meth:`quantize` of vectors that make their own second level, if one read can do it.

        Returns:
            float32 (plan.scales,), what `second_level` makes of `plan_amax`; or None, and nothing
            is written.
        """
        return None

    def plan_amax_both(
        self, row_plan: Plan, column_plan: Plan, x: RawArray, dtype: str
    ) -> tuple[RawArray, RawArray]:
        """:meth:`plan_amax` of both plans of one array, perhaps one result for both."""
        row = self.plan_amax(row_plan, x, dtype)
        if row_plan.has_plain_amax and column_plan.has_plain_amax:
            return row, row
        return row, self.plan_amax(column_plan, x, dtype)

    def quantize_both(self, rowwise: Job, columnwise: Job) -> None:
        """:meth:`quantize` of both jobs of one array, with the same bytes."""
        self.quantize(rowwise)
        self.quantize(columnwise)

    @abstractmethod
    def rotate(
        self, x: RawArray, dtype: str, rotation: Rotation, out: RawArray, out_dtype: str
    ) -> None:
        """Fills `out` (rows, cols) with `rotation.rotate` of `x` along a direction."""

    @abstractmethod
    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        """Fills `out` (rows, cols) of element type `dtype`; the inverse of :meth:`quantize`."""

    def scratch(self, shape: tuple[int, ...], dtype: Any) -> RawArray:
        """An array without values on the current device, for what lies between two steps."""
        return np.empty(shape, dtype)

    def quantize_dequantize(self, job: Job, out: RawArray, out_dtype: str) -> None:
        """Fills `out` (rows, cols) with what dequantize(quantize(x)) gives."""
        plan = job.plan
        whole = job._replace(
            packed=self.scratch(plan.packed_shape, np.uint8),
            block_scale=self.scratch(plan.scale_shape, plan.format.scales.dtype),
        )
        self.quantize(whole)
        self.dequantize(whole._replace(plan=plan.decoding), out, out_dtype)

    @abstractmethod
    def swizzle(self, scales: RawArray, layout: str, out: RawArray) -> None:
        """Copies uint8 (rows, blocks) scales into `layout` order; padding is written 0."""

    @abstractmethod
    def unswizzle(self, swizzled: RawArray, layout: str, out: RawArray) -> None:
        """Inverse of :meth:`swizzle`: fills uint8 (rows, blocks) `out`."""

    @abstractmethod
    def error_sums(
        self,
        x: RawArray,
        x_dtype: str,
        y: RawArray,
        y_dtype: str,
    ) -> ErrorSums:
        """Sums over two (rows, cols) arrays, on the host."""

    @abstractmethod
    def quantized_error_sums(self, job: Job) -> ErrorSums:
        """Sums over x and the float32 dequantized codes, with code and scale counts.

        `saturated` counts codes of the largest finite magnitude, `zero_codes` codes of magnitude
        0, both among the logical elements only; `scale_underflow` counts blocks with a non-zero
        element whose scale decodes to 0 (E4M3 only), `scale_subnormal` those whose scale is a
        non-zero subnormal (E4M3) or 2^-127 under a non-zero block (E8M0).
        """

    def quantize_and_measure(self, job: Job) -> ErrorSums:
        """:meth:`quantize`, then :meth:`quantized_error_sums` of its result."""
        self.quantize(job)
        return self.quantized_error_sums(job)

    def quantized_error_sums_async(self, job: Job) -> PendingSums:
        """:meth:`quantized_error_sums` without waiting; the arrays may be overwritten in order."""
        sums = self.quantized_error_sums(job)
        return PendingSums(lambda: sums)

    # Groups: member by member unless a backend overrides these with one launch for all.

    def grouped_amax(self, plan: GroupedPlan, x: RawArray, dtype: str, out: RawArray) -> None:
        """Fills float32 (plan.second_offsets[-1],) with the amaxes of all members of flat `x`."""
        groups.group_amax(self, plan, x, dtype, out)

    def quantize_grouped(self, jobs: tuple[Job, ...]) -> None:
        """Quantizes all members in one or two directions; see :func:`groups.quantize_group`."""
        groups.quantize_group(self, jobs)

    def dequantize_grouped(self, job: Job, out: RawArray, dtype: str) -> None:
        """Decodes all members into flat `out`; the rest of it is left alone."""
        groups.dequantize_group(self, job, out, dtype)

    def matmul_grouped(self, jobs: tuple[MatmulJob, ...]) -> None:
        """:meth:`matmul` of each job; they are alike but for their rows."""
        for job in jobs:
            self.matmul(job)

    def quantize_grouped_activated(
        self, prologue: Prologue, starts: tuple[int, ...], jobs: tuple[Job, ...]
    ) -> bool:
        """:meth:`activate_grouped` and :meth:`quantize_grouped` of its result in one pass.

        Members begin at `starts` in the arrays of the prologue.

        Returns:
            False if the backend has no such pass for the plans: then nothing was done.
        """
        return False

    def activate_grouped(
        self,
        prologue: Prologue,
        source: GroupShapes,
        group: GroupShapes,
        out: RawArray,
        wants: bool,
    ) -> RawArray | None:
        """:meth:`activate_measured` of all members of a flat buffer.

        Args:
            prologue: without an activation `out` is its x; its sums are of all members, one
                behind the other.
            source: members of the prologue's arrays.
            group: members of `out`; what lies between them may be written too.
            out: results.
            wants: as for :meth:`activate_measured`.

        Returns:
            uint32 (members + 1,): the amax of each member (NaN ignored) as float32 bits, and
            whether some of any is NaN or infinite. None unless the backend measures that in the
            same pass and the caller `wants` it.
        """
        if prologue.activation is not None:
            groups.activate_group(self, prologue, source, out)
        if prologue.sums is not None:
            groups.group_column_sums(self, group, out, prologue.dtype, prologue.sums)
        return None
