# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights in a layout, decoded.

AWQ stores W / s and has the reader multiply the input of the module by s, a number for each column.
The effective weight is therefore the decoded one times s, column by column. Each product is rounded
once to binary32, and once more to the element type that is asked for.
"""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from fp4kit import arrays
from fp4kit.io.containers import DTYPE_CODES
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.storage import QuantizedEntry
from fp4kit.io.stream.chunks import chunk_plan, row_step
from fp4kit.reference.scaling import quiet

from .base import Bytes, RowView, decode, described, fetch_scales
from .codes import read_parts


class EntryView(RowView):
    """A quantized weight as floats of some type."""

    def __init__(self, source: Source, entry: QuantizedEntry, dtype: str) -> None:
        self._source, self._entry, self._dtype = source, entry, dtype
        self.entry = entry
        self.consumed = tuple(spec.name for spec in entry.parts)
        note = entry.plan.format.name
        self.tensor = described(entry.name, DTYPE_CODES[dtype], entry.shape, entry.stored, note)

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        plan, step = self._entry.plan, row_step(self._entry.plan)
        begin, end = first // step * step, min(-(-last // step) * step, plan.rows)
        whole = (begin, end) == (first, last)
        target = out if whole else np.empty((end - begin, out.shape[1]), np.uint8)
        coded = (*read_parts(self._source, self._entry, begin, end), self._entry.second)
        values = target.view(arrays.RAW_DTYPES[self._dtype])
        decode(chunk_plan(plan.decoding, end - begin), coded, values, self._dtype)
        if not whole:
            out[:] = target[first - begin : last - begin]


def read_factors(source: Source, tensor: SourceTensor) -> NDArray[np.float32]:
    """The scale of each column, float32 (columns,)."""
    return fetch_scales(source, tensor, 0, (prod(tensor.spec.shape),))


class SmoothedView(EntryView):
    """A quantized weight that AWQ smoothed times the scale of its columns, as float32."""

    def __init__(self, source: Source, entry: QuantizedEntry, factors: SourceTensor) -> None:
        super().__init__(source, entry, "float32")
        self._scales = factors
        self.consumed = (*self.consumed, factors.name)
        stored = entry.stored + factors.stored
        note = f"{entry.plan.format.name} times {factors.name} (AWQ), decoded"
        self.tensor = described(entry.name, "F32", entry.shape, stored, note)

    @cached_property
    def _factors(self) -> NDArray[np.float32]:
        return read_factors(self._source, self._scales)

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        super().rows(first, last, out)
        values = out.view(np.float32)
        with quiet():
            np.multiply(values, self._factors, values)
