# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks with residuals in NumPy: the ground truth of TensorRT-LLM's ARCQuant quantizer.

`fp4_quantize_with_residual` (TensorRT-LLM, cpp/tensorrt_llm/kernels/arcquantFP4.cu), with an
exactly rounded reciprocal where the kernel's is approximate. Symbols: `g` encode scale, `y` = x g,
`q` a block's decoded scale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.operations import ResidualPlan
from fp4kit.formats import E2M1, E4M3, NVFP4

from . import codecs

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
ONE = np.float32(1)
SIX = np.float32(E2M1.max)
SCALE_MAX = np.float32(E4M3.max)
#: No block scale is 0: a zero block has the smallest one.
SCALE_MIN = np.float32(2.0**-9)


def encode_blocks(y: Floats) -> tuple[Codes, Codes, Floats]:
    """Codes (..., 16), scale bytes (...) and decoded values of float32 blocks (..., 16)."""
    magnitude = np.abs(y)
    amax = np.where(np.isnan(magnitude), np.float32(0), magnitude).max(axis=-1)
    scale = np.maximum(amax / SIX, SCALE_MIN)
    byte = codecs.encode(np.minimum(scale, SCALE_MAX), E4M3)
    q = codecs.decode(byte, E4M3)[..., None]
    code = codecs.encode(y * (ONE / q), E2M1)
    return code, byte, codecs.decode(code, E2M1) * q


def encode(plan: ResidualPlan, values: Floats, scale: Floats) -> tuple[Codes, Codes]:
    """Codes (rows, channels with residuals) and scale bytes (rows, blocks) of float32 values."""
    rounded = "bfloat16" if plan.rounds else "float32"
    y = codecs.round_to(values * scale, rounded)
    y = y.reshape(plan.rows, plan.main_blocks, NVFP4.block_size)
    code, byte, decoded = encode_blocks(y)
    extra, extra_byte = code[:, plan.first :], byte[:, plan.first :]
    if plan.mode == "activation":
        left = codecs.round_to(y - decoded, rounded)
        extra, extra_byte, _ = encode_blocks(left[:, plan.first :])
    all_codes = np.empty((plan.rows, plan.blocks, NVFP4.block_size), np.uint8)
    all_bytes = np.empty((plan.rows, plan.blocks), np.uint8)
    for block in range(plan.main_blocks):
        place = plan.main_place(block)
        all_codes[:, place], all_bytes[:, place] = code[:, block], byte[:, block]
        if block >= plan.first:
            place, number = plan.residual_place(block), block - plan.first
            all_codes[:, place], all_bytes[:, place] = extra[:, number], extra_byte[:, number]
    return all_codes.reshape(plan.rows, -1), all_bytes


def decode(plan: ResidualPlan, value: Floats, byte: Codes) -> Floats:
    """float32 (rows, cols) under g = 1, from values (rows, blocks, 16) and scale bytes."""
    decoded = value * codecs.decode(byte, E4M3)[:, :, None]
    result = np.empty((plan.rows, plan.main_blocks, NVFP4.block_size), np.float32)
    for block in range(plan.main_blocks):
        result[:, block] = decoded[:, plan.main_place(block)]
        if block >= plan.first and plan.mode == "activation":
            result[:, block] = result[:, block] + decoded[:, plan.residual_place(block)]
    return result.reshape(plan.rows, -1)
