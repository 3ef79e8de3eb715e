# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Residual channels: :mod:`fp4kit.reference.residual_blocks`, a row at a time, block by block."""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp4kit.backend.jobs import Job
from fp4kit.backend.operations import ResidualPlan
from fp4kit.reference import residual_blocks, scaling

from .buffers import aligned_output, read_only
from .codecs import (
    E4M3_MAX,
    decode_e4m3,
    decode_times,
    encode_e2m1,
    encode_e4m3,
    nibble_shifts,
    pack,
)
from .elements import (
    ABS,
    INF_BITS,
    at_least,
    at_most,
    bits_float,
    elements,
    f32,
    float_bits,
    index,
    narrow,
    round_to_bfloat,
    u32,
    widen,
)
from .jit import jit_inner, jit_of
from .scaling import ONE, SIX
from .swizzle import linear_output, linear_scales
from .threads import run

BLOCK = index(16)
SCALE_MIN = residual_blocks.SCALE_MIN


class ResidualNumbers(NamedTuple):
    """What the kernels have to know of a plan.

    Attributes:
        cols: channels.
        first: first main block with a residual block.
        main_places: where each main block goes.
        residual_places: where the residual block of each goes (read from `first` on).
        blocks: blocks in a row of the result.
        weight: copy main blocks instead of quantizing residuals.
        to_bfloat: round scaled values and residuals.
        low_first: whether the even element takes the low nibble.
        scale: encode scale.
        order: channel order, empty for none.
    """

    cols: int
    first: int
    main_places: np.ndarray
    residual_places: np.ndarray
    blocks: int
    weight: bool
    to_bfloat: bool
    low_first: bool
    scale: np.float32
    order: np.ndarray


@jit_inner
def value_of(code):
    """float32 of the E2M1 code in the lowest bits of a word (u32)."""
    return decode_times(code, f32(0.5))


@jit_inner
def rounded(value, to_bfloat):
    """A value, rounded to bfloat16 if told."""
    return round_to_bfloat(value) if to_bfloat else value


@jit_inner
def encode_block(y, code):
    """Fills the codes of a block and returns its scale byte (u32)."""
    largest = u32(0)
    for k in range(BLOCK):
        bits = float_bits(y[k]) & ABS
        largest = max(largest, bits if bits <= INF_BITS else u32(0))
    scale = at_least(bits_float(largest) / SIX, SCALE_MIN)
    byte = encode_e4m3(at_most(scale, E4M3_MAX))
    factor = ONE / decode_e4m3(byte)
    for k in range(BLOCK):
        code[k] = encode_e2m1(y[k] * factor)
    return byte


@jit_inner
def store_block(code, low_first, place, packed):
    """Packs the codes of a block behind each other."""
    even_shift, odd_shift = nibble_shifts(low_first)
    for k in range(BLOCK // index(2)):
        even, odd = code[index(2) * k], code[index(2) * k + index(1)]
        packed[place * index(8) + k] = pack(even, odd, even_shift, odd_shift)


@jit_of(allocates=True)
def quantize_rows(x, begin, end, plan, packed, byte):
    """Quantizes rows begin..end of flat elements; `packed` and `byte` are flat too."""
    y, code = np.empty(16, np.float32), np.empty(16, np.uint32)
    cols, blocks, order = index(plan.cols), index(plan.blocks), plan.order
    main_places, residual_places = plan.main_places, plan.residual_places
    for row in range(index(begin), index(end)):
        for block in range(cols // BLOCK):
            for k in range(BLOCK):
                channel = block * BLOCK + k
                source = channel if order.size == 0 else index(order[channel])
                y[k] = rounded(widen(x[row * cols + source]) * plan.scale, plan.to_bfloat)
            place = row * blocks + index(main_places[block])
            main = encode_block(y, code)
            byte[place] = main
            store_block(code, plan.low_first, place, packed)
            if block < index(plan.first):
                continue
            place = row * blocks + index(residual_places[block])
            if not plan.weight:
                q = decode_e4m3(main)
                for k in range(BLOCK):
                    y[k] = rounded(y[k] - value_of(code[k]) * q, plan.to_bfloat)
                main = encode_block(y, code)
            byte[place] = main
            store_block(code, plan.low_first, place, packed)


@jit_of(allocates=True)
def dequantize_rows(packed, byte, begin, end, plan, out):
    """Decodes rows begin..end: the inverse of `quantize_rows`."""
    turn = index(0) if plan.low_first else index(1)
    cols, blocks, order, inverse = (
        index(plan.cols),
        index(plan.blocks),
        plan.order,
        ONE / plan.scale,
    )
    main_places, residual_places = plan.main_places, plan.residual_places
    for row in range(index(begin), index(end)):
        for block in range(cols // BLOCK):
            place = row * blocks + index(main_places[block])
            q = decode_e4m3(u32(byte[place]))
            adds = block >= index(plan.first) and not plan.weight
            other = row * blocks + index(residual_places[block]) if adds else place
            residual = decode_e4m3(u32(byte[other]))
            for k in range(BLOCK):
                shift = u32((k & index(1)) ^ turn) << u32(2)
                code = u32(packed[place * index(8) + (k >> index(1))]) >> shift
                value = value_of(u32(code)) * q
                if adds:
                    code = u32(packed[other * index(8) + (k >> index(1))]) >> shift
                    value = value + value_of(u32(code)) * residual
                channel = block * BLOCK + k
                target = row * cols + (channel if order.size == 0 else index(order[channel]))
                out[target] = narrow(value * inverse, out[target])


def _numbers(job: Job, order: np.ndarray | None) -> ResidualNumbers:
    plan: ResidualPlan = job.plan
    blocks = range(plan.main_blocks)
    return ResidualNumbers(
        cols=plan.cols,
        first=plan.first,
        main_places=np.array([plan.main_place(block) for block in blocks], np.int64),
        residual_places=np.array([plan.residual_place(block) for block in blocks], np.int64),
        blocks=plan.blocks,
        weight=plan.mode == "weight",
        to_bfloat=plan.rounds,
        low_first=plan.nibble_order == "low_first",
        scale=scaling.usable(job.second)[0],
        order=read_only(np.empty(0, np.int64) if order is None else order),
    )


def quantize(job: Job, order: np.ndarray | None) -> None:
    """`Operations.quantize_residual`."""
    plan: ResidualPlan = job.plan
    x, packed = read_only(elements(job.x, job.dtype)), job.packed.reshape(-1)
    numbers = _numbers(job, order)
    with linear_output(job.block_scale, plan.scale_layout, (plan.rows, plan.blocks)) as byte:
        run(lambda b, e: quantize_rows(x, b, e, numbers, packed, byte), plan.rows, plan.cols)


def dequantize(job: Job, order: np.ndarray | None, out: np.ndarray, dtype: str) -> None:
    """`Operations.dequantize_residual`."""
    plan: ResidualPlan = job.plan
    byte = linear_scales(job.block_scale, plan.scale_layout, (plan.rows, plan.blocks))
    packed, scales = read_only(job.packed.reshape(-1)), read_only(byte.reshape(-1))
    numbers = _numbers(job, order)
    with aligned_output(out) as whole:
        result = elements(whole, dtype)
        run(
            lambda b, e: dequantize_rows(packed, scales, b, e, numbers, result),
            plan.rows,
            plan.cols,
        )
