# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How a product is made, by its shape and operands: the one table of thresholds.

1. Few rows: `matmul_small`; ten to a thousand: `matmul_warpgroup`. If they have a kernel for
   the operands and the device.
2. Many rows: operands are decoded in slabs, and cuBLAS multiplies them, where it can be loaded and
   its types hold the values.
3. Else `matmul_any`, which takes everything.
"""

from __future__ import annotations

from fp4kit.backend.matmul import FloatOperand, MatmulJob, Operand, QuantizedOperand

#: Rows and columns of a tile of `matmul_any` and elements of the depth that it takes at a time, as
#: kernels_cu/matmul/tile.cuh has them.
TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 64, 64, 64

#: Rows of a product from which on decoding everything costs less than what cuBLAS gains: more than
#: a tile of `matmul_any` has, which then decodes twice. On an H200 decoding 28672 x 8192 codes is
#: 178 us, and cuBLAS 119 us for 64 rows (`benchmarks/matmul.py --paths`).
LIBRARY_ROWS = TILE_ROWS + 1
#: The same for weights of few elements: 4096 x 4096 take 12 us, and 64 rows by cuBLAS as long.
FEW_ELEMENTS, LIBRARY_ROWS_OF_FEW = 1 << 25, 33
#: Columns and depth below which a launch more counts for more than that.
LIBRARY_COLUMNS, LIBRARY_DEPTH = 256, 256
#: The least compute capability whose tensor cores know bfloat16.
BFLOAT16_CAPABILITY = (8, 0)
#: Bytes of scratch for decoded operands and for sums in float32, together: a quarter of a GiB is
#: little beside weights, and thousands of rows a slab keep a GEMM at its speed.
SCRATCH_BYTES = 256 << 20

#: Thread blocks of `matmul_any` for each multiprocessor below which the depth is cut into pieces.
BLOCKS_WANTED = 2
#: Steps of the depth of a piece at least, and pieces at most: each writes and reads its sums.
LEAST_STEPS, MOST_SPLITS = 8, 16

#: Formats whose codes times scales are numbers of a 16-bit type whatever their scales are. Others
#: mostly are: what is not is found on the device, and the product made anew by `matmul_any`.
ALWAYS_EXACT = {
    "bfloat16": ("nvfp4", "mxfp4", "fp8", "fp8_e5m2"),
    "float16": ("nvfp4", "fp8", "fp8_e5m2"),
}


def tiles_of(job: MatmulJob) -> int:
    """Tiles of a product of `matmul_any`."""
    return -(-job.a.rows // TILE_ROWS) * -(-job.b.rows // TILE_COLUMNS)


def splits_of(tiles: int, depth: int, multiprocessors: int) -> int:
    """Pieces of the depth of a product whose launch has so many tiles."""
    wanted = -(-BLOCKS_WANTED * multiprocessors // tiles)
    possible = -(-depth // TILE_DEPTH) // LEAST_STEPS
    return max(min(wanted, possible, MOST_SPLITS), 1)


def library_dtype(job: MatmulJob) -> str | None:
    """The type that operands are decoded to for cuBLAS, or None if there is none for them."""
    operands = (job.a, job.b)
    numbers = [one.dtype for one in operands if isinstance(one, FloatOperand)]
    dtype = numbers[0] if numbers else "bfloat16"
    # Codes times float32 scales are no 16-bit numbers.
    scaled = any(
        isinstance(one, QuantizedOperand) and one.grid_scale is not None for one in operands
    )
    return None if scaled else dtype


def is_always_exact(operand: Operand, dtype: str) -> bool:
    """Whether each value of an operand is one of a type."""
    if isinstance(operand, FloatOperand) or dtype == "float32":
        return True
    return operand.format.name in ALWAYS_EXACT[dtype]


def is_for_library(job: MatmulJob) -> bool:
    """Whether a product has so many rows that cuBLAS gains more than decoding costs."""
    few = job.b.rows * job.a.depth <= FEW_ELEMENTS
    return job.a.rows >= (LIBRARY_ROWS_OF_FEW if few else LIBRARY_ROWS)


def uses_library(job: MatmulJob, capability: tuple[int, int]) -> bool:
    """Whether cuBLAS is worth it on a device of a compute capability, if it can be loaded."""
    shape = (job.a.rows, job.b.rows, job.a.depth)
    least = (1, LIBRARY_COLUMNS, LIBRARY_DEPTH)
    large = all(size >= limit for size, limit in zip(shape, least, strict=True))
    large = large and is_for_library(job)
    dtype = library_dtype(job)
    known = dtype is not None and (dtype != "bfloat16" or capability >= BFLOAT16_CAPABILITY)
    return known and large and max(shape) < 2**31
