# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantization in NumPy, step by step: vectors, blocks, scales, codes.

A plan's array is laid out as vectors of whole blocks first: of the rows, or of the columns. A 2-D
tile is always worked on in rows; its columnwise result is a transposed copy of the rowwise one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit.backend.jobs import Job, Seed
from fp4kit.options import GROUP
from fp4kit.plan import Plan

from . import codecs, philox, rotation, scale_search, scaling


class Blocks(NamedTuple):
    """A plan's result before packing.

    Attributes:
        codes: uint8 (vectors, whole blocks of elements), one code per byte.
        byte: uint8 (vectors, blocks).
    """

    codes: np.ndarray
    byte: np.ndarray


def works_on_columns(plan: Plan) -> bool:
    """Whether the vectors worked on are columns (2-D tiles are worked on in rows)."""
    return plan.is_columnwise and plan.scheme.block_shape == "1d"


def vectors_of(plan: Plan, values: np.ndarray) -> np.ndarray:
    """float32 (vectors, length) that blocks divide, rotated if the plan says so."""
    vectors = values.T if works_on_columns(plan) else values
    mask, rounding = plan.scheme.rht, plan.scheme.rht_rounding
    if mask is None or rounding is None:
        return vectors
    return rotation.rotate(np.ascontiguousarray(vectors), mask, rounding)


def in_blocks(plan: Plan, vectors: np.ndarray) -> np.ndarray:
    """(n, blocks, block_size), padded with +0.0."""
    size = plan.format.block_size
    blocks = plan.format.num_blocks(vectors.shape[1])
    padded = np.zeros((len(vectors), blocks * size), np.float32)
    padded[:, : vectors.shape[1]] = vectors
    return padded.reshape(len(vectors), blocks, size)


def largest(magnitudes: np.ndarray) -> np.ndarray:
    """Maximum along the last axis with NaN ignored (all NaN or nothing gives 0)."""
    known = np.where(np.isnan(magnitudes), np.float32(0), magnitudes)
    result: np.ndarray = known.max(axis=-1, initial=np.float32(0))
    return result


def plan_amax(plan: Plan, values: np.ndarray) -> np.ndarray:
    """float32 (plan.scales,): `Backend.plan_amax` of float32 values."""
    with scaling.quiet():
        vectors = vectors_of(plan, values)
    return largest(np.abs(vectors).reshape(plan.scales, -1))


def block_amaxes(plan: Plan, values: np.ndarray) -> np.ndarray:
    """Amax of each block, or of its tile for each row of the tile, (n, blocks)."""
    amax = largest(np.abs(values))
    if plan.scheme.block_shape == "1d":
        return amax
    size = plan.format.block_size
    tiles = -(-len(amax) // size)
    padded = np.zeros((tiles * size, amax.shape[1]), np.float32)
    padded[: len(amax)] = amax
    of_tile = padded.reshape(tiles, size, -1).max(axis=1)
    return np.repeat(of_tile, size, axis=0)[: len(amax)]


def scales(
    plan: Plan,
    values: np.ndarray,
    dtype: str,
    second: np.ndarray | None,
    weights: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Scale bytes and element factors, both (n, blocks), of (n, blocks, block_size)."""
    recipe = plan.recipe
    amax = block_amaxes(plan, values)
    if recipe is None:
        assert plan.scale_rule is not None
        byte = scaling.mx_block_scale(amax, plan.format.element, plan.scale_rule)
        return byte, scaling.mx_element_factor(byte)
    column = None
    if second is not None:
        column = np.repeat(second, len(values) // len(second))[:, None]
    if plan.scheme.scale_search is not None:
        assert column is not None
        return scale_search.search(values, amax, column, plan.scheme, weights)
    byte = scaling.nvfp4_block_scale(amax, recipe, column, dtype)
    if plan.scheme.second_level == "per_token":
        assert column is not None
        return byte, scaling.per_token_factor(byte, column)
    return byte, scaling.nvfp4_element_factor(byte, recipe, column)


def element_codes(plan: Plan, values: np.ndarray, factor: np.ndarray, seed: Seed) -> np.ndarray:
    """Codes of (n, blocks, block_size) under factors (n, blocks)."""
    factor = factor[:, :, None]
    if plan.recipe is not None and plan.recipe.divides:
        scaled = np.where(factor == 0, np.float32(0), values / factor)
    else:
        scaled = values * factor
    if plan.scheme.rounding == "stochastic":
        random = philox.random_bits(scaled.size // GROUP, seed, int(works_on_columns(plan)))
        codes = philox.round_stochastically(scaled, random.reshape(scaled.shape))
    else:
        codes = codecs.encode(scaled, plan.format.element)
    if plan.recipe is not None and not plan.recipe.keeps_negative_zero:
        codes = np.where(values == 0, np.uint8(0), codes)
    return codes


def quantize_blocks(job: Job) -> Blocks:
    """Codes and scales of the plan's vectors."""
    plan = job.plan
    with scaling.quiet():
        values = in_blocks(plan, vectors_of(plan, codecs.to_float32(job.x, job.dtype)))
        weights = None
        if job.weights is not None:
            weights = in_blocks(plan, job.weights[None, :])
        byte, factor = scales(plan, values, job.dtype, job.second, weights)
        codes = element_codes(plan, values, factor, job.seed).reshape(len(values), -1)
    if plan.is_columnwise and not works_on_columns(plan):
        return transposed_tiles(plan, codes, byte)
    return Blocks(codes, byte)


def transposed_tiles(plan: Plan, codes: np.ndarray, byte: np.ndarray) -> Blocks:
    """The columnwise form of rowwise 2-D tiles: the same codes, one scale for a tile's columns."""
    size = plan.format.block_size
    result = np.zeros((plan.cols, plan.blocks * size), np.uint8)
    result[:, : plan.rows] = codes[:, : plan.cols].T
    of_tile = byte[::size].T
    return Blocks(result, np.repeat(of_tile, size, axis=0)[: plan.cols])


def store(plan: Plan, result: Blocks, packed: np.ndarray) -> np.ndarray:
    """Writes the codes into `packed`; returns the scales as they are laid out when linear."""
    codes = result.codes
    if plan.format.codes_per_byte == 2:
        packed[...] = codecs.pack_nibbles(codes, plan.nibble_order)
        return result.byte
    packed[...] = codes.T if plan.is_columnwise else codes
    if plan.is_columnwise and plan.scale_layout == "linear":
        return result.byte.T
    return result.byte


def load(plan: Plan, packed: np.ndarray, byte: np.ndarray) -> Blocks:
    """The inverse of :func:`store`, `byte` being (vectors, blocks)."""
    if plan.format.codes_per_byte == 2:
        return Blocks(codecs.unpack_nibbles(packed, plan.nibble_order), byte)
    return Blocks(packed.T if plan.is_columnwise else packed, byte)
