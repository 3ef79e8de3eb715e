# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""cuBLAS, if it is there: GEMMs on the current stream, which graphs can capture.

Called by ctypes, with handles of our own: CuPy's refuse to be captured, and their settings are the
caller's. Nothing of it is needed: without the library other kernels serve.
"""

from __future__ import annotations

import ctypes
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

#: Bytes of workspace that cuBLAS recommends for the newest devices; ours, as its own would be
#: allocated while a graph is captured, and shared by streams, which changes bytes.
WORKSPACE_BYTES = 32 << 20
#: cudaDataType_t, and cublasComputeType_t: float32 without any TF32.
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
COMPUTE_32F, COMPUTE_32F_PEDANTIC = 68, 69
NO_TRANSPOSE, TRANSPOSE = 0, 1
POINTERS_ON_HOST, POINTERS_ON_DEVICE = 0, 1
#: Pieces of the depth are added up in float32, whatever the result's type is.
DISALLOW_REDUCED_PRECISION_REDUCTION = 16
DEFAULT_ALGORITHM = -1


class BlasError(RuntimeError):
    """cuBLAS refused a call."""


@cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    """The library and what it is, or None and why not."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib  # CuPy needs it

    try:
        # Loaded once more by its path, as a library for ctypes.
        library = ctypes.CDLL(str(load_nvidia_dynamic_lib("cublas").abs_path))
    except (DynamicLibNotFoundError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return None, f"not found ({lines[0]}); kernels of fp4kit's own multiply instead"
    for name in (
        *("cublasCreate_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2"),
        *("cublasSetPointerMode_v2", "cublasSetMathMode", "cublasGemmEx", "cublasGetProperty"),
    ):
        getattr(library, name).restype = ctypes.c_int
    parts = []
    for number in range(3):  # major, minor, patch
        value = ctypes.c_int()
        library.cublasGetProperty(number, ctypes.byref(value))
        parts.append(str(value.value))
    return library, f"{'.'.join(parts)}, for products of many rows"


def is_available() -> bool:
    """Whether the library can be loaded; looked up once."""
    return _found()[0] is not None


def description() -> str:
    """Version, or why it is not used, for humans."""
    return _found()[1]


def _call(name: str, *arguments: Any) -> None:
    library, _ = _found()
    status = getattr(library, name)(*arguments)
    if status:
        raise BlasError(f"{name} returned cuBLAS status {status}")


#: Who holds it has told the handle of a device its stream, and may call.
_lock = Lock()


@cache
def _handle(device: int) -> ctypes.c_void_p:
    """The handle of a device, which must be current."""
    handle = ctypes.c_void_p()
    _call("cublasCreate_v2", ctypes.byref(handle))
    _call("cublasSetMathMode", handle, DISALLOW_REDUCED_PRECISION_REDUCTION)
    return handle


class Matrix(NamedTuple):
    """Rows of numbers on the device.

    Attributes:
        address: of the first number.
        dtype: element type.
        stride: numbers from row to row.
    """

    address: int
    dtype: str
    stride: int


class Shape(NamedTuple):
    """Rows of a, rows of b, and the depth of a product."""

    rows: int
    cols: int
    depth: int


class Gemm:
    """GEMMs of one call: a device, its current stream and a workspace."""

    def __init__(self, device: int, stream: int, workspace: int) -> None:
        """For the current device and its stream; `workspace`: address of WORKSPACE_BYTES."""
        self._device, self._stream, self._workspace = device, stream, workspace

    def multiply(self, a: Matrix, b: Matrix, out: Matrix, shape: Shape, factor: int) -> None:
        """Multiplies: out = a b^T, float32 sums, one cast.

        Args:
            a: (rows, depth).
            b: (cols, depth), of the type of a.
            out: (rows, cols), of that type or float32.
            shape: what is multiplied.
            factor: address of two float32 numbers on the device, a factor and 0; or 0 for none.
        """
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        alpha: Any = ctypes.c_void_p(factor) if factor else ctypes.byref(one)
        beta: Any = ctypes.c_void_p(factor + 4) if factor else ctypes.byref(zero)
        mode = POINTERS_ON_DEVICE if factor else POINTERS_ON_HOST
        compute = COMPUTE_32F_PEDANTIC if a.dtype == "float32" else COMPUTE_32F
        with _lock:
            handle = _handle(self._device)
            _call("cublasSetStream_v2", handle, ctypes.c_void_p(self._stream))
            # A stream that is set brings its own workspace with it.
            size = ctypes.c_size_t(WORKSPACE_BYTES)
            _call("cublasSetWorkspace_v2", handle, ctypes.c_void_p(self._workspace), size)
            _call("cublasSetPointerMode_v2", handle, mode)
            # cuBLAS counts along columns: out^T = b a^T there, where each of ours is its transpose.
            _call(
                "cublasGemmEx",
                *(handle, TRANSPOSE, NO_TRANSPOSE, shape.cols, shape.rows, shape.depth, alpha),
                *(ctypes.c_void_p(b.address), TYPES[b.dtype], b.stride),
                *(ctypes.c_void_p(a.address), TYPES[a.dtype], a.stride, beta),
                *(ctypes.c_void_p(out.address), TYPES[out.dtype], out.stride),
                *(compute, DEFAULT_ALGORITHM),
            )
