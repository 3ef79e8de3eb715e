# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Residual channels of the CUDA backend."""

from __future__ import annotations

from fp4kit.backend.operations import Operations, RawArray, ResidualPlan

from . import ready as cuda_ready
from .run import address_of, are_aligned


class CudaResidual(Operations):
    """The part of the CUDA backend that serves residual channels."""

    def quantize_residual(
        self,
        plan: ResidualPlan,
        x: RawArray,
        dtype: str,
        scale: RawArray,
        order: RawArray | None,
        packed: RawArray,
        block_scale: RawArray,
    ) -> None:
        aligned = are_aligned(x, packed, block_scale)
        device = x.device.id
        ready = cuda_ready.quantize_residual(device, plan, dtype, order is not None, aligned)
        pointers = (array.data.ptr for array in (packed, block_scale))
        ready.launch(x.data.ptr, scale.data.ptr, address_of(order), *pointers)

    def dequantize_residual(
        self,
        plan: ResidualPlan,
        packed: RawArray,
        block_scale: RawArray,
        scale: RawArray,
        order: RawArray | None,
        out: RawArray,
        dtype: str,
    ) -> None:
        aligned = are_aligned(packed, out)
        device = packed.device.id
        ready = cuda_ready.dequantize_residual(device, plan, dtype, order is not None, aligned)
        pointers = (array.data.ptr for array in (packed, block_scale, scale))
        ready.launch(*pointers, address_of(order), out.data.ptr)
