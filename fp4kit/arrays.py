# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The only module that knows array frameworks: NumPy, CuPy, torch, JAX and anything with DLPack.

`ingest` turns a caller's array into a raw one (NumPy or CuPy; bfloat16 as its uint16 bits) without
copying it and without leaving its device; `emit` hands a raw result back in the caller's
framework. A framework is looked at only if the caller has already imported it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .errors import DtypeError
from .formats import DTYPES

RAW_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True)
class Origin:
    """Where an array came from, and so where results go back to.

    Attributes:
        framework: `numpy`, `cupy`, `torch`, `jax` or `array_api` (any other with DLPack).
        device: `cpu` or `cuda:N`.
        namespace: the array-API namespace of an `array_api` array.
        stream: raw CUDA stream of the caller (torch's current one), None for CuPy's current one.
    """

    framework: str
    device: str
    namespace: Any = None
    stream: int | None = None

    @property
    def device_kind(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.split(":")[0]


@dataclass(frozen=True)
class Raw:
    """A raw view of a caller's array: NumPy or CuPy data of any strides, and its element type."""

    data: Any
    dtype: str
    origin: Origin


def loaded(name: str) -> ModuleType | None:
    """A framework's module if the process has imported it already."""
    return sys.modules.get(name)


def array_module(origin: Origin) -> Any:
    """NumPy for host arrays, CuPy for device arrays."""
    if origin.device_kind == "cpu":
        return np
    import cupy

    return cupy


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


def device_scope(origin: Origin) -> AbstractContextManager[Any]:
    """Makes the array's device, and the caller's stream, current while work is launched."""
    if origin.device_kind == "cpu":
        return nullcontext()
    import cupy

    number = int(origin.device.split(":")[1])
    scope = ExitStack()
    scope.enter_context(cupy.cuda.Device(number))
    if origin.stream is not None:
        scope.enter_context(caller_stream(origin.stream))
    return scope


def _framework_of(x: object) -> str:
    """Names the framework of `x`, importing nothing."""
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    root = type(x).__module__.split(".")[0]
    if root in ("cupy", "torch"):
        return root
    jax = loaded("jax")
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return "array_api"
    raise DtypeError(
        f"{type(x).__name__} is not an array fp4kit can read; pass a NumPy, CuPy, torch or JAX "
        "array, or any object with __dlpack__ (for a list: numpy.asarray(x, numpy.float32))"
    )


def _from_torch(x: Any) -> tuple[Any, str, Origin]:
    torch = loaded("torch")
    assert torch is not None
    x = x.detach()
    dtype = str(x.dtype).removeprefix("torch.")
    # NumPy and CuPy have no bfloat16: hand over the bits.
    bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    if x.device.type == "cpu":
        return bits.numpy(), dtype, Origin("torch", "cpu")
    if x.device.type != "cuda":
        raise DtypeError(
            f"torch device {x.device} is not supported; move the tensor to cpu or cuda first"
        )
    import cupy

    device = x.device.index or 0
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with cupy.cuda.Device(device), caller_stream(stream):
        data = cupy.from_dlpack(bits)
    return data, dtype, Origin("torch", f"cuda:{device}", stream=stream)


def _from_jax(x: Any) -> tuple[Any, str, Origin]:
    jax = loaded("jax")
    assert jax is not None
    if isinstance(x, jax.core.Tracer):
        raise DtypeError("a traced JAX array holds no data; call fp4kit outside jax.jit")
    devices = x.devices()
    if len(devices) != 1:
        raise DtypeError(
            f"the JAX array lies on {len(devices)} devices; quantize each addressable shard alone"
        )
    device = next(iter(devices))
    dtype = str(x.dtype)
    if device.platform == "cpu":
        return np.asarray(x), dtype, Origin("jax", "cpu")
    import cupy

    bits = jax.lax.bitcast_convert_type(x, jax.numpy.uint16) if dtype == "bfloat16" else x
    data = cupy.from_dlpack(bits)
    return data, dtype, Origin("jax", f"cuda:{data.device.id}")


def _from_array_api(x: Any) -> tuple[Any, str, Origin]:
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
    if namespace is None or not hasattr(namespace, "from_dlpack"):
        raise DtypeError(
            f"{type(x).__name__} has __dlpack__ but no __array_namespace__ to give results back "
            "in; pass numpy.from_dlpack(x) or cupy.from_dlpack(x) instead"
        )
    kind, number = x.__dlpack_device__()
    if kind == 1:
        data = np.from_dlpack(x)
        return data, data.dtype.name, Origin("array_api", "cpu", namespace)
    import cupy

    data = cupy.from_dlpack(x)
    return data, data.dtype.name, Origin("array_api", f"cuda:{number}", namespace)


def _open(x: Any) -> tuple[Any, str, Origin]:
    """(NumPy or CuPy data, dtype name, origin); bfloat16 data may still be of any 16-bit type."""
    framework = _framework_of(x)
    if framework == "numpy":
        data = np.asarray(x)
        return data, data.dtype.name, Origin("numpy", "cpu")
    if framework == "cupy":
        return x, x.dtype.name, Origin("cupy", f"cuda:{x.device.id}")
    if framework == "torch":
        return _from_torch(x)
    if framework == "jax":
        return _from_jax(x)
    return _from_array_api(x)


def ingest(x: Any, what: str = "x") -> Raw:
    """A raw, uncopied view of a float32, float16 or bfloat16 array.

    Args:
        x: array of any framework, shape and strides.
        what: the argument's name, for messages.

    Raises:
        DtypeError: for any other element type or object, with the fix.
    """
    data, dtype, origin = _open(x)
    if dtype not in DTYPES:
        advice = "cast it first, for example x.astype('float32') or x.float()"
        if dtype.startswith("void"):
            advice = "raw 2-byte data has lost its type: view it as ml_dtypes.bfloat16 first"
        raise DtypeError(f"{what} is {dtype}; fp4kit takes {', '.join(DTYPES)}: {advice}")
    if dtype == "bfloat16":
        data = data.view(np.uint16)
    elif data.dtype.byteorder == ">":
        data = data.astype(data.dtype.newbyteorder("="))
    return Raw(data, dtype, origin)


def ingest_bytes(x: Any, what: str) -> Raw:
    """A raw view of a uint8 array (codes or scale bytes); 1-byte float types are viewed as bytes.

    Raises:
        DtypeError: if the elements are not single bytes.
    """
    if type(x).__module__.split(".")[0] == "torch" and x.element_size() == 1:
        torch = loaded("torch")
        assert torch is not None
        x = x.view(torch.uint8)
    data, dtype, origin = _open(x)
    if data.dtype.itemsize != 1:
        raise DtypeError(
            f"{what} is {dtype}; codes and scales are uint8 arrays: use .view('uint8')"
        )
    return Raw(data.view(np.uint8), "uint8", origin)


def ingest_scale(x: Any, what: str, like: Origin) -> Any:
    """A second-level scale (float or float32 array of any shape) as raw float32 on `like`'s device.

    A float is sent to the device (asynchronously); an array must already be there.

    Raises:
        DtypeError: for another element type, or an array on another device.
    """
    xp = array_module(like)
    if isinstance(x, (int, float, np.floating, np.integer)) and not isinstance(x, bool):
        return xp.full(1, np.float32(x), np.float32)
    data, dtype, origin = _open(x)
    if dtype != "float32":
        raise DtypeError(f"{what} is {dtype}; a second-level scale is a float or a float32 array")
    if origin.device != like.device:
        raise DtypeError(
            f"{what} lies on {origin.device}, the input on {like.device}; move it there first "
            "(fp4kit never copies between devices on its own)"
        )
    return xp.ascontiguousarray(data).reshape(-1)


def _torch_from_cupy(data: Any, origin: Origin) -> Any:
    torch = loaded("torch")
    assert torch is not None
    with device_scope(origin):
        return torch.from_dlpack(data)


def emit(data: Any, dtype: str, origin: Origin) -> Any:
    """Hands a raw array back in the caller's framework, on its device, without a copy.

    Args:
        data: NumPy or CuPy array; bfloat16 as uint16.
        dtype: `float32`, `float16`, `bfloat16` or `uint8`.
        origin: the caller's framework.
    """
    if origin.framework == "torch":
        torch = loaded("torch")
        assert torch is not None
        signed = data.view(np.int16) if dtype == "bfloat16" else data
        on_host = origin.device_kind == "cpu"
        tensor = torch.from_numpy(signed) if on_host else _torch_from_cupy(signed, origin)
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    if origin.framework == "jax" and origin.device_kind == "cuda":
        jax = loaded("jax")
        assert jax is not None
        array = jax.dlpack.from_dlpack(data)
        if dtype == "bfloat16":
            return jax.lax.bitcast_convert_type(array, jax.numpy.bfloat16)
        return array
    if dtype == "bfloat16":
        import ml_dtypes

        data = data.view(ml_dtypes.bfloat16)
    if origin.framework == "jax":
        jax = loaded("jax")
        assert jax is not None
        return jax.numpy.asarray(data)
    if origin.framework == "array_api":
        return origin.namespace.from_dlpack(data)
    return data
