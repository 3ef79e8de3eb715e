# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of coded rows with rows of numbers, and the decoding of such rows, as vector code.

Rows are cut into chunks of 128 elements, a chunk into eight vectors of 16. Step s of a chunk of
4-bit codes is bits 4s..4s+3 of each of its 16 words of eight codes, so that a shift is all that
takes codes apart, and all codes of a lane share a block scale. The numbers lie in that order too:
see :func:`fp4kit.cpu.chunks.numbers`. 8-bit codes are taken as they lie.

A lane's products are summed in the order of the chunks and steps, by fused multiplication and
addition; then lanes are added in a fixed tree. That order is the same on all processors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from fp4kit.formats import FormatSpec

from .intrinsics import F32, U8, U32
from .vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF_SCALE,
    INDEX,
    LANES,
    Lanes,
    Vector,
    at,
    e2m1,
    e4m3_part,
    e5m2,
    e8m0,
    load,
    picked_exponents,
    prefetch,
    splat,
    store,
)

CHUNK = 128
STEPS = CHUNK // LANES
VECTOR_BYTES = 4 * LANES
#: Bytes that are read beyond a chunk of 4-bit codes.
SLACK = 3
POINTER = BYTE.as_pointer()


class Coding(NamedTuple):
    """What decides how rows are decoded.

    Attributes:
        element: `e2m1`, `e4m3` or `e5m2`.
        scale: type of the scales: `e4m3`, `e8m0`, `float32`, or "" for none.
        block: elements that share a scale, CHUNK for float32.
    """

    element: str
    scale: str
    block: int

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a chunk."""
        return CHUNK // 2 if self.element == "e2m1" else CHUNK

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a chunk."""
        return {"": 0, "float32": 4}.get(self.scale, CHUNK // self.block)

    @property
    def name(self) -> str:
        """Its part of the names of kernels."""
        return f"{self.element}_{self.scale or 'unscaled'}_{self.block}"


@cache
def coding_of(spec: FormatSpec, *, has_grid: bool) -> Coding:
    """The coding of a format's rows."""
    if spec.has_scale_grid:
        return Coding(spec.element.name, "float32" if has_grid else "", CHUNK)
    return Coding(spec.element.name, spec.scale_type, spec.block_size)


#: Gives the vector of a step.
Step = Callable[[int], Vector]


def _codes(coding: Coding, builder: Any, pointer: Any, features: frozenset[str]) -> Step:
    """Values of a chunk's codes, times HALF_SCALE under E4M3 scales."""
    if coding.element == "e2m1":
        factor = HALF_SCALE if coding.scale == "e4m3" else 1.0
        # Loads are shifts by whole bytes. They go SLACK bytes beyond the chunk, into bits that
        # nothing looks at.
        words = [load(builder, at(builder, pointer, byte), U32) for byte in range(SLACK + 1)]
        return lambda step: e2m1(words[step // 2] >> (4 * (step % 2)), factor, features)

    def value(step: int) -> Vector:
        byte = load(builder, at(builder, pointer, step * LANES), U8)
        if coding.element == "e5m2":
            return e5m2(byte)
        return e4m3_part(byte, ordinary=False) * HALF_SCALE

    return value


def _scales(coding: Coding, builder: Any, pointer: Any, *, ordinary: bool) -> Step:
    """Scales of a chunk, over HALF_SCALE if they are E4M3."""
    if coding.scale == "float32":
        number = builder.load(builder.bitcast(pointer, FLOAT.as_pointer()), align=1)
        one = splat(builder, number, F32)
        return lambda step: one
    picks = [lane * STEPS // coding.block for lane in range(LANES)]
    in_steps = coding.element == "e2m1"
    if coding.scale == "e8m0" and in_steps:
        exponents = picked_exponents(builder, pointer, picks)
        spread = e8m0(exponents, ordinary=ordinary)
        return lambda step: spread
    byte = load(builder, pointer, U8, coding.scale_bytes)
    if in_steps:
        spread = e4m3_part(byte.picked(picks), ordinary=ordinary)
        return lambda step: spread
    scales = e8m0(byte.cast(U32) << 23, ordinary=ordinary)
    return lambda step: scales.picked([step * LANES // coding.block] * LANES)


def _weights(coding: Coding, builder: Any, pointers: tuple[Any, Any], features: Any) -> Step:
    """Decoded elements of a chunk: code times scale, as the reference rounds it."""
    codes = _codes(coding, builder, pointers[0], features)
    if not coding.scale:
        return codes
    scales = _scales(coding, builder, pointers[1], ordinary=False)
    return lambda step: codes(step) * scales(step)


#: Gives the values of a loop anew, from its number and the old ones.
Body = Callable[[Any, list[Any]], list[Any]]


class Tile(NamedTuple):
    """The shape of what one call multiplies.

    Attributes:
        coding: of the coded rows.
        rows: coded rows.
        batch: rows of numbers.
        ordinary: scales multiply sums of eight products, one instruction an element less, where
            neither products nor scales can overflow: scales are E4M3 0 to 0x7E or E8M0 0 to 252,
            numbers as :func:`fp4kit.cpu.chunks.is_ordinary` says.
    """

    coding: Coding
    rows: int
    batch: int
    ordinary: bool = False


def _emit_products(builder: Any, tile: Tile, chunk: Any, sums: list[Vector], features: Any) -> Any:
    """Adds the products of a chunk to sums of all pairs of rows.

    The chunk is pointers to codes and scales of each coded row, and to each row of numbers.
    """
    coding, (codes, scales, numbers) = tile.coding, chunk
    pairs = list(zip(codes, scales, strict=True))

    def number(row: int, step: int) -> Vector:
        return load(builder, at(builder, numbers[row], step * VECTOR_BYTES), F32)

    if tile.ordinary:
        parts: list[Vector] = [None] * len(pairs)
        values = [_codes(coding, builder, one, features) for one, _ in pairs]
        factors = [_scales(coding, builder, one, ordinary=True)(0) for _, one in pairs]
        for step in range(STEPS):
            x = number(0, step)
            for row, value in enumerate(values):
                part = parts[row]
                parts[row] = value(step) * x if part is None else value(step).fma(x, part)
        return [p.fma(f, total) for p, f, total in zip(parts, factors, sums, strict=True)]
    values = [_weights(coding, builder, pair, features) for pair in pairs]
    for step in range(STEPS):
        weights = [value(step) for value in values]
        for column in range(tile.batch):
            x = number(column, step)
            for row, weight in enumerate(weights):
                place = row * tile.batch + column
                sums[place] = weight.fma(x, sums[place])
    return sums


def emit_loop(
    builder: Any, count: Any, start: list[Any], body: Callable[[Any, list[Any]], Any]
) -> Any:
    """Runs a body `count` times over values that it gives anew; returns the last ones."""
    entry = builder.block
    loop, end = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.cbranch(builder.icmp_unsigned("==", count, INDEX(0)), end, loop)
    builder.position_at_end(loop)
    number = builder.phi(INDEX)
    inside = [builder.phi(one.type) for one in start]
    results = body(number, inside)
    following = builder.add(number, INDEX(1))
    last = builder.block
    builder.cbranch(builder.icmp_unsigned("<", following, count), loop, end)
    builder.position_at_end(end)
    outside = [builder.phi(one.type) for one in start]
    number.add_incoming(INDEX(0), entry)
    number.add_incoming(following, last)
    for first, phi, result, final in zip(start, inside, results, outside, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(result, last)
        final.add_incoming(first, entry)
        final.add_incoming(result, last)
    return outside


def row_pointers(builder: Any, first: Any, stride: Any, count: int) -> list[Any]:
    """Pointers to rows that lie `stride` bytes apart."""
    return [at(builder, first, builder.mul(stride, INDEX(row))) for row in range(count)]


def emit_tile(builder: Any, tile: Tile, arguments: Any, features: frozenset[str]) -> None:
    """Writes the function of :func:`fp4kit.cpu.product_functions.tile_product`."""
    codes, code_stride, scales, scale_stride, numbers, number_stride, chunks, sums, fresh = (
        arguments
    )
    code_rows = row_pointers(builder, codes, code_stride, tile.rows)
    scale_rows = row_pointers(builder, scales, scale_stride, tile.rows)
    number_rows = row_pointers(builder, numbers, number_stride, tile.batch)
    places = [at(builder, sums, i * VECTOR_BYTES) for i in range(tile.rows * tile.batch)]
    begins = builder.icmp_unsigned("!=", fresh, INDEX(0))
    zero = ir.Constant(FLOATS, None)
    kept = [load(builder, place, F32).value for place in places]
    start = [builder.select(begins, zero, one) for one in kept]
    # The processor foresees no way from row to row.
    ahead = builder.mul(code_stride, INDEX(tile.rows))

    def body(number: Any, totals: list[Any]) -> list[Any]:
        def moved(pointers: list[Any], size: int) -> list[Any]:
            offset = builder.mul(number, INDEX(size))
            return [at(builder, pointer, offset) for pointer in pointers]

        chunk = (
            moved(code_rows, tile.coding.code_bytes),
            moved(scale_rows, tile.coding.scale_bytes),
            moved(number_rows, STEPS * VECTOR_BYTES),
        )
        for one in chunk[0]:
            prefetch(builder, at(builder, one, ahead))
        lanes = [Lanes(builder, total, F32) for total in totals]
        return [one.value for one in _emit_products(builder, tile, chunk, lanes, features)]

    for place, total in zip(places, emit_loop(builder, chunks, start, body), strict=True):
        store(place, Lanes(builder, total, F32))


def emit_decode(builder: Any, coding: Coding, arguments: Any, features: frozenset[str]) -> None:
    """Writes the function of :func:`fp4kit.cpu.product_functions.row_decoder`."""
    codes, code_ahead, scales, scale_ahead, out, chunks = arguments
    prefetch(builder, at(builder, scales, scale_ahead))

    def body(number: Any, _: list[Any]) -> list[Any]:
        def moved(pointer: Any, size: int) -> Any:
            return at(builder, pointer, builder.mul(number, INDEX(size)))

        pair = (moved(codes, coding.code_bytes), moved(scales, coding.scale_bytes))
        prefetch(builder, at(builder, pair[0], code_ahead))
        values = _weights(coding, builder, pair, features)
        for step in range(STEPS):
            target = moved(out, STEPS * VECTOR_BYTES)
            store(at(builder, target, step * VECTOR_BYTES), values(step))
        return []

    emit_loop(builder, chunks, [], body)
