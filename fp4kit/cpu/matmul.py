# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of quantized matrices; :mod:`fp4kit.reference.matmul` says what is computed.

Few rows are multiplied as the codes of the other matrix are decoded, in registers. For many rows
it is decoded to float32, some rows at a time, which BLAS multiplies.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - numba infers the types

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.matmul import MatmulJob
from fp4kit.reference import scaling
from fp4kit.reference.codecs import to_float32
from fp4kit.reference.matmul import levels

from .buffers import aligned_output, read_only
from .chunks import chunk_count, coded_rows, coding, copy_tail, is_ordinary, numbers
from .elements import ELEMENT_TYPES, f32, index, narrow
from .jit import jit, jit_of
from .products import CHUNK, LANES, SLACK, VECTOR_BYTES, Coding, Tile, panel_product, row_decoder, sum_lanes, tile_product
from .threads import Run, alone, run

#: Coded rows that are multiplied together.
ROWS = 4
#: Most rows of numbers that are multiplied together.
BATCH = 4
#: From how many rows on BLAS multiplies.
MANY = 12
#: Products of elements that take a thread as long as one element takes elsewhere.
PRODUCTS = 8
#: Decoded rows that are multiplied with panels together.
PANEL_ROWS = 12
#: Chunks of the depth of a block: its decoded rows are in the first cache, its panels in the second.
BLOCK_CHUNKS = 2
#: Rows of numbers of a block.
PANEL_BLOCK = 512
#: Largest scale byte that makes no product of it and a code overflow, by the type of scales.
LARGEST_SCALE = {"e4m3": 0x7E, "e8m0": 252}


class Scratch(NamedTuple):
    """Room for a tile.

    Attributes:
        sums: float32, 16 partial sums of each pair of rows.
        codes: uint8, a chunk of each row.
        scales: likewise.
    """

    sums: np.ndarray
    codes: np.ndarray
    scales: np.ndarray


