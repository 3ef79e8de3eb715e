# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of quantized matrices on CUDA: what is launched for them.

What is computed stands in :mod:`fp4kit.reference.matmul`, what is chosen when in
:mod:`fp4kit.cuda.matmul_choice`. Nothing waits for the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from fp4kit.backend.matmul import FloatOperand, MatmulJob, QuantizedOperand, RaggedMatmulJob
from fp4kit.backend.operations import Operations

from . import blas, matmul_library, matmul_small, matmul_warpgroup, run
from . import ready as cuda_ready
from .device import capability
from .geometry import THREADS
from .launch import MAX_GRID
from .matmul_choice import (
    TILE_COLUMNS,
    TILE_ROWS,
    is_for_library,
    splits_of,
    tiles_of,
    uses_library,
)
from .matmul_instances import any_kernel, finish_kernel, ragged_kernel, source_of
from .matmul_words import (
    most_products,
    most_weights,
    product_words,
    products_parameter,
    ragged_parameter,
)
from .prepared import in_rows

#: Products of one weight whose launches are remembered.
MOST_KEPT = 1024


class _Part(NamedTuple):
    """A product of `matmul_any`: its pieces of the depth, and bytes of scratch for their sums."""

    job: MatmulJob
    splits: int
    size: int

    @property
    def blocks(self) -> int:
        """Thread blocks of its tiles."""
        return tiles_of(self.job) * self.splits

    @property
    def finish_blocks(self) -> int:
        """Thread blocks that add its sums up."""
        return self.job.a.rows * -(-self.job.b.rows // THREADS)


def _part(job: MatmulJob, tiles: int) -> _Part:
    """A product in a launch of so many tiles."""
    processors = cuda_ready.multiprocessors(run.current_device())
    splits = splits_of(tiles, job.a.depth, processors)
    return _Part(job, splits, splits * job.a.rows * job.b.rows * 4 if splits > 1 else 0)


def _grid(blocks: int) -> tuple[int]:
    if blocks > MAX_GRID:  # results of 2^43 elements at least: no memory holds them
        raise OverflowError(f"{blocks} tiles do not fit a CUDA grid")
    return (blocks,)


def _launch_batch(jobs: Sequence[MatmulJob], most: int) -> None:
    """One launch for some products, and another one for the sums of those that are cut."""
    a, b = source_of(jobs[0].a), source_of(jobs[0].b)
    tiles = sum(map(tiles_of, jobs))
    parts = [_part(job, tiles) for job in jobs]
    with run.memory(sum(part.size for part in parts)) as address:
        words = []
        for part in parts:
            words.append(product_words(part.job, part.splits, address if part.size else 0))
            address += part.size
        blocks = [part.blocks for part in parts]
        parameter = products_parameter(words, blocks, most)
        run.launch(any_kernel(a, b, most), _grid(sum(blocks)), (parameter,))
        cut = [place for place, part in enumerate(parts) if part.size]
        if cut:
            blocks = [parts[place].finish_blocks for place in cut]
            parameter = products_parameter([words[place] for place in cut], blocks, most)
            run.launch(finish_kernel(most), _grid(sum(blocks)), (parameter, 0, 0, 0, 0))


def launch_any(jobs: Sequence[MatmulJob]) -> None:
    """Products whose operands are of the same kinds, by `matmul_any`."""
    most = most_products(len(jobs))
    for first in range(0, len(jobs), most):
        _launch_batch(jobs[first : first + most], most)


class _Library(NamedTuple):
    """A product by cuBLAS.

    Attributes:
        slabs: how it is cut.
        takes_prepared: whether b is decoded as it lies; else prepared weights are restored first.
    """

    slabs: matmul_library.Slabs
    takes_prepared: bool

    def run(self, job: MatmulJob) -> None:
        """Launches a job that it was found for."""
        if self.takes_prepared:
            matmul_library.launch(job, self.slabs)
            return
        with in_rows(job.b) as b:
            matmul_library.launch(job._replace(b=b), self.slabs)


def _find_library(job: MatmulJob) -> _Library | None:
    """A product by cuBLAS, if it is worth it and can be."""
    if not (blas.is_available() and uses_library(job, capability(run.current_device()))):
        return None
    if not matmul_library.can_repeat(job):
        return None
    return _Library(matmul_library.chosen_slabs(job), matmul_library.takes_prepared(job))


_Found = matmul_warpgroup.Prepared | matmul_small.Prepared | _Library | None


def _choose(job: MatmulJob) -> _Found:
    """What runs a product; None if `matmul_any` does."""
    found: _Found = matmul_warpgroup.find(job)
    if found is None and not (is_for_library(job) and blas.is_available()):
        found = matmul_small.find(job)
    return found or _find_library(job)


def _find(job: MatmulJob) -> _Found:
    """:func:`_choose`, asked once for weights that stay where they are.

    The weights and the key decide; all addresses are taken from the job each time.
    """
    a, b = job.a, job.b
    # Zeros of both signs would be one key.
    if not isinstance(a, FloatOperand) or isinstance(b, FloatOperand) or job.alpha == 0:
        return _choose(job)
    kept, data = b.kept, a.data
    if kept is None:
        return _choose(job)
    accumulates = None if job.c is None else job.c.data.ptr == job.out.data.ptr
    key = (
        *(run.current_device(), data.shape, a.dtype, run.is_aligned(data.data.ptr)),
        *(job.alpha, job.out_dtype, job.bias_dtype, job.c_dtype, job.bias is None, accumulates),
    )
    unknown = object()
    found = kept.get(key, unknown)  # another thread may empty it
    if found is unknown:
        if len(kept) >= MOST_KEPT:
            kept.clear()
        found = kept[key] = _choose(job)
    return found  # type: ignore[no-any-return]


class CudaMatmul(Operations):
    """The part of the CUDA backend that multiplies."""

    def matmul(self, job: MatmulJob) -> None:
        found = _find(job)
        if found is not None:
            found.run(job)
            return
        with in_rows(job.b) as b:
            launch_any((job._replace(b=b),))

    def matmul_grouped(self, jobs: tuple[MatmulJob, ...]) -> None:
        # Members of few rows share a launch: kernels of their own would be a launch each.
        rest: dict[tuple[str, str], list[MatmulJob]] = defaultdict(list)
        with ExitStack() as restored:
            for job in jobs:
                by_library = _find_library(job)
                if by_library is not None:
                    by_library.run(job)
                else:
                    rows = job._replace(b=restored.enter_context(in_rows(job.b)))
                    rest[source_of(rows.a), source_of(rows.b)].append(rows)
            for alike in rest.values():
                launch_any(alike)

    def matmul_ragged(self, job: RaggedMatmulJob) -> None:
        if matmul_small.launch_ragged(job):
            return
        with ExitStack() as restored:
            members = (restored.enter_context(in_rows(each)) for each in job.members)
            rows = tuple(each for each in members if isinstance(each, QuantizedOperand))
            self._launch_ragged(job._replace(members=rows))

    def _launch_ragged(self, job: RaggedMatmulJob) -> None:
        """Ranges of rows by `matmul_ragged`."""
        across = -(-int(job.out.shape[1]) // TILE_COLUMNS)
        a, b = source_of(job.a), source_of(job.members[0])
        most = most_weights(len(job.members))
        for first in range(0, len(job.members), most):
            count = min(most, len(job.members) - first)
            # As many tiles of rows as there can be: see kernels_cu/matmul/matmul_any.cu.
            blocks = (job.a.rows // TILE_ROWS + count) * across
            parameter = ragged_parameter(job, first, count, most)
            run.launch(ragged_kernel(a, b, most), _grid(blocks), (parameter,))
