# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What checks of golden cases share: masks, codes, names of formats."""

from __future__ import annotations

from typing import Any

import numpy as np

import fp4kit
from fp4kit.reference import codecs

OUTPUTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MX_FORMATS = {"e2m1": "mxfp4", "e4m3": "mxfp8", "e5m2": "mxfp8_e5m2"}
LAYOUTS = {"linear": "linear", "128x4": "swizzled_128x4", "8x4": "swizzled_8x4"}


def per_element(mask: np.ndarray, block: int) -> np.ndarray:
    """A mask of blocks as one of elements."""
    return np.repeat(mask, block, axis=-1)


def codes_of(packed: np.ndarray) -> np.ndarray:
    return codecs.unpack_nibbles(packed, "low_first")


def packed_mask(mask: np.ndarray) -> np.ndarray:
    """Bytes both of whose elements are in the mask."""
    return mask[..., 0::2] & mask[..., 1::2]


def one_level(packed: np.ndarray, scale: np.ndarray, layout: str = "linear") -> Any:
    """Codes and E4M3 scales without a second level: they decode to value * scale exactly."""
    return fp4kit.QuantizedTensor(
        packed,
        scale,
        "nvfp4",
        (packed.shape[0], packed.shape[1] * 2),
        recipe="nvfuser",
        scale_layout=layout,
    )
