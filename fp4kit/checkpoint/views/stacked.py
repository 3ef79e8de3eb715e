# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Single experts as one stacked tensor [E, out, in] that a layout stores, and back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from fp4kit.checkpoint.layouts import Layout
from fp4kit.errors import OptionError
from fp4kit.io.read.source import Source
from fp4kit.io.storage import QuantizedEntry
from fp4kit.plan import Plan

from .base import Bytes, RowView, described
from .codes import Codes, Mxfp4Codes, Scales
from .entries import EntryView
from .logical import LogicalSource


class StackedView(RowView):
    """Matrices of one shape and element type, one below the other."""

    def __init__(self, source: LogicalSource, name: str, members: list[str]) -> None:
        tensors = [source.tensors[member] for member in members]
        specs = {(tensor.spec.dtype, tensor.spec.shape) for tensor in tensors}
        if len(specs) > 1:
            raise OptionError(
                f"{source.path}: the experts of {name!r} have different types or shapes, so that "
                "they cannot be one tensor; exclude them"
            )
        spec = tensors[0].spec
        self._source, self._members = source, members
        self._rows = spec.shape[0]
        self.consumed = tuple(
            dict.fromkeys(stored for each in members for stored in source.stored_names(each))
        )
        stored = sum(tensor.stored for tensor in tensors)
        shape = (len(members), *spec.shape)
        self.tensor = described(name, spec.dtype, shape, stored, f"{len(members)} experts")

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        width = out.shape[1]
        while first < last:
            member, row = divmod(first, self._rows)
            count = min(last - first, self._rows - row)
            data = out[:count].reshape(-1)
            self._source.read(self._members[member], row * width, data.data)
            out, first = out[count:], first + count


class StackedCodes(Codes):
    """The same as codes of MXFP4."""

    def __init__(self, name: str, members: list[Mxfp4Codes]) -> None:
        plans = [each.plan for each in members]
        self.name = name
        self.plan = Plan(plans[0].scheme, sum(plan.rows for plan in plans), plans[0].cols)
        self._members = members
        self._starts = np.cumsum([0, *(plan.rows for plan in plans)]).tolist()

    def read(self, first: int, last: int) -> tuple[Bytes, Scales]:  # noqa: D102
        parts = []
        while first < last:
            member = bisect_right(self._starts, first) - 1
            stop = min(last, self._starts[member + 1])
            start = self._starts[member]
            parts.append(self._members[member].read(first - start, stop - start))
            first = stop
        packed, scales = (np.concatenate(each) for each in zip(*parts, strict=True))
        return packed, scales


class ExpertEntryView(EntryView):
    """One expert of a quantized stack, as float32."""

    def __init__(self, source: Source, entry: QuantizedEntry, expert: int, name: str) -> None:
        super().__init__(source, entry, "float32")
        experts, *shape = entry.shape
        self._start = expert * shape[0]
        note = f"{entry.plan.format.name}, expert {expert} of {entry.name}, decoded"
        self.tensor = described(name, "F32", tuple(shape), entry.stored // experts, note)

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        super().rows(self._start + first, self._start + last, out)


def stack(
    source: LogicalSource, codes: dict[str, Codes], stacks: dict[str, list[str]]
) -> tuple[LogicalSource, dict[str, Codes]]:
    """A source with single experts put together, and the codes of what it then has.

    Args:
        source: the logical tensors.
        codes: the codes of some.
        stacks: name of each new tensor to its experts in order.
    """
    found = dict(codes)
    for name, members in stacks.items():
        held = [found.pop(member, None) for member in members]
        coded = [each for each in held if isinstance(each, Mxfp4Codes)]
        if len(coded) == len(members):
            found[name] = StackedCodes(name, coded)
    views = [StackedView(source, name, members) for name, members in stacks.items()]
    parts = {member for members in stacks.values() for member in members}
    return source.with_views(list(views), parts), found


def split_entries(
    source: Source, layout: Layout, entries: dict[str, QuantizedEntry]
) -> Iterator[ExpertEntryView]:
    """Views of every expert of quantized stacks, by their own names."""
    for name, entry in entries.items():
        for expert, single in enumerate(layout.single_names(name, entry.shape)):
            yield ExpertEntryView(source, entry, expert, single)
