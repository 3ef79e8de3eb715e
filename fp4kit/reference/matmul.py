# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of quantized matrices, block by block of the depth.

The order of operations is that of Transformer Engine's reference product
(`custom_recipes/reference_nvfp4.py`): the sum over a block of codes, in float32 and exact for E2M1;
times the product of both block scales; added up block after block.
"""

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


def in_rows(operand: Operand) -> FloatOperand | QuantizedOperand:
    """An operand whose elements lie in rows."""
    return prepared_weights.stored(operand) if isinstance(operand, PreparedOperand) else operand


def step_of(operand: FloatOperand | QuantizedOperand) -> int:
    """Elements of the depth that share a block scale; 128 where all do."""
    if isinstance(operand, FloatOperand) or operand.block_scale is None:
        return GRID_BLOCK
    return operand.format.block_size


def scales_of(operand: FloatOperand | QuantizedOperand, step: int) -> Floats | None:
    """The block scale of each `step` elements of the depth, float32 (rows, steps), or None."""
    if isinstance(operand, FloatOperand):
        return None
    steps = -(-operand.depth // step)
    if operand.block_scale is not None:
        byte = linear_scales(operand)
        is_e8m0 = operand.format.scale_type == "e8m0"
        decoded = codecs.decode_e8m0(byte) if is_e8m0 else codecs.decode(byte, E4M3)
    elif operand.grid_scale is not None:
        grid = operand.grid_scale.T if operand.transposed else operand.grid_scale
        decoded = np.repeat(grid, GRID_BLOCK, axis=0)[: operand.rows]
    else:
        return None
    result: Floats = np.repeat(decoded, step_of(operand) // step, axis=1)[:, :steps]
    return result


def elements_of(operand: FloatOperand | QuantizedOperand, step: int) -> Floats:
    """The elements without any scale, float32 (rows, steps, step), zeros behind the depth."""
    if isinstance(operand, FloatOperand):
        values = codecs.to_float32(operand.data, operand.dtype)
    else:
        packed = operand.packed.T if operand.transposed else operand.packed
        if operand.format.packs_nibbles:
            order = "low_first" if operand.low_first else "high_first"
            packed = codecs.unpack_nibbles(packed, order)
        values = codecs.decode(packed[:, : operand.depth], operand.format.element)
    steps = -(-operand.depth // step)
    result = np.zeros((operand.rows, steps * step), np.float32)
    result[:, : operand.depth] = values
    return result.reshape(operand.rows, steps, step)


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
    """What multiplies each sum, float32, of a shape that broadcasts to that of the product.

    ((level of a * level of b) / divisor) * alpha, each step rounded.
    """
    result: Floats = np.ones((1, 1), np.float32)
    of_a, of_b = levels(job.a), levels(job.b)
    if of_a is not None:
        result = result * of_a[:, None]
    if of_b is not None:
        result = result * of_b
    return (result / job.divisor) * np.float32(job.alpha)


def sums(a: FloatOperand | QuantizedOperand, b: FloatOperand | QuantizedOperand) -> Floats:
    """The product without second levels, float32 (rows of a, rows of b)."""
    step = min(step_of(a), step_of(b))
    of_a, of_b = elements_of(a, step), elements_of(b, step)
    scale_a, scale_b = scales_of(a, step), scales_of(b, step)
    result = np.zeros((a.rows, b.rows), np.float32)
    for block in range(of_a.shape[1]):
        dot = np.zeros_like(result)
        for k in range(step):
            dot += np.multiply.outer(of_a[:, block, k], of_b[:, block, k])
        scale: Floats = np.ones((1, 1), np.float32)
        if scale_a is not None:
            scale = scale * scale_a[:, block, None]
        if scale_b is not None:
            scale = scale * scale_b[:, block]
        result += scale * dot
    return result


def matmul(job: MatmulJob) -> None:
    """`Backend.matmul`."""
    with scaling.quiet():
        result = factors(job) * sums(in_rows(job.a), in_rows(job.b))
        if job.bias is not None:
            result = result + codecs.to_float32(job.bias, job.bias_dtype)
        if job.c is not None:
            result = result + codecs.to_float32(job.c, job.c_dtype)
        job.out[...] = codecs.from_float32(result, job.out_dtype)
