# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How thread blocks divide products by warpgroups, which sm_90 has (`matmul/warpgroup.cu`)."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from fp4kit.backend.prepared import TILE_DEPTH, TILE_ROWS, tile_shape
from fp4kit.formats import FormatSpec

from .compile import CXX_FORMATS, Instance, instance
from .matmul_shapes import PREPARED, ROWS_CHUNK_BYTES

FILE = "matmul/warpgroup.cu"
#: Threads that fill the stages.
FILLERS = 128
CONTROL_BYTES = 128


class WarpgroupShape(NamedTuple):
    """WarpgroupShape of `matmul/shape.cuh`: how a thread block divides a product.

    Attributes:
        groups: of warpgroups, each with 64 rows of its own.
        slices: of the depth, each a warpgroup of every group.
        chunks: pieces of 128 of the depth of a warpgroup in a step.
        stages: of the ring.
        columns: rows in bfloat16 of the activations.
        parts: such rows that each of the activations makes.
    """

    groups: int
    slices: int
    chunks: int
    stages: int
    columns: int
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 128 * self.groups * self.slices + FILLERS

    @property
    def room(self) -> int:
        """Columns of a thread block: those of whole rows of activations."""
        return self.columns // self.parts * self.parts

    def stage_bytes(self, spec: FormatSpec, form: int) -> int:
        """Bytes of a stage in shared memory."""
        chunk = tile_shape(spec, 1, 1)[2] if form == PREPARED else ROWS_CHUNK_BYTES
        weights = 4 * self.groups * self.slices * self.chunks * chunk
        return weights + self.slices * self.chunks * TILE_DEPTH * 2 * self.columns

    def shared(self, spec: FormatSpec, form: int) -> int:
        """Bytes of shared memory: barriers, and the stages or the sums."""
        sums = 4 * self.slices * self.columns * (64 * self.groups + 8)
        return CONTROL_BYTES + max(self.stages * self.stage_bytes(spec, form), sums)

    def span(self, rows: int, processors: int) -> int:
        """Tiles of 16 rows of a thread block, so that all have about as many."""
        tiles = -(-rows // TILE_ROWS)
        turns = -(-tiles // (4 * self.groups * processors))
        return -(-tiles // (turns * processors))


@cache
def multiply_warpgroup_kernel(spec: FormatSpec, form: int, shape: WarpgroupShape) -> Instance:
    """The kernel of a format, a form of its weights and a shape."""
    numbers = ", ".join(str(number) for number in shape)
    words = CXX_FORMATS[spec.name], f"Number<{form}>", f"WarpgroupShape<{numbers}>"
    return instance("multiply_warpgroup_kernel", FILE, *words)


@cache
def arrange_columns_kernel(form: int, shape: WarpgroupShape) -> Instance:
    """The kernel that puts activations in order for a form of weights."""
    words = (f"Number<{number}>" for number in (form, shape.columns, shape.parts))
    return instance("arrange_columns_kernel", FILE, *words)
