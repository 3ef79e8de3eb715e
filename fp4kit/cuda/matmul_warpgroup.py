# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of some ten to some hundred rows with FP4 weights, by warpgroups: `matmul/warpgroup.cu`.

Devices of compute capability 9.0 have them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from fp4kit.backend.matmul import FloatOperand, MatmulJob
from fp4kit.backend.prepared import TILE_DEPTH, TILE_ROWS, tile_shape
from fp4kit.formats import BLOCK_FORMATS, FormatSpec
from fp4kit.layout import padded_scale_shape

from . import device as cuda_device
from . import matmul_shapes, run
from . import ready as cuda_ready
from .compile import CXX_FORMATS, Instance, instance
from .geometry import THREADS
from .launch import Launch
from .matmul_choice import FEW_ELEMENTS, LIBRARY_ROWS_OF_FEW
from .matmul_shapes import PREPARED, ROWS, ROWS_CHUNK_BYTES, Sizes
from .matmul_small import PARTS, Numbers, arrays_of, form_of, is_fit, numbers_of

FILE = "matmul/warpgroup.cu"
#: The compute capability that has these products.
CAPABILITY = (9, 0)
#: Threads that fill the stages.
FILLERS = 128
CONTROL_BYTES = 128
#: (groups, tiles, slices) of 4, 8 and 16 tiles of 16 rows at once.
DIVISIONS = ((1, 1, 4), (1, 2, 2), (2, 2, 1))
#: (chunks, stages) of each of them, for so many columns: what fits shared memory.
STEPS = {
    16: ((2, 3), (2, 4), (2, 5)),
    32: ((2, 2), (2, 3), (2, 4)),
    64: ((1, 2), (2, 2), (2, 3)),
    128: (None, (1, 2), (2, 2)),
}
#: Rows of activations up to which the kernels of `matmul_small` are faster: of many rows of
#: weights, and of few (the first division).
SMALL_COLUMNS, SMALL_COLUMNS_OF_FEW = 32, 32
#: Depth to which that many always fit: known without a look at anything else.
SMALL_DEPTH = 8192
#: Those beyond which cuBLAS is faster, of the divisions.
MOST_COLUMNS = (128, 128, 256)


