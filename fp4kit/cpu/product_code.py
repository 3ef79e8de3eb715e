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
from numba import extending as untyped_extending
from numba import types as untyped_types

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
    at,
    e2m1,
    e4m3_part,
    e5m2,
    e8m0,
    features_of,
    load,
    picked_exponents,
    prefetch,
    splat,
    store,
)

extending: Any = untyped_extending
types: Any = untyped_types
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
Step = Callable[[int], Lanes]


def _codes(coding: Coding, builder: Any, pointer: Any, features: frozenset[str]) -> Step:
    """Values of a chunk's codes, times HALF_SCALE under E4M3 scales."""
    if coding.element == "e2m1":
        factor = HALF_SCALE if coding.scale == "e4m3" else 1.0
        # Loads are shifts by whole bytes. They go SLACK bytes beyond the chunk, into bits that
        # nothing looks at.
        words = [load(builder, at(builder, pointer, byte), U32) for byte in range(SLACK + 1)]
        return lambda step: e2m1(words[step // 2] >> (4 * (step % 2)), factor, features)

    def value(step: int) -> Lanes:
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


def _emit_products(builder: Any, tile: Tile, chunk: Any, sums: list[Lanes], features: Any) -> Any:
    """Adds the products of a chunk to sums of all pairs of rows.

    Args:
        chunk: pointers to codes and scales of each coded row, and to each row of numbers.
    """
    coding, (codes, scales, numbers) = tile.coding, chunk
    pairs = list(zip(codes, scales, strict=True))

    def number(row: int, step: int) -> Lanes:
        return load(builder, at(builder, numbers[row], step * VECTOR_BYTES), F32)

    if tile.ordinary:
        parts: list[Lanes | None] = [None] * len(pairs)
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


def _loop(builder: Any, count: Any, start: list[Any], body: Callable[[Any, list[Any]], Any]) -> Any:
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


def _rows(builder: Any, first: Any, stride: Any, count: int) -> list[Any]:
    """Pointers to rows that lie `stride` bytes apart."""
    return [at(builder, first, builder.mul(stride, INDEX(row))) for row in range(count)]


def _emit_tile(builder: Any, tile: Tile, arguments: Any, features: frozenset[str]) -> None:
    codes, code_stride, scales, scale_stride, numbers, number_stride, chunks, sums, fresh = (
        arguments
    )
    code_rows = _rows(builder, codes, code_stride, tile.rows)
    scale_rows = _rows(builder, scales, scale_stride, tile.rows)
    number_rows = _rows(builder, numbers, number_stride, tile.batch)
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

    for place, total in zip(places, _loop(builder, chunks, start, body), strict=True):
        store(place, Lanes(builder, total, F32))


def _emit_decode(builder: Any, coding: Coding, arguments: Any, features: frozenset[str]) -> None:
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

    _loop(builder, chunks, [], body)


def _known_to_numba(name: str, sizes: tuple[int, ...], emit: Callable[..., None]) -> Any:
    """What numba is to know of a function of LLVM that is called with arrays and numbers.

    Args:
        name: of the function.
        sizes: of each argument: 1 for a number, else the length of a tuple of an array, the bytes
            before what is meant, and numbers. All numbers are uint64.
        emit: writes the function's body: (builder, flat arguments, features).
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        passed: list[Any] = []
        for type_, value, size in zip(signature.args, values, sizes, strict=True):
            if size == 1:
                passed.append(value)
                continue
            array, offset, *numbers = (builder.extract_value(value, i) for i in range(size))
            data = context.make_array(type_[0])(context, builder, value=array).data
            passed += [at(builder, builder.bitcast(data, POINTER), offset), *numbers]
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [value.type for value in passed])
            function = ir.Function(builder.module, kind, name)
            function.linkage = "internal"
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            emit(inner, function.args, features_of(context))
            inner.ret_void()
        builder.call(function, passed)
        return context.get_dummy_value()

    def infer(_context: Any, *arguments: Any) -> Any:
        wanted = [
            types.uint64 if size == 1 else types.Tuple([one[0], *[types.uint64] * (size - 1)])
            for one, size in zip(arguments, sizes, strict=True)
        ]
        return types.none(*wanted), generate

    return infer


@cache
def tile_product(tile: Tile) -> Any:
    """A function for kernels that adds products of a tile to sums, 16 partial ones a pair of rows.

    Its arguments: codes, scales and numbers, each as (array, where, bytes from row to row); chunks;
    (sums, where, 1 if they begin with zero or else 0).
    """
    kind = "ordinary" if tile.ordinary else "exact"
    name = f"multiply_{kind}_{tile.coding.name}_{tile.rows}x{tile.batch}"

    def emit(builder: Any, arguments: Any, features: Any) -> None:
        _emit_tile(builder, tile, arguments, features)

    infer = _known_to_numba(name, (3, 3, 3, 1, 3), emit)

    def multiply(context, codes, scales, numbers, chunks, sums):  # type: ignore[no-untyped-def] # noqa: ANN
        return infer(context, codes, scales, numbers, chunks, sums)

    multiply.__name__ = name
    return extending.intrinsic(multiply)


@cache
def row_decoder(coding: Coding) -> Any:
    """A function for kernels that decodes chunks of a row to float32, in the order of steps.

    Its arguments: codes and scales, each as (array, where, how many bytes on is what will be
    decoded soon); (out, where); chunks.
    """
    name = f"decode_{coding.name}"

    def emit(builder: Any, arguments: Any, features: Any) -> None:
        _emit_decode(builder, coding, arguments, features)

    infer = _known_to_numba(name, (3, 3, 2, 1), emit)

    def decode(context, codes, scales, out, chunks):  # type: ignore[no-untyped-def] # noqa: ANN
        return infer(context, codes, scales, out, chunks)

    decode.__name__ = name
    return extending.intrinsic(decode)


@cache
def panel_product(rows: int, panels: int, row_bytes: int) -> Any:
    """A function for kernels that adds products of decoded rows and panels of numbers to sums.

    A panel is 16 rows of numbers side by side, so that each lane sums the products of one row, in
    the order of the depth.

    Its arguments: (decoded float32 rows `row_bytes` apart, where); (panels, where, bytes from panel
    to panel); depth; (sums of rows and 16 * panels, where, bytes from row to row).
    """
    name = f"multiply_panels_{rows}x{panels}"

    def emit(builder: Any, arguments: Any, _features: Any) -> None:
        decoded, numbers, panel_stride, depth, sums, sum_stride = arguments
        panel_firsts = _rows(builder, numbers, panel_stride, panels)

        def body(number: Any, totals: list[Any]) -> list[Any]:
            element, vector = (builder.mul(number, INDEX(size)) for size in (4, VECTOR_BYTES))
            x = [load(builder, at(builder, first, vector), F32) for first in panel_firsts]
            results = []
            weights = at(builder, decoded, element)
            for row in range(rows):
                # A constant distance is a part of the instruction and takes no register.
                place = at(builder, weights, row * row_bytes)
                place = builder.bitcast(place, FLOAT.as_pointer())
                weight = splat(builder, builder.load(place, align=4), F32)
                for panel, one in enumerate(x):
                    total = Lanes(builder, totals[row * panels + panel], F32)
                    results.append(weight.fma(one, total).value)
            return results

        start = [ir.Constant(FLOATS, None)] * (rows * panels)
        results = _loop(builder, depth, start, body)
        for row, first in enumerate(_rows(builder, sums, sum_stride, rows)):
            for panel in range(panels):
                place = at(builder, first, panel * VECTOR_BYTES)
                more = Lanes(builder, results[row * panels + panel], F32)
                store(place, load(builder, place, F32) + more)

    infer = _known_to_numba(name, (2, 3, 1, 3), emit)

    def multiply(context, rows, panels, depth, sums):  # type: ignore[no-untyped-def] # noqa: ANN
        return infer(context, rows, panels, depth, sums)

    multiply.__name__ = name
    return extending.intrinsic(multiply)


def _sum_lanes(_context: Any, sums: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=values[0])
        pointer = at(builder, builder.bitcast(array.data, POINTER), values[1])
        return load(builder, pointer, F32).total()

    return types.float32(sums, types.uint64), generate


#: The sum of the 16 partial sums at an offset in bytes.
sum_lanes = extending.intrinsic(_sum_lanes)
__all__ = ["FLOATS"]
