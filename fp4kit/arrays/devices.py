# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Where an array lies, and copies to another device on a caller's word: by its framework's means.

Nothing else in fp4kit copies between devices.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from fp4kit.errors import BackendUnavailableError, DtypeError, OptionError, brief

from .dlpack import HOST_DEVICES, host_array
from .frameworks import FOREIGN_ERRORS, framework_of_type, loaded

#: Devices by name: the host in the array's own framework, the host in NumPy, a GPU.
_DEVICE = re.compile(r"cpu|numpy|cuda(:\d+)?")


def framework_and_device(x: Any) -> tuple[str, str]:
    """(framework, `cpu` or `cuda:N`) of an array, by what it says itself; no element is looked at.

    Other frameworks than NumPy, CuPy, torch and JAX are `dlpack`; a device that none of fp4kit's
    names fits is named as its framework does.

    Raises:
        DtypeError: if it says nothing of that kind.
    """
    framework = framework_of_type(type(x))
    if framework in ("numpy", "masked"):
        return "numpy", "cpu"
    if framework == "cupy":
        return framework, f"cuda:{x.device.id}"
    if framework == "torch":
        kind = x.device.type
        return framework, kind if kind != "cuda" else f"cuda:{x.device.index or 0}"
    jax = loaded("jax")
    try:
        if jax is not None and isinstance(x, jax.Array):
            (device,) = x.devices()
            on_gpu = device.platform in ("cuda", "gpu")
            return "jax", f"cuda:{device.local_hardware_id}" if on_gpu else str(device.platform)
        kind, number = x.__dlpack_device__()
        return "dlpack", "cpu" if int(kind) in HOST_DEVICES else f"cuda:{number}"
    except FOREIGN_ERRORS:
        raise DtypeError(
            f"a {type(x).__name__} does not say on which device it lies; pass an array of NumPy, "
            "CuPy, torch or JAX, on one device"
        ) from None


def place_in_words(x: Any) -> str:
    """An array's framework, and its device if that is a GPU that is easily told."""
    framework = framework_of_type(type(x))
    if framework == "cupy" or (framework == "torch" and x.device.type == "cuda"):
        return f"{framework} on {framework_and_device(x)[1]}"
    return framework or type(x).__module__.partition(".")[0].removesuffix("lib")


def device_name(device: Any) -> str:
    """`cpu`, `numpy`, `cuda` (the current GPU) or `cuda:N`.

    Args:
        device: such a name, or a device object of torch, CuPy or JAX.

    Raises:
        OptionError: for anything else.
    """
    name = device
    kind = f"{type(device).__module__}.{type(device).__name__}"
    if kind == "torch.device":
        name = str(device)
    elif kind.startswith("cupy.") and kind.endswith(".Device"):
        name = f"cuda:{device.id}"
    elif kind.startswith(("jax", "jaxlib")) and kind.endswith("Device"):
        on_gpu = device.platform in ("cuda", "gpu")
        name = f"cuda:{device.local_hardware_id}" if on_gpu else str(device.platform)
    if not isinstance(name, str) or not _DEVICE.fullmatch(name):
        raise OptionError(
            f"device={brief(device)} is not known; choose cpu, cuda or cuda:N (in the framework of "
            "the arrays), numpy, or a device object of torch, CuPy or JAX"
        )
    return name


def move(x: Any, device: str) -> Any:
    """An array on a device: itself if it lies there, else a copy.

    NumPy arrays become CuPy's on a GPU and these NumPy's on the host; torch and JAX keep their
    arrays, but for `numpy`. A GPU's array is copied on the current stream of its framework, and the
    call returns when the host may read the copy.

    Args:
        x: a uint8, float32 or int64 array.
        device: a name as :func:`device_name` gives it.

    Raises:
        BackendUnavailableError: if there is no such device.
        DtypeError: if the array's framework has no way to move it there.
    """
    framework, own = framework_and_device(x)
    if device == "numpy":
        return _to_numpy(x, framework, own)
    if device == own or (device == "cuda" and own.startswith("cuda")):
        return x
    number = None if device == "cpu" else int(device.partition(":")[2] or 0)
    if framework == "dlpack":
        raise DtypeError(
            f"a {type(x).__name__} cannot be moved from {own} to {device} here; move its arrays by "
            "the means of its framework, or to 'numpy' first"
        )
    try:
        if framework == "torch":
            return x.to(device)
        if framework == "jax":
            return _to_jax_device(x, number)
        if number is None:
            return _to_numpy(x, framework, own)
        return _to_cupy(x, device)
    except (ImportError, *FOREIGN_ERRORS) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BackendUnavailableError(f"copy to {device}", {framework: lines[0]}) from None


def _to_numpy(x: Any, framework: str, own: str) -> Any:
    if framework == "numpy":
        return x
    if framework == "cupy":
        with x.device:
            return x.get()
    if framework == "torch":
        torch = loaded("torch")
        assert torch is not None
        # NumPy knows no float8.
        return (x.view(torch.uint8) if x.element_size() == 1 else x).detach().cpu().numpy()
    if framework == "jax":
        return np.array(x)
    if own == "cpu":
        return np.array(host_array(x)[0])
    raise DtypeError(f"a {type(x).__name__} on {own} cannot be moved to the host here")


def _to_cupy(x: Any, device: str) -> Any:
    import cupy

    number = device.partition(":")[2] or cupy.cuda.runtime.getDevice()
    with cupy.cuda.Device(int(number)):
        return cupy.asarray(x)


def _to_jax_device(x: Any, number: int | None) -> Any:
    jax = loaded("jax")
    assert jax is not None
    kind = "cpu" if number is None else "cuda"
    for device in jax.local_devices(backend=kind):
        if (device.local_hardware_id or 0) == (number or 0):
            return jax.device_put(x, device)
    raise RuntimeError(f"there is no device {kind}:{number}")
