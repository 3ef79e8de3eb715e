# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The loop of the rowwise kernels: tiles of up to 128 blocks that share a second-level scale.

Data is flat: words of two elements (see :mod:`fp4kit.cpu.elements`), blocks one after the other.
What is done to a tile comes from quantize.py, dequantize.py or error_sums.py, in loops that LLVM
vectorizes one by one. A tile stays in the L1 cache between them.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fp4kit.backend.interface import Plan

from .buffers import flat_or_empty
from .elements import f32
from .jit import jit_part
from .threads import run

#: Blocks per tile: 2048 or 4096 elements.
TILE = 128
#: Words that share a factor in the inner loops: a constant, so that LLVM makes vector code of them
#: (an MX block is two groups).
GROUP = np.uint64(8)


class Tile(NamedTuple):
    """Some blocks under one second-level scale.

    Attributes:
        first: number of the first block.
        blocks: how many.
        second: the scale, 1 if there is none.
    """

    first: int
    blocks: int
    second: np.float32


class Scratch(NamedTuple):
    """Room for what lies between the loops of a tile.

    Attributes:
        factor: float32 (2 * TILE,), of each block, then of each group.
        amaxes: uint32 (2 * TILE,), likewise.
    """

    factor: np.ndarray
    amaxes: np.ndarray


@jit_part
def spread(factor, groups_per_block, count):
    """Turns one factor per block into one per group, in place."""
    if groups_per_block == 2:
        for b in range(count - 1, -1, -1):
            factor[2 * b + 1] = factor[b]
            factor[2 * b] = factor[b]


@jit_part
def next_tile(first, end, second, blocks_per_second):
    """The tile that starts at a block; block b is under second[b // blocks_per_second], if any."""
    stop, scale = min(end, first + TILE), f32(1)
    if second.size > 0:
        group = first // blocks_per_second
        stop, scale = min(stop, (group + 1) * blocks_per_second), second[group]
    return Tile(first, stop - first, scale)


def block_range(
    plan: Plan, kernel: Any, second: np.ndarray | None, job: Callable[[], Any]
) -> Callable[[int, int], Any]:
    """A function that runs a tile kernel over a range of blocks and returns the job.

    Args:
        plan: of the blocks.
        kernel: takes (job, begin, end, second, blocks_per_second, scratch).
        second: second-level scales.
        job: makes what the kernel works on; called for each range, since what it holds of scratch
            belongs to one thread.
    """
    scales, per_second = flat_or_empty(second), plan.rows_per_scale * plan.blocks

    def work(begin: int, end: int) -> Any:
        made = job()
        scratch = Scratch(np.empty(2 * TILE, np.float32), np.empty(2 * TILE, np.uint32))
        kernel(made, begin, end, scales, per_second, scratch)
        return made

    return work


def run_blocks(plan: Plan, work: Callable[[int, int], Any], *, sums: bool = False) -> list[Any]:
    """Calls work(begin, end) over all blocks of a rowwise plan; see `threads.run`."""
    return run(work, plan.rows * plan.blocks, plan.format.block_size, sums=sums)
