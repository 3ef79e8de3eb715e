# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Residual channels of the CUDA backend."""

from __future__ import annotations

from fp4kit.backend.jobs import Job, RawArray
from fp4kit.backend.operations import Operations

from . import ready as cuda_ready
from .run import address_of, addresses_of, are_aligned


class CudaResidual(Operations):
    """The part of the CUDA backend that serves residual channels."""

    def quantize_residual(self, job: Job, order: RawArray | None) -> None:
        aligned = are_aligned(job.x, job.packed, job.block_scale)
        device, ordered = job.x.device.id, order is not None
        ready = cuda_ready.quantize_residual(device, job.plan, job.dtype, ordered, aligned)
        scale, codes, block_scale = addresses_of(job)
        ready.launch(job.x.data.ptr, scale, address_of(order), codes, block_scale)

    def dequantize_residual(
        self, job: Job, order: RawArray | None, out: RawArray, dtype: str
    ) -> None:
        aligned = are_aligned(job.packed, out)
        device, ordered = job.packed.device.id, order is not None
        ready = cuda_ready.dequantize_residual(device, job.plan, dtype, ordered, aligned)
        scale, codes, block_scale = addresses_of(job)
        ready.launch(codes, block_scale, scale, address_of(order), out.data.ptr)
