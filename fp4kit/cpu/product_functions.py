# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The functions of :mod:`fp4kit.cpu.product_code` as kernels call them, with arrays."""

# ruff: noqa: ANN001, ANN202 - numba infers the types

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import extending as untyped_extending
from numba import types as untyped_types

from .intrinsics import F32
from .product_code import (
    POINTER,
    VECTOR_BYTES,
    Coding,
    Tile,
    emit_decode,
    emit_loop,
    emit_tile,
    row_pointers,
)
from .vectors import FLOAT, FLOATS, INDEX, Lanes, Vector, at, features_of, load, splat, store

extending: Any = untyped_extending
types: Any = untyped_types


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
        emit_tile(builder, tile, arguments, features)

    infer = _known_to_numba(name, (3, 3, 3, 1, 3), emit)

    def multiply(context, codes, scales, numbers, chunks, sums):
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
        emit_decode(builder, coding, arguments, features)

    infer = _known_to_numba(name, (3, 3, 2, 1), emit)

    def decode(context, codes, scales, out, chunks):
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
        panel_firsts = row_pointers(builder, numbers, panel_stride, panels)

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
        results = emit_loop(builder, depth, start, body)
        for row, first in enumerate(row_pointers(builder, sums, sum_stride, rows)):
            for panel in range(panels):
                place = at(builder, first, panel * VECTOR_BYTES)
                more: Vector = Lanes(builder, results[row * panels + panel], F32)
                store(place, load(builder, place, F32) + more)

    infer = _known_to_numba(name, (2, 3, 1, 3), emit)

    def multiply(context, rows, panels, depth, sums):
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
