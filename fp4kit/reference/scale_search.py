# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Choosing a block's scale by the error it leaves: four_over_six and sweep, in NumPy.

four_over_six (Cook et al., "Four Over Six", 2025; Transformer Engine's `nvfp4_use_4over6`) maps a
block's amax onto 6 or onto 4, whichever leaves the lower error. sweep tries ten neighbouring
scales. All arithmetic is binary32, one rounding per operation, and every sum has a fixed order, so
that equal inputs choose equal scales on every backend.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4kit.formats import E2M1, E4M3
from fp4kit.options import GROUP
from fp4kit.scheme import Scheme

from . import codecs, scaling

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
#: Distance of each candidate of a sweep from the scale code of recipe te, in order of preference.
SWEEP_STEPS = (0, -1, 1, -2, 2, -3, 3, 4, 5, 6)


class Choice(NamedTuple):
    """Scale bytes and element factors, (rows, blocks) both."""

    byte: Codes
    factor: Floats


def search(
    values: Floats,
    amax: Floats,
    second: Floats,
    scheme: Scheme,
    weights: Floats | None = None,
) -> Choice:
    """The scale of each block that leaves the lowest error.

    Args:
        values: float32 (rows, blocks, 16), padded with zeros.
        amax: float32 (rows, blocks): of the block, or of its tile in all rows of the tile.
        second: the tensor's (or row's) amax, float32 (rows, 1).
        scheme: what to search and which error to compare; 2-D tiles choose as one.
        weights: float32 (1, blocks, 16), what the error of each column counts; None for alike.

    Returns:
        The chosen bytes and the factors that elements are multiplied with.
    """
    if scheme.scale_search == "four_over_six":
        candidates = four_over_six_candidates(amax, second, scheme)
    else:
        candidates = sweep_candidates(amax, second, scheme)
    best = Choice(candidates[0], factor_of(candidates[0], second, scheme))
    error = total_error(values, best, second, scheme, weights)
    for byte in candidates[1:]:
        other = Choice(byte, factor_of(byte, second, scheme))
        new = total_error(values, other, second, scheme, weights)
        better = new < error
        error = np.where(better, new, error)
        best = Choice(
            np.where(better, other.byte, best.byte), np.where(better, other.factor, best.factor)
        )
    return best


def four_over_six_candidates(amax: Floats, second: Floats, scheme: Scheme) -> list[Codes]:
    """The scale that maps the amax onto 6, then the one that maps it onto 4."""
    encode = scaling.te_encode_scale(second, scheme.e4m3_max)
    six = (amax / scaling.SIX) * encode
    four = six * np.float32(1.5)
    return [codecs.encode(np.minimum(scale, scaling.SCALE_MAX), E4M3) for scale in (six, four)]


def sweep_candidates(amax: Floats, second: Floats, scheme: Scheme) -> list[Codes]:
    """The scale of recipe te and its neighbours; those out of 1..126 are replaced by te's own."""
    own = scaling.te_block_scale(amax, second, scheme.e4m3_max)
    candidates = []
    for step in SWEEP_STEPS:
        code = own.astype(np.int64) + step
        possible = (code >= 1) & (code <= E4M3.max_code)
        candidates.append(np.where(possible, code, own).astype(np.uint8))
    return candidates


def factor_of(byte: Codes, second: Floats, scheme: Scheme) -> Floats:
    """What elements are multiplied with under each scale: step 3 of recipe te."""
    return scaling.te_element_factor(byte, second, scheme.e4m3_max)


def total_error(
    values: Floats,
    choice: Choice,
    second: Floats,
    scheme: Scheme,
    weights: Floats | None = None,
) -> Floats:
    """Error of each block (or tile, in all of its rows) under a choice of scales, (rows, blocks).

    Elements are summed in order; the sums of a tile's rows as Transformer Engine's warps do it,
    pairs 8, 4, 2 and 1 rows apart.
    """
    assert scheme.search_error is not None
    code = codecs.encode(values * choice.factor[:, :, None], E2M1)
    decoded = codecs.decode(code, E2M1)
    q = codecs.decode(choice.byte, E4M3)
    wanted = values
    if scheme.search_error.endswith("_scaled"):
        wanted = values * scaling.te_encode_scale(second, scheme.e4m3_max)[:, :, None]
        decoded = decoded * q[:, :, None]
    elif scheme.scale_search == "four_over_six":
        decoded = decoded * q[:, :, None] * second[:, :, None]
        decoded = decoded / scaling.second_level_range(scheme.e4m3_max)
    else:
        decoded = decoded * scaling.te_decode_factor(q, second, scheme.e4m3_max)[:, :, None]
    difference = decoded - wanted
    error = difference * difference if scheme.search_error.startswith("mse") else np.abs(difference)
    if weights is not None:
        error = error * weights
    total = np.zeros(error.shape[:2], np.float32)
    for i in range(GROUP):
        total = total + error[:, :, i]
    return tile_sums(total) if scheme.block_shape == "2d" else total


def tile_sums(rows: Floats) -> Floats:
    """Sums over tiles of 16 rows (the last one filled up with zeros), repeated for each row."""
    count, blocks = rows.shape
    padded = np.zeros((-(-count // GROUP) * GROUP, blocks), np.float32)
    padded[:count] = rows
    tiles = padded.reshape(-1, GROUP, blocks)
    for distance in (8, 4, 2, 1):
        tiles = tiles[:, :distance] + tiles[:, distance:]
    return np.repeat(tiles[:, 0], GROUP, axis=0)[:count]
