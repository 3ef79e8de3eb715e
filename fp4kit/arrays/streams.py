# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA streams of callers: torch's current one, and others' as CuPy's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any


@dataclass(frozen=True)
class _RawStream:
    """A caller's stream under the CUDA stream protocol, which CuPy takes."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def caller_stream(pointer: int) -> Any:
    """A CuPy stream for a raw CUDA stream that somebody else owns."""
    import cupy

    return cupy.cuda.Stream.from_external(_RawStream(pointer))


@lru_cache(maxsize=256)
def known_stream(pointer: int, device: int) -> Any:
    """:func:`caller_stream`, made once for a device."""
    return caller_stream(pointer)


@cache
def _raw_stream() -> Callable[[int], int]:
    """What says the raw pointer of torch's current stream of a device."""
    torch = sys.modules["torch"]
    # No part of torch's interface, but a tenth of the time: torch.compile's own code calls it.
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def torch_pointer(device: int) -> int:
    """The raw pointer of torch's current stream of a device."""
    return _raw_stream()(device)


def torch_stream(device: int) -> Any:
    """Torch's current stream of a device, to be entered as CuPy's."""
    return known_stream(torch_pointer(device), device)
