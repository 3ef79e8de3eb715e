# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Prepared weights in NumPy: :mod:`fp4kit.backend.prepared` says what lies where."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.matmul import PreparedOperand, QuantizedOperand
from fp4kit.backend.operations import Operations
from fp4kit.backend.prepared import (
    LEAST_SCALE_E8M0,
    MOST_SCALE_E8M0,
    TILE_CODES,
    TILE_DEPTH,
    TILE_ROWS,
    WeightsJob,
    tile_shape,
)
from fp4kit.formats import E4M3, FormatSpec
from fp4kit.layout import scale_offsets

Bytes = NDArray[np.uint8]
#: Row tiles at a time, so that what lies between stays in the caches of a CPU.
_STRIP = 4


def _spread(values: NDArray[np.uint32], sign: int, magnitude: tuple[int, int, int]) -> Any:
    """Codes with their sign and the bits of their magnitude, the lowest first, moved to places."""
    result = (values >> 3 & 1) << sign
    for bit, place in enumerate(magnitude):
        result = result | (values >> bit & 1) << place
    return result


@cache
def _half_tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What the low and the high four codes of a word contribute to a prepared word."""
    half = np.arange(1 << 16, dtype=np.uint32)
    codes: list[Any] = [half >> (4 * j) & 15 for j in range(4)]
    first, second = (
        _spread(codes[parity], 15, (6, 7, 8)) | _spread(codes[2 + parity], 12, (3, 4, 5))
        for parity in range(2)
    )
    third, fourth = (
        _spread(codes[parity], 9, (0, 1, 2)) | _spread(codes[2 + parity], 11, (13, 14, 10))
        for parity in range(2)
    )
    return first | second << 16, third | fourth << 16


@cache
def _restore_table() -> NDArray[np.uint32]:
    """The codes of each half of a prepared word, in the low nibbles of bytes."""
    half = np.arange(1 << 16, dtype=np.uint32)
    places = ((15, (6, 7, 8)), (12, (3, 4, 5)), (9, (0, 1, 2)), (11, (13, 14, 10)))
    result = np.zeros_like(half)
    for number, (sign, magnitude) in enumerate(places):
        code = (half >> sign & 1) << 3
        for bit, place in enumerate(magnitude):
            code = code | (half >> place & 1) << bit
        result |= code << (8 * number)
    return result


def _swap_nibbles(codes: Bytes) -> Bytes:
    swapped: Bytes = (codes >> 4 | codes << 4).astype(np.uint8, copy=False)
    return swapped


def _shape_of_words(tiles: int, depth_tiles: int) -> tuple[int, ...]:
    """(row tile, g, r, depth tile, t, i): rows are 2 g + r, words 4 t + i."""
    return tiles, TILE_ROWS // 2, 2, depth_tiles, 4, 4


def _shape_of_scales(spec: FormatSpec, tiles: int, depth_tiles: int) -> tuple[int, ...]:
    """(row tile, g, r, depth tile, t, block of a lane)."""
    return tiles, TILE_ROWS // 2, 2, depth_tiles, 4, TILE_DEPTH // spec.block_size // 4


def is_plain(spec: FormatSpec, codes: Bytes, scales: Bytes) -> bool:
    """Whether the kernels of small products take all blocks: see :attr:`PreparedTensor.is_plain`.

    Args:
        spec: an FP4 format.
        codes: (rows, blocks * block_size / 2).
        scales: (rows, blocks).
    """
    if spec.scale_type != "e8m0":
        return bool(scales.max(initial=0) <= E4M3.max_code)
    if scales.max(initial=0) > MOST_SCALE_E8M0:
        return False
    small = scales < LEAST_SCALE_E8M0
    of_small = codes.reshape(*scales.shape, -1)[small]
    return not bool((of_small & 0x77).any())


def prepare(job: WeightsJob) -> bool:
    """`Backend.prepare_weights`."""
    spec = job.format
    row_tiles, depth_tiles, _ = tile_shape(spec, job.rows, job.depth)
    low, high = _half_tables()
    plain = True
    offsets = None
    if job.scale_layout != "linear":
        offsets = scale_offsets(job.rows, job.blocks, job.scale_layout)
    for start in range(0, row_tiles, _STRIP):
        count = min(_STRIP, row_tiles - start)
        lines = slice(start * TILE_ROWS, min((start + count) * TILE_ROWS, job.rows))
        codes = np.zeros((count * TILE_ROWS, depth_tiles * TILE_DEPTH // 2), np.uint8)
        given = job.packed[lines]
        codes[: given.shape[0], : given.shape[1]] = given if job.low_first else _swap_nibbles(given)
        halves = codes.view("<u2")
        words = low[halves[:, ::2]] | high[halves[:, 1::2]]
        stored = (
            job.block_scale[lines]
            if offsets is None
            else job.block_scale.reshape(-1)[offsets[lines]]
        )
        scales = np.zeros(
            (count * TILE_ROWS, depth_tiles * TILE_DEPTH // spec.block_size), np.uint8
        )
        scales[: stored.shape[0], : stored.shape[1]] = stored
        plain = plain and is_plain(spec, codes, scales)
        target = job.tiles[start : start + count]
        ordered = words.reshape(_shape_of_words(count, depth_tiles)).transpose(0, 3, 2, 1, 4, 5)
        target[:, :, :TILE_CODES] = (
            np.ascontiguousarray(ordered, "<u4").view(np.uint8).reshape(count, depth_tiles, -1)
        )
        shape = _shape_of_scales(spec, count, depth_tiles)
        target[:, :, TILE_CODES:] = (
            scales.reshape(shape).transpose(0, 3, 1, 4, 2, 5).reshape(count, depth_tiles, -1)
        )
    return plain


def restore(job: WeightsJob) -> None:
    """`Backend.restore_weights`."""
    spec = job.format
    row_tiles, depth_tiles, _ = tile_shape(spec, job.rows, job.depth)
    table = _restore_table()
    for start in range(0, row_tiles, _STRIP):
        count = min(_STRIP, row_tiles - start)
        lines = slice(start * TILE_ROWS, min((start + count) * TILE_ROWS, job.rows))
        source = job.tiles[start : start + count]
        halves = np.ascontiguousarray(source[:, :, :TILE_CODES]).view("<u2")
        even, odd = table[halves[..., ::2]], table[halves[..., 1::2]]
        words = (even | odd << 4).reshape(count, depth_tiles, 2, TILE_ROWS // 2, 4, 4)
        ordered = np.ascontiguousarray(words.transpose(0, 3, 2, 1, 4, 5), "<u4")
        codes = ordered.view(np.uint8).reshape(count * TILE_ROWS, -1)
        target = job.packed[lines]
        wanted = codes[: target.shape[0], : target.shape[1]]
        target[...] = wanted if job.low_first else _swap_nibbles(wanted)
        _, groups, _, _, lanes, each = _shape_of_scales(spec, count, depth_tiles)
        scales = source[:, :, TILE_CODES:].reshape(count, depth_tiles, groups, lanes, 2, each)
        ordered_scales = scales.transpose(0, 2, 4, 1, 3, 5).reshape(count * TILE_ROWS, -1)
        job.block_scale[lines] = ordered_scales[: target.shape[0], : job.blocks]


def stored(operand: PreparedOperand) -> QuantizedOperand:
    """A prepared operand in rows."""
    spec = operand.format
    packed = np.empty((operand.rows, spec.packed_cols(operand.depth)), np.uint8)
    scales = np.empty((operand.rows, operand.blocks), np.uint8)
    restore(operand.weights_job(packed, scales))
    return operand.stored_as(packed, scales)


class HostPreparedWeights(Operations):
    """Prepared weights on the host: bytes that move, and no arithmetic."""

    def prepare_weights(self, job: WeightsJob) -> bool:
        return prepare(job)

    def restore_weights(self, job: WeightsJob) -> None:
        restore(job)
