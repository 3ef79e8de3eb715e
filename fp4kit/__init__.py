# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""NVFP4, MXFP4 and MXFP8 quantization for NumPy, CuPy, torch and JAX arrays, byte-exact."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import amax, dequantize, quantize
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
    from .fake import quantize_dequantize
    from .formats import ALL_FORMATS, ALL_RECIPES, FormatSpec, Recipe
    from .grouped import dequantize_grouped, quantize_grouped
    from .grouped_tensor import GroupedDirections, GroupedTensor
    from .metrics import ErrorStats, error_stats
    from .quantize_variants import Directions
    from .residual import ResidualTensor, dequantize_residual, quantize_residual
    from .rotation import hadamard_transform
    from .scale_ops import convert_second_level, swizzle, unswizzle
    from .tensor import QuantizedTensor
    from .variant import Variant

__version__ = "0.1.0"

__all__ = [
    "ALL_FORMATS",
    "ALL_RECIPES",
    "BackendStatus",
    "BackendUnavailableError",
    "Directions",
    "DtypeError",
    "ErrorStats",
    "FileFormatError",
    "FormatSpec",
    "Fp4kitError",
    "GroupedDirections",
    "GroupedTensor",
    "KernelCompileError",
    "NonFiniteError",
    "OptionError",
    "QuantizedTensor",
    "Recipe",
    "ResidualTensor",
    "ShapeError",
    "Variant",
    "__version__",
    "amax",
    "backend_status",
    "convert_second_level",
    "dequantize",
    "dequantize_grouped",
    "dequantize_residual",
    "error_stats",
    "hadamard_transform",
    "quantize",
    "quantize_dequantize",
    "quantize_grouped",
    "quantize_residual",
    "swizzle",
    "unswizzle",
]

#: Modules that hold the public names; imported when a name is first asked for (PEP 562), because
#: NumPy alone takes about as long to import as `fp4kit --help` may take.
_HOMES = (
    "errors", "formats", "api", "backends", "metrics", "scale_ops", "tensor", "variant",
    "quantize_variants", "rotation", "fake", "residual",
    "grouped", "grouped_tensor",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = import_module(f".{home}", __name__)
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
