# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The backends and how one is chosen: every one answers before work, none is tried and caught."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from fp4kit import trace
from fp4kit.backend.interface import Backend, Request
from fp4kit.errors import BackendUnavailableError
from fp4kit.formats import one_of
from fp4kit.scheme import Scheme

#: In order of preference for a device class; the first that accepts the device's arrays serves.
BACKEND_NAMES = ("cuda", "cpu", "reference")
DEFAULT_FOR_DEVICE = {"cuda": "cuda", "cpu": "cpu"}


@dataclass(frozen=True)
class BackendStatus:
    """What one backend says about this machine.

    Attributes:
        name: `cuda`, `cpu` or `reference`.
        available: whether it can run here at all.
        reason: why not, or None.
        details: versions, devices and the like, for `fp4kit env`.
    """

    name: str
    available: bool
    reason: str | None
    details: dict[str, str]


def get_backend(name: str, *, grid: bool = False) -> Backend:
    """Loads a backend by name; loading imports no optional package.

    Args:
        name: one of `BACKEND_NAMES`.
        grid: that for formats with float32 scales.
    """
    one_of("backend", name, BACKEND_NAMES)
    return _loaded(name, grid)


@cache
def _loaded(name: str, grid: bool) -> Backend:
    if name == "cuda":
        from fp4kit.cuda.backend import CudaBackend
        from fp4kit.cuda.grid import CudaGridBackend

        return CudaGridBackend() if grid else CudaBackend()
    if name == "cpu":
        from fp4kit.cpu.backend import CpuBackend, CpuGridBackend

        return CpuGridBackend() if grid else CpuBackend()
    from fp4kit.reference.backend import ReferenceBackend
    from fp4kit.reference.grid import ReferenceGridBackend

    return ReferenceGridBackend() if grid else ReferenceBackend()


def select(request: Request, backend: str | None) -> Backend:
    """The backend that serves a request: the named one, else the default of the device.

    Raises:
        BackendUnavailableError: if it cannot, with its reason. Another one is never tried instead.
    """
    name = DEFAULT_FOR_DEVICE[request.device_kind]
    if backend is not None:
        name = one_of("backend", backend, BACKEND_NAMES)
    scheme = request.scheme
    chosen = get_backend(name, grid=scheme is not None and scheme.spec.has_scale_grid)
    reason = chosen.unavailable_reason() or chosen.refusal(request)
    reason = reason or chosen.lacks(request.operation)
    if reason is None:
        return chosen
    raise BackendUnavailableError(request.describe(), {name: reason})


def engine_for(
    operation: str, device: str, dtype: str, scheme: Scheme | None, backend: str | None
) -> Backend:
    """:func:`select` by the fields of a request; backends never take an answer back."""
    if backend is not None:
        one_of("backend", backend, BACKEND_NAMES)
    chosen = _selected(operation, device, dtype, scheme, backend)
    if trace.ENABLED:
        request = Request(operation, device, dtype, scheme)
        reason = "the default of the device" if backend is None else "named by the caller"
        trace.say(request.describe(), f"backend {chosen.name}", reason)
    return chosen


@lru_cache(maxsize=1024)
def _selected(
    operation: str, device: str, dtype: str, scheme: Scheme | None, backend: str | None
) -> Backend:
    return select(Request(operation, device, dtype, scheme), backend)


def backend_status() -> list[BackendStatus]:
    """Which backends can run on this machine, and why the others cannot.

    Returns:
        One entry per backend, in order of preference. Asking imports numba and CuPy if they are
        installed, and compiles nothing.

    Examples:
        >>> [entry.name for entry in backend_status() if entry.name == "reference"]
        ['reference']
    """
    result = []
    for name in BACKEND_NAMES:
        backend = get_backend(name)
        reason = backend.unavailable_reason()
        details = backend.details() if reason is None else {}
        result.append(BackendStatus(name, reason is None, reason, details))
    return result
