# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The numba kernel modules, imported when first needed, and the view of codes they take."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import numpy as np

from fp4kit.backend.interface import Plan


@cache
def kernels() -> tuple[ModuleType, ModuleType, ModuleType, ModuleType]:
    """(words, kinds, encode, decode) kernel modules; importing them imports numba."""
    names = ("words", "kinds", "encode", "decode")
    modules = [importlib.import_module(f"fp4kit.cpu.{name}") for name in names]
    return modules[0], modules[1], modules[2], modules[3]


def read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written.

    Kernels are compiled for such inputs alone, whether or not the caller's arrays can be written.
    """
    view = array.view()
    view.flags.writeable = False
    return view


def code_words(packed: np.ndarray, plan: Plan) -> np.ndarray:
    """Packed codes as flat words of two elements: bytes for E2M1, 16-bit words for FP8."""
    flat = packed.reshape(-1)
    return flat if plan.format.codes_per_byte == 2 else flat.view(np.uint16)


def aligned(out: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """`out` itself if kernels can write whole words into it, else a buffer to copy back from."""
    if out.shape[1] == cols and out.ctypes.data % out.itemsize == 0:
        return out
    return np.empty((rows, cols), out.dtype)


def words_of(data: np.ndarray, dtype: str) -> np.ndarray:
    """Raw (rows, cols) data, cols even, as flat words of two elements."""
    word = kernels()[0].WORD_TYPES[dtype]
    flat = data.reshape(-1)
    if flat.ctypes.data % flat.itemsize:
        flat = flat.copy()
    result: np.ndarray = flat.view(word)
    return result


def padded_rows(data: np.ndarray, cols: int) -> np.ndarray:
    """Rows zero-padded to `cols`: a copy, or the data itself if there is nothing to pad."""
    if data.shape[1] == cols:
        return data
    result = np.zeros((data.shape[0], cols), data.dtype)
    result[:, : data.shape[1]] = data
    return result
