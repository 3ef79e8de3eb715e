# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as logical float tensors: what is stored plainly, and what views compute."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace as with_changes

import numpy as np

from fp4kit.checkpoint.models.experts import FusedTensor
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.cpu.matrices import round_float32
from fp4kit.formats import DTYPES as FLOATS
from fp4kit.io.containers import DTYPE_CODES, TensorSpec
from fp4kit.io.read.source import SourceTensor

from .base import Bytes, Overlay, RowView, TensorView

#: Bytes of float32 that are computed and rounded at a time: a few megabytes would have views that
#: pass through a whole matrix for any number of rows do that many times.
WIDE_BYTES = 64 << 20


class Cast(RowView):
    """Another view rounded to a narrower element type, for tensors that stay unquantized."""

    # It cuts by itself.
    uncut = True

    def __init__(self, view: TensorView, dtype: str) -> None:
        self._view = view
        self._dtype = dtype
        spec = view.tensor.spec
        self.tensor = with_changes(
            view.tensor,
            spec=TensorSpec(spec.name, DTYPE_CODES[dtype], spec.shape),
            dtype=dtype,
        )
        self.consumed, self.fused = view.consumed, view.fused

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        width = self._view.tensor.row_bytes
        step = max(WIDE_BYTES // width, 1)
        wide = np.empty(min(step, last - first) * width, np.uint8)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            part = wide[: (end - begin) * width]
            self._view.read(begin * width, part.data)
            target = out[begin - first : end - first].reshape(-1)
            round_float32(part.view(np.float32), self._dtype, target)


class LogicalSource(Overlay):
    """The logical tensors of a checkpoint; its views may be taken back, or change their type.

    Attributes:
        checkpoint: where the stored tensors are.
    """

    def __init__(
        self, checkpoint: Checkpoint, views: list[TensorView], dropped: Collection[str]
    ) -> None:
        """Puts views in the place of what they consume; see :class:`.base.Overlay`."""
        super().__init__(checkpoint, views, dropped)
        self.checkpoint = checkpoint

    def is_decoded(self, name: str) -> bool:
        """Whether a tensor is computed from FP8 or MXFP4, and not only a part of a float one."""
        view = self.views.get(name)
        return view is not None and self.checkpoint.tensors[view.consumed[0]].dtype not in FLOATS

    def fused_of(self, name: str) -> FusedTensor | None:
        """The tensor of all experts that a tensor is shown as a part of, None if it is of none."""
        view = self.views.get(name)
        return None if view is None else view.fused

    def stored_names(self, name: str) -> tuple[str, ...]:
        """What a tensor is made from."""
        view = self.views.get(name)
        return (name,) if view is None else view.consumed

    def with_views(self, views: list[TensorView], without: Collection[str] = ()) -> LogicalSource:
        """The same checkpoint with more views, and without some of those that there are."""
        kept = [view for name, view in self.views.items() if name not in without]
        return LogicalSource(self.checkpoint, kept + views, self._dropped)

    def rejoin(self, names: list[str]) -> list[str]:
        """Takes views back; returns the stored tensors that appear in their place."""
        stored = dict.fromkeys(part for name in names for part in self.views[name].consumed)
        for name in names:
            del self.views[name]
        self.tensors = self._in_order()
        return list(stored)

    def cast(self, name: str, dtype: str) -> SourceTensor:
        """Has a view give another element type from now on; returns the tensor that it is then."""
        view = Cast(self.views[name], dtype)
        self.views[name] = view
        self.tensors[name] = view.tensor
        return view.tensor
