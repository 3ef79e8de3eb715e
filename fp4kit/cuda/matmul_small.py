# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows of bfloat16 with FP4 weights that are read once: `matmul/small.cu`.

Which jobs these are, and how thread blocks divide them. `benchmarks/matmul_ladder.py` times other
shapes; `benchmarks/NOTES.md` says what was tried.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from fp4kit.backend.matmul import (
    FloatOperand,
    MatmulJob,
    Operand,
    PreparedOperand,
    QuantizedOperand,
)
from fp4kit.backend.prepared import TILE_DEPTH, TILE_ROWS, tile_shape
from fp4kit.formats import (
    BLOCK_FORMATS,
    DTYPES,
    SCALE_LAYOUTS,
    SECOND_LEVEL_SCALES,
    FormatSpec,
)
from fp4kit.layout import padded_scale_shape

from . import device as cuda_device
from . import ready as cuda_ready
from .compile import CXX_FORMATS, Instance, instance
from .launch import Launch
from .run import address_of, current_device, is_aligned

FILE = "matmul/small.cu"
#: The least architecture that has mma.sync of bfloat16.
MIN_CAPABILITY = (8, 0)
#: Rows of activations at most.
MOST_TOKENS = 64
#: kFormPrepared and kFormRows.
PREPARED, ROWS = 0, 1
#: A piece of 128 of the depth in shared memory, of weights in rows: WeightStage::kChunkBytes.
ROWS_CHUNK_BYTES = 1152
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
        staged: whether activations come step by step.
        bulk: whether prepared weights come in stretches.
    """

    groups: int
    tiles: int
    slices: int
    chunks: int
    stages: int
    tokens: int
    staged: bool
    bulk: bool = True

    @property
    def rows(self) -> int:
        """Rows of weights of a thread block."""
        return self.groups * self.tiles * TILE_ROWS

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 32 * self.groups * self.slices

    def shared(self, spec: FormatSpec, form: int, depth: int) -> int:
        """Bytes of shared memory."""
        chunk = tile_shape(spec, 1, 1)[2] if form == PREPARED else ROWS_CHUNK_BYTES
        rings = self.groups * self.slices * self.stages * self.tiles * self.chunks * chunk
        sums = 0
        if self.slices > 1:
            buffers = 1 if self.staged else 2
            sums = 4 * buffers * self.slices * self.tokens * (self.rows + 8)
        pieces = 2 * self.slices * self.chunks if self.staged else -(-depth // TILE_DEPTH)
        image = pieces * 4 * 4 * max(self.tokens, 2) * 16
        barriers = -(-(8 * self.groups * self.slices * self.stages + 8) // 128) * 128
        return barriers + rings + sums + image


class Sizes(NamedTuple):
    """What decides how a product is divided, and its cost."""

    tokens: int
    rows: int
    depth: int

    def cost(self, shape: Shape, processors: int) -> float:
        """Bytes that the busiest multiprocessor takes, those of activations at a discount."""
        tiles = -(-self.rows // shape.rows)
        turns = -(-tiles // processors)
        weights = turns * shape.rows * self.depth / 2
        activations = 2 * self.tokens * self.depth * (turns if shape.staged else 1)
        return weights + ACTIVATION_COST * activations


def _shapes(form: int) -> tuple[Shape, ...]:
    """All shapes in use, those with less room for tokens first.

    Two pieces of the depth beside each other are one stretch of prepared weights, and whole lines
    of 128 bytes of rows.
    """
    result = []
    for tokens in (1, 2, 8, 16):
        result += [Shape(2, 1, 8, 2, stages, tokens, False) for stages in (4, 2)]
    if form == PREPARED:
        divisions = ((2, 1, 8, 1), (2, 2, 8, 1), (7, 1, 2, 1), (7, 2, 2, 1), (7, 2, 1, 1))
    else:
        divisions = ((2, 1, 8, 2), (4, 1, 4, 2), (7, 1, 2, 2), (7, 2, 2, 2), (7, 2, 1, 2))
    for tokens in (8, 16, 32, 64):
        result += [
            Shape(*division, stages, tokens, True) for division in divisions for stages in (4, 2)
        ]
    return tuple(result)


SHAPES = {form: _shapes(form) for form in (PREPARED, ROWS)}


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
    return [
        multiply_small_kernel(spec, form, shape)
        for spec in formats
        for form, shapes in SHAPES.items()
        for shape in shapes
        if takes(spec, shape, 1)
    ]


def sample_instances() -> list[Instance]:
    """Some of these that differ in every respect: compiling all takes minutes."""
    return all_instances()[::5]


@lru_cache(maxsize=1024)
def choose(spec: FormatSpec, form: int, sizes: Sizes, processors: int, most: int) -> Shape | None:
    """The shape of least cost with room for the tokens; None if none fits `most` bytes of memory.

    Of equal ones the first counts: that with the least room, and the most stages.
    """
    fitting = [
        shape
        for shape in SHAPES[form]
        if takes(spec, shape, sizes.tokens) and shape.shared(spec, form, sizes.depth) <= most
    ]
    if not fitting:
        return None
    room = min(shape.tokens for shape in fitting)
    return min(
        (shape for shape in fitting if shape.tokens == room),
        key=lambda shape: sizes.cost(shape, processors),
    )


class Numbers(NamedTuple):
    """The scalars of a launch beside its sizes, in the kernel's order from `layout` on."""

    layout: int
    high_first: int
    rows_per_level_a: int
    direction_a: int
    rows_per_level_b: int
    direction_b: int
    constant: int
    alpha: int
    out_type: int
    bias_type: int
    c_type: int
    members: int = 1
    wide_offsets: int = 0


