# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of products as rows of numbers for a GEMM: codes times block scales."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fp4kit.backend.matmul import FloatOperand, Operand, PreparedOperand, QuantizedOperand
from fp4kit.backend.prepared import TILE_DEPTH as PREPARED_DEPTH
from fp4kit.backend.prepared import TILE_ROWS as PREPARED_ROWS
from fp4kit.formats import SCALE_LAYOUTS, FormatSpec
from fp4kit.layout import TILE, padded_scale_shape
from fp4kit.plan import Plan
from fp4kit.scheme import Scheme

from . import ready as cuda_ready
from . import run
from .device import capability
from .geometry import LANE
from .launch import WARP, grid_for
from .matmul_choice import is_always_exact
from .matmul_instances import decode_fp4_kernel, decode_kernel, source_of
from .matmul_shapes import PREPARED, ROWS
from .matmul_small import arrays_of, order_of
from .matmul_words import addresses_of, flags_of

#: Rows of decoded operands are whole 16-byte pieces of any type.
STRIDE = 8
#: The least compute capability that multiplies pairs of bfloat16.
PAIRS_CAPABILITY = (8, 0)
#: Columns of stored scales that places of 32 bits do for.
MOST_STORED_COLUMNS = 1 << 24


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


def _is_whole(operand: QuantizedOperand, stride: int) -> bool:
    """Whether rows are whole blocks, one after the other, and as long as those of the result."""
    rowwise = operand.block_scale is not None and not operand.transposed
    return rowwise and operand.depth == stride and operand.depth % operand.format.block_size == 0


def form_of_fp4(operand: Operand, dtype: str, stride: int) -> int | None:
    """How FP4 weights lie, if `decode_fp4` takes them."""
    if isinstance(operand, FloatOperand) or not operand.format.packs_nibbles:
        return None
    exact = is_always_exact(operand, dtype)
    if not exact or capability(run.current_device()) < PAIRS_CAPABILITY:
        return None
    codes, _ = arrays_of(operand)
    if not run.is_aligned(codes):
        return None
    if isinstance(operand, PreparedOperand):
        return PREPARED
    _, stored = padded_scale_shape(operand.rows, operand.blocks, operand.scale_layout)
    return ROWS if _is_whole(operand, stride) and stored < MOST_STORED_COLUMNS else None


def decodes_blocks(operand: QuantizedOperand, rows: Rows, dtype: str) -> bool:
    """Whether the kernels of `dequantize` decode rows to what a GEMM takes."""
    return (
        _is_whole(operand, rows.stride)
        and rows.first % TILE[operand.scale_layout][0] == 0
        and is_always_exact(operand, dtype)
    )


def _decode_fp4(
    operand: PreparedOperand | QuantizedOperand, rows: Rows, dtype: str, target: int, form: int
) -> None:
    layout, high_first = order_of(operand)
    _, stored = padded_scale_shape(operand.rows, operand.blocks, layout)
    row_tiles, depth_tiles = -(-rows.number // PREPARED_ROWS), -(-operand.depth // PREPARED_DEPTH)
    row_tiles += rows.first % PREPARED_ROWS > 0  # of which a part is before the rows
    arguments = (
        *(*arrays_of(operand), target, rows.first, rows.number, depth_tiles, rows.stride),
        *(operand.format.packed_cols(operand.depth), stored),
        *(SCALE_LAYOUTS.index(layout), int(high_first)),
    )
    kernel = decode_fp4_kernel(operand.format, dtype, form)
    run.launch(kernel, grid_for(row_tiles * depth_tiles * WARP), arguments)


def decode(
    operand: PreparedOperand | QuantizedOperand, rows: Rows, dtype: str, target: int, flag: int
) -> None:
    """Writes rows as numbers.

    Args:
        operand: what is decoded; prepared weights as `form_of_fp4` takes them.
        rows: which rows.
        dtype: element type of the numbers.
        target: address of the first.
        flag: address of a word that becomes 1 if some value is none of that type.
    """
    form = form_of_fp4(operand, dtype, rows.stride)
    if form is not None:
        _decode_fp4(operand, rows, dtype, target, form)
        return
    assert isinstance(operand, QuantizedOperand)  # others were restored
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
