# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of ten to a thousand rows with FP4 weights, by warpgroups: `matmul/warpgroup.cu`.

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
from .matmul_shapes import PREPARED, ROWS, ROWS_CHUNK_BYTES, Sizes
from .matmul_small import PARTS, Numbers, arrays_of, form_of, is_fit, numbers_of

FILE = "matmul/warpgroup.cu"
#: The compute capability that has these products.
CAPABILITY = (9, 0)
#: Threads that fill the stages.
FILLERS = 128
CONTROL_BYTES = 1024
#: Stages begin at multiples of so many bytes.
ALIGNMENT = 1024
#: (groups, tiles, chunks, stages) for so many columns: what fits shared memory.
STEPS = {
    16: ((4, 1, 2, 5), (2, 1, 2, 8)),
    32: ((4, 1, 2, 4), (2, 1, 2, 6)),
    64: ((4, 1, 2, 3), (2, 1, 2, 4)),
    128: ((2, 2, 2, 2), (2, 1, 1, 5)),
    256: ((2, 1, 1, 3),),
}
#: Microseconds of 128 of the depth for so many columns and tiles of a thread block, prepared and as
#: rows; of a turn of thread blocks beside that; of joining pieces, and the bytes a microsecond of
#: their sums: on an H200.
CHUNK_US = {
    (16, 16): (0.58, 0.75), (16, 8): (0.33, 0.43),
    (32, 16): (0.65, 0.82), (32, 8): (0.36, 0.44),
    (64, 16): (0.81, 0.99), (64, 8): (0.45, 0.53),
    (128, 16): (1.45, 1.60), (128, 8): (0.72, 0.85), (256, 8): (1.46, 1.46),
}  # fmt: skip
TURN_US, JOIN_US, JOIN_RATE = 3.0, 2.2, 45e3
#: Pieces of the depth at most, and 128 of it that each has at least.
MOST_SPLITS, LEAST_STEPS = 16, 4
#: Rows of activations up to which the kernels of `matmul_small` are faster where all of them fit
#: shared memory.
SMALL_COLUMNS = 8
#: Depth to which that many always fit: known without a look at anything else.
SMALL_DEPTH = 8192
#: Columns beyond which cuBLAS is faster, by the parts of a row: float16 makes two columns of it,
#: and cuBLAS's float32 has no tensor cores.
MOST_COLUMNS = {1: 1024, 2: 512, 3: 3072}


