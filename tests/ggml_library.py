# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""ggml's own encoders and decoders of blocks, in the library that llama-cpp-python comes with."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

_POINTER = ctypes.c_void_p


class _Traits(ctypes.Structure):
    """`struct ggml_type_traits`."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, _POINTER, _POINTER, ctypes.c_int64)),
    )


_library = ctypes.CDLL(str(Path(llama_cpp.llama_cpp._base_path) / "libggml-base.so"))
_library.ggml_quantize_chunk.restype = ctypes.c_size_t
_library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)


def encode(array, kind):
    """Blocks that ggml makes of a float32 matrix."""
    rows, cols = array.shape
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    source = np.ascontiguousarray(array, np.float32)
    out = np.empty((rows, cols // elements * nbytes), np.uint8)
    _library.ggml_quantize_chunk(
        ctypes.c_int(kind.value), source.ctypes.data_as(_POINTER), out.ctypes.data_as(_POINTER),
        ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(cols), None,
    )  # fmt: skip
    return out


def decode(blocks, kind):
    """float32 that ggml makes of rows of blocks."""
    traits = _library.ggml_get_type_traits(ctypes.c_int(kind.value)).contents
    source = np.ascontiguousarray(blocks, np.uint8)
    rows, row = source.shape
    out = np.empty((rows, row // traits.type_size * traits.blck_size), np.float32)
    traits.to_float(source.ctypes.data, out.ctypes.data, out.size)
    return out
