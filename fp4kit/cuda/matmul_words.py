# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products as the kernels of `kernels_cu/matmul/` take them: 64-bit words of one parameter.

A launch takes several products, or ranges of rows with a weight each; what does not fit its
parameter takes another launch. Nothing is copied to the device, so that graphs can hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.matmul import (
    FloatOperand,
    MatmulJob,
    Operand,
    PreparedOperand,
    RaggedMatmulJob,
)
from fp4kit.formats import DTYPES, SCALE_LAYOUTS, SECOND_LEVEL_SCALES

from . import device as cuda_device
from .launch import ITEM_SIZES, VECTOR
from .run import address_of

#: Words of a MatmulProduct (product.cuh).
PRODUCT_WORDS = 21
#: Products of a launch: as many as fit 4096 and 32764 bytes of parameters.
MOST_PRODUCTS = (22, 184)
#: Weights of a ragged launch, likewise.
MOST_WEIGHTS = (160, 1352)
#: Bytes that a group of 16 codes of 4 bits takes.
HALF_VECTOR = VECTOR // 2


def _is_vector(operand: Operand) -> bool:
    """Whether every group of 16 can be loaded at once."""
    if isinstance(operand, FloatOperand):
        row = operand.depth * ITEM_SIZES[operand.dtype]
        return row % VECTOR == 0 and operand.data.data.ptr % VECTOR == 0
    assert not isinstance(operand, PreparedOperand)  # cuda/matmul.py has restored it
    address = operand.packed.data.ptr
    if operand.format.packs_nibbles:
        return bool(address % HALF_VECTOR == 0)
    row = operand.format.packed_cols(operand.depth)
    return not operand.transposed and row % VECTOR == 0 and address % VECTOR == 0


def flags_of(operand: Operand) -> int:
    """What MatmulOperand reads out of its flags."""
    if isinstance(operand, PreparedOperand):  # whose level alone is read
        return SECOND_LEVEL_SCALES.index(operand.level_name) << 4
    vector = int(_is_vector(operand)) << 6
    if isinstance(operand, FloatOperand):
        return vector
    layout = SCALE_LAYOUTS.index(operand.scale_layout)
    nibbles = int(not operand.low_first) << 2
    direction = SECOND_LEVEL_SCALES.index(operand.level_name) << 4
    return layout | nibbles | int(operand.transposed) << 3 | direction | vector


def addresses_of(operand: Operand) -> tuple[int, int, int]:
    """Addresses of (data, scale, level), 0 for what is missing."""
    if isinstance(operand, FloatOperand):
        return operand.data.data.ptr, 0, 0
    if isinstance(operand, PreparedOperand):
        return operand.tiles.data.ptr, 0, address_of(operand.level)
    scale = operand.grid_scale if operand.block_scale is None else operand.block_scale
    return operand.packed.data.ptr, address_of(scale), address_of(operand.level)


def _operand(operand: Operand) -> tuple[int, ...]:
    per_level = operand.rows if isinstance(operand, FloatOperand) else operand.rows_per_level
    return *addresses_of(operand), operand.rows, flags_of(operand), per_level


def _bits(value: Any) -> int:
    return int(np.float32(value).view(np.uint32))


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def product_words(
    job: MatmulJob, splits: int = 1, partial: int = 0, inexact: int = 0
) -> tuple[int, ...]:
    """A MatmulProduct.

    Args:
        job: the product.
        splits: pieces of the depth.
        partial: address of the sums of each, if there is more than one.
        inexact: address of a word that says whether there is anything to do, or 0.
    """
    types = (job.out_dtype, job.bias_dtype, job.c_dtype)
    return (
        *_operand(job.a),
        *_operand(job.b),
        job.a.depth,
        job.out.data.ptr,
        address_of(job.bias),
        address_of(job.c),
        sum(DTYPES.index(name) << 2 * place for place, name in enumerate(types)),
        _signed(_bits(job.divisor) | _bits(job.alpha) << 32),
        splits,
        partial,
        inexact,
    )


def _room(needed: int, rooms: Sequence[int]) -> int:
    """The smallest number of places that holds so many, or the largest that there is."""
    possible = rooms if cuda_device.has_large_parameters() else rooms[:-1]
    return next((room for room in possible if room >= needed), possible[-1])


def most_products(needed: int) -> int:
    """Places of the parameter for so many products, as far as they fit one."""
    return _room(needed, MOST_PRODUCTS)


def most_weights(needed: int) -> int:
    """Places of the parameter for so many weights of a ragged product, likewise."""
    return _room(needed, MOST_WEIGHTS)


def _parameter(words: NDArray[np.int64]) -> NDArray[np.void]:
    """Words as one element, which CuPy passes by value."""
    return words.view(np.dtype((np.void, words.nbytes)))


def products_parameter(
    products: Sequence[tuple[int, ...]], blocks: Sequence[int], most: int
) -> NDArray[np.void]:
    """MatmulProducts<most>.

    Args:
        products: words of each.
        blocks: thread blocks of each.
        most: places for products.
    """
    count = len(products)
    words = np.zeros(1 + most + 1 + most * PRODUCT_WORDS, np.int64)
    words[0] = count
    words[2 : 2 + count] = tuple(accumulate(blocks))
    first = most + 2
    words[first : first + count * PRODUCT_WORDS] = tuple(chain.from_iterable(products))
    return _parameter(words)


def ragged_parameter(job: RaggedMatmulJob, first: int, count: int, most: int) -> NDArray[np.void]:
    """RaggedWeights<most> of so many ranges from the `first` on."""
    weights = job.members[first : first + count]
    product = MatmulJob(
        job.a, weights[0], job.out, job.out_dtype, job.alpha, job.bias, job.bias_dtype
    )
    # Accesses to all of them at once need all of them aligned.
    aligned = all(map(_is_vector, weights))
    shared = product_words(product)
    place = 10  # the flags of b
    shared = (*shared[:place], shared[place] & ~(int(not aligned) << 6), *shared[place + 1 :])
    offsets = job.offsets.data.ptr + first * job.offsets.itemsize
    wide = int(job.offsets.itemsize == np.dtype(np.int64).itemsize)
    words = np.zeros(PRODUCT_WORDS + 4 + 3 * most, np.int64)
    words[: PRODUCT_WORDS + 4] = (*shared, offsets, wide, count, first * weights[0].rows)
    addresses = np.array([addresses_of(weight) for weight in weights], np.int64)
    words[PRODUCT_WORDS + 4 : PRODUCT_WORDS + 4 + 3 * count] = addresses.reshape(-1)
    return _parameter(words)
