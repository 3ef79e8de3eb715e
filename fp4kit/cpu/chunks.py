# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of products as kernels take them: rows of numbers in the order of steps, coded rows.

:mod:`fp4kit.cpu.product_code` says what chunks and steps are. Rows of numbers end with zeros up to
a whole chunk; of coded rows the last part of a chunk is copied and filled with zeros by the
kernels, because what lies behind it does not count.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.matmul import FloatOperand, QuantizedOperand
from fp4kit.formats import GRID_BLOCK

from .buffers import read_only, records
from .elements import ABS, INF_BITS, elements, float_bits, index, u32, widen
from .jit import jit, jit_of, jit_part
from .product_code import CHUNK, SLACK, STEPS, Coding, coding_of
from .product_functions import row_decoder
from .swizzle import TILE_ROWS, unswizzle_rows
from .threads import Run
from .vectors import LANES

#: Bits of 2^114: 8 * 6 * HALF_SCALE times that is finite.
LARGEST_ORDINARY = u32((127 + 114) << 23)
#: Bits of 2^-125, the least number whose half is exact.
SMALLEST_ORDINARY = u32(2 << 23)


class Shape(NamedTuple):
    """How coded rows lie.

    Attributes:
        code_row: bytes of the codes of a row.
        scale_row: bytes of its scales.
        code_chunk: bytes of the codes of a chunk.
        scale_chunk: bytes of its scales.
        depth: elements of a row.
        element_bits: 4 or 8.
        low_first: whether the even element takes the low nibble.
    """

    code_row: np.uint64
    scale_row: np.uint64
    code_chunk: np.uint64
    scale_chunk: np.uint64
    depth: np.uint64
    element_bits: np.uint64
    low_first: np.uint64


class CodedRows(NamedTuple):
    """Rows as kernels read them.

    Attributes:
        codes: uint8, flat.
        scales: uint8, flat; float32 scales as their bytes.
        shape: one record of Shape.
    """

    codes: np.ndarray
    scales: np.ndarray
    shape: np.ndarray


def coding(operand: QuantizedOperand) -> Coding:
    """What decides how an operand is decoded."""
    return coding_of(operand.format, has_grid=operand.grid_scale is not None)


