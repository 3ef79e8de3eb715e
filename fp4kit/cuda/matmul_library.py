# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of many rows: operands decoded in slabs of bounded scratch, multiplied by cuBLAS.

A slab of b is decoded without its second level, which multiplies the sums. Where that is one
number and nothing is added, it is the GEMM's factor, and the GEMM rounds once; else the GEMM leaves
float32 sums, and `matmul_finish` does the rest. A NaN of cuBLAS has not our pattern: the
result is read once more for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit import trace
from fp4kit.backend.matmul import FloatOperand, MatmulJob, Operand, PreparedOperand

from . import blas, run
from . import ready as cuda_ready
from .geometry import THREADS
from .launch import ITEM_SIZES, VECTOR, grid_for
from .matmul_choice import SCRATCH_BYTES, TILE_COLUMNS, TILE_ROWS, is_always_exact, library_dtype
from .matmul_decode import STRIDE, Rows, decode, decodes_tiles
from .matmul_instances import (
    any_kernel,
    factor_kernel,
    finish_kernel,
    nan_kernel,
    source_of,
)
from .matmul_words import (
    MOST_PRODUCTS,
    product_words,
    products_parameter,
)

#: Rows of a whose decoded numbers and sums share the scratch with those of b.
SLAB_ROWS = 4096
#: Rows of b of a slab are a multiple of this, so that only the last has a ragged tile.
SLAB_STEP = 256
#: Thread blocks, for each multiprocessor, of kernels that go over memory in turns.
TURN_BLOCKS = 8


class Slabs(NamedTuple):
    """How a product is cut, and where its scratch is, in bytes from its start.

    Attributes:
        dtype: what operands are decoded to.
        stride: elements from row to row of a decoded operand.
        rows: rows of a of a slab.
        cols: rows of b of a slab.
        sums: whether sums go to scratch as float32.
        places: of the inexact flag and the factor; decoded a; decoded b; sums; and the end.
    """

    dtype: str
    stride: int
    rows: int
    cols: int
    sums: bool
    places: tuple[int, int, int, int, int]


def is_one_factor(job: MatmulJob) -> bool:
    """Whether one number multiplies all sums, and nothing is added."""
    levels = [one.level for one in (job.a, job.b) if not isinstance(one, FloatOperand)]
    single = all(level is None or level.size == 1 for level in levels)
    return single and job.bias is None and job.c is None


