# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Codes and block scales as they are, from any stored form, in one order: low nibble first, linear.

They are what stays when a weight goes from one layout to another without being decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.api.backends import get_backend
from fp4kit.backend.interface import Plan
from fp4kit.io.dequantize import entry_parts
from fp4kit.io.read.source import Source
from fp4kit.io.storage import QuantizedEntry
from fp4kit.io.stream.chunks import chunk_plan, row_step
from fp4kit.scheme import Scheme, as_scheme

from .base import Bytes, fetch
from .fp8 import Fp8View
from .mxfp4 import Mxfp4View

#: Bytes, or float32.
Scales = NDArray[Any]


def swap_nibbles(packed: Bytes) -> Bytes:
    """Codes in the other nibble order."""
    return (packed << np.uint8(4)) | (packed >> np.uint8(4))


def read_parts(source: Source, entry: QuantizedEntry, first: int, last: int) -> tuple[Bytes, Bytes]:
    """Codes and block scales of some rows of a weight, as its layout has them."""
    plan = chunk_plan(entry.plan, last - first)
    packed = np.empty(plan.packed_shape, np.uint8)
    parts = packed, np.empty(plan.scale_shape, plan.format.scales.dtype)
    for part, data in zip(entry_parts(source, entry, first, last), parts, strict=True):
        fetch(source, part.name, part.start, data)
    return parts


class Codes(ABC):
    """A quantized weight as codes and block scales.

    Attributes:
        name: logical name.
        plan: format and shape.
        step: rows that a chunk begins at a multiple of.
    """

    name: str
    plan: Plan
    step: int = 1

    @abstractmethod
    def read(self, first: int, last: int) -> tuple[Bytes, Scales]:
        """Packed codes (low nibble first) and block scales (linear) of some rows.

        Args:
            first: a multiple of `step`.
            last: a multiple of `step`, or the number of rows.

        Returns:
            uint8 (last - first, bytes per row), and uint8 (last - first, blocks) or the float32
            scales of FP8.
        """


class EntryCodes(Codes):
    """A weight that is stored in a layout."""

    def __init__(self, source: Source, entry: QuantizedEntry) -> None:
        self.name = entry.name
        self.plan = entry.plan
        self.step = row_step(entry.plan)
        self._source = source
        self._entry = entry

    def read(self, first: int, last: int) -> tuple[Bytes, Bytes]:  # noqa: D102
        plan = chunk_plan(self.plan, last - first)
        packed, scales = read_parts(self._source, self._entry, first, last)
        if plan.format.codes_per_byte == 2 and plan.nibble_order == "high_first":
            packed = swap_nibbles(packed)
        if plan.scale_layout != "linear":
            linear = np.empty((plan.rows, plan.blocks), np.uint8)
            get_backend("cpu").unswizzle(scales, plan.scale_layout, linear)
            scales = linear
        return packed, scales


class Mxfp4Codes(Codes):
    """An MXFP4 weight of a checkpoint, perhaps one of several fused experts.

    Attributes:
        view: the same as floats.
    """

    def __init__(self, view: Mxfp4View) -> None:
        rows, cols = view.matrix
        self.name = view.tensor.name
        self.plan = Plan(Scheme("mxfp4").parts[0], rows, cols)
        self.view = view

    def read(self, first: int, last: int) -> tuple[Bytes, Bytes]:  # noqa: D102
        return self.view.codes(first, last)


class Fp8Codes(Codes):
    """An FP8 weight of a checkpoint, of any dialect.

    Attributes:
        view: the same as floats.
    """

    def __init__(self, view: Fp8View, granularity: str) -> None:
        rows, cols = view.tensor.spec.shape
        self.name = view.tensor.name
        scheme = as_scheme(view.format, {"granularity": granularity})
        self.plan = Plan(scheme.parts[0], rows, cols)
        self.step = row_step(self.plan)
        self.view = view

    def under(self, plan: Plan) -> Fp8Codes | None:
        """The same under the granularity of a plan, None if its format or scales are others."""
        granularity = plan.scheme.granularity
        if plan.format is not self.plan.format or granularity not in self.view.granularities:
            return None
        assert granularity is not None
        return Fp8Codes(self.view, granularity)

    def read(self, first: int, last: int) -> tuple[Bytes, Scales]:  # noqa: D102
        granularity = self.plan.scheme.granularity
        assert granularity is not None
        return self.view.code_rows(first, last, granularity)
