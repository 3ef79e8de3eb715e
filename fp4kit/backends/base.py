# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a backend must offer, and the plan that decides every byte.

Arrays here are raw: C-contiguous NumPy or CuPy arrays of float32, float16, or uint16 holding
bfloat16 bits. Allocation, contiguity, frameworks and validation are the caller's work.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp4kit.formats import FormatSpec, Recipe
from fp4kit.layout import padded_scale_shape

RawArray = Any
"""A C-contiguous NumPy or CuPy array; see the module's docstring."""


@dataclass(frozen=True)
class Request:
    """A call, before any work: what a backend is asked whether it can do."""

    operation: str
    device: str
    dtype: str
    format: str | None = None
    recipe: str | None = None

    @property
    def device_kind(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.split(":")[0]

    def describe(self) -> str:
        """The request in words, for error messages."""
        words = [self.operation, f"{self.dtype} arrays on {self.device}"]
        if self.format:
            words.append(f"as {self.format}")
        if self.recipe:
            words.append(f"with recipe {self.recipe}")
        return " ".join(words)


@dataclass(frozen=True)
class Plan:
    """Everything that decides bytes, except the arrays.

    Attributes:
        format: block format.
        recipe: NVFP4 order of operations, None for MX formats.
        scale_rule: MX rule, None for NVFP4.
        rows: product of the leading dimensions.
        cols: logical length K of the quantized axis.
        scale_layout: order of the block scales.
        nibble_order: which nibble the even element takes.
        has_second_level: whether a second-level scale exists (in `recipe.direction`).
        rows_per_scale: rows that share one second-level value.
    """

    format: FormatSpec
    recipe: Recipe | None
    scale_rule: str | None
    rows: int
    cols: int
    scale_layout: str = "linear"
    nibble_order: str = "low_first"
    has_second_level: bool = True
    rows_per_scale: int = 1

    # Plans are the keys of caches on the path of every call: what is derived is derived once.

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of strings differ from process to process.
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def blocks(self) -> int:
        """Blocks per row."""
        return self.format.num_blocks(self.cols)

    @cached_property
    def packed_shape(self) -> tuple[int, int]:
        """Shape of the packed codes, rows flattened."""
        return self.rows, self.format.packed_cols(self.cols)

    @cached_property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the stored block scales, rows flattened, layout padding included."""
        if self.rows == 0 or self.cols == 0:
            return (0, self.blocks) if self.rows == 0 else (self.rows, 0)
        return padded_scale_shape(self.rows, self.blocks, self.scale_layout)


@dataclass
class ErrorSums:
    """Sums over elements and blocks from which error statistics follow; they add up over slabs.

    All sums are float64. `x` is the original, `y` the dequantized value. Counts of codes and
    scales stay 0 when no codes are at hand.
    """

    elements: int = 0
    sum_x2: float = 0.0
    sum_y2: float = 0.0
    sum_xy: float = 0.0
    sum_d2: float = 0.0
    max_abs_error: float = 0.0
    saturated: int = 0
    zero_codes: int = 0
    blocks: int = 0
    scale_underflow: int = 0
    scale_subnormal: int = 0

    def __iadd__(self, other: ErrorSums) -> ErrorSums:
        for name in self.__dataclass_fields__:
            if name != "max_abs_error":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        # NaN wins in either place; max() would keep it or lose it by the order of its arguments.
        if not self.max_abs_error >= other.max_abs_error:
            known = not math.isnan(self.max_abs_error)
            self.max_abs_error = other.max_abs_error if known else self.max_abs_error
        return self


@dataclass(frozen=True)
class PendingSums:
    """Error sums that a device may still be working on.

    Attributes:
        result: waits for them.
    """

    result: Callable[[], ErrorSums]


class Backend(ABC):
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
        """float32 (n,) second-level scale in the recipe's direction from float32 (n,) amax."""

    @abstractmethod
    def convert_second_level(self, value: RawArray, source: str, target: str) -> RawArray:
        """`scaling.convert_second_level` on the device of `value`, float32 (n,)."""

    @abstractmethod
    def quantize(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        second: RawArray | None,
        packed: RawArray,
        block_scale: RawArray,
    ) -> None:
        """Fills `packed` (plan.packed_shape) and `block_scale` (plan.scale_shape), uint8 both.

        Args:
            plan: what to do; neither `plan.rows` nor `plan.cols` is 0.
            x: (rows, cols).
            dtype: element type of `x`.
            second: float32 (n,) in the recipe's direction, n * plan.rows_per_scale == rows.
            packed: output codes, whole blocks; codes past `cols` are those of +0.0.
            block_scale: output scales, layout padding written as 0.
        """

    @abstractmethod
    def dequantize(
        self,
        plan: Plan,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
        out: RawArray,
        dtype: str,
    ) -> None:
        """Fills `out` (rows, cols) of element type `dtype`; the inverse of :meth:`quantize`."""

    @abstractmethod
    def quantize_dequantize(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        second: RawArray | None,
        out: RawArray,
        out_dtype: str,
    ) -> None:
        """Fills `out` (rows, cols) with what dequantize(quantize(x)) gives."""

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
    def quantized_error_sums(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
    ) -> ErrorSums:
        """Sums over x and the float32 dequantized codes, with code and scale counts.

        `saturated` counts codes of the largest finite magnitude, `zero_codes` codes of magnitude
        0, both among the logical elements only; `scale_underflow` counts blocks with a non-zero
        element whose scale decodes to 0 (E4M3 only), `scale_subnormal` those whose scale is a
        non-zero subnormal (E4M3) or 2^-127 under a non-zero block (E8M0).
        """

    def quantize_and_measure(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        second: RawArray | None,
        packed: RawArray,
        block_scale: RawArray,
    ) -> ErrorSums:
        """:meth:`quantize`, then :meth:`quantized_error_sums` of its result."""
        self.quantize(plan, x, dtype, second, packed, block_scale)
        return self.quantized_error_sums(plan, x, dtype, packed, block_scale, second)

    def quantized_error_sums_async(
        self,
        plan: Plan,
        x: RawArray,
        dtype: str,
        packed: RawArray,
        block_scale: RawArray,
        second: RawArray | None,
    ) -> PendingSums:
        """:meth:`quantized_error_sums` without waiting; the arrays may be overwritten in order."""
        sums = self.quantized_error_sums(plan, x, dtype, packed, block_scale, second)
        return PendingSums(lambda: sums)
