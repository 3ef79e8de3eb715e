# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What this machine has for CUDA: CuPy, driver, NVRTC, devices; and why it cannot be used."""

from __future__ import annotations

from functools import cache

from . import blas
from . import compile as cuda_module

MIN_CUPY = (14, 2)
MIN_CAPABILITY = (7, 5)
#: fp4kit itself is on no package index: its extras are those of its source.
PIP_ADVICE = (
    "in fp4kit's source directory `pip install '.[cuda13]'` (drivers for CUDA 13) or "
    "`pip install '.[cuda12]'` brings what is needed"
)


def _number(version: str) -> tuple[int, ...]:
    """The leading integers of a version, `14.2.0rc1` giving (14, 2)."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def reason() -> str | None:
    """Why no CUDA device can be used here, with the fix."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            return f"CuPy cannot be imported ({error}); reinstall it: {PIP_ADVICE}"
        return f"CuPy is not installed; {PIP_ADVICE}"
    except Exception as error:  # a broken installation raises anything
        return f"CuPy cannot be imported ({error}); reinstall it: {PIP_ADVICE}"
    if _number(cupy.__version__)[:2] < MIN_CUPY:
        wanted = ".".join(map(str, MIN_CUPY))
        return f"CuPy {cupy.__version__} is too old, {wanted} is needed; {PIP_ADVICE}"
    runtime = cupy.cuda.runtime
    try:
        if runtime.driverGetVersion() == 0:
            return "no NVIDIA driver is installed (libcuda is missing)"
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"no CUDA device can be used: {error}"
    if count == 0:
        return "no CUDA device is visible (see CUDA_VISIBLE_DEVICES)"
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # the loader's error type depends on how the library is missing
        return f"NVRTC, which compiles the kernels, cannot be loaded ({error}); {PIP_ADVICE}"
    if all(capability(number) < MIN_CAPABILITY for number in range(count)):
        return too_old(0)
    return None


@cache
def capability(device: int) -> tuple[int, int]:
    """Compute capability of a device."""
    import cupy

    text = cupy.cuda.Device(device).compute_capability
    return int(text[:-1]), int(text[-1])


def too_old(device: int) -> str:
    """That a device is of an architecture without what the kernels need."""
    major, minor = capability(device)
    wanted = ".".join(map(str, MIN_CAPABILITY))
    return f"device {device} has compute capability {major}.{minor}, {wanted} or newer is needed"


@cache
def has_large_parameters() -> bool:
    """Whether kernels may have 32764 bytes of parameters instead of 4096."""
    import cupy

    driver = cupy.cuda.runtime.driverGetVersion()
    return bool(driver >= 12010 and cupy.cuda.nvrtc.getVersion() >= (12, 1))


def usable_devices() -> list[str]:
    """The devices that the kernels run on."""
    import cupy

    numbers = range(cupy.cuda.runtime.getDeviceCount())
    return [f"cuda:{number}" for number in numbers if capability(number) >= MIN_CAPABILITY]


def details() -> dict[str, str]:
    """Versions and devices, for humans."""
    import cupy

    runtime = cupy.cuda.runtime
    result = {
        "cupy": cupy.__version__,
        "cuda runtime": str(runtime.runtimeGetVersion()),
        "cuda driver": str(runtime.driverGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cublas": blas.description(),
    }
    for number in range(runtime.getDeviceCount()):
        name = runtime.getDeviceProperties(number)["name"].decode()
        major, minor = capability(number)
        chosen = cuda_module.architecture_option(major, minor) or f"-arch=sm_{major}{minor}"
        result[f"device {number}"] = f"{name}, compute capability {major}.{minor}, {chosen}"
    return result
