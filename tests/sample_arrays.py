# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays to quantize."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.formats import BLOCK_FORMATS

F32 = np.float32
#: NumPy dtype of each element type the library takes.
NUMPY = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
MX_FORMATS = tuple(name for name, spec in BLOCK_FORMATS.items() if not spec.has_second_level)


def gaussian(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(F32).astype(NUMPY[dtype])


def block(*values, size=16, fill=0.0):
    """One row of `size` elements that starts with `values`."""
    row = np.full((1, size), fill, F32)
    row[0, : len(values)] = values
    return row


def quantized(x, format="nvfp4", **options):
    """Quantized by the reference."""
    return fp4kit.quantize(x, format, backend="reference", **options)
