# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a backend must offer, and the plan that decides every byte.

Arrays here are raw: C-contiguous NumPy or CuPy arrays of float32, float16, or uint16 holding
bfloat16 bits. Allocation, contiguity, frameworks and validation are the caller's work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fp4kit.formats import FormatSpec, Recipe
from fp4kit.layout import padded_scale_shape
from fp4kit.variant import Variant

from .error_sums import ErrorSums as ErrorSums
from .error_sums import PendingSums as PendingSums

RawArray = Any
"""A C-contiguous NumPy or CuPy array; see the module's docstring."""


Seed = tuple[int, int]
"""(key of 64 bits, stream of 32 bits) of the random numbers; see :mod:`fp4kit.philox`."""

NO_SEED: Seed = (0, 0)


@dataclass(frozen=True)
class Request:
    """A call, before any work: what a backend is asked whether it can do."""

    operation: str
    device: str
    dtype: str
    format: str | None = None
    recipe: str | None = None
    variant: Variant | None = None

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
        if self.variant is not None:
            words.append(f"({self.variant.describe()})")
        return " ".join(words)


@dataclass(frozen=True)
class Plan:
    """Everything that decides bytes, except the arrays.

    `rows` and `cols` are those of the array, whatever the direction of the blocks; a vector is what
    blocks divide: a row of it, or a column.

    Attributes:
        format: block format.
        recipe: NVFP4 order of operations, None for MX formats.
        scale_rule: MX rule, None for NVFP4.
        rows: product of the leading dimensions.
        cols: length of the last dimension.
        scale_layout: order of the block scales.
        nibble_order: which nibble the even element takes.
        has_second_level: whether a second-level scale exists (in `recipe.direction`).
        rows_per_scale: vectors that share one second-level value.
        variant: deviations from plain rowwise quantization, None if there are none.
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
    variant: Variant | None = None

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
    def decoding(self) -> Plan:
        """The plan that decodes what this one quantizes: without a variant if that is plain."""
        if self.variant is None or not self.variant.decodes_plainly:
            return self
        return replace(self, variant=None)

    @cached_property
    def is_columnwise(self) -> bool:
        """Whether blocks run along the columns of the array."""
        return self.variant is not None and self.variant.axis == "column"

    @cached_property
    def transposes(self) -> bool:
        """Whether the codes are those of the transpose: columnwise FP4."""
        return self.is_columnwise and self.format.codes_per_byte == 2

    @cached_property
    def vectors(self) -> int:
        """Number of vectors that blocks divide: rows, or columns."""
        return self.cols if self.is_columnwise else self.rows

    @cached_property
    def length(self) -> int:
        """Elements of such a vector."""
        return self.rows if self.is_columnwise else self.cols

    @cached_property
    def scales(self) -> int:
        """Number of second-level values."""
        return max(self.vectors // self.rows_per_scale, 1)

    @cached_property
    def blocks(self) -> int:
        """Blocks per vector."""
        return self.format.num_blocks(self.length)

    @cached_property
    def packed_shape(self) -> tuple[int, int]:
        """Shape of the packed codes, rows flattened."""
        if self.is_columnwise and not self.transposes:
            return self.blocks * self.format.block_size, self.cols
        return self.vectors, self.format.packed_cols(self.length)

    @cached_property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the stored block scales, rows flattened, layout padding included.

        Scales that are not transposed (columnwise MXFP8) are stored as (blocks, cols) when linear;
        swizzled, they are those of the transposed scale matrix, as matrix products take them.
        """
        shape = (self.vectors, self.blocks)
        if self.vectors and self.length:
            shape = padded_scale_shape(*shape, self.scale_layout)
        if self.is_columnwise and not self.transposes and self.scale_layout == "linear":
            return shape[1], shape[0]
        return shape


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
        seed: Seed = NO_SEED,
    ) -> None:
        """Fills `packed` (plan.packed_shape) and `block_scale` (plan.scale_shape), uint8 both.

        Args:
            plan: what to do; neither `plan.rows` nor `plan.cols` is 0.
            x: (rows, cols).
            dtype: element type of `x`.
            second: float32 (plan.scales,) in the recipe's direction; for per-token plans already
                raised to the smallest amax they count with.
            packed: output codes, whole blocks; codes past the end of a vector are those of +0.0.
            block_scale: output scales, layout padding written as 0.
            seed: for stochastic rounding.
        """

    def plan_amax(self, plan: Plan, x: RawArray, dtype: str) -> RawArray:
        """The amaxes that a plan's second-level scales are made from, NaN ignored.

        Returns:
            float32 (plan.scales,): of each plan.rows_per_scale vectors, after the rotation and its
            rounding if the plan has one; 0 for an empty array.
        """
        raise NotImplementedError(f"{self.name} refuses variants")

    def plan_amax_both(
        self, row_plan: Plan, column_plan: Plan, x: RawArray, dtype: str
    ) -> tuple[RawArray, RawArray]:
        """:meth:`plan_amax` of both plans of one array."""
        return self.plan_amax(row_plan, x, dtype), self.plan_amax(column_plan, x, dtype)

    def quantize_both(
        self,
        row_plan: Plan,
        column_plan: Plan,
        x: RawArray,
        dtype: str,
        row_second: RawArray | None,
        column_second: RawArray | None,
        row_packed: RawArray,
        row_scale: RawArray,
        column_packed: RawArray,
        column_scale: RawArray,
        seed: Seed = NO_SEED,
    ) -> None:
        """:meth:`quantize` under both plans of one array, with the same bytes."""
        self.quantize(row_plan, x, dtype, row_second, row_packed, row_scale, seed)
        self.quantize(column_plan, x, dtype, column_second, column_packed, column_scale, seed)

    def rotate(
        self,
        x: RawArray,
        dtype: str,
        axis: str,
        mask: int,
        rounding: str,
        inverse: bool,
        out: RawArray,
        out_dtype: str,
    ) -> None:
        """Fills `out` (rows, cols) with `rotation.rotate` of `x` along an axis."""
        raise NotImplementedError(f"{self.name} refuses variants")

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