class WarpgroupShape(NamedTuple):
    """WarpgroupShape of `matmul/shape.cuh`: how a thread block divides a product.

    Attributes:
        groups: of warpgroups, each with rows of its own.
        tiles: of 16 rows of a warp.
        slices: of the depth, each a warpgroup of every group.
        chunks: pieces of 128 of the depth of a warpgroup in a step.
        stages: of the ring.
        columns: rows in bfloat16 of the activations.
        parts: such rows that each of the activations makes.
    """

    groups: int
    tiles: int
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
        weights = 4 * self.groups * self.tiles * self.slices * self.chunks * chunk
        return weights + self.slices * self.chunks * TILE_DEPTH * 2 * self.columns

    def shared(self, spec: FormatSpec, form: int) -> int:
        """Bytes of shared memory: barriers, and the stages or the sums."""
        sums = 4 * self.slices * self.columns * (64 * self.groups * self.tiles + 8)
        return CONTROL_BYTES + max(self.stages * self.stage_bytes(spec, form), sums)

    def span(self, rows: int, processors: int) -> int:
        """Tiles of 16 rows of a thread block, so that all have about as many."""
        tiles = -(-rows // TILE_ROWS)
        turns = -(-tiles // (4 * self.groups * self.tiles * processors))
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


def _shapes() -> tuple[WarpgroupShape, ...]:
    return tuple(
        WarpgroupShape(*division, *step, columns)
        for columns, steps in STEPS.items()
        for division, step in zip(DIVISIONS, steps, strict=True)
        if step is not None
    )


SHAPES = _shapes()


def all_instances() -> list[Instance]:
    """Every kernel that a product can launch."""
    formats = [spec for spec in BLOCK_FORMATS.values() if spec.packs_nibbles]
    shapes = [shape._replace(parts=parts) for shape in SHAPES for parts in PARTS.values()]
    result = [
        multiply_warpgroup_kernel(spec, form, shape)
        for spec in formats
        for form in (PREPARED, ROWS)
        for shape in shapes
    ]
    arrange = [arrange_columns_kernel(form, shape) for form in (PREPARED, ROWS) for shape in shapes]
    return list(dict.fromkeys(result + arrange))


def sample_instances() -> list[Instance]:
    """Some of these that differ in every respect: compiling all takes minutes."""
    return all_instances()[::13]


def choose(sizes: Sizes, processors: int, fits_small: bool) -> WarpgroupShape | None:
    """How to divide a product; None if other kernels are faster.

    Args:
        sizes: of the product.
        processors: multiprocessors of the device.
        fits_small: whether `matmul_small` has a shape for the product.

    All limits were measured on an H200, by `benchmarks/matmul.py --paths` and the ladders.
    """
    tiles = -(-sizes.rows // TILE_ROWS)
    number = next(
        (
            number
            for number, (groups, each, _) in enumerate(DIVISIONS)
            if tiles <= 4 * groups * each * processors
        ),
        len(DIVISIONS) - 1,
    )
    most = MOST_COLUMNS[number]
    if sizes.rows * sizes.depth <= FEW_ELEMENTS:
        most = LIBRARY_ROWS_OF_FEW - 1
    small = SMALL_COLUMNS_OF_FEW if number == 0 else SMALL_COLUMNS
    if sizes.tokens > most or (fits_small and sizes.tokens <= small):
        return None
    shapes = [
        shape._replace(parts=sizes.parts)
        for shape in SHAPES
        if (shape.groups, shape.tiles, shape.slices) == DIVISIONS[number]
    ]
    # Several blocks of columns where one does not hold them.
    return next((shape for shape in shapes if shape.room >= sizes.tokens), shapes[-1])


class Prepared(NamedTuple):
    """The launches of a product.

    Attributes:
        arrange: for (x, image).
        multiply: for (codes, scales, x, out, level of a, of b, bias, c, image).
        image_bytes: of the image of the activations.
    """

    arrange: cuda_ready.Ready
    multiply: cuda_ready.Ready
    image_bytes: int


def prepare(
    device: int,
    spec: FormatSpec,
    form: int,
    shape: WarpgroupShape,
    sizes: Sizes,
    numbers: Numbers,
) -> Prepared:
    """The launches of a product divided in a way."""
    span = shape.span(sizes.rows, cuda_ready.multiprocessors(device))
    row_blocks = -(-sizes.rows // (TILE_ROWS * span))
    column_blocks = -(-sizes.tokens // shape.room)
    depth_tiles = -(-sizes.depth // TILE_DEPTH)
    _, stored_cols = padded_scale_shape(sizes.rows, spec.num_blocks(sizes.depth), numbers.layout)
    *words, _, _ = numbers.words()  # all but those of several weights
    scalars = (*sizes[:3], spec.packed_cols(sizes.depth), stored_cols, span, *words)
    multiply = Launch(
        multiply_warpgroup_kernel(spec, form, shape), (row_blocks * column_blocks,), scalars,
        shape.shared(spec, form), shape.threads,
    )  # fmt: skip
    pieces = column_blocks * depth_tiles * shape.columns
    arrange = Launch(
        arrange_columns_kernel(form, shape),
        (-(-4 * pieces // THREADS),),
        (sizes.tokens, sizes.depth, depth_tiles, shape.room, int(numbers.high_first)),
    )
    return Prepared(
        cuda_ready.Ready(device, arrange, addresses=2),
        cuda_ready.Ready(device, multiply, addresses=9),
        pieces * 2 * TILE_DEPTH,
    )


@lru_cache(maxsize=4096)
def _prepared(device: int, name: str, form: int, sizes: Sizes, numbers: Numbers) -> Prepared | None:
    if cuda_device.capability(device) != CAPABILITY:
        return None
    spec, processors = BLOCK_FORMATS[name], cuda_ready.multiprocessors(device)
    most = cuda_ready.shared_memory_of_block(device)
    small = matmul_shapes.choose(spec, form, sizes, processors, most)
    shape = choose(sizes, processors, small is not None)
    return None if shape is None else prepare(device, spec, form, shape, sizes, numbers)


def launch(job: MatmulJob) -> bool:
    """Launches a product with FP4 weights.

    Args:
        job: any product.

    Returns:
        False, and nothing was launched, unless the operands are those that
        :func:`.matmul_small.launch` takes, there are so many rows of activations that these kernels
        are the fastest, and the device has them.
    """
    x, weights = job.a, job.b
    if not isinstance(x, FloatOperand) or not is_fit(x):
        return False
    parts, form = PARTS[x.dtype], form_of(weights)
    columns = x.rows * parts
    if form is None or columns > MOST_COLUMNS[-1]:
        return False
    if columns <= SMALL_COLUMNS and x.depth <= SMALL_DEPTH:
        return False
    assert not isinstance(weights, FloatOperand)
    numbers = numbers_of(job)
    sizes = Sizes(columns, weights.rows, weights.depth, parts)
    prepared = _prepared(run.current_device(), weights.format.name, form, sizes, numbers)
    if prepared is None:
        return False
    with run.memory(prepared.image_bytes) as image:
        prepared.arrange.launch(x.data.data.ptr, image)
        prepared.multiply.launch(
            *(*arrays_of(weights), x.data.data.ptr, job.out.data.ptr),
            *(0, run.address_of(weights.level), run.address_of(job.bias), run.address_of(job.c)),
            image,
        )
    return True
