# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The file operations, in one place for callers."""

from .compare import compare_files, inspect_file
from .dequantize_file import dequantize_file
from .quantize_file import plan_quantize_file, quantize_file
from .report import FileReport, QuantizeOptions, TensorReport

__all__ = [
    "FileReport",
    "QuantizeOptions",
    "TensorReport",
    "compare_files",
    "dequantize_file",
    "inspect_file",
    "plan_quantize_file",
    "quantize_file",
]
