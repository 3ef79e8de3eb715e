# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Encode and decode E2M1, E4M3, E5M2 and E8M0 in NumPy: the readable ground truth.

Rounding is to nearest, ties to the even code (IEEE 754 roundTiesToEven on the small type),
saturating; formats as in the OCP Microscaling specification 1.0, sections 5.3 and 5.4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4kit.formats import E8M0_NAN, ElementType

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def encode(values: Floats, element: ElementType) -> Codes:
    """Rounds float32 values to codes of `element`, saturating.

    The sign of zero, and of values that round to zero, is kept. NaN becomes the element's NaN code
    with a positive sign; infinities become the largest finite value.

    Args:
        values: float32 array of any shape.
        element: target type.

    Returns:
        uint8 codes of the same shape (one code per byte, also for E2M1).
    """
    bits = values.view(np.uint32)
    magnitude = np.abs(values)
    # Boundary i lies between codes i and i + 1; it is exact in binary32 for these small types.
    table = element.magnitudes
    boundaries = (table[:-1] + table[1:]) / np.float32(2)
    code = np.searchsorted(boundaries, magnitude.ravel()).reshape(values.shape)
    at_boundary = np.minimum(code, element.max_code - 1)
    tie = magnitude == boundaries[at_boundary]
    code = code + (tie & (code % 2 == 1))
    code = np.where(np.isnan(values), element.nan_code, code)
    sign = (bits >> 31).astype(np.uint8) << np.uint8(element.bits - 1)
    sign = np.where(np.isnan(values), np.uint8(0), sign)
    return code.astype(np.uint8) | sign


def decode(codes: Codes, element: ElementType) -> Floats:
    """Exact float32 value of each code."""
    result: Floats = element.values[codes]
    return result


def decode_e8m0(scale: Codes) -> Floats:
    """2^(byte - 127) as float32; byte 0 is the subnormal 2^-127 (not 0), byte 255 is NaN."""
    # The byte is binary32's exponent field, except that field 0 would be 0.
    bits = np.where(scale == 0, np.uint32(0x00400000), scale.astype(np.uint32) << np.uint32(23))
    result: Floats = np.where(scale == E8M0_NAN, np.float32(np.nan), bits.view(np.float32))
    return result


def pack_nibbles(codes: Codes, nibble_order: str) -> Codes:
    """Packs E2M1 codes (..., K), K even, two per byte into (..., K/2).

    Args:
        codes: values 0..15.
        nibble_order: `low_first` puts the even element into the low nibble, `high_first` into the
            high one.
    """
    even, odd = codes[..., 0::2], codes[..., 1::2]
    low, high = (even, odd) if nibble_order == "low_first" else (odd, even)
    return low | (high << np.uint8(4))


def unpack_nibbles(packed: Codes, nibble_order: str) -> Codes:
    """Inverse of :func:`pack_nibbles`: (..., N) bytes to (..., 2N) codes."""
    low, high = packed & np.uint8(15), packed >> np.uint8(4)
    pair = (low, high) if nibble_order == "low_first" else (high, low)
    return np.stack(pair, axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def bfloat16_bits_to_float32(bits: NDArray[np.uint16]) -> Floats:
    """Widens bfloat16 bit patterns exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16_bits(values: Floats) -> NDArray[np.uint16]:
    """Rounds float32 to bfloat16 bit patterns, nearest even; NaN becomes the quiet NaN 7FC0."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    result: NDArray[np.uint16] = np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    return result


def to_float32(data: np.ndarray, dtype: str) -> Floats:
    """Widens raw input (float32, float16, or uint16 bfloat16 bits) exactly to float32."""
    if dtype == "bfloat16":
        return bfloat16_bits_to_float32(data)
    return np.asarray(data, np.float32)


def from_float32(values: Floats, dtype: str) -> np.ndarray:
    """Rounds float32 once to the raw form of `dtype` (bfloat16 as uint16 bits).

    NaN becomes the positive quiet one: its sign and payload would depend on the processor.
    """
    if dtype == "bfloat16":
        return float32_to_bfloat16_bits(values)
    return np.where(np.isnan(values), np.float32(np.nan), values).astype(dtype)


def round_to(values: Floats, dtype: str) -> Floats:
    """Rounds float32 values to `dtype` and widens them again."""
    return to_float32(from_float32(values, dtype), dtype)
