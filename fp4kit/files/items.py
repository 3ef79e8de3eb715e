# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""One tensor of an open file: what its header says, and its data when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.api.tensor import QuantizedTensor
from fp4kit.checkpoint.views.fp8 import Fp8View
from fp4kit.checkpoint.views.mxfp4 import Mxfp4View
from fp4kit.formats import MXFP4
from fp4kit.io.containers import DTYPES
from fp4kit.io.dequantize import entry_parts
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.storage import QuantizedEntry
from fp4kit.plan import plan_of


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor; nothing is read for it.

    Attributes:
        name: logical name.
        shape: logical shape.
        dtype: element type of the array; of a quantized tensor the one that it was quantized from
            (`bfloat16` where a file does not say).
        format: block format of a quantized tensor, None for an array.
        nbytes: bytes that it takes in the file, scales included.
        note: how an array is made from what is stored; empty where it is stored so.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str | None
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Item:
    """A tensor and where its bytes are: a plain one (or a view), a quantized one, MXFP4 blocks."""

    source: Source
    tensor: SourceTensor | QuantizedEntry | Mxfp4View | Fp8View

    def info(self, name: str) -> TensorInfo:
        """What is known without reading."""
        tensor = self.tensor
        if isinstance(tensor, QuantizedEntry):
            format: str | None = tensor.plan.format.name
            return TensorInfo(name, tensor.shape, tensor.dtype, format, tensor.stored)
        if isinstance(tensor, Mxfp4View):
            found = tensor.tensor
            return TensorInfo(name, found.spec.shape, "bfloat16", "mxfp4", found.stored)
        if isinstance(tensor, Fp8View):
            found = tensor.tensor
            format = None if tensor.scheme is None else tensor.scheme.format
            return TensorInfo(name, found.spec.shape, "bfloat16", format, found.stored)
        return TensorInfo(name, tensor.shape, tensor.dtype, None, tensor.stored, tensor.note)

    def read(self) -> Any:
        """The array or the quantized tensor."""
        if isinstance(self.tensor, QuantizedEntry):
            return self._read_entry(self.tensor)
        if isinstance(self.tensor, Mxfp4View):
            return _read_blocks(self.tensor)
        if isinstance(self.tensor, Fp8View):
            return _read_fp8(self.tensor)
        size = self.tensor.spec.nbytes
        return _as_array(self.tensor, _bytes(self.source, self.tensor.name, 0, size))

    def _read_entry(self, entry: QuantizedEntry) -> QuantizedTensor:
        plan = entry.plan
        packed, scales = (
            _bytes(part.source, part.name, part.start, part.stop)
            for part in entry_parts(self.source, entry, 0, plan.rows)
        )
        lead = entry.shape[:-1]
        second: dict[str, Any] = {}
        if plan.recipe is not None and plan.has_second_level:
            second[plan.recipe.keeps] = entry.second
        return QuantizedTensor(
            packed=packed.reshape(*lead, plan.packed_shape[1]),
            block_scale=scales.view(plan.format.scales.dtype).reshape(plan.scale_shape_of(lead)),
            scheme=plan.scheme,
            shape=entry.shape,
            source_dtype=entry.dtype,
            **second,
        )


def _bytes(source: Source, name: str, start: int, stop: int) -> np.ndarray:
    """Stored or computed bytes of a tensor."""
    data = np.empty(stop - start, np.uint8)
    source.read(name, start, data.data)
    return data


def _as_array(tensor: SourceTensor, data: np.ndarray) -> np.ndarray:
    """Bytes as the array that they are; elements of less than a byte stay bytes."""
    kind, shape = DTYPES[tensor.spec.dtype], tensor.spec.shape
    if kind.bits < 8:
        bits = (shape[-1] if shape else 1) * kind.bits
        return data.reshape(*shape[:-1], bits // 8) if bits % 8 == 0 else data
    try:
        dtype = np.dtype(kind.name)
    except TypeError:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, kind.name))
    return data.view(dtype).reshape(shape)


def _read_blocks(view: Mxfp4View) -> QuantizedTensor:
    """MXFP4 of another tool: its codes and scales are those of fp4kit."""
    rows, _ = view.matrix
    shape = view.tensor.spec.shape
    packed, scale = view.codes(0, rows)
    return QuantizedTensor(
        packed=packed.reshape(*shape[:-1], packed.shape[1]),
        block_scale=scale.reshape(*shape[:-1], scale.shape[1]),
        format="mxfp4",
        shape=shape,
        scale_rule=MXFP4.default_scale_rule,
        source_dtype="bfloat16",
    )


def _read_fp8(view: Fp8View) -> QuantizedTensor:
    """FP8 of another tool with float scales: its codes are those of fp4kit."""
    shape, scheme = view.tensor.spec.shape, view.scheme
    assert scheme is not None
    codes, scales = view.codes()
    return QuantizedTensor(
        packed=codes.reshape(shape),
        block_scale=scales.reshape(plan_of(shape, scheme.parts[0]).scale_shape_of(shape[:-1])),
        scheme=scheme,
        shape=shape,
        source_dtype="bfloat16",
    )
