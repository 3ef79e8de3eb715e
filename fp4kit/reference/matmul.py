# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of quantized matrices, one element of the depth after the other."""

from __future__ import annotations

import numpy as np

from fp4kit.backend.matmul import (
    FloatOperand,
    MatmulJob,
    Operand,
    PreparedOperand,
    QuantizedOperand,
)
from fp4kit.formats import E4M3, GRID_BLOCK
from fp4kit.layout import scale_offsets

from . import codecs, scaling
from . import prepared as prepared_weights
from .codecs import Floats

ONE = np.float32(1)


def linear_scales(operand: QuantizedOperand) -> np.ndarray:
    """Scale bytes (rows, blocks) of an operand in any layout."""
    stored = operand.block_scale
    assert stored is not None
    if operand.scale_layout == "linear" and operand.transposed:
        turned: np.ndarray = stored.T
        return turned
    offsets = scale_offsets(operand.rows, operand.blocks, operand.scale_layout)
    result: np.ndarray = stored.reshape(-1)[offsets]
    return result


def block_scales(operand: QuantizedOperand) -> Floats:
    """The scale of each element, float32 (rows, depth)."""
    shape, spec = (operand.rows, operand.depth), operand.format
    if operand.block_scale is None:
        if operand.grid_scale is None:
            return np.ones(shape, np.float32)
        grid = operand.grid_scale.T if operand.transposed else operand.grid_scale
        rows = np.repeat(grid, GRID_BLOCK, axis=0)[: operand.rows]
        whole: Floats = np.repeat(rows, GRID_BLOCK, axis=1)[:, : operand.depth]
        return whole
    byte = linear_scales(operand)
    is_e8m0 = spec.scale_type == "e8m0"
    decoded = codecs.decode_e8m0(byte) if is_e8m0 else codecs.decode(byte, E4M3)
    scales: Floats = np.repeat(decoded, spec.block_size, axis=1)[:, : operand.depth]
    return scales


def values(operand: Operand) -> Floats:
    """An operand without its second level, float32 (rows, depth): code times block scale."""
    if isinstance(operand, FloatOperand):
        return codecs.to_float32(operand.data, operand.dtype)
    if isinstance(operand, PreparedOperand):
        operand = prepared_weights.stored(operand)
    packed = operand.packed.T if operand.transposed else operand.packed
    if operand.format.packs_nibbles:
        packed = codecs.unpack_nibbles(packed, "low_first" if operand.low_first else "high_first")
    codes = packed[:, : operand.depth]
    result: Floats = codecs.decode(codes, operand.format.element) * block_scales(operand)
    return result


def levels(operand: Operand) -> Floats | None:
    """The second level of each row as a factor, float32 (rows,), or None."""
    if isinstance(operand, FloatOperand) or operand.level is None:
        return None
    level = operand.level
    if operand.level_name != "amax":
        level = scaling.usable(level)
    if operand.level_name == "encode_scale":
        level = ONE / level
    result: Floats = np.repeat(level, operand.rows_per_level)
    return result


def factors(job: MatmulJob) -> Floats:
    """What multiplies each sum, float32, of a shape that broadcasts to that of the product."""
    result: Floats = np.full((1, 1), job.constant, np.float32)
    of_a, of_b = levels(job.a), levels(job.b)
    if of_a is not None:
        result = result * of_a[:, None]
    if of_b is not None:
        result = result * of_b
    return result * np.float32(job.alpha)


def matmul(job: MatmulJob) -> None:
    """`Backend.matmul`."""
    with scaling.quiet():
        a, b = values(job.a), values(job.b)
        sums = np.zeros((job.a.rows, job.b.rows), np.float32)
        for k in range(job.a.depth):
            sums += np.multiply.outer(a[:, k], b[:, k])
        result = factors(job) * sums
        if job.bias is not None:
            result = result + codecs.to_float32(job.bias, job.bias_dtype)
        if job.c is not None:
            result = result + codecs.to_float32(job.c, job.c_dtype)
        job.out[...] = codecs.from_float32(result, job.out_dtype)
