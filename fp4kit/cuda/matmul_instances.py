# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of `kernels_cu/matmul/` that products of any kind are made of."""

from __future__ import annotations

from functools import cache

from fp4kit.backend.matmul import FloatOperand, Operand
from fp4kit.formats import ALL_FORMATS, BLOCK_FORMATS, DTYPES, FormatSpec

from .compile import CXX_DTYPES, CXX_FORMATS, NAMESPACE, Instance, instance
from .matmul_words import MOST_PRODUCTS, MOST_WEIGHTS

CXX_ELEMENTS = {"e4m3": "E4m3", "e5m2": "E5m2"}


@cache
def numbers_source(dtype: str) -> str:
    """How a kernel reads numbers."""
    return f"Numbers<{NAMESPACE}::{CXX_DTYPES[dtype]}>"


@cache
def quantized_source(spec: FormatSpec) -> str:
    """How a kernel reads codes and scales of a format."""
    if spec.has_scale_grid:
        return f"Grid<{NAMESPACE}::{CXX_ELEMENTS[spec.element.name]}>"
    return f"Blocks<{NAMESPACE}::{CXX_FORMATS[spec.name]}>"


def source_of(operand: Operand) -> str:
    """How a kernel reads an operand."""
    if isinstance(operand, FloatOperand):
        return numbers_source(operand.dtype)
    return quantized_source(operand.format)


def _numbered(kernel: str, file: str, names: tuple[str, ...], number: int) -> Instance:
    """An instance whose last template argument is a number."""
    arguments = ", ".join([*(f"{NAMESPACE}::{name}" for name in names), str(number)])
    return Instance(file, f"{NAMESPACE}::{kernel}<{arguments}>")


@cache
def any_kernel(a: str, b: str, most: int) -> Instance:
    """Tiles of at most so many products of sources."""
    return _numbered("matmul_any_kernel", "matmul/matmul_any.cu", (a, b), most)


@cache
def ragged_kernel(a: str, b: str, most: int) -> Instance:
    """Tiles of ranges of rows with at most so many weights."""
    return _numbered("matmul_ragged_kernel", "matmul/matmul_any.cu", (a, b), most)


@cache
def finish_kernel(most: int) -> Instance:
    """Sums to elements of at most so many products."""
    return _numbered("matmul_finish_kernel", "matmul/finish.cu", (), most)


@cache
def factor_kernel() -> Instance:
    """The one factor of a product."""
    return _numbered("matmul_factor_kernel", "matmul/finish.cu", (), MOST_PRODUCTS[0])


@cache
def nan_kernel(dtype: str) -> Instance:
    """NaN of a GEMM to ours."""
    return instance("matmul_nan_kernel", "matmul/finish.cu", CXX_DTYPES[dtype])


@cache
def decode_kernel(source: str, dtype: str) -> Instance:
    """Rows of an operand as numbers."""
    return instance("matmul_decode_kernel", "matmul/decode.cu", source, CXX_DTYPES[dtype])


@cache
def decode_prepared_kernel(spec: FormatSpec, dtype: str) -> Instance:
    """Rows of prepared weights as numbers."""
    words = CXX_FORMATS[spec.name], CXX_DTYPES[dtype]
    return instance("decode_prepared_kernel", "matmul/decode_prepared.cu", *words)


def all_instances() -> list[Instance]:
    """Every kernel that any product can launch."""
    quantized = [quantized_source(spec) for spec in ALL_FORMATS.values()]
    numbers = [numbers_source(dtype) for dtype in DTYPES]
    result = [factor_kernel()]
    result += [*map(nan_kernel, DTYPES), *map(finish_kernel, MOST_PRODUCTS)]
    result += [
        decode_prepared_kernel(spec, dtype)
        for spec in BLOCK_FORMATS.values()
        for dtype in DTYPES
        if spec.packs_nibbles
    ]
    result += [decode_kernel(source, dtype) for source in quantized for dtype in DTYPES]
    for b in quantized:
        for a in numbers + quantized:
            result += [any_kernel(a, b, most) for most in MOST_PRODUCTS]
        for a in numbers:
            result += [ragged_kernel(a, b, most) for most in MOST_WEIGHTS]
    return result