def scratch(batch: int) -> Scratch:
    """Room for a tile of some rows of numbers."""
    codes, scales = (np.empty(ROWS * CHUNK + SLACK, np.uint8) for _ in range(2))
    return Scratch(np.empty(ROWS * batch * VECTOR_BYTES // 4, np.float32), codes, scales)


@cache
def product_kernel(code: Coding, batch: int) -> Any:
    """A kernel that multiplies coded rows begin..end with all rows of numbers.

    Args:
        code: how the rows are coded.
        batch: rows of numbers that are multiplied together.
    """
    exact = tile_product(Tile(code, ROWS, batch))
    known = batch == 1 and code.element == "e2m1"
    quick = tile_product(Tile(code, ROWS, batch, ordinary=True)) if known else exact
    largest = np.uint8(LARGEST_SCALE.get(code.scale, 0))

    @jit_of(exact)
    def multiply_rows(rows, numbers, ordinary, begin, end, scratch, out):
        shape, zero = rows.shape[0], index(0)
        sums, codes, scales = scratch.sums, scratch.codes, scratch.scales
        number_row = index(4 * numbers.shape[1])
        row = index(begin)
        while row < index(end):
            # What is left over is multiplied row by row, each as if it were ROWS rows.
            count = index(ROWS) if row + index(ROWS) <= index(end) else index(1)
            apart = index(1) if count > index(1) else index(0)
            code, code_row = row * shape.code_row, apart * shape.code_row
            scale, scale_row = row * shape.scale_row, apart * shape.scale_row
            simple = known and ordinary
            if simple:
                worst = np.uint8(0)
                for i in range(scale, scale + count * shape.scale_row):
                    worst = max(worst, rows.scales[i])
                simple = worst <= largest
            # Behind the last row there is nothing to read.
            is_last = (row + count) * shape.code_row == index(rows.codes.size)
            chunks = (shape.depth - index(is_last and shape.depth > 0)) // index(CHUNK)
            rest = shape.depth - chunks * index(CHUNK)
            if rest:
                copy_tail(rows, row, chunks, count, codes, scales)
            for first in range(index(0), index(numbers.shape[0]), index(batch)):
                number = first * number_row
                for part in range(2 if rest else 1):
                    if part == 0:
                        c, s, d = rows.codes, rows.scales, chunks
                        c0, c1, s0, s1 = code, code_row, scale, scale_row
                        n, fresh = number, index(1)
                    else:
                        c, s, d = codes, scales, index(1)
                        c0, c1, s0, s1 = zero, apart * shape.code_chunk, zero, apart * shape.scale_chunk
                        fresh = zero
                        n = number + chunks * index(4 * CHUNK)
                    if simple:
                        quick(c, c0, c1, s, s0, s1, numbers, n, number_row, d, sums, zero, fresh)
                    else:
                        exact(c, c0, c1, s, s0, s1, numbers, n, number_row, d, sums, zero, fresh)
                for column in range(min(index(batch), index(out.shape[0]) - first)):
                    for r in range(count):
                        place = (r * index(batch) + column) * index(VECTOR_BYTES)
                        out[first + column, row + r] = sum_lanes(sums, place)
            row += count

    return multiply_rows


@jit
def finish(sums, row_factor, col_factor, alpha, bias, c, first, out):
    """Columns of the product from their sums: factors, bias, what is added, rounding."""
    has_bias, has_c = bias.size > 0, c.size > 0
    for m in range(index(sums.shape[0])):
        factor = row_factor[m]
        for n in range(index(sums.shape[1])):
            column = index(first) + n
            value = factor * col_factor[column] * alpha * sums[m, n]
            if has_bias:
                value += bias[column]
            if has_c:
                value += c[m, column]
            out[m, column] = narrow(value, out[m, column])


class Finish(NamedTuple):
    """What turns sums into the product, as :func:`finish` takes it."""

    row_factor: np.ndarray
    col_factor: np.ndarray
    alpha: np.float32
    bias: np.ndarray
    c: np.ndarray

    def __call__(self, sums: np.ndarray, first: int, out: np.ndarray) -> None:
        """Writes the columns of some sums, the first of which is known."""
        finish(sums, *self, first, out)


def finish_of(job: MatmulJob) -> Finish:
    """Factors and addends of a product."""
    constant, of_a, of_b = job.constant, levels(job.a), levels(job.b)
    with scaling.quiet():
        rows = np.full(job.a.rows, constant) if of_a is None else constant * of_a
    cols = np.ones(job.b.rows, np.float32) if of_b is None else of_b
    bias = np.empty(0, np.float32) if job.bias is None else to_float32(job.bias, job.bias_dtype)
    c = np.empty((0, 0), np.float32) if job.c is None else to_float32(job.c, job.c_dtype)
    alpha = np.float32(job.alpha)
    return Finish(read_only(rows), read_only(cols), alpha, read_only(bias), read_only(c))


def multiply_few(job: MatmulJob, end: Finish, out: np.ndarray, run: Run) -> None:
    """Multiplies rows that are few, decoding the other matrix in registers."""
    assert not isinstance(job.b, (int, float))
    b: Any = job.b
    count = job.a.rows
    batch = -(-count // -(-count // BATCH))
    x = read_only(numbers(job.a, b, 1, batch, run))
    ordinary = batch == 1 and is_ordinary(x)
    kernel = product_kernel(coding(b), batch)

    def work(begin: int, stop: int) -> None:
        first, last = begin * ROWS, min(stop * ROWS, b.rows)
        sums = np.empty((count, last - first), np.float32)
        rows = coded_rows(b, first, last)
        kernel(rows, x, ordinary, 0, last - first, scratch(batch), sums)
        end(sums, first, out)

    run(work, -(-b.rows // ROWS), max(ROWS * b.depth * count // PRODUCTS, 1))


@cache
def panel_kernel(code: Coding, rows_together: int, most_panels: int) -> Any:
    """A kernel that multiplies coded rows begin..end with panels of numbers.

    Args:
        code: how the rows are coded.
        rows_together: decoded rows of one call of the innermost loop.
        most_panels: panels of it.
    """
    decode_row = row_decoder(code)
    one = panel_product(rows_together, 1)
    several = panel_product(rows_together, most_panels)

    @jit_of(decode_row, several)
    def multiply_panels(rows, numbers, begin, end, scratch, sums):
        shape, zero = rows.shape[0], index(0)
        room, codes, scales = scratch.sums, scratch.codes, scratch.scales
        width = index(numbers.shape[1])
        panels, chunks = index(numbers.shape[0] // LANES), width // index(CHUNK)
        panel_bytes, sum_row = width * index(VECTOR_BYTES), index(4 * sums.shape[1])
        room_row = index(4 * CHUNK * BLOCK_CHUNKS)
        for first in range(zero, chunks, index(BLOCK_CHUNKS)):
            count = min(index(BLOCK_CHUNKS), chunks - first)
            for group in range(index(begin), index(end), index(rows_together)):
                for r in range(min(index(rows_together), index(end) - group)):
                    row = group + r
                    # Behind the last row there is nothing to read.
                    is_last = (row + index(1)) * shape.code_row == index(rows.codes.size)
                    whole = (shape.depth - index(is_last)) // index(CHUNK)
                    here = min(max(whole, first) - first, count)
                    code = row * shape.code_row + first * shape.code_chunk
                    scale = row * shape.scale_row + first * shape.scale_chunk
                    place = r * room_row
                    decode_row(rows.codes, code, rows.scales, scale, room, place, here)
                    if here < count:
                        copy_tail(rows, row, whole, 1, codes, scales)
                        place += here * index(4 * CHUNK)
                        decode_row(codes, zero, scales, zero, room, place, index(1))
                depth, target = count * index(CHUNK), (group - index(begin)) * sum_row
                panel, number = zero, first * index(CHUNK * VECTOR_BYTES)
                while panel < panels:
                    together = index(most_panels) if panel + index(most_panels) <= panels else index(1)
                    start = panel * panel_bytes + number
                    goal = target + panel * index(VECTOR_BYTES)
                    if together > index(1):
                        several(room, zero, room_row, numbers, start, panel_bytes, depth, sums, goal, sum_row)
                    else:
                        one(room, zero, room_row, numbers, start, panel_bytes, depth, sums, goal, sum_row)
                    panel += together

    return multiply_panels


def multiply_many(job: MatmulJob, end: Finish, out: np.ndarray, run: Run) -> None:
    """Multiplies rows that are many, with decoded rows of the other matrix that are in the cache."""
    b: Any = job.b
    count = job.a.rows
    x = read_only(numbers(job.a, b, LANES, LANES, run))
    kernel = panel_kernel(coding(b), PANEL_ROWS, 2)

    def work(begin: int, stop: int) -> None:
        first, last = begin * PANEL_ROWS, min(stop * PANEL_ROWS, b.rows)
        rows = coded_rows(b, first, last)
        room = scratch(1)._replace(sums=np.zeros(PANEL_ROWS * BLOCK_CHUNKS * CHUNK, np.float32))
        for m in range(0, x.shape[0], PANEL_BLOCK):
            part = x[m : m + PANEL_BLOCK]
            sums = np.zeros(((stop - begin) * PANEL_ROWS, part.shape[0]), np.float32)
            kernel(rows, part, 0, last - first, room, sums)
            here = slice(m, min(m + PANEL_BLOCK, count))
            one = end._replace(row_factor=end.row_factor[here], c=end.c[here])
            one(sums.T[: here.stop - m, : last - first], first, out[here])

    run(work, -(-b.rows // PANEL_ROWS), max(PANEL_ROWS * b.depth * count // PRODUCTS, 1))


def multiply(job: MatmulJob, run: Run) -> None:
    """A product, on threads as `run` spreads them."""
    end = finish_of(job)
    with aligned_output(job.out) as whole:
        out = whole.view(ELEMENT_TYPES[job.out_dtype])
        with scaling.quiet():
            (multiply_few if job.a.rows < MANY else multiply_many)(job, end, out, run)


def matmul(job: MatmulJob) -> None:
    """`Backend.matmul`."""
    multiply(job, run)


def matmul_grouped(jobs: tuple[MatmulJob, ...]) -> None:
    """`Backend.matmul_grouped`: small products run side by side, each in one thread."""
    for job in jobs:
        multiply(job, run)


__all__ = ["alone", "chunk_count"]
