# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of quantized matrices; :mod:`fp4kit.reference.matmul` says what is computed.

Few rows are multiplied while the codes of the other matrix are decoded, in registers: its bytes
are what limits. Many rows are multiplied with decoded rows that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from fp4kit.backend.matmul import (
    FloatOperand,
    MatmulJob,
    Operand,
    PreparedOperand,
    QuantizedOperand,
)
from fp4kit.reference import scaling
from fp4kit.reference.codecs import to_float32
from fp4kit.reference.matmul import levels
from fp4kit.reference.prepared import stored

from .buffers import read_only
from .chunks import CodedRows, coded_rows, coding, is_ordinary, lies_as_read, numbers
from .elements import ELEMENT_TYPES
from .matmul_kernels import (
    GROUP_ROWS,
    Factors,
    finish,
    panel_kernel,
    registers,
    row_kernel,
    scratch,
)
from .threads import SMALL, Run, alone, run, thread_count
from .vectors import LANES

#: From how many rows on they are multiplied in panels: measured, see benchmarks/NOTES.md.
MANY = 17
#: Rows of numbers whose panels are multiplied together: a block of them is in the second cache.
PANEL_BLOCK = 512
#: Products that take a thread as long as an element elsewhere.
PRODUCTS = 32
#: Products of a job, in such elements, below which jobs of a group share no thread with others.
SIDE_BY_SIDE = 4 * SMALL

NO_BIAS, NO_C = (read_only(np.empty(shape, np.float32)) for shape in (0, (0, 0)))
#: Operands of which each row lies in one piece.
Rows = FloatOperand | QuantizedOperand
#: Gives coded rows begin..end of an operand, and where among them the first one is.
Source = Callable[[int, int], tuple[CodedRows, int]]


def _source(operand: QuantizedOperand) -> Source:
    if lies_as_read(operand):
        whole = coded_rows(operand, 0, operand.rows)
        return lambda begin, end: (whole, begin)
    return lambda begin, end: (coded_rows(operand, begin, end), 0)


def _factors(job: MatmulJob) -> Factors:
    with scaling.quiet():
        given = levels(job.a), levels(job.b)
    rows, cols = (
        np.ones(operand.rows, np.float32) if level is None else level
        for operand, level in zip((job.a, job.b), given, strict=True)
    )
    bias = NO_BIAS if job.bias is None else read_only(to_float32(job.bias, job.bias_dtype))
    c = NO_C if job.c is None else read_only(to_float32(job.c, job.c_dtype))
    return Factors(rows, cols, job.divisor, np.float32(job.alpha), bias, c)


def _multiply_few(job: MatmulJob, factors: Factors, out: np.ndarray, run: Run) -> None:
    b, count = cast(QuantizedOperand, job.b), job.a.rows
    batch = -(-count // -(-count // registers().batch))
    x = numbers(cast(Rows, job.a), b, 1, batch, run)
    ordinary, source = count == 1 and is_ordinary(x), _source(b)
    kernel = row_kernel(coding(b), batch)

    def work(begin: int, end: int) -> None:
        first, last = begin * GROUP_ROWS, min(end * GROUP_ROWS, b.rows)
        rows, place = source(first, last)
        sums = np.empty((count, last - first), np.float32)
        kernel(rows, x, ordinary, place, place + last - first, scratch(), sums)
        finish(sums, factors, 0, first, out)

    size = max(GROUP_ROWS * b.depth * count // PRODUCTS, 1)
    tiles = -(-b.rows // GROUP_ROWS)
    if tiles * size <= SMALL or (lies_as_read(b) and thread_count() == 1):
        run = alone  # of what is not copied a piece takes no room that would have to be small
    run(work, tiles, size)


def _multiply_many(job: MatmulJob, factors: Factors, out: np.ndarray, run: Run) -> None:
    b, count = cast(QuantizedOperand, job.b), job.a.rows
    x = numbers(cast(Rows, job.a), b, LANES, LANES, run)
    kernel, source, together = panel_kernel(coding(b)), _source(b), registers().panel_rows

    def work(begin: int, end: int) -> None:
        first, last = begin * together, min(end * together, b.rows)
        rows, place = source(first, last)
        room = scratch()
        for top in range(0, count, PANEL_BLOCK):
            part = x[top : top + PANEL_BLOCK]
            sums = np.zeros(((end - begin) * together, part.shape[0]), np.float32)
            kernel(rows, part, place, place + last - first, room, sums)
            known = sums.T[: min(count - top, PANEL_BLOCK), : last - first]
            finish(known, factors, top, first, out)

    run(work, -(-b.rows // together), max(together * b.depth * count // PRODUCTS, 1))


def _in_rows(operand: Operand) -> Rows:
    return stored(operand) if isinstance(operand, PreparedOperand) else operand


def _multiply(job: MatmulJob, run: Run) -> None:
    job = job._replace(a=_in_rows(job.a), b=_in_rows(job.b))
    multiply = _multiply_few if job.a.rows < MANY else _multiply_many
    out = job.out if job.out.flags.aligned else np.empty_like(job.out)
    multiply(job, _factors(job), out.view(ELEMENT_TYPES[job.out_dtype]), run)
    if out is not job.out:
        job.out[...] = out


def matmul(job: MatmulJob) -> None:
    """`Backend.matmul`."""
    _multiply(job, run)


def matmul_grouped(jobs: tuple[MatmulJob, ...]) -> None:
    """`Backend.matmul_grouped`: small products side by side, each in one thread."""
    products = sum(job.a.rows * job.b.rows * job.a.depth for job in jobs)
    size = max(products // PRODUCTS // max(len(jobs), 1), 1)

    def work(begin: int, end: int) -> None:
        for job in jobs[begin:end]:
            _multiply(job, alone)

    if size < SIDE_BY_SIDE:
        run(work, len(jobs), size)
        return
    for job in jobs:
        _multiply(job, run)