@lru_cache(maxsize=4096)
def _ready(
    device: int, spec: FormatSpec, form: int, shape: Shape, sizes: Sizes, numbers: Numbers
) -> cuda_ready.Ready:
    """For (codes, scales, x, out, level of a, of b, bias, c, members, offsets)."""
    kernel = multiply_small_kernel(spec, form, shape)
    shared = shape.shared(spec, form, sizes.depth)
    resident = cuda_ready.resident_blocks(device, kernel, shared, shape.threads)
    tiles = -(-sizes.rows // shape.rows) * numbers.members
    layout = SCALE_LAYOUTS[numbers.layout]
    _, stored_cols = padded_scale_shape(sizes.rows, spec.num_blocks(sizes.depth), layout)
    scalars = (*sizes, spec.packed_cols(sizes.depth), stored_cols, *numbers)
    launch = Launch(kernel, (min(tiles, resident),), scalars, shared, shape.threads)
    return cuda_ready.Ready(device, launch, addresses=10)


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


def _direction(operand: Operand) -> tuple[int, int]:
    """(rows of a second-level value, its direction) as the kernel takes them."""
    if isinstance(operand, FloatOperand) or operand.level is None:
        return 1, 0
    return operand.rows_per_level, SECOND_LEVEL_SCALES.index(operand.level_name)


def _codes_are_aligned(weights: QuantizedOperand) -> bool:
    """Whether whole pieces of 128 of the depth can be copied from rows."""
    scales = weights.block_scale
    return (
        weights.depth % TILE_DEPTH == 0
        and weights.rows % TILE_ROWS == 0
        and scales is not None
        and is_aligned(weights.packed.data.ptr | scales.data.ptr)
    )


def _form_of(job: MatmulJob) -> int | None:
    """How the weights lie, if this product is one of those here."""
    x, weights = job.a, job.b
    if not isinstance(x, FloatOperand) or x.dtype != "bfloat16" or x.rows > MOST_TOKENS:
        return None
    if x.depth % 8 or not x.depth or not is_aligned(x.data.data.ptr):
        return None
    if isinstance(weights, PreparedOperand):
        return PREPARED if weights.is_plain and is_aligned(weights.tiles.data.ptr) else None
    if not isinstance(weights, QuantizedOperand) or not weights.format.packs_nibbles:
        return None
    return ROWS if _codes_are_aligned(weights) else None


def launch(job: MatmulJob) -> bool:
    """Launches a product of a few rows of bfloat16 with FP4 weights.

    Args:
        job: any product.

    Returns:
        False, and nothing was launched, unless all of this holds: a is bfloat16, at most 64 rows,
        16-byte aligned, its depth a multiple of 8; b is prepared with plain scales, or has nvfp4 or
        mxfp4 rows, 16-byte aligned, their number a multiple of 16 and the depth one of 128; the
        device is an sm_80 or newer, with shared memory for one of the shapes.
    """
    form = _form_of(job)
    device = current_device()
    if form is None or cuda_device.capability(device) < MIN_CAPABILITY:
        return False
    x, weights = job.a, job.b
    assert isinstance(x, FloatOperand)
    assert not isinstance(weights, FloatOperand)
    spec, sizes = weights.format, Sizes(x.rows, weights.rows, weights.depth)
    most = cuda_ready.shared_memory_of_block(device)
    shape = choose(spec, form, sizes, cuda_ready.multiprocessors(device), most)
    if shape is None:
        return False
    if isinstance(weights, PreparedOperand):
        codes, scales, layout, high_first = weights.tiles, None, "linear", False
    else:
        codes, scales = weights.packed, weights.block_scale
        layout, high_first = weights.scale_layout, not weights.low_first
    numbers = Numbers(
        SCALE_LAYOUTS.index(layout),
        int(high_first),
        *_direction(x),
        *_direction(weights),
        *(_bits(float(job.constant)), _bits(job.alpha)),
        *(DTYPES.index(name) for name in (job.out_dtype, job.bias_dtype, job.c_dtype)),
    )
    ready = _ready(device, spec, form, shape, sizes, numbers)
    ready.launch(
        *(codes.data.ptr, address_of(scales), x.data.data.ptr, job.out.data.ptr),
        *(0, address_of(weights.level), address_of(job.bias), address_of(job.c), 0, 0),
    )
    return True
