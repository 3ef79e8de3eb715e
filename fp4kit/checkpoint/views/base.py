# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Logical tensors that are computed from stored ones while they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit import arrays
from fp4kit.api.backends import select
from fp4kit.backend.interface import Plan, Request
from fp4kit.backend.jobs import Job
from fp4kit.checkpoint.models.experts import Excluded, FusedTensor, nothing
from fp4kit.checkpoint.read.code_names import FLOATS
from fp4kit.cpu.matrices import transpose
from fp4kit.errors import FileFormatError
from fp4kit.io.containers import DTYPES, TensorSpec
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.reference import codecs

Bytes = NDArray[np.uint8]
#: Packed codes, block scales, and a second level where there is one.
Coded = tuple[Bytes, Bytes, NDArray[np.float32] | None]
#: Element types of which only the bits matter, by their number.
UNSIGNED = {16: np.uint16, 32: np.uint32}
#: Logical bytes that are computed at a time; temporary memory is a fraction of it, or one row.
CHUNK_BYTES = 16 << 20
#: Stored bytes that are read at a time where only some of them are wanted.
READ_BYTES = 4 << 20


@dataclass(frozen=True)
class ViewOptions:
    """What decides about the views of stored tensors, beside these themselves.

    Attributes:
        config: content of config.json, empty without one.
        experts_layout: how experts are fused, `out_in`, `in_out` or `interleaved`; None to decide
            by model type and shapes.
        layers: modules to ComfyUI's formats, where markers or headers say them.
        fused: whether fused experts are separated; else they are one tensor as transformers keeps
            it, which for gpt-oss is [E, in, out], and biases stay as they are stored.
        excluded: whether a tensor is left alone, understood or not; fused experts that are stay
            fused.
        unscaled_fp8: FP8 without a scale was only cast, and is taken as it is.
    """

    config: dict[str, Any] = field(default_factory=dict)
    experts_layout: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    fused: bool = True
    excluded: Excluded = nothing
    unscaled_fp8: bool = False


class TensorView(ABC):
    """A logical tensor that is computed from stored ones while it is read.

    Attributes:
        tensor: name, element type and logical shape; its note says how it is made.
        consumed: names of the stored tensors that it needs, which are then not copied.
        fused: the tensor of all experts that it is a part of, None if it is of none.
    """

    tensor: SourceTensor
    consumed: tuple[str, ...]
    fused: FusedTensor | None = None

    @abstractmethod
    def read(self, offset: int, out: memoryview) -> None:
        """Fills `out` with C-order little-endian logical bytes from `offset` on.

        Any number of threads may read at once; temporary memory is bounded.

        Raises:
            FileFormatError: if what is stored cannot be decoded.
        """


