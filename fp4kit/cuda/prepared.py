# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights prepared for tensor cores, on the CUDA backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from fp4kit.backend.matmul import FloatOperand, Operand, PreparedOperand, QuantizedOperand
from fp4kit.backend.operations import Operations
from fp4kit.backend.prepared import WeightsJob, tile_shape
from fp4kit.formats import BLOCK_FORMATS, SCALE_LAYOUTS, FormatSpec
from fp4kit.layout import padded_scale_shape

from . import run as cuda_run
from .compile import CXX_FORMATS, Instance, instance
from .launch import WARP, grid_for
from .run import scratch

FILE = "matmul/prepare.cu"


@cache
def prepare_weights_kernel(spec: FormatSpec) -> Instance:
    """Rows of codes and scales to tiles."""
    return instance("prepare_weights_kernel", FILE, CXX_FORMATS[spec.name])


@cache
def restore_weights_kernel(spec: FormatSpec) -> Instance:
    """Tiles to rows of codes and linear scales."""
    return instance("restore_weights_kernel", FILE, CXX_FORMATS[spec.name])


def all_instances() -> list[Instance]:
    """Every kernel of this module."""
    formats = [spec for spec in BLOCK_FORMATS.values() if spec.packs_nibbles]
    kernels = (prepare_weights_kernel, restore_weights_kernel)
    return [kernel(spec) for kernel in kernels for spec in formats]


def restore(job: WeightsJob) -> None:
    """`Backend.restore_weights`."""
    row_tiles, depth_tiles, _ = tile_shape(job.format, job.rows, job.depth)
    arguments = (
        *(job.tiles, job.packed, job.block_scale, job.rows, job.packed.shape[1]),
        *(job.blocks, int(not job.low_first), row_tiles, depth_tiles),
    )
    grid = grid_for(row_tiles * depth_tiles * WARP)
    cuda_run.launch(restore_weights_kernel(job.format), grid, arguments)


@contextmanager
def in_rows(operand: Operand) -> Iterator[FloatOperand | QuantizedOperand]:
    """An operand as the general kernels take it, for what is launched in between.

    Prepared weights are restored to scratch memory.
    """
    if not isinstance(operand, PreparedOperand):
        yield operand
        return
    rows = operand.rows
    shapes = ((rows, operand.format.packed_cols(operand.depth)), (rows, operand.blocks))
    with cuda_run.byte_arrays(*shapes) as (packed, scales):
        restore(operand.weights_job(packed, scales))
        yield operand.stored_as(packed, scales)


class CudaPreparedWeights(Operations):
    """The part of the CUDA backend that prepares weights."""

    def prepare_weights(self, job: WeightsJob) -> bool:
        odd = scratch(1, np.uint32, clear=True)
        row_tiles, depth_tiles, _ = tile_shape(job.format, job.rows, job.depth)
        _, stored_cols = padded_scale_shape(job.rows, job.blocks, job.scale_layout)
        arguments = (
            *(job.packed, job.block_scale, job.tiles, odd, job.rows, job.packed.shape[1]),
            *(job.blocks, stored_cols, SCALE_LAYOUTS.index(job.scale_layout)),
            *(int(not job.low_first), row_tiles, depth_tiles),
        )
        grid = grid_for(row_tiles * depth_tiles * WARP)
        cuda_run.launch(prepare_weights_kernel(job.format), grid, arguments)
        return not int(odd.get()[0])

    def restore_weights(self, job: WeightsJob) -> None:
        restore(job)
