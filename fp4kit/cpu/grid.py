# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 under float32 scales: see :mod:`fp4kit.reference.grid` for what is computed.

Data is flat words of two elements, rows of an even number of them. A rectangle shares a scale: its
amax, scale and codes are made while its elements are in the cache.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.interface import Job, Plan
from fp4kit.reference import scaling
from fp4kit.reference.grid import LIMITS, zero_scale

from .buffers import aligned_output, padded_rows, read_only
from .codecs import encode_float8
from .elements import (
    bits_float,
    f32,
    high,
    high_magnitude,
    index,
    infinity_of,
    join,
    low,
    low_magnitude,
    narrow_half,
    round_to_bfloat,
    u32,
    widen_half,
    widen_magnitude,
    words,
)
from .intrinsics import F32, I32, U16, U32, U64, intrinsic
from .jit import jit, jit_inner, jit_part
from .quantize import largest_known
from .threads import run

#: Words in a piece of work where one scale serves all: 8192 elements.
PIECE = 4096


class Cut(NamedTuple):
    """How a matrix is cut into rectangles.

    Attributes:
        rows: rows of the matrix.
        words: words of a row.
        tile_rows: rows of a rectangle.
        tile_words: words of a row of it.
        across: rectangles side by side.
        step: from the scale of a rectangle to that of the next: 1, or 0 if all share one.
    """

    rows: int
    words: int
    tile_rows: int
    tile_words: int
    across: int
    step: int


class Rules(NamedTuple):
    """The element type and the order of operations: see :mod:`fp4kit.reference.grid`.

    Attributes:
        mantissa_bits: of the element type.
        bias: of the element type.
        max_value: largest element.
        measures: whether scales are made here.
        rounds_scale: as in GridRecipe.
        rounds_quotient: as in GridRecipe.
        largest: largest finite number of the input's type.
        zero_scale: scale of what has no usable one.
    """

    mantissa_bits: int
    bias: int
    max_value: np.float32
    measures: bool
    rounds_scale: bool
    rounds_quotient: bool
    largest: np.float32
    zero_scale: np.float32


@intrinsic(F32(F32, U32), F32(F32, I32), F32(F32, U64))
def round_like(value, word):
    """A float32 rounded to the element type of a word."""
    if word.kind == U32:
        return round_to_bfloat(value)
    return widen_half(narrow_half(value)) if word.kind == I32 else value


@intrinsic(U16(U32, U32))
def code_word(even, odd):
    """The word of two codes."""
    return (even | (odd << 8)).cast(U16)


@jit_part
def scale_of(rules, amax, word):
    """The scale of an amax."""
    result = min(amax, rules.largest) / rules.max_value
    if rules.rounds_scale:
        result = round_like(result, word)
    if not (result > f32(0) and result <= rules.largest):
        result = rules.zero_scale
    return result


@jit_part
def rectangle_amax(words, first, rows, row_words, count):
    """The amax of a rectangle, NaN ignored."""
    infinity, largest = infinity_of(words[first]), u32(0)
    for row in range(rows):
        even, odd, start = u32(0), u32(0), first + row * row_words
        for i in range(count):
            even = max(even, low_magnitude(words[start + i]))
            odd = max(odd, high_magnitude(words[start + i]))
        largest = max(largest, max(even, odd))
    if largest > infinity:
        largest = u32(0)
        for row in range(rows):
            for i in range(count):
                largest = max(largest, largest_known(words[first + row * row_words + i]))
    return bits_float(widen_magnitude(largest, words[first]))


@jit_inner
def encode_row(words, first, count, divisor, rules, codes):
    """Words of two codes of `count` words under one scale."""
    bits, bias, largest = u32(rules.mantissa_bits), u32(rules.bias), rules.max_value
    if rules.rounds_quotient:
        for i in range(count):
            word = words[first + i]
            even, odd = low(word) / divisor, high(word) / divisor
            even, odd = round_like(even, word), round_like(odd, word)
            even = encode_float8(even, bits, bias, largest)
            odd = encode_float8(odd, bits, bias, largest)
            codes[first + i] = code_word(even, odd)
    else:
        for i in range(count):
            word = words[first + i]
            even, odd = low(word) / divisor, high(word) / divisor
            even = encode_float8(even, bits, bias, largest)
            odd = encode_float8(odd, bits, bias, largest)
            codes[first + i] = code_word(even, odd)


@jit
def quantize_rectangles(words, begin, end, cut, rules, scale, codes):
    """Quantizes rectangles begin..end into words of two codes; makes their scales if it should.

    Returns the largest amax of theirs.
    """
    seen = f32(0)
    row_words, across = index(cut.words), index(cut.across)
    for number in range(index(begin), index(end)):
        strip = number // across
        at, row = (number - strip * across) * index(cut.tile_words), strip * index(cut.tile_rows)
        count = min(index(cut.tile_words), row_words - at)
        rows = min(index(cut.tile_rows), index(cut.rows) - row)
        first = row * row_words + at
        # Also where the scale is known: the divisions below would wait for memory, this pass does
        # not, and leaves the elements in the cache.
        amax = rectangle_amax(words, first, rows, row_words, count)
        seen = max(seen, amax)
        if rules.measures:
            scale[number] = scale_of(rules, amax, words[first])
        divisor = scale[number * index(cut.step)]
        for _ in range(rows):
            encode_row(words, first, count, divisor, rules, codes)
            first += row_words
    return seen


