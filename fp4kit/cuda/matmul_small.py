# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows with FP4 weights that are read once: `matmul/small.cu`.

Which jobs these are, and their launches; `matmul_shapes.py` says how thread blocks divide them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fp4kit.backend.jobs import RawArray
from fp4kit.backend.matmul import (
    FloatOperand,
    MatmulJob,
    Operand,
    PreparedOperand,
    QuantizedOperand,
    RaggedMatmulJob,
)
from fp4kit.backend.prepared import TILE_DEPTH, TILE_ROWS
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
from . import run
from .geometry import THREADS
from .launch import Launch
from .matmul_shapes import (
    MOST_TOKENS,
    PREPARED,
    ROWS,
    Shape,
    Sizes,
    arrange_tokens_kernel,
    choose,
    choose_for_members,
    multiply_small_kernel,
)
from .run import address_of, current_device, is_aligned

#: The least architecture that has mma.sync of bfloat16.
MIN_CAPABILITY = (8, 0)
#: Rows in bfloat16 whose sum a row of a type is, exactly.
PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}


class Numbers(NamedTuple):
    """What a launch is told beside its sizes; the kernel takes them in this order.

    Attributes:
        layout: order of the block scales.
        high_first: whether the even element takes the high nibble.
        rows_per_level_a: rows of a that share a second-level value.
        direction_a: what these values are.
        rows_per_level_b: likewise of b.
        direction_b: likewise.
        divisor: what the ranges of both second levels divide by.
        alpha_bits: factor of the product, as the bits of a float32: zeros of both signs differ.
        out_dtype: element type of the result.
        bias_dtype: likewise of what is added.
        c_dtype: likewise.
        members: how many weights there are.
        wide_offsets: whether their offsets have 64 bits.
    """

    layout: str = "linear"
    high_first: bool = False
    rows_per_level_a: int = 1
    direction_a: str = "amax"
    rows_per_level_b: int = 1
    direction_b: str = "amax"
    divisor: float = 1.0
    alpha_bits: int = 0x3F800000  # 1.0
    out_dtype: str = "bfloat16"
    bias_dtype: str = "float32"
    c_dtype: str = "float32"
    members: int = 1
    wide_offsets: bool = False

    def words(self) -> tuple[int, ...]:
        """The same as the kernel's integers."""
        return (
            SCALE_LAYOUTS.index(self.layout),
            int(self.high_first),
            *(self.rows_per_level_a, SECOND_LEVEL_SCALES.index(self.direction_a)),
            *(self.rows_per_level_b, SECOND_LEVEL_SCALES.index(self.direction_b)),
            *(_bits(self.divisor), self.alpha_bits),
            *(DTYPES.index(name) for name in (self.out_dtype, self.bias_dtype, self.c_dtype)),
            *(self.members, int(self.wide_offsets)),
        )


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


class Prepared(NamedTuple):
    """The launches of a product.

    Attributes:
        multiply: for (codes, scales, x, out, level of a, of b, bias, c, members, offsets, image).
        arrange: for (x, image), or None.
        image_bytes: of the image of the activations.
    """

    multiply: cuda_ready.Ready
    arrange: cuda_ready.Ready | None = None
    image_bytes: int = 0

    def run(self, job: MatmulJob) -> None:
        """Launches the product with the addresses of a job that it was found for."""
        x, weights = job.a, job.b
        assert isinstance(x, FloatOperand)
        assert not isinstance(weights, FloatOperand)
        self.launch(
            *(*arrays_of(weights), x.data.data.ptr, job.out.data.ptr, 0),
            *(address_of(weights.level), address_of(job.bias), address_of(job.c), 0, 0),
        )

    def launch(self, *addresses: int) -> None:
        """Launches the product with these addresses, all but that of the image."""
        if not self.image_bytes:
            self.launch_with(0, *addresses)
            return
        with run.memory(self.image_bytes) as image:
            self.launch_with(image, *addresses)

    def launch_with(self, image: int, codes: int, scales: int, x: int, *others: int) -> None:
        """The same with memory for the image."""
        if self.arrange is not None:
            self.arrange.launch(x, image)
        self.multiply.launch(codes, scales, x, *others, image)