class RowView(TensorView):
    """A view that is computed row by row (a row is what the last axis spans).

    Attributes:
        uncut: :meth:`rows` bounds its temporary memory itself, and many rows at once cost less.
    """

    uncut = False

    @abstractmethod
    def rows(self, first: int, last: int, out: Bytes) -> None:
        """Computes whole rows.

        Args:
            first: index of the first row, leading dimensions flattened.
            last: index after the last row.
            out: uint8 (last - first, row bytes) to fill, C-contiguous, aligned for the elements.
        """

    def read(self, offset: int, out: memoryview) -> None:  # noqa: D102
        if not len(out):
            return
        target = np.frombuffer(out, np.uint8)
        width = self.tensor.row_bytes
        item = DTYPES[self.tensor.spec.dtype].bits // 8
        most = max(CHUNK_BYTES // width, 1)
        done = 0
        while done < len(target):
            first, skip = divmod(offset + done, width)
            left = target[done:]
            whole = len(left) // width if self.uncut else min(len(left) // width, most)
            if skip == 0 and whole and left.ctypes.data % item == 0:
                self.rows(first, first + whole, left[: whole * width].reshape(whole, width))
                done += whole * width
                continue
            # An odd beginning or end: the row that holds it, or all rows of a misaligned buffer.
            count = max(min(whole, most), 1) if skip == 0 else 1
            buffer = np.empty((count, width), np.uint8)
            self.rows(first, first + count, buffer)
            chunk = buffer.reshape(-1)[skip : skip + len(left)]
            left[: len(chunk)] = chunk
            done += len(chunk)


class TransposedMatrices(RowView):
    """Stacked matrices [E, out, in] of another view as [E, in, out]."""

    # All stored rows of a matrix are passed through for any number of columns.
    uncut = True

    def __init__(self, stored: TensorView, note: str) -> None:
        spec = stored.tensor.spec
        experts, self._out, self._inputs = spec.shape
        self._element = UNSIGNED[DTYPES[spec.dtype].bits]
        shape = (experts, self._inputs, self._out)
        self.tensor = described(spec.name, spec.dtype, shape, stored.tensor.stored, note)
        self.consumed = stored.consumed

    @abstractmethod
    def chunks(
        self, matrix: int, begin: int, end: int
    ) -> Iterator[tuple[int, NDArray[np.generic], int]]:
        """Stored rows of a matrix with at least the columns begin..end.

        Yields:
            Index of the first row, the rows, and where column `begin` is in them.
        """

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        target = out.view(self._element)
        done = first
        while done < last:
            matrix, begin = divmod(done, self._inputs)
            end = min(begin + last - done, self._inputs)
            lines = target[done - first : done - first + end - begin]
            for row, chunk, skip in self.chunks(matrix, begin, end):
                transpose(chunk.view(self._element), skip, 1, lines, row)
            done += end - begin


class Overlay(Source):
    """A source with some of its tensors replaced by views.

    Attributes:
        path: that of the source.
        metadata: that of the source.
        tensors: every tensor that is not a part of a view, and every view, in the order in which
            their parts are stored.
        views: the views by name.
    """

    # So can what it is made of, and every view.
    concurrent = True

    def __init__(
        self, source: Source, views: list[TensorView], dropped: Collection[str] = ()
    ) -> None:
        """Puts views in the place of what they consume."""
        self._source = source
        self._dropped = frozenset(dropped)
        self.path = source.path
        self.metadata = source.metadata
        self.views = {view.tensor.name: view for view in views}
        self.tensors = self._in_order()

    def _in_order(self) -> dict[str, SourceTensor]:
        first: dict[str, list[TensorView]] = {}
        for view in self.views.values():
            first.setdefault(view.consumed[0], []).append(view)
        consumed = {name for view in self.views.values() for name in view.consumed}
        tensors: dict[str, SourceTensor] = {}
        for name, tensor in self._source.tensors.items():
            for view in first.get(name, ()):
                tensors[view.tensor.name] = view.tensor
            if name in consumed or name in self._dropped:
                continue
            if name in self.views:
                raise FileFormatError(
                    f"{where(self._source, name)} is stored, and {self.views[name].consumed[0]!r} "
                    "stands for a tensor of the same name; remove one of them"
                )
            tensors[name] = tensor
        return tensors

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        view = self.views.get(name)
        if view is None:
            self._source.read(name, offset, out)
        else:
            view.read(offset, out)

    def divisible(self, name: str) -> bool:  # noqa: D102
        # A view may pass through a whole matrix for any number of rows.
        return name not in self.views

    def check_unchanged(self) -> None:  # noqa: D102
        self._source.check_unchanged()

    def close(self) -> None:  # noqa: D102
        self._source.close()


def described(
    name: str, dtype: str, shape: tuple[int, ...], stored: int, note: str
) -> SourceTensor:
    """What a view presents itself as."""
    return SourceTensor(TensorSpec(name, dtype, shape), DTYPES[dtype].name, stored, note)


def fetch(source: Source, name: str, offset: int, out: NDArray[np.generic]) -> None:
    """Reads stored bytes of a tensor into a C-contiguous array."""
    if out.size:
        source.read(name, offset, out.reshape(-1).view(np.uint8).data)


def fetch_scales(
    source: Source, tensor: SourceTensor, offset: int, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Stored scales as float32, from element `offset` on."""
    dtype = DTYPES[tensor.spec.dtype]
    if tensor.spec.dtype in FLOATS:
        raw = np.empty(shape, arrays.RAW_DTYPES[dtype.name])
        fetch(source, tensor.name, offset * dtype.bits // 8, raw)
        values = codecs.to_float32(raw, dtype.name)
    else:
        exponents = np.empty(shape, np.uint8)
        fetch(source, tensor.name, offset, exponents)
        values = codecs.decode_e8m0(exponents)
    if not np.isfinite(values).all():
        raise FileFormatError(
            f"{where(source, tensor.name)} holds a NaN or infinite scale; the weight cannot be "
            "decoded"
        )
    return values


def decode(plan: Plan, codes: Coded, out: NDArray[np.generic], dtype: str) -> None:
    """Decodes rows of a quantized weight on the CPU.

    Args:
        plan: format and shape of these rows.
        codes: packed codes, block scales, and the second level or None.
        out: (rows, cols) of the element type to fill.
        dtype: that type.
    """
    packed, scales, second = codes
    backend = select(Request("dequantize", "cpu", dtype, plan.scheme), None)
    backend.dequantize(Job(plan, None, dtype, second, packed, scales), out, dtype)


def fetch_rows(source: Source, name: str, first: int, step: int, out: Bytes) -> None:
    """Reads every `step`-th stored row.

    Args:
        source: the stored tensors.
        name: the tensor.
        first: index of the first row, leading dimensions flattened.
        step: distance between rows; 1 reads straight into `out`.
        out: uint8 (rows, bytes per row), C-contiguous.
    """
    rows, width = out.shape
    if step == 1 or not out.size:
        fetch(source, name, first * width, out)
        return
    most = max(READ_BYTES // (width * step), 1)
    for begin in range(0, rows, most):
        end = min(begin + most, rows)
        # The rows in between are not read beyond the last wanted one: the tensor may end there.
        span = np.empty(((end - begin - 1) * step + 1, width), np.uint8)
        fetch(source, name, (first + begin * step) * width, span)
        out[begin:end] = span[::step]


def where(source: Source, name: str) -> str:
    """The beginning of a message about a stored tensor."""
    return f"{source.path}: tensor {name!r}:"