class WarpgroupShape(NamedTuple):
    """WarpgroupShape of `matmul/shape.cuh`: how a thread block divides a product.

    Attributes:
        groups: of warpgroups that multiply.
        tiles: of 16 rows of a warp.
        chunks: pieces of 128 of the depth in a step.
        stages: of the ring.
        columns: rows in bfloat16 of the activations.
        parts: such rows that each of the activations makes.
    """

    groups: int
    tiles: int
    chunks: int
    stages: int
    columns: int
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 128 * self.groups + FILLERS

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of a thread block."""
        return 4 * self.groups * self.tiles

    @property
    def room(self) -> int:
        """Columns of a thread block: those of whole rows of activations."""
        return self.columns // self.parts * self.parts

    def stage_bytes(self, spec: FormatSpec, form: int) -> int:
        """Bytes of a stage in shared memory."""
        chunk = tile_shape(spec, 1, 1)[2] if form == PREPARED else ROWS_CHUNK_BYTES
        whole = self.chunks * (self.row_tiles * chunk + TILE_DEPTH * 2 * self.columns)
        return -(-whole // ALIGNMENT) * ALIGNMENT

    def shared(self, spec: FormatSpec, form: int) -> int:
        """Bytes of shared memory: barriers, and the stages or the sums."""
        sums = 4 * self.columns * (TILE_ROWS * self.row_tiles + 8)
        return CONTROL_BYTES + max(self.stages * self.stage_bytes(spec, form), sums)

    def blocks(self, sizes: Sizes) -> tuple[int, int]:
        """How many thread blocks there are for the rows, and for the columns."""
        tiles = -(-sizes.rows // TILE_ROWS)
        return -(-tiles // self.row_tiles), -(-sizes.tokens // self.room)

    def sum_bytes(self) -> int:
        """Bytes of the sums of a thread block."""
        return 4 * TILE_ROWS * self.row_tiles * self.columns


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
        WarpgroupShape(*step, columns) for columns, steps in STEPS.items() for step in steps
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


class Division(NamedTuple):
    """How a product is divided among thread blocks.

    Attributes:
        shape: of a thread block.
        splits: pieces of the depth, each a thread block for all rows and columns.
    """

    shape: WarpgroupShape
    splits: int

    def cost_us(self, form: int, sizes: Sizes, processors: int) -> float:
        """Microseconds that the product takes, roughly: turns of thread blocks."""
        shape, splits = self
        chunk = CHUNK_US[shape.columns, shape.row_tiles][form]
        row_blocks, column_blocks = shape.blocks(sizes)
        turns = -(-row_blocks * column_blocks * splits // processors)
        all_steps = -(-sizes.depth // (TILE_DEPTH * shape.chunks))
        steps = -(-all_steps // splits)
        taken = turns * (steps * shape.chunks * chunk + TURN_US)
        if splits > 1:
            taken += JOIN_US + splits * shape.sum_bytes() / JOIN_RATE
        return taken


def choose(form: int, sizes: Sizes, processors: int) -> Division:
    """How to divide a product: by pieces of the depth only if all have a multiprocessor."""
    most = max(-(-sizes.depth // TILE_DEPTH) // LEAST_STEPS, 1)
    divisions = []
    for shape in (each._replace(parts=sizes.parts) for each in SHAPES):
        row_blocks, column_blocks = shape.blocks(sizes)
        free = max(processors // (row_blocks * column_blocks), 1)
        divisions += [Division(shape, each + 1) for each in range(min(free, most, MOST_SPLITS))]
    return min(divisions, key=lambda each: each.cost_us(form, sizes, processors))


def is_fastest(sizes: Sizes, fits_small: bool) -> bool:
    """Whether other kernels are slower.

    Args:
        sizes: of the product.
        fits_small: whether `matmul_small` has all activations in shared memory.

    All limits were measured on an H200, by `benchmarks/matmul.py --paths` and the ladders.
    """
    most = MOST_COLUMNS[sizes.parts]
    return sizes.tokens <= most and not (fits_small and sizes.tokens <= SMALL_COLUMNS)


class Prepared(NamedTuple):
    """The launches of a product.

    Attributes:
        arrange: for (x, image, counters).
        multiply: for (codes, scales, x, out, level of a, of b, bias, c, image, sums, counters).
        places: of the sums and the counters behind the image; and the end, in bytes.
    """

    arrange: cuda_ready.Ready
    multiply: cuda_ready.Ready
    places: tuple[int, int, int]

    def run(self, job: MatmulJob) -> None:
        """Launches the product with the addresses of a job that it was found for."""
        x, weights = job.a, job.b
        assert isinstance(x, FloatOperand)
        assert not isinstance(weights, FloatOperand)
        address = x.data.data.ptr
        sums, arrived, end = self.places
        with run.memory(end) as image:
            sums, arrived = image + sums, image + arrived
            self.arrange.launch(address, image, arrived)
            self.multiply.launch(
                *(*arrays_of(weights), address, job.out.data.ptr, 0),
                *(run.address_of(weights.level), run.address_of(job.bias), run.address_of(job.c)),
                *(image, sums, arrived),
            )


def prepare(
    device: int,
    spec: FormatSpec,
    form: int,
    division: Division,
    sizes: Sizes,
    numbers: Numbers,
) -> Prepared:
    """The launches of a product divided in a way."""
    shape, splits = division
    row_blocks, column_blocks = shape.blocks(sizes)
    row_tiles = -(-sizes.rows // TILE_ROWS)
    span = -(-row_tiles // row_blocks)
    depth_tiles = -(-sizes.depth // TILE_DEPTH)
    _, stored_cols = padded_scale_shape(sizes.rows, spec.num_blocks(sizes.depth), numbers.layout)
    *words, _, _ = numbers.words()  # all but those of several weights
    scalars = (*sizes[:3], spec.packed_cols(sizes.depth), stored_cols, span, splits, *words)
    blocks = row_blocks * column_blocks
    multiply = Launch(
        multiply_warpgroup_kernel(spec, form, shape), (blocks * splits,), scalars,
        shape.shared(spec, form), shape.threads,
    )  # fmt: skip
    pieces = column_blocks * depth_tiles * shape.columns
    counters = blocks if splits > 1 else 0
    threads = max(4 * pieces, counters)
    arrange = Launch(
        arrange_columns_kernel(form, shape),
        (-(-threads // THREADS),),
        (sizes.tokens, sizes.depth, depth_tiles, shape.room, int(numbers.high_first), counters),
    )
    sums = pieces * 2 * TILE_DEPTH
    arrived = sums + (counters * splits * shape.sum_bytes())
    return Prepared(
        cuda_ready.Ready(device, arrange, addresses=3),
        cuda_ready.Ready(device, multiply, addresses=11, early=True),
        (sums, arrived, arrived + 4 * counters),
    )


@lru_cache(maxsize=4096)
def _prepared(device: int, name: str, form: int, sizes: Sizes, numbers: Numbers) -> Prepared | None:
    if cuda_device.capability(device) != CAPABILITY:
        return None
    spec, processors = BLOCK_FORMATS[name], cuda_ready.multiprocessors(device)
    most = cuda_ready.shared_memory_of_block(device)
    small = matmul_shapes.choose(spec, form, sizes, processors, most)
    if not is_fastest(sizes, small is not None and not small.staged):
        return None
    return prepare(device, spec, form, choose(form, sizes, processors), sizes, numbers)


def find(job: MatmulJob) -> Prepared | None:
    """The launches of a product with FP4 weights.

    Args:
        job: any product.

    Returns:
        None unless the operands are those that
        :func:`.matmul_small.find` takes, there are so many rows of activations that these kernels
        are the fastest, and the device has them.
    """
    x, weights = job.a, job.b
    if not isinstance(x, FloatOperand) or not is_fit(x):
        return None
    parts, form = PARTS[x.dtype], form_of(weights)
    columns = x.rows * parts
    if form is None or columns > MOST_COLUMNS[parts]:
        return None
    if columns <= SMALL_COLUMNS and x.depth <= SMALL_DEPTH:
        return None
    assert not isinstance(weights, FloatOperand)
    numbers = numbers_of(job)
    sizes = Sizes(columns, weights.rows, weights.depth, parts)
    return _prepared(run.current_device(), weights.format.name, form, sizes, numbers)
