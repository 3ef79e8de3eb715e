# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""NVFP4, MXFP4 and MXFP8 quantization for NumPy, CuPy, torch and JAX arrays, byte-exact."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.backends import BackendStatus, backend_status
    from .api.grouped import dequantize_grouped, quantize_grouped
    from .api.grouped_tensor import GroupedPair, GroupedTensor
    from .api.matmul import matmul
    from .api.matmul_grouped import matmul_grouped
    from .api.metrics import ErrorStats, error_stats
    from .api.prepared import PreparedTensor, prepare
    from .api.quantize import amax, dequantize, quantize
    from .api.quantize_dequantize import quantize_dequantize
    from .api.residual import ResidualTensor, dequantize_residual, quantize_residual
    from .api.rotation import hadamard_transform
    from .api.scale_ops import convert_second_level, swizzle, unswizzle
    from .api.tensor import DirectionPair, QuantizedTensor
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
    from .files.calibrate import CalibrationReport, calibrate
    from .files.convert import convert_checkpoint, dequantize_checkpoint, dequantize_file
    from .files.open import TensorFile, open
    from .files.quantize import quantize_checkpoint, quantize_file
    from .files.save import save
    from .files.shared import finish_checkpoint
    from .files.survey import survey
    from .files.survey_report import SurveyReport
    from .files.verify import VerifyReport, verify
    from .formats import ALL_FORMATS, ALL_RECIPES, FormatSpec, Recipe
    from .scheme import Scheme

__version__ = "0.1.0"

__all__ = [
    "ALL_FORMATS",
    "ALL_RECIPES",
    "BackendStatus",
    "BackendUnavailableError",
    "CalibrationReport",
    "DirectionPair",
    "DtypeError",
    "ErrorStats",
    "FileFormatError",
    "FormatSpec",
    "Fp4kitError",
    "GroupedPair",
    "GroupedTensor",
    "KernelCompileError",
    "NonFiniteError",
    "OptionError",
    "PreparedTensor",
    "QuantizedTensor",
    "Recipe",
    "ResidualTensor",
    "Scheme",
    "ShapeError",
    "SurveyReport",
    "TensorFile",
    "VerifyReport",
    "__version__",
    "amax",
    "backend_status",
    "calibrate",
    "convert_checkpoint",
    "convert_second_level",
    "dequantize",
    "dequantize_checkpoint",
    "dequantize_file",
    "dequantize_grouped",
    "dequantize_residual",
    "error_stats",
    "finish_checkpoint",
    "hadamard_transform",
    "matmul",
    "matmul_grouped",
    "open",
    "prepare",
    "quantize",
    "quantize_checkpoint",
    "quantize_dequantize",
    "quantize_file",
    "quantize_grouped",
    "quantize_residual",
    "save",
    "survey",
    "swizzle",
    "unswizzle",
    "verify",
]

#: Where the public names live; a module is imported when a name of it is first asked for (PEP 562),
#: because NumPy alone takes about as long to import as `fp4kit --help` may take.
_HOMES = {
    "errors": (
        "BackendUnavailableError",
        "DtypeError",
        "FileFormatError",
        "Fp4kitError",
        "KernelCompileError",
        "NonFiniteError",
        "OptionError",
        "ShapeError",
    ),
    "formats": (
        "ALL_FORMATS",
        "ALL_RECIPES",
        "FormatSpec",
        "Recipe",
    ),
    "scheme": ("Scheme",),
    "api.backends": (
        "BackendStatus",
        "backend_status",
    ),
    "api.quantize": (
        "amax",
        "dequantize",
        "quantize",
    ),
    "api.quantize_dequantize": ("quantize_dequantize",),
    "api.prepared": (
        "PreparedTensor",
        "prepare",
    ),
    "api.tensor": ("DirectionPair", "QuantizedTensor"),
    "api.grouped": (
        "dequantize_grouped",
        "quantize_grouped",
    ),
    "api.grouped_tensor": ("GroupedPair", "GroupedTensor"),
    "api.residual": (
        "ResidualTensor",
        "dequantize_residual",
        "quantize_residual",
    ),
    "files.open": (
        "TensorFile",
        "open",
    ),
    "files.save": ("save",),
    "files.shared": ("finish_checkpoint",),
    "files.survey": ("survey",),
    "files.survey_report": ("SurveyReport",),
    "files.calibrate": (
        "CalibrationReport",
        "calibrate",
    ),
    "files.convert": (
        "convert_checkpoint",
        "dequantize_checkpoint",
        "dequantize_file",
    ),
    "files.quantize": (
        "quantize_checkpoint",
        "quantize_file",
    ),
    "files.verify": (
        "VerifyReport",
        "verify",
    ),
    "api.matmul": ("matmul",),
    "api.matmul_grouped": ("matmul_grouped",),
    "api.metrics": (
        "ErrorStats",
        "error_stats",
    ),
    "api.rotation": ("hadamard_transform",),
    "api.scale_ops": (
        "convert_second_level",
        "swizzle",
        "unswizzle",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
