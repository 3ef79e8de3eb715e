# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of products as rows of numbers for a GEMM: codes times block scales."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fp4kit.backend.matmul import PreparedOperand, QuantizedOperand
from fp4kit.backend.prepared import TILE_DEPTH as PREPARED_DEPTH
from fp4kit.backend.prepared import TILE_ROWS as PREPARED_ROWS
from fp4kit.formats import FormatSpec
from fp4kit.layout import TILE, padded_scale_shape
from fp4kit.plan import Plan
from fp4kit.scheme import Scheme

from . import ready as cuda_ready
from . import run
from .device import capability
from .geometry import LANE
from .launch import WARP, grid_for
from .matmul_choice import is_always_exact
from .matmul_instances import decode_kernel, decode_prepared_kernel, source_of
from .matmul_words import addresses_of, flags_of

#: Rows of decoded operands are whole 16-byte pieces of any type.
STRIDE = 8
#: The least compute capability that multiplies pairs of bfloat16.
PAIRS_CAPABILITY = (8, 0)


class Rows(NamedTuple):
    """Rows of an operand that are decoded.

    Attributes:
        first: the first of them.
        number: how many.
        stride: elements from row to row of the result, a multiple of STRIDE.
    """

    first: int
    number: int
    stride: int


@lru_cache(maxsize=256)
def _codes_times_scales(
    spec: FormatSpec, rows: int, depth: int, layout: str, low_first: bool
) -> Plan:
    """How rows of blocks are decoded without a second level."""
    scheme = Scheme(
        spec.name,  # type: ignore[arg-type]
        recipe="torchao" if spec.has_second_level else None,
        second_level="none" if spec.has_second_level else None,
        scale_layout=layout,  # type: ignore[arg-type]
        nibble_order="low_first" if low_first or not spec.packs_nibbles else "high_first",
    )
    return Plan(scheme.parts[0].decoding, rows, depth)


def decodes_tiles(operand: PreparedOperand, dtype: str) -> bool:
    """Whether prepared weights are decoded as they lie."""
    known = capability(run.current_device()) >= PAIRS_CAPABILITY
    return known and is_always_exact(operand, dtype) and run.is_aligned(operand.tiles.data.ptr)


def decodes_blocks(operand: QuantizedOperand, rows: Rows, dtype: str) -> bool:
    """Whether the kernels of `dequantize` decode rows to what a GEMM takes."""
    whole = operand.depth == rows.stride and operand.depth % operand.format.block_size == 0
    rowwise = operand.block_scale is not None and not operand.transposed
    return (
        whole
        and rowwise
        and rows.first % TILE[operand.scale_layout][0] == 0
        and is_always_exact(operand, dtype)
    )


def _decode_prepared(operand: PreparedOperand, rows: Rows, dtype: str, target: int) -> None:
    row_tiles, depth_tiles = -(-rows.number // PREPARED_ROWS), -(-operand.depth // PREPARED_DEPTH)
    row_tiles += rows.first % PREPARED_ROWS > 0  # of which a part is before the rows
    shape = (rows.first, rows.number, depth_tiles, rows.stride)
    kernel = decode_prepared_kernel(operand.format, dtype)
    grid = grid_for(row_tiles * depth_tiles * WARP)
    run.launch(kernel, grid, (operand.tiles.data.ptr, target, *shape))


def decode(
    operand: PreparedOperand | QuantizedOperand, rows: Rows, dtype: str, target: int, flag: int
) -> None:
    """Writes rows as numbers.

    Args:
        operand: what is decoded; prepared weights as `decodes_tiles` takes them.
        rows: which rows.
        dtype: element type of the numbers.
        target: address of the first.
        flag: address of a word that becomes 1 if some value is none of that type.
    """
    if isinstance(operand, PreparedOperand):
        _decode_prepared(operand, rows, dtype, target)
        return
    data, scale, _ = addresses_of(operand)
    if decodes_blocks(operand, rows, dtype):
        spec, layout = operand.format, operand.scale_layout
        plan = _codes_times_scales(spec, rows.number, operand.depth, layout, operand.low_first)
        _, stored = padded_scale_shape(rows.number, plan.blocks, layout)
        data += rows.first * spec.packed_cols(operand.depth)
        scale += rows.first * stored
        aligned = run.is_aligned(data | target)
        ready = cuda_ready.dequantize(run.current_device(), plan, dtype, 1, aligned)
        ready.launch(data, scale, 0, target)
        return
    given = 0 if is_always_exact(operand, dtype) else flag
    grid = grid_for(rows.number * -(-rows.stride // LANE))
    shape = (operand.depth, rows.first, rows.number, rows.stride)
    words = (data, scale, operand.rows, flags_of(operand), *shape, target, given)
    run.launch(decode_kernel(source_of(operand), dtype), grid, words)
