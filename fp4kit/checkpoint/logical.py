# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as logical float tensors: what is stored plainly, and what views compute."""

from __future__ import annotations

from dataclasses import replace as with_changes

import numpy as np

from fp4kit import arrays, codecs
from fp4kit.formats import DTYPES as FLOATS
from fp4kit.io.safetensors import DTYPE_CODES, DTYPES, TensorSpec
from fp4kit.io.source import Source, SourceTensor

from .directory import Checkpoint
from .views import View

#: Elements converted at a time.
CHUNK = 1 << 20


class Cast(View):
    """Another view rounded to a narrower element type, for tensors that stay unquantized."""

    def __init__(self, view: View, dtype: str) -> None:
        self._view = view
        self._dtype = dtype
        spec = view.tensor.spec
        self.tensor = with_changes(
            view.tensor,
            spec=TensorSpec(spec.name, DTYPE_CODES[dtype], spec.shape),
            dtype=dtype,
        )
        self.consumed = view.consumed

    def read(self, offset: int, out: memoryview) -> None:  # noqa: D102
        width = DTYPES[self.tensor.spec.dtype].bits // 8
        first, skip = divmod(offset, width)
        target = np.frombuffer(out, np.uint8)
        done = 0
        while done < len(target):
            count = min(CHUNK, -(-(len(target) - done + skip) // width))
            wide = np.empty(count, np.float32)
            self._view.read(first * 4, wide.view(np.uint8).data)
            narrow = codecs.from_float32(wide, self._dtype)
            raw = np.ascontiguousarray(narrow, arrays.RAW_DTYPES[self._dtype]).view(np.uint8)
            piece = raw[skip : skip + len(target) - done]
            target[done : done + len(piece)] = piece
            done, first, skip = done + len(piece), first + count, 0


class LogicalSource(Source):
    """The logical tensors of a checkpoint, in the order in which their parts are stored.

    Attributes:
        path: the checkpoint.
        metadata: that of its shards.
        tensors: every tensor that is not a part of a view, and every view.
        views: the views by name.
        checkpoint: where the stored tensors are.
    """

    def __init__(self, checkpoint: Checkpoint, views: list[View], dropped: set[str]) -> None:
        """Puts views in the place of what they consume.

        Args:
            checkpoint: the stored tensors.
            views: what is computed from some of them.
            dropped: stored tensors that appear nowhere.
        """
        self.checkpoint = checkpoint
        self._dropped = dropped
        self.path = checkpoint.path
        self.metadata = checkpoint.metadata
        self.views = {view.tensor.name: view for view in views}
        self.tensors = self._in_order()

    def _in_order(self) -> dict[str, SourceTensor]:
        first: dict[str, list[View]] = {}
        for view in self.views.values():
            first.setdefault(view.consumed[0], []).append(view)
        consumed = {name for view in self.views.values() for name in view.consumed}
        tensors: dict[str, SourceTensor] = {}
        for name, tensor in self.checkpoint.tensors.items():
            for view in first.get(name, ()):
                tensors[view.tensor.name] = view.tensor
            if name not in consumed and name not in self._dropped:
                tensors[name] = tensor
        return tensors

    def is_decoded(self, name: str) -> bool:
        """Whether a tensor is computed from FP8 or MXFP4, and not only a part of a float one."""
        view = self.views.get(name)
        return view is not None and self.checkpoint.tensors[view.consumed[0]].dtype not in FLOATS

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

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        view = self.views.get(name)
        if view is None:
            self.checkpoint.read(name, offset, out)
        else:
            view.read(offset, out)

    def close(self) -> None:  # noqa: D102
        self.checkpoint.close()
