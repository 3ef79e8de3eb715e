# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantized numbers in torch: products and rounding with gradients, modules, whole models.

`Linear` holds a quantized weight and multiplies with it, `load` puts such modules into a model from
a checkpoint. Importing this package imports torch.
"""

from __future__ import annotations

from .linear import Linear
from .loading import load
from .product import matmul
from .report import LoadReport
from .straight_through import hadamard_transform, quantize_dequantize

__all__ = ["Linear", "LoadReport", "hadamard_transform", "load", "matmul", "quantize_dequantize"]
