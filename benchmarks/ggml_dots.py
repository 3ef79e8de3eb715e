# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's products of one row with quantized rows, called in its own shared library.

ggml quantizes the row of numbers to 8 bits (Q8_0), then calls a `vec_dot` for each quantized row,
from as many threads as it has. Here a numba loop does that, with the library's function pointers.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np

#: Number of the type, elements of a block, bytes of a block, by the name of fp4kit's format.
TYPES = {"mxfp4": (39, 32, 17), "nvfp4": (40, 64, 36)}
Q8_BLOCK, Q8_BYTES = 32, 34
P = ctypes.c_size_t
VEC_DOT = ctypes.CFUNCTYPE(None, ctypes.c_int32, P, P, P, P, P, P, ctypes.c_int32)
FROM_FLOAT = ctypes.CFUNCTYPE(None, P, P, ctypes.c_int64)


class Traits(ctypes.Structure):
    """`struct ggml_type_traits_cpu`."""

    _fields_ = (
        ("from_float", P),
        ("vec_dot", P),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


class Ggml:
    """The functions of one libggml-cpu.so."""

    def __init__(self, path: Path) -> None:
        for name in ("libggml-base.so", "libggml-cpu.so"):
            self.library = ctypes.CDLL(str(path / name), mode=ctypes.RTLD_GLOBAL)
        self.library.ggml_cpu_init()
        self.library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(Traits)

    def traits(self, number: int) -> Traits:
        """What the library knows of a type."""
        result: Traits = self.library.ggml_get_type_traits_cpu(number).contents
        return result


class Product:
    """Rows of a format as ggml stores them, with random codes, and their product with a row."""

    def __init__(self, ggml: Ggml, name: str, rows: int, depth: int) -> None:
        number, block, size = TYPES[name]
        traits = ggml.traits(number)
        quantizer = ggml.traits(traits.vec_dot_type)
        self.rows, self.depth, self.row_bytes = rows, depth, depth // block * size
        rng = np.random.default_rng(0)
        blocks = rng.integers(0, 256, (rows * (depth // block), size), np.uint8)
        # Scales of moderate size: whole products stay finite.
        low, scales = (120, 1) if name == "mxfp4" else (0x30, 4)
        blocks[:, :scales] = rng.integers(low, low + 8, (blocks.shape[0], scales), np.uint8)
        self.blocks = blocks.reshape(-1)
        self.row = np.empty(depth // Q8_BLOCK * Q8_BYTES, np.uint8)
        self.out = np.empty(rows, np.float32)
        self._dot, self._quantize = VEC_DOT(traits.vec_dot), FROM_FLOAT(quantizer.from_float)
        dot = self._dot

        @numba.njit(nogil=True)
        def dots(first: int, last: int, depth: int, out: int, x: int, size: int, y: int) -> None:
            for i in range(first, last):
                dot(depth, out + 4 * i, 0, x + i * size, 0, y, 0, 1)

        self._dots = dots

    def __call__(self, x: np.ndarray, pool: ThreadPoolExecutor | None, threads: int) -> None:
        """The product of float32 (depth,) with all rows, on some threads."""
        self._quantize(x.ctypes.data, self.row.ctypes.data, self.depth)
        fixed = (self.depth, self.out.ctypes.data, self.blocks.ctypes.data, self.row_bytes)
        if pool is None:
            self._dots(0, self.rows, *fixed, self.row.ctypes.data)
            return
        # ggml's threads take pieces of rows in turn.
        step = -(-self.rows // (4 * threads))
        begins = range(0, self.rows, step)
        list(
            pool.map(
                lambda b: self._dots(b, min(b + step, self.rows), *fixed, self.row.ctypes.data),
                begins,
            )
        )
