# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""NVFP4, MXFP4 and MXFP8 quantization for NumPy, CuPy, torch and JAX arrays, byte-exact."""

from .api import amax, dequantize, quantize, quantize_dequantize
from .backends import BackendStatus, backend_status
from .errors import (
    BackendUnavailableError,
    DtypeError,
    FileFormatError,
    Fp4kitError,
    KernelCompileError,
    NonFiniteError,
    OptionError,
    ShapeError,
)
from .formats import ALL_FORMATS, ALL_RECIPES, FormatSpec, Recipe
from .metrics import ErrorStats, error_stats
from .scale_ops import convert_second_level, swizzle, unswizzle
from .tensor import QuantizedTensor

__version__ = "0.1.0"

__all__ = [
    "ALL_FORMATS",
    "ALL_RECIPES",
    "BackendStatus",
    "BackendUnavailableError",
    "DtypeError",
    "ErrorStats",
    "FileFormatError",
    "FormatSpec",
    "Fp4kitError",
    "KernelCompileError",
    "NonFiniteError",
    "OptionError",
    "QuantizedTensor",
    "Recipe",
    "ShapeError",
    "__version__",
    "amax",
    "backend_status",
    "convert_second_level",
    "dequantize",
    "error_stats",
    "quantize",
    "quantize_dequantize",
    "swizzle",
    "unswizzle",
]
