# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused 3-D experts, shown as the linear layers of single experts: `experts.3.gate_proj.weight`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.checkpoint.models.experts import (
    Excluded,
    ExpertsLayout,
    decide,
    expert_name,
    fused_bias,
    fused_weight,
    nothing,
    projections,
    stay_fused,
)
from fp4kit.cpu.transpose import transpose
from fp4kit.errors import FileFormatError
from fp4kit.io.containers import DTYPES
from fp4kit.io.read.source import Source, SourceTensor

from .base import READ_BYTES, Bytes, RowView, View, described, fetch, fetch_rows
from .base import where as about_tensor
from .expert_record import FusedTensor

FLOATS = ("F32", "BF16", "F16")
#: Whole source rows are read unless more than this many times what is wanted would be.
MOST_EXCESS = 4
UNSIGNED = {16: np.uint16, 32: np.uint32}


@dataclass(frozen=True)
class Slice:
    """Which rows (or columns) of which expert a view shows.

    Attributes:
        expert: number of the expert.
        start: first index along the fused axis.
        step: distance between indices.
    """

    expert: int
    start: int = 0
    step: int = 1


class ExpertView(RowView):
    """Rows of one expert of an [E, out, in] tensor."""

    def __init__(
        self, source: Source, tensor: SourceTensor, shown: SourceTensor, part: Slice
    ) -> None:
        self._source = source
        self._name = tensor.name
        self._start = part.expert * tensor.spec.shape[1] + part.start
        self._step = part.step
        self.tensor = shown
        self.consumed = (tensor.name,)

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        fetch_rows(self._source, self._name, self._start + first * self._step, self._step, out)


class BiasView(ExpertView):
    """Elements of one expert of a bias [E, out]."""

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        item = DTYPES[self.tensor.spec.dtype].bits // 8
        # To fetch_rows every element is a row.
        fetch_rows(self._source, self._name, self._start, self._step, out.reshape(-1, item))


