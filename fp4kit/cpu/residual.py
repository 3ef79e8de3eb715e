# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The numba kernels of :mod:`fp4kit.reference.residual_blocks`: a row at a time, block by block."""

# ruff: noqa: ANN001, ANN201 - numba infers the types

from __future__ import annotations

import numpy as np

from fp4kit.reference import residual_blocks

from .encode import encode_e2m1
from .jit import jit_inner, jit_of
from .scales import E4M3_MAX, ONE, SIX, at_least, at_most, decode_e4m3, encode_e4m3
from .tiles import index, widen
from .variant_decode import narrow
from .words import ABS, INF_BITS, bits_float, f32, float_bits, narrow_bfloat, u32

BLOCK = index(16)
SCALE_MIN = residual_blocks.SCALE_MIN
#: Twice the value of E2M1 magnitude code c stands in bits 4c..4c+3.
DOUBLED_VALUES = u32(0xC8643210)


@jit_inner
def value_of(code):
    """float32 of an E2M1 code (u32)."""
    magnitude = f32((DOUBLED_VALUES >> ((code & u32(7)) << u32(2))) & u32(15)) * f32(0.5)
    return bits_float(float_bits(magnitude) ^ u32((code & u32(8)) << u32(28)))


@jit_inner
def rounded(value, to_bfloat):
    """A value, rounded to bfloat16 if told."""
    return bits_float(narrow_bfloat(value) << u32(16)) if to_bfloat else value


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
def store_block(code, even_shift, odd_shift, place, packed):
    """Packs the codes of a block behind each other."""
    for k in range(BLOCK // index(2)):
        pair = (code[index(2) * k] << even_shift) | (code[index(2) * k + index(1)] << odd_shift)
        packed[place * index(8) + k] = np.uint8(pair)


@jit_of()
def quantize_rows(
    x, begin, end, cols, first, main_places, residual_places, blocks, weight, to_bfloat, low_first,
    scale, order, packed, byte,
):  # fmt: skip
    """Quantizes rows begin..end.

    Args:
        x: flat elements.
        begin: first row.
        end: one past the last.
        cols: channels.
        first: first main block with a residual block.
        main_places: where each main block goes.
        residual_places: where the residual block of each goes (read from `first` on).
        blocks: blocks in a row of the result.
        weight: copy main blocks instead of quantizing residuals.
        to_bfloat: round scaled values and residuals.
        low_first: nibble order.
        scale: encode scale.
        order: channel order, empty for none.
        packed: output bytes.
        byte: output scale bytes (rows, blocks), flat.
    """
    y, code = np.empty(16, np.float32), np.empty(16, np.uint32)
    even_shift = u32(0) if low_first else u32(4)
    odd_shift = u32(4) - even_shift
    for row in range(index(begin), index(end)):
        for block in range(index(cols) // BLOCK):
            for k in range(BLOCK):
                channel = block * BLOCK + k
                source = channel if order.size == 0 else index(order[channel])
                y[k] = rounded(widen(x[row * index(cols) + source]) * scale, to_bfloat)
            place = row * index(blocks) + index(main_places[block])
            main = encode_block(y, code)
            byte[place] = main
            store_block(code, even_shift, odd_shift, place, packed)
            if block < index(first):
                continue
            place = row * index(blocks) + index(residual_places[block])
            if not weight:
                q = decode_e4m3(main)
                for k in range(BLOCK):
                    y[k] = rounded(y[k] - value_of(code[k]) * q, to_bfloat)
                main = encode_block(y, code)
            byte[place] = main
            store_block(code, even_shift, odd_shift, place, packed)


@jit_of()
def dequantize_rows(
    packed, byte, begin, end, cols, first, main_places, residual_places, blocks, weight, low_first,
    scale, order, out,
):  # fmt: skip
    """Decodes rows begin..end: the inverse of `quantize_rows`."""
    turn = index(0) if low_first else index(1)
    inverse = ONE / scale
    for row in range(index(begin), index(end)):
        for block in range(index(cols) // BLOCK):
            place = row * index(blocks) + index(main_places[block])
            q = decode_e4m3(u32(byte[place]))
            adds = block >= index(first) and not weight
            other = row * index(blocks) + index(residual_places[block]) if adds else place
            residual = decode_e4m3(u32(byte[other]))
            for k in range(BLOCK):
                shift = u32((k & index(1)) ^ turn) << u32(2)
                code = u32(packed[place * index(8) + (k >> index(1))]) >> shift
                value = value_of(u32(code) & u32(15)) * q
                if adds:
                    code = u32(packed[other * index(8) + (k >> index(1))]) >> shift
                    value = value + value_of(u32(code) & u32(15)) * residual
                channel = block * BLOCK + k
                target = channel if order.size == 0 else index(order[channel])
                target = row * index(cols) + target
                out[target] = narrow(value * inverse, out[target])
