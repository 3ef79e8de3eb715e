# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused 3-D experts as linear layers of single ones, `experts.3.gate_proj.weight`, and back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp4kit.checkpoint.models.expert_types import decide
from fp4kit.checkpoint.models.experts import (
    ExpertPart,
    ExpertsLayout,
    FusedTensor,
    fused_bias,
    fused_weight,
    stay_fused,
)
from fp4kit.checkpoint.read.code_names import FLOATS
from fp4kit.cpu.matrices import transpose
from fp4kit.errors import FileFormatError
from fp4kit.io.containers import DTYPE_CODES, DTYPES
from fp4kit.io.read.source import Source, SourceTensor

from .base import (
    READ_BYTES,
    UNSIGNED,
    Bytes,
    RowView,
    TensorView,
    TransposedMatrices,
    ViewOptions,
    described,
    fetch,
    fetch_rows,
    where,
)

#: Whole source rows are read unless more than this many times what is wanted would be.
MOST_EXCESS = 4


class ExpertView(RowView):
    """Rows of one expert of an [E, out, in] tensor, or elements of one of a bias [E, out]."""

    def __init__(
        self, source: Source, tensor: SourceTensor, shown: SourceTensor, part: ExpertPart
    ) -> None:
        self._source = source
        self._fused = tensor
        self._part = part
        self._item = DTYPES[tensor.spec.dtype].bits // 8
        self.tensor = shown
        self.consumed = (tensor.name,)

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        part, shape = self._part, self._fused.spec.shape
        start = part.expert * shape[1] + part.start + first * part.step
        # Of a bias every element is a row to fetch_rows.
        lines = out if len(shape) == 3 else out.reshape(-1, self._item)
        fetch_rows(self._source, self._fused.name, start, part.step, lines)


