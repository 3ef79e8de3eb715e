# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights that AWQ smoothed: what the layer computes with, which is not what is stored.

AWQ stores W / s and has the reader multiply the input of the module by s, a number for each column.
The effective weight is therefore the decoded one times s, column by column. Each product is rounded
once to binary32, and once more to the element type that is asked for.
"""

from __future__ import annotations

from dataclasses import replace as with_changes
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job
from fp4kit.io.metadata import QuantizedEntry
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.stream.chunks import chunk_plan
from fp4kit.reference.scaling import quiet

from .base import Bytes, RowView, described, fetch_scales
from .codes import EntryCodes


def read_factors(source: Source, tensor: SourceTensor) -> NDArray[np.float32]:
    """The scale of each column, float32 (columns,)."""
    return fetch_scales(source, tensor, 0, (prod(tensor.spec.shape),))


class FoldedView(RowView):
    """A quantized weight times the scale of its columns, as float32."""

    def __init__(self, source: Source, entry: QuantizedEntry, factors: SourceTensor) -> None:
        """Shows a weight.

        Args:
            source: the stored tensors.
            entry: the quantized weight, complete.
            factors: the scales of its columns.
        """
        self._source = source
        self._entry = entry
        self._scales = factors
        self._codes = EntryCodes(source, entry)
        self.consumed = (*(part.name for part in entry.parts), factors.name)
        self.tensor = described(
            entry.name,
            "F32",
            entry.shape,
            entry.stored + factors.stored,
            f"{entry.plan.format.name} times {factors.name} (AWQ), decoded",
        )

    @cached_property
    def _factors(self) -> NDArray[np.float32]:
        return read_factors(self._source, self._scales)

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        step, plan = self._codes.step, self._entry.plan.decoding
        begin, end = first // step * step, min(-(-last // step) * step, plan.rows)
        packed, scales = self._codes.read(begin, end)
        scheme = plan.scheme.replace(scale_layout="linear", nibble_order="low_first")
        linear = chunk_plan(with_changes(plan, scheme=scheme), end - begin)
        wide = np.empty((end - begin, plan.cols), np.float32)
        job = Job(linear, None, "float32", self._entry.second, packed, scales)
        get_backend("cpu").dequantize(job, wide, "float32")
        with quiet():
            np.multiply(wide[first - begin : last - begin], self._factors, out.view(np.float32))