class TransposedView(RowView):
    """Columns of one expert of an [E, in, out] tensor, shown as rows."""

    # All source rows are passed through for any number of columns.
    uncut = True

    def __init__(
        self, source: Source, tensor: SourceTensor, shown: SourceTensor, part: Slice
    ) -> None:
        self._source = source
        self._name = tensor.name
        self._item = DTYPES[tensor.spec.dtype].bits // 8
        self._element = UNSIGNED[self._item * 8]
        self._inputs, self._width = tensor.spec.shape[1:]
        self._first_input = part.expert * self._inputs
        self._part = part
        self.tensor = shown
        self.consumed = (tensor.name,)

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        part, item = self._part, self._item
        start = part.start + first * part.step
        wanted = (last - first - 1) * part.step + 1
        target = out.view(self._element)
        # Whole source rows are one read; single columns of each are as many reads as rows.
        begin, width = (0, self._width) if self._width <= MOST_EXCESS * wanted else (start, wanted)
        count = max(min(READ_BYTES // (width * item), self._inputs), 1)
        buffer = np.empty((count, width), self._element)
        for row in range(0, self._inputs, count):
            chunk = buffer[: min(count, self._inputs - row)]
            self._fetch(self._first_input + row, begin, chunk)
            transpose(chunk, start - begin, part.step, target, row)

    def _fetch(self, row: int, begin: int, chunk: np.ndarray) -> None:
        """Reads `chunk.shape[1]` columns from `begin` on of some source rows."""
        if chunk.shape[1] == self._width:
            fetch(self._source, self._name, row * self._width * self._item, chunk)
            return
        for number, line in enumerate(chunk):
            at = ((row + number) * self._width + begin) * self._item
            fetch(self._source, self._name, at, line)


def weight_views(
    source: Source, prefix: str, role: str, tensor: SourceTensor, layout: ExpertsLayout
) -> Iterator[View]:
    """One view per expert and projection of a fused weight.

    Args:
        source: where the tensor is read.
        prefix: name of the module of all experts.
        role: `gate_up_proj` or `down_proj`.
        tensor: the weight, three-dimensional.
        layout: how it lies.
    """
    experts, out, inputs = tensor.spec.shape
    if layout.transposed:
        out, inputs = inputs, out
    kind = TransposedView if layout.transposed else ExpertView
    fused = FusedTensor(tensor.name, tensor.spec.shape, layout)
    for expert in range(experts):
        for projection, rows, start, step in projections(role, out, layout):
            shown = described(
                expert_name(prefix, expert, projection),
                tensor.spec.dtype,
                (rows, inputs),
                tensor.stored * rows // max(experts * out, 1),
                f"expert {expert} of {tensor.name} ({layout.note})",
            )
            view = kind(source, tensor, shown, Slice(expert, start, step))
            view.fused = fused
            yield view


def bias_views(
    source: Source, prefix: str, role: str, tensor: SourceTensor, layout: ExpertsLayout
) -> Iterator[View]:
    """One view per expert and projection of a fused bias [E, out]; see :func:`weight_views`."""
    experts, out = tensor.spec.shape
    fused = FusedTensor(tensor.name, tensor.spec.shape, layout)
    for expert in range(experts):
        for projection, size, start, step in projections(role, out, layout):
            shown = described(
                expert_name(prefix, expert, projection, "bias"),
                tensor.spec.dtype,
                (size,),
                tensor.stored * size // max(experts * out, 1),
                f"expert {expert} of {tensor.name}",
            )
            view = BiasView(source, tensor, shown, Slice(expert, start, step))
            view.fused = fused
            yield view


def fused_biases(source: Source) -> dict[str, dict[str, SourceTensor]]:
    """The fused biases: prefix to role to tensor."""
    found: dict[str, dict[str, SourceTensor]] = {}
    for name, tensor in source.tensors.items():
        match = fused_bias(name)
        if match and tensor.spec.dtype in FLOATS and len(tensor.spec.shape) == 2:
            found.setdefault(match[0], {})[match[1]] = tensor
    return found


def _check_bias(
    source: Source, bias: SourceTensor, weight: SourceTensor | None, layout: ExpertsLayout
) -> None:
    if weight is None:
        return
    experts, out, inputs = weight.spec.shape
    expected = (experts, inputs if layout.transposed else out)
    if bias.spec.shape != expected:
        raise FileFormatError(
            f"{about_tensor(source, bias.name)} has shape {list(bias.spec.shape)}, "
            f"{weight.name!r} needs {list(expected)}"
        )


def _names(weights: dict[str, SourceTensor]) -> dict[str, tuple[str, int]]:
    """Role to the name and number of experts."""
    return {role: (tensor.name, tensor.spec.shape[0]) for role, tensor in weights.items()}


def _is_experts(prefix: str, weights: dict[str, SourceTensor], source: Source) -> bool:
    """Whether 3-D weights are routed experts fused, and not something else of such a name."""
    last = prefix.rpartition(".")[2]
    if last.startswith(("shared_expert", "share_expert")):
        # They see every token: the first axis, mostly of size 1, chooses nothing.
        return False
    if "gate_up_proj" in weights:
        return True
    # Gate and up that are stacked too, but apart, belong to `down_proj`: all stay as they are.
    apart = (f"{prefix}.{name}" for name in ("gate_proj", "up_proj"))
    stacked = any(name in source.tensors or f"{name}.weight" in source.tensors for name in apart)
    return last.endswith("experts") and not stacked


def find_views(
    source: Source,
    config: dict[str, Any],
    experts_layout: str | None = None,
    excluded: Excluded = nothing,
) -> list[View]:
    """Views of every expert that is fused with others into 3-D float tensors.

    Args:
        source: the tensors, perhaps already decoded ones.
        config: content of config.json.
        experts_layout: `out_in`, `in_out` or `interleaved` to override the model type.
        excluded: whether a tensor is left alone; experts that are stay fused, unlooked at.

    Raises:
        OptionError: if it cannot be told how they are fused; the message names the override.
        FileFormatError: if a bias does not fit its weight.
    """
    fused: dict[str, dict[str, SourceTensor]] = {}
    for name, tensor in source.tensors.items():
        match = fused_weight(name)
        shape = tensor.spec.shape
        if match and tensor.spec.dtype in FLOATS and len(shape) == 3 and 0 not in shape:
            fused.setdefault(match[0], {})[match[1]] = tensor
    fused = {
        prefix: weights
        for prefix, weights in fused.items()
        if _is_experts(prefix, weights, source)
        and not stay_fused(prefix, _names(weights), excluded)
    }
    biases = fused_biases(source) if fused else {}
    views: list[View] = []
    for prefix, weights in fused.items():
        shapes = {role: tensor.spec.shape for role, tensor in weights.items()}
        layout = decide(
            config,
            experts_layout,
            shapes.get("gate_up_proj"),
            shapes.get("down_proj"),
            prefix in biases,
            about_tensor(source, next(iter(weights.values())).name),
            prefix,
        )
        for role, tensor in weights.items():
            views += weight_views(source, prefix, role, tensor, layout)
        for role, tensor in biases.get(prefix, {}).items():
            _check_bias(source, tensor, weights.get(role), layout)
            views += bias_views(source, prefix, role, tensor, layout)
    return views
