# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What is different while a stream's work becomes part of a CUDA graph."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

#: CU_STREAM_CAPTURE_MODE_RELAXED.
RELAXED = 2
#: Device arrays of ours that captured graphs use on every replay: they must outlive the call.
_captured: list[Any] = []


def is_capturing() -> bool:
    """Whether the current stream's work becomes part of a graph."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    # The null stream cannot be captured, and asking it would fail while another one is.
    return bool(stream.ptr != 0 and stream.is_capturing())


def keep_if_captured(array: Any) -> Any:
    """Returns a device array of ours, kept alive for good if a graph is being captured."""
    if is_capturing():
        _captured.append(array)
    return array


@cache
def driver() -> ctypes.CDLL:
    """CUDA's driver, which CuPy has loaded."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _exchange(mode: ctypes.c_int) -> None:
    """Makes `mode` that of this thread, and the former one `mode`."""
    status = driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode returned CUDA status {status}")


@contextmanager
def allocations_allowed() -> Iterator[None]:
    """Lets this thread allocate memory and load kernels while a stream is captured.

    Other frameworks (torch) begin captures in a mode that forbids both to everybody; their own
    allocators make the same exception.
    """
    mode = ctypes.c_int(RELAXED)
    _exchange(mode)
    try:
        yield
    finally:
        _exchange(mode)
