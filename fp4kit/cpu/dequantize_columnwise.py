# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Dequantization of columnwise codes, panel by panel."""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from fp4kit.backend.interface import Job, Plan

from .buffers import flat_or_empty, read_only
from .codecs import decode_e2m1, decode_e8m0
from .elements import f32, float_bits, index, u32
from .jit import jit_inner, jit_of
from .panels import PANEL_COLS, fill_panels
from .plan_numbers import plan_record
from .scaling import NO_RECIPE, TE, nvfp4_factors, te_factors
from .swizzle import linear_scales
from .tiles import TILE, Output, code_at


@jit_inner
def column_factors(plan, byte, second, first, last):
    """Decode factors of one block of each of some columns; runs of equal second levels at once."""
    count = second.size
    if plan.rules.recipe == NO_RECIPE:
        for b in range(count):
            first[b] = decode_e8m0(u32(byte[b]))
            last[b] = f32(1)
        return
    b = 0
    while b < count:
        stop = b + 1
        while stop < count and float_bits(second[stop]) == float_bits(second[b]):
            stop += 1
        if plan.rules.recipe == TE and plan.has_second:
            of_all = te_factors(plan.rules, second[b], byte, b, stop - b, first[b:stop])
        else:
            of_all = nvfp4_factors(plan.rules, second[b], byte, b, stop - b, first[b:stop])
        for i in range(b, stop):
            last[i] = of_all
        b = stop


@jit_of(allocates=True)
def decode_panel(panel, plans, stored, second, table):
    """Decodes a panel of columnwise codes.

    Args:
        panel: to fill.
        plans: one record of PlanNumbers.
        stored: an Output that holds codes and scales.
        second: second-level scales.
        table: values of all 8-bit codes.
    """
    plan, first, last = plans[0], np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    byte, each = np.empty(TILE, np.uint8), np.empty(TILE, np.float32)
    words = np.empty((4, TILE), np.uint32)
    x, packed, codes, scales = panel.x, stored.words, stored.codes, stored.scales
    zero_mask = u32(0xFFFFFFFF) if plan.rules.decodes_zero else u32(0)
    size, col, count = plan.size, panel.col, panel.cols
    down, per_block, turn = (plan.rows + size - 1) // size, size // 8, index(plan.high_first)
    has_second, shared, cols = plan.has_second, plan.vectors_per_second, plan.cols
    vector_stride, block_stride = plan.vector_stride, plan.block_stride
    for b in range(count):
        each[b] = second[(col + b) // shared] if has_second else f32(1)
    for start in range(panel.row, panel.row + panel.rows, size):
        block = start // size
        for b in range(count):
            byte[b] = scales[(col + b) * vector_stride + block * block_stride]
        column_factors(plan, byte, each[:count], first, last)
        if plan.bits == 4:
            for b in range(count):
                place = index(((col + b) * down + block) * per_block)
                for w in range(index(per_block)):
                    words[w, b] = packed[place + w]
        for k in range(index(min(size, plan.rows - start))):
            target = index((start - panel.row) * PANEL_COLS) + k * index(PANEL_COLS)
            if plan.bits == 4:
                for b in range(index(count)):
                    code = code_at(words, k ^ turn, b, 4)
                    x[target + b] = decode_e2m1(code, first[b], last[b], zero_mask)
            else:
                source = (index(start) + k) * index(cols) + index(col)
                for b in range(index(count)):
                    x[target + b] = table[codes[source + b]] * first[b]


def dequantize(job: Job, out: np.ndarray, dtype: str) -> None:
    """`Backend.dequantize` of a columnwise plan."""
    plan: Plan = job.plan
    codes = job.packed.reshape(-1)
    if codes.size % 4 or codes.ctypes.data % 4:
        codes = np.concatenate([codes, np.zeros(-codes.size % 4, np.uint8)])
    byte = linear_scales(job.block_scale, plan.scale_layout, (plan.vectors, plan.blocks))
    stored = Output(read_only(codes.view(np.uint32)), read_only(codes), read_only(byte.reshape(-1)))
    numbers, scales = plan_record(plan, dtype), flat_or_empty(job.second)
    table = read_only(plan.format.element.values)
    fill_panels(out, dtype, lambda panel: decode_panel(panel, numbers, stored, scales, table))