@jit
def quantize_columns(words, begin, end, cut, rules, scale, codes):
    """Quantizes rows begin..end under one scale for each column (an even number of them)."""
    bits, bias, largest = u32(rules.mantissa_bits), u32(rules.bias), rules.max_value
    for row in range(index(begin), index(end)):
        first = row * index(cut.words)
        for i in range(index(cut.words)):
            word = words[first + i]
            even, odd = low(word) / scale[2 * i], high(word) / scale[2 * i + index(1)]
            if rules.rounds_quotient:
                even, odd = round_like(even, word), round_like(odd, word)
            even = encode_float8(even, bits, bias, largest)
            odd = encode_float8(odd, bits, bias, largest)
            codes[first + i] = code_word(even, odd)


@jit
def dequantize_rectangles(codes, begin, end, cut, table, scale, out):
    """Decodes rectangles begin..end to words of two elements."""
    row_words, across = index(cut.words), index(cut.across)
    for number in range(index(begin), index(end)):
        strip = number // across
        at, row = (number - strip * across) * index(cut.tile_words), strip * index(cut.tile_rows)
        count = min(index(cut.tile_words), row_words - at)
        rows = min(index(cut.tile_rows), index(cut.rows) - row)
        first = row * row_words + at
        factor = scale[number * index(cut.step)]
        for _ in range(rows):
            for i in range(count):
                word = u32(codes[first + i])
                even, odd = table[word & u32(0xFF)] * factor, table[word >> u32(8)] * factor
                out[first + i] = join(even, odd, out[first + i])
            first += row_words


@jit
def dequantize_columns(codes, begin, end, cut, table, scale, out):
    """Decodes rows begin..end under one scale for each column (an even number of them)."""
    for row in range(index(begin), index(end)):
        first = row * index(cut.words)
        for i in range(index(cut.words)):
            word = u32(codes[first + i])
            even = table[word & u32(0xFF)] * scale[2 * i]
            odd = table[word >> u32(8)] * scale[2 * i + index(1)]
            out[first + i] = join(even, odd, out[first + i])


def _rules(plan: Plan, dtype: str, *, measures: bool) -> Rules:
    element, recipe = plan.format.element, plan.grid_recipe
    return Rules(
        element.mantissa_bits,
        element.bias,
        np.float32(element.max),
        measures,
        recipe.rounds_scale,
        recipe.rounds_quotient,
        LIMITS[dtype][0],
        zero_scale(recipe, dtype),
    )


KERNELS = {
    "quantize_rectangles": quantize_rectangles,
    "quantize_columns": quantize_columns,
    "dequantize_rectangles": dequantize_rectangles,
    "dequantize_columns": dequantize_columns,
}


def _run(plan: Plan, name: str, source: Any, rules: Any, scale: Any, target: Any) -> None:
    """Runs a kernel (source, begin, end, cut, rules, scale, target) over a matrix."""
    measures = getattr(rules, "measures", False)
    assert plan.grid is not None
    rows, cols = plan.grid
    width = -(-plan.cols // 2)
    across, flat = plan.scale_shape[1], scale.reshape(-1)
    if flat.size > 1 and plan.scale_shape[0] == 1 and cols == 1:
        # Each column has a scale of its own, and so has what an odd number of them is padded with.
        flat = np.append(flat, np.ones(flat.size % 2, np.float32))
        cut = Cut(plan.rows, width, 1, width, 1, 0)
        work, count, size = KERNELS[f"{name}_columns"], plan.rows, 2 * width
    else:
        if flat.size == 1 and not measures:
            # One long row: whatever the shape is, pieces of it are work for all cores.
            total = plan.rows * width
            cut = Cut(1, total, 1, PIECE, -(-total // PIECE), 0)
        else:
            tile = width if across == 1 else cols // 2
            cut = Cut(plan.rows, width, rows, tile, across, 1)
        work = KERNELS[f"{name}_rectangles"]
        count = cut.across * -(-cut.rows // cut.tile_rows)
        size = 2 * cut.tile_rows * cut.tile_words
    run(lambda b, e: work(source, b, e, cut, rules, flat, target), count, size)


def quantize(job: Job) -> None:
    """Fills codes and scales; a scale of the whole tensor and those of columns are given."""
    plan, packed, scale = job.plan, job.packed, job.block_scale
    if job.second is not None:
        scale[...] = scaling.usable(job.second).reshape(plan.scale_shape)
    even = plan.cols + plan.cols % 2
    source = read_only(words(padded_rows(job.x, even), job.dtype))
    codes = packed
    if packed.shape[1] != even or packed.ctypes.data % 2:
        codes = np.empty((plan.rows, even), np.uint8)
    rules = _rules(plan, job.dtype, measures=job.second is None)
    _run(plan, "quantize", source, rules, scale, codes.reshape(-1).view(np.uint16))
    if codes is not packed:
        packed[...] = codes[:, : plan.cols]


def dequantize(job: Job, out: np.ndarray, dtype: str) -> None:
    """`Backend.dequantize`."""
    plan = job.plan
    even = plan.cols + plan.cols % 2
    codes = padded_rows(job.packed, even).reshape(-1)
    if codes.ctypes.data % 2:
        codes = codes.copy()
    source, table = read_only(codes.view(np.uint16)), read_only(plan.format.element.values)
    with aligned_output(out, even) as whole:
        _run(plan, "dequantize", source, table, job.block_scale, words(whole, dtype))
