# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a quantized tensor holds, in logical order: unpacked codes, decoded block scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import fp4kit
from fp4kit import arrays
from fp4kit.formats import ELEMENT_TYPES
from fp4kit.reference.codecs import decode_e8m0

if TYPE_CHECKING:
    from .tensor import QuantizedTensor


def unpacked_codes(q: QuantizedTensor) -> Any:
    """See :meth:`QuantizedTensor.codes`."""
    plan = q.plan()
    raw = arrays.ingest_bytes(q.packed, "packed")
    with arrays.device_scope(raw.origin):
        codes = raw.data.reshape(plan.packed_shape)
        if plan.format.packs_nibbles:
            low, high = codes & 15, codes >> 4
            first, second = (low, high) if plan.nibble_order == "low_first" else (high, low)
            xp = arrays.array_module(raw.origin)
            codes = xp.stack((first, second), axis=-1).reshape(codes.shape[0], 2 * codes.shape[1])
        if plan.transposes:
            codes = codes.T
        codes = codes[: plan.rows, : plan.cols].reshape(q.shape)
        fresh = codes.copy(order="C")
        return arrays.emit(fresh, "uint8", raw.origin)


def decoded_scales(q: QuantizedTensor) -> Any:
    """See :meth:`QuantizedTensor.block_scale_values`."""
    plan = q.plan()
    stored = arrays.ingest_scales(q.block_scale, "block_scale", plan.format)
    if plan.grid is not None:
        with arrays.device_scope(stored.origin):
            return arrays.emit(stored.data.copy(order="C"), "float32", stored.origin)
    with arrays.device_scope(stored.origin):
        scales = stored.data
        if plan.scale_layout != "linear":
            scales = fp4kit.unswizzle(q.block_scale, (plan.vectors, plan.blocks), plan.scale_layout)
            scales = arrays.ingest_bytes(scales, "block_scale").data
        if not plan.is_columnwise:
            scales = scales.reshape(*q.shape[:-1], plan.blocks)
        elif plan.transposes or plan.scale_layout != "linear":
            scales = scales.T
        xp = arrays.array_module(stored.origin)
        table = xp.asarray(_table(plan.format.scale_type))
        return arrays.emit(xp.ascontiguousarray(table[scales]), "float32", stored.origin)


def _table(scale_type: str) -> Any:
    """The value of every scale byte."""
    if scale_type == "e8m0":
        return decode_e8m0(np.arange(256, dtype=np.uint8))
    return ELEMENT_TYPES[scale_type].values
