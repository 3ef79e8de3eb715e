# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Formats by name."""

import numpy as np

import fp4kit

x = np.ones((32, 64), np.float32)
for q in (fp4kit.quantize(x), fp4kit.quantize(x, "mxfp4"), fp4kit.quantize(x, "mxfp8_e5m2")):
    rows: int = q.shape[0]
    bits: float = q.bits_per_element
    name: str = q.format
fp4kit.quantize(x, "nvpf4")  # wrong
fp4kit.quantize(x, "fp4")  # wrong
fp4kit.quantize(x, 4)  # wrong
fp4kit.quantize_dequantize(x, "mxpf8")  # wrong
