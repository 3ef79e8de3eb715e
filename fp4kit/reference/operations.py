# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations, column sums and residual channels in NumPy, step by step."""

from __future__ import annotations

import numpy as np

from fp4kit import layout
from fp4kit.backend.jobs import Job, Prologue, RawArray
from fp4kit.backend.matmul import MatmulJob
from fp4kit.backend.operations import Operations
from fp4kit.formats import E2M1, NVFP4

from . import activations, codecs, matmul, residual_blocks, scaling


class ReferenceOperations(Operations):
    """What the reference backend offers beside quantization itself."""

    def activate(self, prologue: Prologue, out: RawArray) -> None:
        dtype, other = prologue.dtype, prologue.other
        z = None if other is None else codecs.to_float32(other, dtype)
        assert prologue.activation is not None
        with scaling.quiet():
            values = codecs.to_float32(prologue.x, dtype)
            result = activations.activation(prologue.activation, values, z)
            out[...] = codecs.from_float32(result, dtype)

    def column_sums(self, x: RawArray, dtype: str, out: RawArray) -> None:
        with scaling.quiet():
            sums = activations.column_sums(codecs.to_float32(x, dtype))
            out[...] = codecs.from_float32(sums, "float32")

    def quantize_residual(self, job: Job, order: RawArray | None) -> None:
        plan = job.plan
        values = codecs.to_float32(job.x, job.dtype)
        if order is not None:
            values = values[:, order]
        with scaling.quiet():
            code, byte = residual_blocks.encode(plan, values, scaling.usable(job.second))
        job.packed[...] = codecs.pack_nibbles(code, plan.nibble_order)
        flat = np.zeros(job.block_scale.size, np.uint8)
        flat[layout.scale_offsets(plan.rows, plan.blocks, plan.scale_layout)] = byte
        job.block_scale[...] = flat.reshape(job.block_scale.shape)

    def dequantize_residual(
        self, job: Job, order: RawArray | None, out: RawArray, dtype: str
    ) -> None:
        plan = job.plan
        offsets = layout.scale_offsets(plan.rows, plan.blocks, plan.scale_layout)
        code = codecs.unpack_nibbles(job.packed, plan.nibble_order)
        value = codecs.decode(code, E2M1).reshape(plan.rows, plan.blocks, NVFP4.block_size)
        with scaling.quiet():
            result = residual_blocks.decode(plan, value, job.block_scale.ravel()[offsets])
            result = result * (scaling.ONE / scaling.usable(job.second))
            stored = codecs.from_float32(result, dtype)
        out[:, slice(None) if order is None else order] = stored

    def matmul(self, job: MatmulJob) -> None:
        matmul.matmul(job)
