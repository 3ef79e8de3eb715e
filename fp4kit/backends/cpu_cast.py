# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Float32 rounded to a narrower element type, as :func:`fp4kit.codecs.from_float32` does it."""

from __future__ import annotations

import numpy as np

from fp4kit import arrays, codecs

from .cpu_threads import run
from .cpu_words import WORD_TYPES, round_range


def round_float32(values: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """Rounds once, nearest even, on all cores.

    Args:
        values: float32, flat, C-contiguous.
        dtype: `bfloat16`, `float16` or `float32`.
        out: uint8, flat, C-contiguous, aligned for the element type; takes as many elements.
    """
    raw = out.view(arrays.RAW_DTYPES[dtype])
    even = len(values) // 2 * 2
    pairs = values[:even].view(np.uint64)
    words = raw[:even].view(WORD_TYPES[dtype])
    run(lambda begin, end: round_range(pairs, begin, end, words), len(pairs), 2)
    raw[even:] = codecs.from_float32(values[even:], dtype)
