# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of NVFP4 in plain torch operations, as one writes them without kernels of one's own.

Recipe te for ordinary values (no zero tensor, no infinity): scales E4M3(a * S/6) with S = range/A,
codes E2M1(x / (q/S)). Results nearly equal fp4kit's: torch adds and divides in orders of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 16
LARGEST_CODE_VALUE = 6.0
LARGEST_SCALE = 448.0
#: What the largest magnitude is mapped to, with scales up to 448 and up to 256.
RANGE = LARGEST_CODE_VALUE * 448
RANGE_256 = LARGEST_CODE_VALUE * 256
#: Transformer Engine's signs; bit i = 1 negates element i.
SIGN_MASK = 0xD7E8

Quantized = tuple[Tensor, Tensor]
"""uint8 codes (rows, K/2), the even element in the low nibble, and float8_e4m3fn (rows, K/16)."""


def blocks_of(x: Tensor) -> Tensor:
    """Rows as float32 blocks (rows, K/16, 16)."""
    return x.float().reshape(x.shape[0], -1, GROUP)


def steps(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """(first code of its binade, steps of that binade) of magnitudes up to 6.

    The steps are 0.5 below 2, 1 below 4, and 2 above: the code is the sum of both, rounded.
    """
    below2, below4 = magnitude < 2, magnitude < 4
    count = torch.where(below2, magnitude * 2, torch.where(below4, magnitude, magnitude * 0.5))
    first = torch.where(below2, 0.0, torch.where(below4, 2.0, 4.0))
    return first, count


def nearest_codes(scaled: Tensor) -> Tensor:
    """E2M1 codes, ties to the even one."""
    first, count = steps(scaled.abs().clamp(max=LARGEST_CODE_VALUE))
    return with_signs(first + count.round(), scaled)


def stochastic_codes(scaled: Tensor) -> Tensor:
    """E2M1 codes, up with the probability of the distance from the lower neighbour."""
    first, count = steps(scaled.abs().clamp(max=LARGEST_CODE_VALUE))
    whole = count.floor()
    up = torch.rand_like(count) < count - whole
    return with_signs(first + whole + up, scaled)


def with_signs(code: Tensor, scaled: Tensor) -> Tensor:
    """Codes of magnitudes as uint8 with the signs of what they stand for."""
    return code.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)


def code_values(codes: Tensor) -> Tensor:
    """float32 values of codes."""
    code = (codes & 7).float()
    value = torch.where(code < 4, code * 0.5, torch.where(code < 6, code - 2, code * 2 - 8))
    return torch.where(codes >= 8, -value, value)


def packed(codes: Tensor) -> Tensor:
    """Two codes a byte."""
    pairs = codes.reshape(codes.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def element_factor(scale: Tensor, encode: Tensor) -> Tensor:
    """1 / (q / S) of decoded scales."""
    return (1 / (scale * (1 / encode))).clamp(max=torch.finfo(torch.float32).max)


def te_scales(blocks: Tensor, encode: Tensor) -> Tensor:
    """E4M3 scale of each block."""
    scale = blocks.abs().amax(-1) * (encode * (1 / LARGEST_CODE_VALUE))
    return scale.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)


def quantize_rows(x: Tensor, amax: Tensor) -> Quantized:
    """NVFP4 rowwise."""
    blocks, encode = blocks_of(x), RANGE / amax
    scale = te_scales(blocks, encode)
    factor = element_factor(scale.float(), encode)
    return packed(nearest_codes(blocks * factor[..., None])), scale


def quantize_columns(x: Tensor, amax: Tensor) -> Quantized:
    """NVFP4 of the transpose."""
    return quantize_rows(x.t().contiguous(), amax)


def quantize_stochastically(x: Tensor, amax: Tensor) -> Quantized:
    """NVFP4 rowwise with stochastic rounding."""
    blocks, encode = blocks_of(x), RANGE / amax
    scale = te_scales(blocks, encode)
    factor = element_factor(scale.float(), encode)
    return packed(stochastic_codes(blocks * factor[..., None])), scale


def quantize_four_over_six(x: Tensor, amax: Tensor) -> Quantized:
    """NVFP4 rowwise, scales up to 256: the largest element at 6, or at 4 if that errs less."""
    blocks, encode = blocks_of(x), RANGE_256 / amax
    base = blocks.abs().amax(-1) / LARGEST_CODE_VALUE * encode

    def candidate(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = scale.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float()
        codes = nearest_codes(blocks * element_factor(q, encode)[..., None])
        decoded = code_values(codes) * q[..., None] * amax / RANGE_256
        return q, codes, (decoded - blocks).square().sum(-1)

    q6, codes6, error6 = candidate(base)
    q4, codes4, error4 = candidate(base * 1.5)
    better = error4 < error6
    codes = torch.where(better[..., None], codes4, codes6)
    return packed(codes), torch.where(better, q4, q6).to(torch.float8_e4m3fn)


def hadamard_matrix(device: torch.device | str) -> Tensor:
    """bfloat16 (16, 16): diag(signs) H / 4."""
    indices = range(GROUP)
    rows = [
        [(-1.0) ** ((i & j).bit_count() + (SIGN_MASK >> i & 1)) / 4 for j in indices]
        for i in indices
    ]
    return torch.tensor(rows, dtype=torch.bfloat16, device=device)


def rotate_rows(x: Tensor, matrix: Tensor) -> Tensor:
    """Rotates groups of 16 along the rows by a product with the matrix."""
    return (x.reshape(-1, GROUP) @ matrix).reshape(x.shape)


def quantize_rotated_columns(x: Tensor, amax: Tensor, matrix: Tensor) -> Quantized:
    """NVFP4 of the transpose, rotated; amax after the rotation."""
    return quantize_rows(rotate_rows(x.t().contiguous(), matrix), amax)


# ------------------------------------------------------------------------------------------------
# Agreement with fp4kit
# ------------------------------------------------------------------------------------------------


def share(flags: Tensor) -> float:
    """The share of True."""
    return int(flags.sum()) / flags.numel()


def equal_share(theirs: Quantized, codes: Tensor, scales: Tensor) -> float:
    """The share of equal codes or of equal scales, the lesser."""
    difference = theirs[0] ^ codes
    same = (share((difference & 15) == 0) + share(difference < 16)) / 2
    return min(same, share(theirs[1].view(torch.uint8) == scales))


def neighbour_share(theirs: Quantized, codes: Tensor, scales: Tensor) -> float:
    """The same, where codes of equal signs and neighbouring magnitudes count as equal."""
    same = 0.0
    for shift in (0, 4):
        one, other = ((array >> shift & 15).to(torch.int8) for array in (theirs[0], codes))
        near = ((one & 7) - (other & 7)).abs() <= 1
        same += share(near & ((one ^ other) < 8)) / 2
    return min(same, share(theirs[1].view(torch.uint8) == scales))


def close_share(theirs: Tensor, ours: Tensor) -> float:
    """The share of bfloat16 values that differ by no more than rounding twice does."""
    return share((theirs.float() - ours.float()).abs() <= 2**-6 * ours.float().abs() + 2**-7)