def ready_of(
    device: int, spec: FormatSpec, form: int, shape: Shape, sizes: Sizes, numbers: Numbers
) -> Prepared:
    """The launches of a product divided in a way."""
    kernel = multiply_small_kernel(spec, form, shape)
    shared = shape.shared(spec, form, sizes.depth)
    resident = cuda_ready.resident_blocks(device, kernel, shared, shape.threads)
    span = shape.span(sizes.rows, numbers.members, cuda_ready.multiprocessors(device))
    tiles = -(-sizes.rows // (TILE_ROWS * span)) * numbers.members
    _, stored_cols = padded_scale_shape(sizes.rows, spec.num_blocks(sizes.depth), numbers.layout)
    scalars = (*sizes[:3], spec.packed_cols(sizes.depth), stored_cols, span, *numbers.words())
    launch = Launch(kernel, (min(tiles, resident),), scalars, shared, shape.threads)
    multiply = cuda_ready.Ready(device, launch, addresses=11)
    # Prepared weights take pieces of eight elements of bfloat16 as they lie, if all are there. That
    # is faster than to put all in order before where a thread block reads few of them.
    as_they_lie = form == PREPARED and sizes.parts == 1 and sizes.depth % TILE_DEPTH == 0
    as_they_lie = as_they_lie and numbers.members > 1
    if not shape.staged or as_they_lie or not sizes.tokens:
        return Prepared(multiply)
    pieces = -(-sizes.depth // TILE_DEPTH) * sizes.tokens
    arrange = Launch(
        arrange_tokens_kernel(form, sizes.parts),
        (-(-16 * pieces // THREADS),),
        (sizes.tokens, sizes.depth, int(numbers.high_first)),
    )
    return Prepared(multiply, cuda_ready.Ready(device, arrange, addresses=2), 256 * pieces)


@lru_cache(maxsize=4096)
def _ready(device: int, name: str, form: int, sizes: Sizes, numbers: Numbers) -> Prepared | None:
    """`ready_of` the shape of least cost; None if there is none."""
    if cuda_device.capability(device) < MIN_CAPABILITY:
        return None
    spec, processors = BLOCK_FORMATS[name], cuda_ready.multiprocessors(device)
    most = cuda_ready.shared_memory_of_block(device)
    if numbers.members == 1:
        shape = choose(spec, form, sizes, processors, most)
    else:
        shape = choose_for_members(spec, form, sizes, numbers.members, processors, most)
    return None if shape is None else ready_of(device, spec, form, shape, sizes, numbers)


def level_of(operand: Operand) -> tuple[int, str]:
    """(rows of a second-level value, what it is) as the kernel takes them."""
    if isinstance(operand, FloatOperand) or operand.level is None:
        return 1, "amax"
    return operand.rows_per_level, operand.level_name


def numbers_of(job: MatmulJob) -> Numbers:
    """What a launch of a product is told beside its sizes."""
    return Numbers(
        *(*order_of(job.b), *level_of(job.a), *level_of(job.b)),
        *(float(job.divisor), _bits(job.alpha), job.out_dtype, job.bias_dtype, job.c_dtype),
    )


def is_fit(x: FloatOperand) -> bool:
    """Whether activations are ones that the kernels take."""
    return x.depth % 8 == 0 and x.depth > 0 and is_aligned(x.data.data.ptr)


def form_of(weights: Operand) -> int | None:
    """How weights lie, if the kernels take such."""
    if isinstance(weights, PreparedOperand):
        return PREPARED if weights.is_plain and is_aligned(weights.tiles.data.ptr) else None
    if not isinstance(weights, QuantizedOperand) or not weights.format.packs_nibbles:
        return None
    scales = weights.block_scale
    assert scales is not None
    whole = weights.depth % TILE_DEPTH == 0 and weights.rows % TILE_ROWS == 0
    return ROWS if whole and is_aligned(weights.packed.data.ptr | scales.data.ptr) else None


def arrays_of(weights: Operand) -> tuple[int, int]:
    """Addresses of (tiles, nothing) or (codes, scales)."""
    if isinstance(weights, PreparedOperand):
        return weights.tiles.data.ptr, 0
    assert isinstance(weights, QuantizedOperand)
    return weights.packed.data.ptr, address_of(weights.block_scale)


def order_of(weights: Operand) -> tuple[str, bool]:
    """(scale layout, whether the even element takes the high nibble)."""
    if isinstance(weights, QuantizedOperand):
        return weights.scale_layout, not weights.low_first
    return "linear", False


def find(job: MatmulJob) -> Prepared | None:
    """The launches of a product of a few rows with FP4 weights.

    Args:
        job: any product.

    Returns:
        None unless all of this holds: a is not quantized, has at most
        64 rows (32 of float16, 21 of float32), 16-byte aligned, its depth a multiple of 8; b is
        prepared with plain scales, or has nvfp4 or mxfp4 rows, 16-byte aligned, their number a
        multiple of 16 and the depth one of 128; the device is an sm_80 or newer, with shared memory
        for one of the shapes.
    """
    x, weights = job.a, job.b
    if not isinstance(x, FloatOperand) or not is_fit(x):
        return None
    parts, form = PARTS[x.dtype], form_of(weights)
    if form is None or x.rows * parts > MOST_TOKENS:
        return None
    assert not isinstance(weights, FloatOperand)
    numbers = numbers_of(job)
    sizes = Sizes(x.rows * parts, weights.rows, weights.depth, parts)
    return _ready(current_device(), weights.format.name, form, sizes, numbers)


@lru_cache(maxsize=256)
def _table(device: int, words: tuple[int, ...]) -> RawArray:
    """The addresses of the arrays of all members, on the device.

    Kept: weights stay where they are, and a graph that was captured reads it again.
    """
    import cupy

    return cupy.asarray(np.array(words, np.uint64))


def launch_ragged(job: RaggedMatmulJob) -> bool:
    """Launches products of consecutive rows with weights of their own, all at once.

    Returns:
        False, and nothing was launched, unless the activations and each of the weights are such as
        :func:`launch` takes, of any number of rows but 64 for each of the weights in the mean, the
        weights alike, and the result is that of one multiplication: no level of rows differs in
        number. The first call for some weights copies their addresses to the device.
    """
    x, first = job.a, job.members[0]
    count = len(job.members)
    forms = {form_of(each) for each in job.members}
    parts = PARTS[x.dtype]
    if forms not in ({PREPARED}, {ROWS}) or not is_fit(x) or x.rows * parts > MOST_TOKENS * count:
        return False
    assert not isinstance(first, FloatOperand)
    alike = {(level_of(each), order_of(each)) for each in job.members}
    if len(alike) > 1 or count == 1:
        return False
    numbers = Numbers(
        *(*order_of(first), 1, "amax", *level_of(first)),
        *(first.level_range, _bits(job.alpha), job.out_dtype, job.bias_dtype),
        members=count,
        wide_offsets=bool(job.offsets.dtype.itemsize == 8),
    )
    sizes = Sizes(x.rows * parts, first.rows, first.depth, parts)
    device = current_device()
    ready = _ready(device, first.format.name, forms.pop(), sizes, numbers)
    if ready is None:
        return False
    biases = [0] * count
    if job.bias is not None:
        biases = [job.bias.data.ptr + job.bias.strides[0] * number for number in range(count)]
    words = tuple(
        word
        for member, bias in zip(job.members, biases, strict=True)
        for word in (*arrays_of(member), address_of(member.level), bias)
    )
    table = _table(device, words)
    ready.launch(
        *(0, 0, x.data.data.ptr, job.out.data.ptr, 0, 0, 0, 0),
        *(table.data.ptr, job.offsets.data.ptr),
    )
    return True
