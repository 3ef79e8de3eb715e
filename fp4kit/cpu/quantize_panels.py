# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantization panel by panel: columnwise, both directions, 2-D, rotated, searched, stochastic.

A tile is loaded (and rotated), its block scales made or searched, its codes packed into words of
32 bits, and both stored. Plain rowwise quantization is faster in :mod:`fp4kit.cpu.quantize`.
"""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from fp4kit.backend.interface import Job, Plan

from .buffers import flat_or_empty, records
from .codecs import encode_e2m1, encode_float8
from .elements import f32, float_bits, index, u32, u64
from .jit import jit_inner, jit_of
from .panels import Panel, each_widened
from .philox import encode_stochastically, random_words
from .plan_numbers import plan_numbers
from .rotation import rotate
from .scale_search import NO_SEARCH, search
from .scaling import NO_RECIPE, TE, mx_scales, nvfp4_scales, te_scales_each
from .swizzle import linear_output
from .tiles import (
    GROUP,
    LONGEST,
    TILE,
    Output,
    Tile,
    block_amaxes,
    load,
    make_scratch,
    store_tile,
    tile_amaxes,
)


@jit_inner
def tile_count(plan, cols):
    """Blocks in a tile of `cols` columns."""
    if plan.in_columns:
        return cols
    return (cols + plan.size - 1) // plan.size * plan.size


@jit_inner
def load_tile(plan, panel, first, count, v):
    """Loads a tile of a panel, rotated if the plan says so."""
    size = plan.size
    load(panel, plan.in_columns, first, count, size, v)
    if plan.rotated:
        rotate(v, count, size, plan.mask, plan.to_bfloat, False)
        # A rotation may have made -0.0 of what was loaded as padding.
        if plan.in_columns:
            for k in range(max(panel.rows - first, 0), size):
                for b in range(count):
                    v[k, b] = f32(0)
        else:
            blocks = count // size
            for k in range(max(panel.cols - (blocks - 1) * size, 0), size):
                for r in range(size):
                    v[k, r * blocks + blocks - 1] = f32(0)


@jit_inner
def number_blocks(plan, tile, second, scratch):
    """The second-level value and the number of the first group of 16 codes of each block."""
    each, group, size = scratch.second, scratch.group, plan.size
    per_block, shared = size // GROUP, plan.vectors_per_second
    if plan.in_columns:
        down = (plan.rows + size - 1) // size
        for b in range(tile.blocks):
            vector = tile.col + b
            each[b] = second[vector // shared] if plan.has_second else f32(1)
            group[b] = u64((vector * down + tile.row // size) * per_block)
        return
    blocks = tile.blocks // size
    across = (plan.cols + size - 1) // size
    for r in range(size):
        vector = min(tile.row + r, plan.rows - 1)
        number = 0 if plan.columnwise else vector // shared
        value = second[number] if plan.has_second else f32(1)
        for j in range(blocks):
            each[r * blocks + j] = value
            block = (tile.row + r) * across + tile.col // size + j
            group[r * blocks + j] = u64(block * per_block)


@jit_inner
def tile_scales(plan, tile, weights, scratch):
    """Scale bytes and element factors of the blocks of a tile."""
    amax, second, byte, factor = scratch.amax, scratch.second, scratch.byte, scratch.factor
    count = tile.blocks
    block_amaxes(scratch.v, count, plan.size, amax)
    if plan.is_2d:
        tile_amaxes(amax, plan.size, count // plan.size)
    if plan.rules.recipe == NO_RECIPE:
        mx_scales(plan.rules, f32(1), amax, count, byte, 0, factor)
    elif plan.search != NO_SEARCH:
        search(plan, tile, weights, scratch)
    elif plan.rules.recipe == TE:
        te_scales_each(plan.rules, second, plan.per_token, amax, count, byte, factor)
    else:
        b = 0
        while b < count:
            stop = b + 1
            while stop < count and float_bits(second[stop]) == float_bits(second[b]):
                stop += 1
            nvfp4_scales(plan.rules, second[b], amax[b:stop], stop - b, byte, b, factor[b:stop])
            b = stop


@jit_inner
def tile_codes(plan, count, scratch):
    """Code words of the blocks of a tile: eight 4-bit codes or four bytes in each."""
    v, factor, words, rules = scratch.v, scratch.factor, scratch.words, plan.rules
    random, group, keeps_zero = scratch.random, scratch.group, rules.keeps_zero
    per_word = index(32 // plan.bits)
    for w in range(index(plan.size) // per_word):
        for b in range(index(count)):
            words[w, b] = u32(0)
    for k in range(index(plan.size)):
        w = k // per_word
        place = k % per_word
        if plan.bits == 8:
            mantissa_bits, bias, max_value = rules.mantissa_bits, rules.bias, rules.max_value
            for b in range(index(count)):
                code = encode_float8(v[k, b] * factor[b], mantissa_bits, bias, max_value)
                words[w, b] |= u32(code * u32(index(1) << (place * index(8))))
            continue
        place = place ^ index(plan.high_first)
        # A product, because numba would shift in 64 bits.
        weight = u32(index(1) << (place * index(4)))
        if plan.stochastic:
            element = k % index(GROUP)
            if element == index(0):
                # Groups are numbered along the packed codes, so a block's follow each other.
                direction = 1 if plan.in_columns else 0
                random_words(group, count, direction, plan.subsequence, plan.key, random)
                for b in range(index(count)):
                    group[b] += u64(1)
            source, turn = element // index(4), u32(element % index(4) * index(8))
            for b in range(index(count)):
                code = encode_stochastically(v[k, b] * factor[b], random[source, b], turn)
                words[w, b] |= u32(code * weight)
        elif rules.divides:
            for b in range(index(count)):
                code = encode_e2m1(v[k, b] / factor[b])
                code = u32(0) if factor[b] == f32(0) else code
                code = u32(0) if v[k, b] == f32(0) and not keeps_zero else code
                words[w, b] |= u32(code * weight)
        else:
            for b in range(index(count)):
                words[w, b] |= u32(encode_e2m1(v[k, b] * factor[b]) * weight)


@jit_of(allocates=True)
def quantize_panel(panel, directions, plans, seconds, weights, outputs):
    """Quantizes a panel in one or two directions.

    Args:
        panel: a Panel.
        directions: how many of the two entries of each of the following to use.
        plans: two records of PlanNumbers.
        seconds: two float32 arrays of second-level scales.
        weights: what an error of each column counts in a search; empty for all alike.
        outputs: two Output.
    """
    scratch = make_scratch()
    for d in range(directions):
        plan = plans[d]
        count = tile_count(plan, panel.cols)
        for first in range(0, panel.rows, plan.size):
            rows = min(plan.size, panel.rows - first)
            tile = Tile(panel.row + first, panel.col, rows, count)
            load_tile(plan, panel, first, count, scratch.v)
            number_blocks(plan, tile, seconds[d], scratch)
            tile_scales(plan, tile, weights, scratch)
            tile_codes(plan, count, scratch)
            store_tile(plan, tile, scratch, outputs[d])


@jit_of(allocates=True)
def amax_panel(panel, plans, vectors):
    """Raises `vectors` to the largest magnitudes (bits, NaN ignored) of a panel."""
    v, amax, plan = np.empty((LONGEST, TILE), np.float32), np.empty(TILE, np.uint32), plans[0]
    count = tile_count(plan, panel.cols)
    blocks = count // plan.size
    for first in range(0, panel.rows, plan.size):
        load_tile(plan, panel, first, count, v)
        block_amaxes(v, count, plan.size, amax)
        if plan.columnwise:
            for b in range(count):
                vectors[panel.col + b] = max(vectors[panel.col + b], amax[b])
        else:
            for r in range(min(plan.size, panel.rows - first)):
                place = panel.row + first + r
                for j in range(blocks):
                    vectors[place] = max(vectors[place], amax[r * blocks + j])


def _output(job: Job, done: ExitStack) -> Output:
    """Where codes and scales of a job go: its arrays, or buffers that are copied to them."""
    plan: Plan = job.plan
    packed = job.packed
    codes = packed.reshape(-1)
    if codes.size % 4 or codes.ctypes.data % 4:
        codes = np.empty(-(-codes.size // 4) * 4, np.uint8)
        done.callback(lambda: np.copyto(packed, codes[: packed.size].reshape(packed.shape)))
    scales = linear_output(job.block_scale, plan.scale_layout, (plan.vectors, plan.blocks))
    return Output(codes.view(np.uint32), codes, done.enter_context(scales))


def quantize(*jobs: Job) -> None:
    """`Backend.quantize` of one job, or `quantize_both` of two, reading the array once."""
    x, dtype, (key, subsequence) = jobs[0].x, jobs[0].dtype, jobs[0].seed
    # The kernel takes two directions; one stands for both.
    pair = (jobs[0], jobs[-1])
    numbers = records(
        *(
            plan_numbers(job.plan, dtype)._replace(key=np.uint64(key), subsequence=subsequence)
            for job in pair
        )
    )
    seconds = tuple(flat_or_empty(job.second) for job in pair)
    weights = flat_or_empty(jobs[0].weights)
    with ExitStack() as done:
        outputs = [_output(job, done) for job in jobs]
        two = (outputs[0], outputs[-1])
        each_widened(
            x, dtype, lambda panel: quantize_panel(panel, len(jobs), numbers, seconds, weights, two)
        )


def rotated_amaxes(plan: Plan, x: np.ndarray, dtype: str) -> np.ndarray:
    """`Backend.plan_amax` of a plan that rotates."""
    vectors = np.zeros(plan.vectors, np.uint32)
    # Amaxes are those of vectors, whatever shares a block scale.
    numbers = plan_numbers(plan, dtype)._replace(is_2d=False, in_columns=plan.is_columnwise)
    plans = records(numbers)

    def work(panel: Panel) -> None:
        amax_panel(panel, plans, vectors)

    each_widened(x, dtype, work, alone="columns" if plan.is_columnwise else "rows")
    largest: np.ndarray = vectors.view(np.float32).reshape(plan.scales, -1).max(axis=1)
    return largest