def slabs_of(job: MatmulJob, budget: int) -> Slabs:
    """Slabs whose scratch is within so many bytes, if a row of each operand is."""
    dtype = library_dtype(job)
    assert dtype is not None
    rows, cols, depth = job.a.rows, job.b.rows, job.a.depth
    stride = -(-depth // STRIDE) * STRIDE
    sums = not is_one_factor(job) or job.out_dtype not in (dtype, "float32")
    row_bytes = stride * ITEM_SIZES[dtype]
    of_a, of_b = (row_bytes * (not isinstance(one, FloatOperand)) for one in (job.a, job.b))
    if of_a or sums:
        rows = min(rows, SLAB_ROWS, max(budget // 2 // max(of_a, 1), 1))
    each = of_b + 4 * rows * sums  # bytes of a column
    if each:
        possible = max((budget - rows * of_a) // each, 1)
        step = SLAB_STEP if possible >= SLAB_STEP else 1
        most = min(cols, possible // step * step)
        # As few as possible, and about as large.
        count = -(-cols // most)
        cols = min(most, -(-cols // (count * step)) * step)
    a = 256  # the flag, and the factor behind it
    b = a + _whole(rows * of_a)
    values = b + _whole(cols * of_b)
    end = values + _whole(4 * rows * cols * sums)
    return Slabs(dtype, stride, rows, cols, sums, (0, a, b, values, end))


def chosen_slabs(job: MatmulJob) -> Slabs:
    """Slabs within the scratch that there is beside cuBLAS's workspace."""
    return slabs_of(job, SCRATCH_BYTES - blas.WORKSPACE_BYTES)


def _whole(size: int) -> int:
    return -(-size // 256) * 256


def can_repeat(job: MatmulJob) -> bool:
    """Whether the product can be made anew if some value turns out to be inexact."""
    dtype = library_dtype(job)
    assert dtype is not None
    exact = all(is_always_exact(one, dtype) for one in (job.a, job.b))
    return exact or job.c is None or job.c.data.ptr != job.out.data.ptr


def _clear(address: int, size: int) -> None:
    import cupy

    cupy.cuda.runtime.memsetAsync(address, 0, size, cupy.cuda.get_current_stream().ptr)


def takes_prepared(job: MatmulJob) -> bool:
    """Whether prepared weights are decoded as they lie; else they must be restored first."""
    dtype = library_dtype(job)
    assert dtype is not None
    exact = all(is_always_exact(one, dtype) for one in (job.a, job.b))  # else it reads them again
    return exact and isinstance(job.b, PreparedOperand) and decodes_tiles(job.b, dtype)


def _turns(size: int) -> tuple[int]:
    """Thread blocks that go over so many bytes."""
    (enough,) = grid_for(max(size // VECTOR, 1))
    return (min(enough, TURN_BLOCKS * cuda_ready.multiprocessors(run.current_device())),)


class _Call:
    """A product in the making."""

    def __init__(self, job: MatmulJob, slabs: Slabs, scratch: int, gemm: blas.Gemm) -> None:
        self._job, self._slabs, self._gemm = job, slabs, gemm
        self._flag, self._a, self._b, self._sums = (scratch + place for place in slabs.places[:4])
        exact = [is_always_exact(one, slabs.dtype) for one in (job.a, job.b)]
        self._guards = not all(exact)

    def run(self) -> None:
        job, slabs = self._job, self._slabs
        factor = 0 if slabs.sums else self._flag + 16
        if self._guards:
            _clear(self._flag, 4)
        if factor:
            run.launch(factor_kernel(), (1,), (self._parameter(1), factor))
        for row in range(0, job.a.rows, slabs.rows):
            rows = min(slabs.rows, job.a.rows - row)
            a = self._matrix(job.a, row, rows, self._a)
            for col in range(0, job.b.rows, slabs.cols):
                cols = min(slabs.cols, job.b.rows - col)
                # One slab of b is decoded once for all of a.
                if slabs.cols < job.b.rows or row == 0:
                    b = self._matrix(job.b, col, cols, self._b)
                shape = blas.Shape(rows, cols, job.a.depth)
                self._multiply(a, b, shape, (row, col), factor)
        if factor:
            arguments = (job.out.data.ptr, job.out.size)
            run.launch(nan_kernel(job.out_dtype), _turns(job.out.nbytes), arguments)
        if self._guards:
            self._repeat()

    def _matrix(self, operand: Operand, first: int, rows: int, target: int) -> blas.Matrix:
        """Rows of an operand as numbers, decoded if need be."""
        dtype, stride = self._slabs.dtype, self._slabs.stride
        if isinstance(operand, FloatOperand):
            start = first * operand.depth * ITEM_SIZES[dtype]
            return blas.Matrix(operand.data.data.ptr + start, dtype, operand.depth)
        decode(operand, Rows(first, rows, stride), dtype, target, self._flag)
        return blas.Matrix(target, dtype, stride)

    def _multiply(
        self,
        a: blas.Matrix,
        b: blas.Matrix,
        shape: blas.Shape,
        place: tuple[int, int],
        factor: int,
    ) -> None:
        job, (row, col) = self._job, place
        if self._slabs.sums:
            sums = blas.Matrix(self._sums, "float32", shape.cols)
            self._gemm.multiply(a, b, sums, shape, 0)
            grid = (shape.rows * -(-shape.cols // THREADS),)
            arguments = (self._parameter(grid[0]), row, col, shape.rows, shape.cols)
            run.launch(finish_kernel(MOST_PRODUCTS[0]), grid, arguments)
            return
        start = (row * job.b.rows + col) * ITEM_SIZES[job.out_dtype]
        out = blas.Matrix(job.out.data.ptr + start, job.out_dtype, job.b.rows)
        self._gemm.multiply(a, b, out, shape, factor)

    def _parameter(self, blocks: int) -> np.ndarray:
        words = product_words(self._job, 1, self._sums)
        return products_parameter([words], [blocks], MOST_PRODUCTS[0])

    def _repeat(self) -> None:
        """Makes the product anew if some value was inexact, which only the device knows."""
        job = self._job
        blocks = -(-job.a.rows // TILE_ROWS) * -(-job.b.rows // TILE_COLUMNS)
        words = product_words(job, inexact=self._flag)
        parameter = products_parameter([words], [blocks], MOST_PRODUCTS[0])
        kernel = any_kernel(source_of(job.a), source_of(job.b), MOST_PRODUCTS[0])
        run.launch(kernel, (blocks,), (parameter,))


def launch(job: MatmulJob, slabs: Slabs) -> None:
    """Fills `job.out` slab by slab, as :func:`chosen_slabs` says of it.

    :func:`.matmul_choice.uses_library` must agree, and cuBLAS be there.
    """
    import cupy

    device = run.current_device()
    if trace.ENABLED:
        shape = f"{job.a.rows} x {job.b.rows} x {job.a.depth}"
        choice = f"cublasGemmEx of {slabs.dtype}, {shape}, slabs of {slabs.rows} x {slabs.cols}"
        trace.say(f"cuda:{device}", choice, "many rows: decoded once, then cuBLAS")
    with run.memory(blas.WORKSPACE_BYTES + slabs.places[-1]) as address:
        stream = cupy.cuda.get_current_stream().ptr
        gemm = blas.Gemm(device, stream, address)
        _Call(job, slabs, address + blas.WORKSPACE_BYTES, gemm).run()