class TransposedView(ExpertView):
    """Columns of one expert of an [E, in, out] tensor, shown as rows."""

    # All source rows are passed through for any number of columns.
    uncut = True

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        part, item, element = self._part, self._item, UNSIGNED[self._item * 8]
        inputs, columns = self._fused.spec.shape[1:]
        start = part.start + first * part.step
        wanted = (last - first - 1) * part.step + 1
        # Whole source rows are one read; single columns of each are as many reads as rows.
        begin, width = (0, columns) if columns <= MOST_EXCESS * wanted else (start, wanted)
        count = max(min(READ_BYTES // (width * item), inputs), 1)
        buffer = np.empty((count, width), element)
        for row in range(0, inputs, count):
            chunk = buffer[: min(count, inputs - row)]
            at = ((part.expert * inputs + row) * columns + begin) * item
            for lines, offset in (
                [(chunk, at)]
                if width == columns
                else [(line, at + number * columns * item) for number, line in enumerate(chunk)]
            ):
                fetch(self._source, self._fused.name, offset, lines)
            transpose(chunk, start - begin, part.step, out.view(element), row)


def split(source: Source, tensor: SourceTensor, layout: ExpertsLayout) -> Iterator[TensorView]:
    """One view per expert and projection of a fused weight [E, ., .] or bias [E, out]."""
    shape = tensor.spec.shape
    fused = FusedTensor(tensor.name, shape, layout)
    kind = TransposedView if layout.transposed and not fused.is_bias else ExpertView
    note = "" if fused.is_bias else f" ({layout.note})"
    for part in fused.parts():
        shown = described(
            part.name,
            tensor.spec.dtype,
            fused.part_shape(part),
            tensor.stored * part.rows // max(shape[0] * fused.outputs, 1),
            f"expert {part.expert} of {tensor.name}{note}",
        )
        view = kind(source, tensor, shown, part)
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


def check_bias(source: Source, bias: SourceTensor, weight: str, expected: tuple[int, ...]) -> None:
    """Refuses a fused bias that does not fit its weight."""
    if bias.spec.shape != expected:
        raise FileFormatError(
            f"{where(source, bias.name)} has shape {list(bias.spec.shape)}, {weight!r} needs "
            f"{list(expected)}"
        )


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


def find_views(source: Source, options: ViewOptions) -> list[TensorView]:
    """Views of every expert that is fused with others into 3-D float tensors."""
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
        and not stay_fused(
            prefix,
            {role: (tensor.name, tensor.spec.shape[0]) for role, tensor in weights.items()},
            options.excluded,
        )
    }
    biases = fused_biases(source) if fused else {}
    views: list[TensorView] = []
    for prefix, weights in fused.items():
        shapes = {role: tensor.spec.shape for role, tensor in weights.items()}
        layout = decide(
            options.config,
            options.experts_layout,
            shapes.get("gate_up_proj"),
            shapes.get("down_proj"),
            prefix in biases,
            where(source, next(iter(weights.values())).name),
            prefix,
        )
        for tensor in weights.values():
            views += split(source, tensor, layout)
        for role, tensor in biases.get(prefix, {}).items():
            if role in weights:
                fused_as = FusedTensor(weights[role].name, weights[role].spec.shape, layout)
                expected = (fused_as.shape[0], fused_as.outputs)
                check_bias(source, tensor, fused_as.name, expected)
            views += split(source, tensor, layout)
    return views


# The inverse: single experts as the fused tensors that they were.


class JoinedView(RowView):
    """Single experts as one tensor [E, out, in], or biases as one [E, out]."""

    def __init__(self, source: Source, fused: FusedTensor, dtype: str) -> None:
        """Puts experts together."""
        self._source = source
        self._experts: list[list[ExpertPart]] = [[] for _ in range(fused.shape[0])]
        stored = 0
        for part in fused.parts():
            self._experts[part.expert].append(part)
            stored += source.tensors[part.name].stored
        self._outputs = fused.outputs
        #: Bytes of a row; of a bias, every element is one.
        self.width = fused.inputs * (DTYPES[DTYPE_CODES[dtype]].bits // 8)
        shape = (fused.shape[0], fused.outputs)
        self.tensor = described(
            fused.name,
            DTYPE_CODES[dtype],
            shape if fused.is_bias else (*shape, fused.inputs),
            stored,
            f"{fused.shape[0]} experts, put together ({fused.layout.note})",
        )
        self.consumed = tuple(part.name for members in self._experts for part in members)

    def rows(self, first: int, last: int, out: Bytes) -> None:
        """Rows of the tensor; those of a bias are whole experts."""
        per_row = out.shape[1] // self.width
        self.outputs(first * per_row, last * per_row, out.reshape(-1, self.width))

    def outputs(self, first: int, last: int, out: Bytes) -> None:
        """Fills what belongs to some outputs, experts one after the other."""
        done = first
        while done < last:
            expert, begin = divmod(done, self._outputs)
            end = min(begin + last - done, self._outputs)
            target = out[done - first : done - first + end - begin]
            for part in self._experts[expert]:
                self._read(part, begin, end, target)
            done += end - begin

    def _read(self, part: ExpertPart, begin: int, end: int, out: Bytes) -> None:
        """Fills the rows of one part that lie in begin..end of an expert."""
        low = min(max(-(-(begin - part.start) // part.step), 0), part.rows)
        high = min(max(-(-(end - part.start) // part.step), low), part.rows)
        if low == high:
            return
        at = part.start + low * part.step - begin
        target = out[at : at + (high - low - 1) * part.step + 1 : part.step]
        data = target if part.step == 1 else np.empty(target.shape, np.uint8)
        self._source.read(part.name, low * self.width, data.reshape(-1).data)
        if part.step > 1:
            target[:] = data


class JoinedTransposed(TransposedMatrices):
    """Single experts as one tensor [E, in, out]."""

    def __init__(self, joined: JoinedView) -> None:
        super().__init__(joined, joined.tensor.note)
        self._joined = joined

    def chunks(  # noqa: D102
        self, matrix: int, begin: int, end: int
    ) -> Iterator[tuple[int, Bytes, int]]:
        width = self._joined.width
        count = max(min(READ_BYTES // width, self._out), 1)
        buffer = np.empty((count, width), np.uint8)
        for row in range(0, self._out, count):
            chunk = buffer[: min(count, self._out - row)]
            start = matrix * self._out + row
            self._joined.outputs(start, start + len(chunk), chunk)
            yield row, chunk, begin


def join(source: Source, fused: FusedTensor, dtype: str) -> RowView:
    """The view of a fused tensor whose parts a source has."""
    joined = JoinedView(source, fused, dtype)
    return JoinedTransposed(joined) if fused.layout.transposed and not fused.is_bias else joined
