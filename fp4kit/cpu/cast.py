# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Float32 rounded to a narrower type: :func:`fp4kit.reference.codecs.from_float32`."""

from __future__ import annotations

import importlib

import numpy as np

from fp4kit import arrays
from fp4kit.float_mode import by_ieee
from fp4kit.reference import codecs

from .load import read_only
from .threads import run


@by_ieee
def round_float32(values: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """Rounds once, nearest even, on all cores.

    Args:
        values: float32, flat, C-contiguous.
        dtype: `bfloat16`, `float16` or `float32`.
        out: uint8, flat, C-contiguous, aligned for the element type; takes as many elements.
    """
    kernels = importlib.import_module("fp4kit.cpu.words")
    raw = out.view(arrays.RAW_DTYPES[dtype])
    even = len(values) // 2 * 2
    pairs = read_only(values[:even].view(np.uint64))
    words = raw[:even].view(kernels.WORD_TYPES[dtype])
    run(lambda begin, end: kernels.round_range(pairs, begin, end, words), len(pairs), 2)
    raw[even:] = codecs.from_float32(values[even:], dtype)
