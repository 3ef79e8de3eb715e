# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operations around quantization that a backend may lack: activations, column sums, residuals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fp4kit.formats import NVFP4
from fp4kit.layout import padded_scale_shape

from .jobs import Job, Prologue, RawArray
from .matmul import MatmulJob, RaggedMatmulJob
from .prepared import WeightsJob


@dataclass(frozen=True)
class ResidualPlan:
    """A quantization with residual channels: everything that decides bytes, except the arrays.

    Attributes:
        rows: product of the leading dimensions.
        cols: channels, a multiple of 16.
        residual: residual channels, the last of them: a multiple of 16 up to `cols`.
        mode: `activation` stores the quantized residual, `weight` a copy of the main block.
        layout: `interleaved` puts each residual block behind its main block, `appended` all of
            them behind all main blocks.
        scale_layout: order of the block scales.
        nibble_order: which nibble the even element takes.
        rounds: round scaled values and residuals to bfloat16.
    """

    rows: int
    cols: int
    residual: int
    mode: str
    layout: str
    scale_layout: str
    nibble_order: str
    rounds: bool

    @cached_property
    def main_blocks(self) -> int:
        """Blocks of a row without the residual ones."""
        return self.cols // NVFP4.block_size

    @cached_property
    def first(self) -> int:
        """The first main block that has a residual block."""
        return (self.cols - self.residual) // NVFP4.block_size

    @cached_property
    def blocks(self) -> int:
        """Blocks of a row, the residual ones included."""
        return (self.cols + self.residual) // NVFP4.block_size

    @cached_property
    def packed_shape(self) -> tuple[int, int]:
        """Shape of the packed codes."""
        return self.rows, NVFP4.packed_cols(self.cols + self.residual)

    @cached_property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the stored block scales, layout padding included."""
        if not self.rows or not self.blocks:
            return self.rows, self.blocks
        return padded_scale_shape(self.rows, self.blocks, self.scale_layout)

    def main_place(self, block: int) -> int:
        """Where main block `block` stands among the blocks of a row."""
        if self.layout == "appended":
            return block
        return block + max(0, block - self.first)

    def residual_place(self, block: int) -> int:
        """Where the residual block of main block `block` stands, block >= first."""
        if self.layout == "appended":
            return self.main_blocks + block - self.first
        return self.main_place(block) + 1


class Operations:
    """Operations that a backend offers by overriding them; :meth:`lacks` says which it does not."""

    name: str

    def lacks(self, operation: str) -> str | None:
        """Why an operation cannot be served, or None."""
        base = getattr(Operations, operation, None)
        if base is None or getattr(type(self), operation) is not base:
            return None
        return f"has no {operation}; use a host array, or backend='reference' with one"

    def activate(self, prologue: Prologue, out: RawArray) -> None:
        """Fills `out` (rows, n) with an activation, computed in float32, rounded to its dtype."""
        raise NotImplementedError(self.lacks("activate"))

    def column_sums(self, x: RawArray, dtype: str, out: RawArray) -> None:
        """Fills float32 (cols,) with `activations.column_sums` of x (rows, cols); NaN canonical."""
        raise NotImplementedError(self.lacks("column_sums"))

    def activate_with_sums(self, prologue: Prologue, out: RawArray) -> None:
        """:meth:`activate`, and :meth:`column_sums` of its result; neither array is empty."""
        self.activate(prologue, out)
        self.column_sums(out, prologue.dtype, prologue.sums)

    def activate_measured(self, prologue: Prologue, out: RawArray, wants: bool) -> RawArray | None:
        """:meth:`activate` and column sums, whichever are asked for; without either `out` is x.

        Returns:
            uint32 (2,): the amax of the result (NaN ignored) as float32 bits, and whether some of
            it is NaN or infinite. None unless the backend measures that in the same pass and the
            caller `wants` it.
        """
        if prologue.activation is None:
            assert prologue.sums is not None
            self.column_sums(prologue.x, prologue.dtype, prologue.sums)
        elif prologue.sums is None:
            self.activate(prologue, out)
        else:
            self.activate_with_sums(prologue, out)
        return None

    def quantize_activated(self, prologue: Prologue, jobs: tuple[Job, ...]) -> bool:
        """Quantizes what :meth:`activate_measured` would give, in one pass; nothing is empty.

        Args:
            prologue: what comes first.
            jobs: of one direction, or of the rows and the columns, without x.

        Returns:
            False if the backend has no such pass for the plans: then nothing was done.
        """
        return False

    def quantize_residual(self, job: Job, order: RawArray | None) -> None:
        """Fills codes and scales, residual blocks included; see :mod:`fp4kit.api.residual`.

        Args:
            job: its plan is a :class:`ResidualPlan`, its second level float32 (1,) encode scale.
            order: int64 (cols,): channel j of the result is channel order[j] of `x`; or None.
        """
        raise NotImplementedError(self.lacks("quantize_residual"))

    def dequantize_residual(
        self, job: Job, order: RawArray | None, out: RawArray, dtype: str
    ) -> None:
        """Fills `out` (rows, cols): main blocks plus, in activation mode, residual blocks."""
        raise NotImplementedError(self.lacks("dequantize_residual"))

    def matmul(self, job: MatmulJob) -> None:
        """Fills `job.out` with a product; see :func:`fp4kit.matmul`."""
        raise NotImplementedError(self.lacks("matmul"))

    def matmul_ragged(self, job: RaggedMatmulJob) -> None:
        """:meth:`matmul` of each range of rows; nothing waits for the device."""
        raise NotImplementedError(self.lacks("matmul_ragged"))

    def prepare_weights(self, job: WeightsJob) -> bool:
        """Fills `job.tiles`; see :mod:`fp4kit.backend.prepared`.

        Returns:
            Whether every block scale is plain: neither negative nor NaN, nor an E8M0 scale above
            2^8. It is on the host: a GPU is waited for.
        """
        raise NotImplementedError(self.lacks("prepare_weights"))

    def restore_weights(self, job: WeightsJob) -> None:
        """Fills `job.packed` and the linear `job.block_scale` from `job.tiles`."""
        raise NotImplementedError(self.lacks("restore_weights"))
