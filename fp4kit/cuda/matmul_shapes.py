# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How thread blocks divide a product of a few rows with FP4 weights (`matmul/small.cu`).

`benchmarks/matmul_ladder.py` times more of them; `benchmarks/NOTES.md` says what was tried.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from fp4kit.backend.prepared import TILE_DEPTH, TILE_ROWS, tile_shape
from fp4kit.formats import BLOCK_FORMATS, FormatSpec

from .compile import CXX_FORMATS, Instance, instance

NVFP4 = BLOCK_FORMATS["nvfp4"]
FILE = "matmul/small.cu"
#: Rows of activations at most.
MOST_TOKENS = 64
#: kFormPrepared and kFormRows.
PREPARED, ROWS = 0, 1
#: A piece of 128 of the depth in shared memory, of weights in rows: WeightStage::kChunkBytes.
ROWS_CHUNK_BYTES = 1152
#: Threads that fill the stages, where warps of their own do: if activations come step by step, and
#: if they stay.
STAGED_FILLERS, FILLERS = 64, 128
#: How much a byte of activations from the L2 cache counts beside one of weights from memory.
ACTIVATION_COST = 0.3


class Shape(NamedTuple):
    """SmallShape of `matmul/small.cuh`: how a thread block divides a product.

    Attributes:
        groups: of warps, each with rows of its own.
        tiles: of 16 rows of a warp.
        slices: of the depth, each a warp of every group.
        chunks: pieces of 128 of the depth of a warp in a step.
        stages: of a warp's ring.
        tokens: room for rows of activations.
        staged: whether activations come step by step, else they stay.
        bulk: whether prepared weights come in stretches.
        filled: whether warps of their own fill one ring: of rows, where activations stay.
        parts: rows in bfloat16 that each of the activations makes.
    """

    groups: int
    tiles: int
    slices: int
    chunks: int
    stages: int
    tokens: int
    staged: bool
    bulk: bool = True
    filled: bool = False
    parts: int = 1

    @property
    def rows(self) -> int:
        """Rows of weights of a thread block."""
        return self.groups * self.tiles * TILE_ROWS

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        fillers = STAGED_FILLERS if self.staged else FILLERS * self.filled
        return 32 * self.groups * self.slices + fillers

    def span(self, rows: int, members: int, processors: int) -> int:
        """Tiles of 16 rows that a thread block takes at a time, so that all have as much to do."""
        most = self.groups * self.tiles
        if not self.staged:
            return most
        tiles = -(-rows // TILE_ROWS)
        # To begin and end a turn counts as one more; of equal ones the largest.
        return min(
            range(most, 0, -self.tiles),
            key=lambda span: -(-members * -(-tiles // span) // processors) * (span + 1),
        )

    def padded(self, depth: int) -> int:
        """Pieces of 128 of the depth that whole steps would have."""
        step = self.slices * self.chunks
        return -(-depth // (TILE_DEPTH * step)) * step

    def shared(self, spec: FormatSpec, form: int, depth: int) -> int:
        """Bytes of shared memory."""
        chunk = tile_shape(spec, 1, 1)[2] if form == PREPARED else ROWS_CHUNK_BYTES
        rings = self.groups * self.slices * self.stages * self.tiles * self.chunks * chunk
        buffers = 1 if self.staged or self.tokens > (2 if self.slices > 8 else 8) else 2
        sums = 4 * buffers * self.slices * self.tokens * (self.rows + 8)
        pieces = -(-depth // TILE_DEPTH)
        if self.staged:
            pieces = self.stages * self.slices * self.chunks
        image = pieces * 4 * 4 * self.tokens * 16
        barriers = -(-(8 * self.groups * self.slices * self.stages + 8) // 128) * 128
        return barriers + rings + sums + image


class Sizes(NamedTuple):
    """What decides how a product is divided, and its cost.

    Attributes:
        tokens: rows of activations in bfloat16, of which those of other types make several.
        rows: rows of the weights.
        depth: elements that are summed.
        parts: rows in bfloat16 for each of the activations.
    """

    tokens: int
    rows: int
    depth: int
    parts: int = 1

    def cost(self, shape: Shape, processors: int, members: int = 1) -> float:
        """Bytes that the busiest multiprocessor takes, those of activations at a discount."""
        rows = TILE_ROWS * shape.span(self.rows, members, processors)
        turns = -(-members * -(-self.rows // rows) // processors)
        weights = turns * rows * self.depth / 2
        activations = 2 * self.tokens * self.depth * (turns if shape.staged else 1)
        return weights + ACTIVATION_COST * activations


#: (groups, tiles, slices, chunks, stages) whose activations stay: each warp has a ring, or warps of
#: their own fill one for all, which costs less where lanes copy rows.
WIDE, DEEP, NARROW = (1, 2, 16, 2, 2), (1, 2, 8, 2, 2), (1, 1, 16, 2, 2)
LONG, SHORT = (1, 2, 8, 4, 2), (1, 2, 16, 1, 2)
FILLED = (2, 1, 8, 2, 3), (2, 1, 8, 2, 2)
#: Those in use by the form of weights and the room for tokens, the preferred first; the last of
#: prepared weights are for rows that go round better by 16.
RESIDENT = {
    PREPARED: {
        1: (WIDE, DEEP, NARROW),
        2: (WIDE, NARROW, DEEP),
        4: (LONG, DEEP, NARROW),
        8: (DEEP, NARROW),
    },
    ROWS: {1: FILLED, 2: FILLED, 4: FILLED, 8: (FILLED[0], SHORT, FILLED[1])},
}
#: The same step by step: for tiles of many rows and of few, each with a smaller one for many tokens
#: and for devices of less shared memory.
STAGED = (
    *((14, 1, 1, 2, 4), (14, 1, 1, 1, 4)),
    *((7, 1, 2, 2, 4), (7, 1, 2, 1, 4)),
    *((4, 1, 4, 1, 4), (4, 1, 4, 1, 3), (2, 1, 8, 1, 4), (2, 1, 8, 1, 3)),
)
#: Bytes of shared memory that a thread block has on any device.
MOST_SHARED = 227 * 1024


def _shapes(form: int) -> tuple[Shape, ...]:
    """All shapes in use, those with less room for tokens first."""
    result = []
    for tokens, shapes in RESIDENT[form].items():
        result += [Shape(*each, tokens, False, filled=each in FILLED) for each in shapes]
    for tokens in (8, 16, 32, 64):
        staged = [Shape(*each, tokens, True) for each in STAGED]
        result += [each for each in staged if each.shared(NVFP4, form, 0) <= MOST_SHARED]
    return tuple(result)


SHAPES = {form: _shapes(form) for form in (PREPARED, ROWS)}


@cache
def arrange_tokens_kernel(form: int, parts: int) -> Instance:
    """The kernel that puts activations in order for a form of weights."""
    return instance("arrange_tokens_kernel", FILE, f"Number<{form}>", f"Number<{parts}>")


@cache
def multiply_small_kernel(spec: FormatSpec, form: int, shape: Shape) -> Instance:
    """The kernel of a format, a form of its weights and a shape."""
    numbers = ", ".join(str(int(number)) for number in shape)
    words = CXX_FORMATS[spec.name], f"Number<{form}>", f"SmallShape<{numbers}>"
    return instance("multiply_small_kernel", FILE, *words)


def takes(spec: FormatSpec, shape: Shape, tokens: int) -> bool:
    """Whether a shape has a kernel for a format, and room for so many tokens."""
    # A scale of 32 elements is that of a whole slice: two tokens' columns are of no more use.
    return tokens <= shape.tokens and not (spec.block_size == 32 and shape.tokens == 1)


def all_instances() -> list[Instance]:
    """Every kernel that a product can launch."""
    formats = [spec for spec in BLOCK_FORMATS.values() if spec.packs_nibbles]
    result = [
        multiply_small_kernel(spec, form, shape._replace(parts=parts))
        for spec in formats
        for form, shapes in SHAPES.items()
        for shape in shapes
        for parts in (1, 2, 3)
        if takes(spec, shape, parts)
    ]
    return result + [arrange_tokens_kernel(form, parts) for form in SHAPES for parts in (1, 2, 3)]


def sample_instances() -> list[Instance]:
    """Some of these that differ in every respect: compiling all takes minutes."""
    return list(dict.fromkeys([*all_instances()[::23], arrange_tokens_kernel(ROWS, 3)]))


@lru_cache(maxsize=1024)
def choose(spec: FormatSpec, form: int, sizes: Sizes, processors: int, most: int) -> Shape | None:
    """The shape of least cost with room for the tokens; None if none fits so many bytes.

    Of those of equal cost that whose warps have most to do in a tile's last step, then the first.
    """
    fitting = [
        shape
        for shape in SHAPES[form]
        if takes(spec, shape, sizes.tokens) and shape.shared(spec, form, sizes.depth) <= most
    ]
    if not fitting:
        return None
    room = min(shape.tokens for shape in fitting)
    best = min(
        (shape for shape in fitting if shape.tokens == room),
        key=lambda shape: (
            sizes.cost(shape, processors),
            shape.staged and shape.rows,
            shape.padded(sizes.depth),
        ),
    )
    return best._replace(parts=sizes.parts)


def choose_for_members(
    spec: FormatSpec, form: int, sizes: Sizes, members: int, processors: int, most: int
) -> Shape | None:
    """The same for tokens of several weights, of which a kernel takes as many as it has room for.

    Nobody knows here how many each has: there is room for one and a half times the mean.
    """
    room = max(8, min(3 * sizes.tokens // (2 * members), MOST_TOKENS))
    fitting = [
        shape
        for shape in SHAPES[form]
        if shape.staged and shape.shared(spec, form, sizes.depth) <= most
    ]
    wanted = min((each.tokens for each in fitting if each.tokens >= room), default=None)
    each = sizes._replace(tokens=max(sizes.tokens // members, 1))
    best = min(
        (shape for shape in fitting if shape.tokens == wanted),
        key=lambda shape: (each.cost(shape, processors, members), shape.rows),
        default=None,
    )
    return None if best is None else best._replace(parts=sizes.parts)