def chunk_count(depth: int) -> int:
    """Chunks of a row, the last one filled up."""
    return -(-depth // CHUNK)


def zeros(rows: int, depth: int) -> np.ndarray:
    """float32 zeros (rows, whole chunks), each row at the beginning of a cache line."""
    count, line = rows * chunk_count(depth) * CHUNK, 64
    room = np.zeros(count + line // 4, np.float32)
    first = -room.ctypes.data % line // 4
    return room[first : first + count].reshape(rows, -1)


# Layers of a model are alike, and to make a record takes longer than to multiply a small one.
@lru_cache(256)
def _record(kind: Any, numbers: tuple[int, ...]) -> np.ndarray:
    return records(kind(*map(index, numbers)))


def coded_rows(operand: QuantizedOperand, begin: int, end: int) -> CodedRows:
    """Rows begin..end of an operand: a view, or a copy of what lies in another order."""
    code = coding(operand)
    if operand.transposed:
        codes = np.empty((end - begin, operand.packed.shape[0]), np.uint8)
        transpose_bytes(read_only(operand.packed), begin, codes)
    else:
        codes = operand.packed[begin:end]
    scales = _scale_rows(operand, begin, end)
    numbers = (
        codes.shape[1],
        scales.shape[1],
        code.code_bytes,
        code.scale_bytes,
        operand.depth,
        operand.format.element.bits,
        operand.low_first,
    )
    shape = _record(Shape, numbers)
    return CodedRows(read_only(codes.reshape(-1)), read_only(scales.reshape(-1)), shape)


@jit
def transpose_bytes(source, first, out):
    """Fills `out` with columns of a matrix from `first` on, as rows, eight bytes at a time."""
    rows, depth = index(out.shape[0]), index(out.shape[1])
    whole = depth // index(8) * index(8)
    for top in range(index(0), rows, index(64)):
        stop = min(top + index(64), rows)
        for k in range(index(0), whole, index(8)):
            for r in range(top, stop):
                for i in range(index(8)):
                    out[r, k + i] = source[k + i, index(first) + r]
        for k in range(whole, depth):
            for r in range(top, stop):
                out[r, k] = source[k, index(first) + r]


def lies_as_read(operand: QuantizedOperand) -> bool:
    """Whether :func:`coded_rows` copies nothing."""
    return (
        operand.scale_layout == "linear" and not operand.transposed and operand.grid_scale is None
    )


def _scale_rows(operand: QuantizedOperand, begin: int, end: int) -> np.ndarray:
    """Bytes of the scales of rows, row after row."""
    stored, layout = operand.block_scale, operand.scale_layout
    if operand.grid_scale is not None:
        grid = operand.grid_scale.T if operand.transposed else operand.grid_scale
        numbers = np.ascontiguousarray(grid[np.arange(begin, end) // GRID_BLOCK])
        return numbers.view(np.uint8)
    if stored is None:
        return np.empty((end - begin, 0), np.uint8)
    if layout == "linear":
        return np.ascontiguousarray((stored.T if operand.transposed else stored)[begin:end])
    words = stored.reshape(-1) if stored.ctypes.data % 4 == 0 else stored.flatten()
    result = np.empty((end - begin, -(-operand.blocks // 4)), np.uint32)
    unswizzle_rows(read_only(words.view(np.uint32)), begin, TILE_ROWS[layout], result)
    return result.view(np.uint8)


# -- rows of numbers ------------------------------------------------------------------------------


@jit
def arrange_rows(x, order, begin, end, out):
    """Rows begin..end as float32, zeros behind them left alone; see Order."""
    depth, swap, side = order[0].depth, order[0].swap, order[0].side
    width = index(out.shape[1])
    flat = out.reshape(-1)
    whole = depth // index(CHUNK) * index(CHUNK) if order[0].in_steps else index(0)
    for row in range(index(begin), index(end)):
        source = row * depth
        target = row // side * side * width + row % side
        for chunk in range(index(0), whole, index(CHUNK)):
            for step in range(index(STEPS)):
                for lane in range(index(LANES)):
                    element = x[source + chunk + lane * index(STEPS) + (step ^ swap)]
                    flat[target + (chunk + step * index(LANES) + lane) * side] = widen(element)
        for i in range(whole, depth):
            place = i
            if order[0].in_steps:
                inside = i - whole
                step = (inside % index(STEPS)) ^ swap
                place = whole + step * index(LANES) + inside // index(STEPS)
            flat[target + place * side] = widen(x[source + i])


@jit
def magnitudes(x):
    """Bits of the largest finite magnitude, and of the smallest but zero less one."""
    largest, smallest = u32(0), u32(0xFFFFFFFF)
    for i in range(index(x.size)):
        bits = float_bits(x[i]) & ABS
        largest = max(largest, bits if bits < INF_BITS else u32(0))
        smallest = min(smallest, bits - u32(1))
    return largest, smallest


class Order(NamedTuple):
    """How rows of numbers are to lie.

    Attributes:
        depth: elements of a row.
        swap: 1 if the odd element of a pair comes first in the codes, else 0.
        side: rows side by side, element by element: 1, or LANES in panels.
        in_steps: whether elements go into the order of steps.
    """

    depth: np.uint64
    swap: np.uint64
    side: np.uint64
    in_steps: np.uint64


def numbers(
    a: FloatOperand | QuantizedOperand, b: QuantizedOperand, side: int, multiple: int, run: Run
) -> np.ndarray:
    """Rows of the first operand for products with the second, without its second level.

    Args:
        a: first operand.
        b: second operand, whose coding decides the order.
        side: rows that lie side by side.
        multiple: rows are filled up with zeros to a multiple of it.
        run: how work is spread over threads.

    Returns:
        float32 (rows, whole chunks).
    """
    if isinstance(a, QuantizedOperand):
        a = FloatOperand(_decoded(a, run), "float32")
    out = zeros(-(-a.rows // multiple) * multiple, a.depth)
    x = read_only(elements(a.data, a.dtype))
    order = _record(Order, (a.depth, not b.low_first, side, b.format.packs_nibbles))
    if a.rows == 1:
        arrange_rows(x, order, 0, 1, out)
    else:
        run(lambda begin, end: arrange_rows(x, order, begin, end, out), a.rows, max(a.depth, 1))
    return out


def is_ordinary(x: np.ndarray) -> bool:
    """Whether sums of eight products of numbers with codes can be scaled afterwards."""
    largest, smallest = magnitudes(x.reshape(-1))
    return bool(largest <= LARGEST_ORDINARY and smallest >= SMALLEST_ORDINARY - 1)


def _decoded(operand: QuantizedOperand, run: Run) -> np.ndarray:
    """A quantized operand as float32 (rows, depth), as its elements lie."""
    out = zeros(operand.rows, operand.depth)
    _decode(operand, out, run)
    if operand.format.packs_nibbles:
        lanes = out.reshape(operand.rows, -1, STEPS, LANES).transpose(0, 1, 3, 2)
        if not operand.low_first:
            lanes = lanes[..., np.arange(STEPS) ^ 1]
        out = lanes.reshape(out.shape)
    return np.ascontiguousarray(out[:, : operand.depth])


# -- coded rows -----------------------------------------------------------------------------------


@jit_part
def whole_chunks(rows, stop):
    """Chunks of a row, or of rows, that end before row `stop`, to be read where they lie.

    Behind the last row of all there is nothing to read: the last one is left to the tail.
    """
    shape = rows.shape[0]
    is_last = stop * shape.code_row == index(rows.codes.size) and shape.depth > index(0)
    return (shape.depth - index(is_last)) // index(CHUNK)


@jit_part
def copy_tail(rows, row, chunks, count, codes, scales):
    """Copies what `count` rows have behind whole chunks, filled with zeros to a chunk."""
    shape = rows.shape[0]
    rest = shape.depth - index(chunks) * index(CHUNK)
    code_bytes = (rest * shape.element_bits + index(7)) // index(8)
    code_first, scale_first = index(chunks) * shape.code_chunk, index(chunks) * shape.scale_chunk
    scale_bytes = min(shape.scale_row - scale_first, shape.scale_chunk)
    for r in range(index(count)):
        source, target = (row + r) * shape.code_row + code_first, r * shape.code_chunk
        for i in range(shape.code_chunk):
            codes[target + i] = rows.codes[source + i] if i < code_bytes else np.uint8(0)
        if shape.element_bits == index(4) and rest % index(2):
            mask = np.uint8(0x0F) if shape.low_first else np.uint8(0xF0)
            codes[target + code_bytes - index(1)] &= mask
        source, target = (row + r) * shape.scale_row + scale_first, r * shape.scale_chunk
        for i in range(shape.scale_chunk):
            scales[target + i] = rows.scales[source + i] if i < scale_bytes else np.uint8(0)


@cache
def decode_kernel(code: Coding) -> Any:
    """A kernel that decodes rows begin..end to float32 in the order of steps."""
    decode_row = row_decoder(code)

    @jit_of(decode_row)
    def decode_rows(rows, begin, end, tail_codes, tail_scales, out):
        shape, zero = rows.shape[0], index(0)
        width = index(4 * out.shape[1])
        for row in range(index(begin), index(end)):
            chunks, target = whole_chunks(rows, row + index(1)), row * width
            codes = (rows.codes, row * shape.code_row, zero)
            scales = (rows.scales, row * shape.scale_row, zero)
            decode_row(codes, scales, (out, target), chunks)
            if chunks * index(CHUNK) < shape.depth:
                copy_tail(rows, row, chunks, 1, tail_codes, tail_scales)
                tail = (tail_codes, zero, zero), (tail_scales, zero, zero)
                target += chunks * index(4 * CHUNK)
                decode_row(tail[0], tail[1], (out, target), index(1))

    return decode_rows


def _decode(operand: QuantizedOperand, out: np.ndarray, run: Run) -> None:
    """Decodes an operand to float32 (rows, whole chunks) in the order of steps."""
    kernel = decode_kernel(coding(operand))

    def work(begin: int, end: int) -> None:
        rows = coded_rows(operand, begin, end)
        codes, scales = (np.empty(CHUNK + SLACK, np.uint8) for _ in range(2))
        kernel(rows, 0, end - begin, codes, scales, out[begin:end])

    run(work, out.shape[0], max(operand.depth, 1))
