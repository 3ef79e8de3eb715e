# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The only module that knows array frameworks: NumPy, CuPy, torch, JAX and anything with DLPack.

`ingest` turns a caller's array into a raw one (NumPy or CuPy; bfloat16 as its uint16 bits) without
copying it and without leaving its device; `emit` hands a raw result back in the caller's
framework. A framework is looked at only if the caller has already imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .errors import DtypeError
from .formats import DTYPES

RAW_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
#: The scope of a call whose device and stream are current already.
_NO_SCOPE: AbstractContextManager[None] = nullcontext()
#: Device arrays of ours that captured graphs use on every replay: they must outlive the call.
_captured: list[Any] = []


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

    @cached_property
    def device_kind(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.split(":")[0]

    @cached_property
    def device_number(self) -> int:
        """N of `cuda:N`."""
        return int(self.device.split(":")[1])


class Raw(NamedTuple):
    """A raw view of a caller's array: NumPy or CuPy data of any strides, and its element type.

    bfloat16 is uint16 on the host. On a device it may be any 16-bit type: kernels see a pointer.
    `scan` is what is known already of the values: uint32 (2,), the amax (NaN ignored) as float32
    bits, and whether some are NaN or infinite; of a group, an amax for each member ahead of that.
    """

    data: Any
    dtype: str
    origin: Origin
    scan: Any = None


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
        return _NO_SCOPE
    import cupy

    if origin.stream is None and cupy.cuda.runtime.getDevice() == origin.device_number:
        return _NO_SCOPE
    scope = ExitStack()
    scope.enter_context(cupy.cuda.Device(origin.device_number))
    if origin.stream is not None:
        scope.enter_context(caller_stream(origin.stream))
    return scope


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


def scratch(shape: int | tuple[int, ...], dtype: Any, origin: Origin) -> Any:
    """A raw array for what a call needs between its steps."""
    array = array_module(origin).empty(shape, dtype)
    return array if origin.device_kind == "cpu" else keep_if_captured(array)


def is_contiguous(data: Any) -> bool:
    """Whether raw data is C-contiguous."""
    if isinstance(data, np.ndarray):
        return data.flags.c_contiguous
    import cupy

    # CuPy's `flags` cost four times as much to make as this check (which would add a dimension to
    # arrays that have none).
    return data.ndim == 0 or cupy.ascontiguousarray(data) is data


def contiguous(data: Any, origin: Origin) -> Any:
    """Raw data itself if it is C-contiguous, else a copy on its device."""
    if origin.device_kind == "cpu":
        return np.ascontiguousarray(data)
    import cupy

    if is_contiguous(data):
        return data
    with device_scope(origin):
        bits = data.view(np.uint16) if data.dtype.itemsize == 2 else data
        return keep_if_captured(cupy.ascontiguousarray(bits))


def _name_framework(kind: type) -> str | None:
    """`numpy`, `cupy` or `torch`, None where the object itself must be asked."""
    if issubclass(kind, (np.ndarray, np.generic)):
        return "numpy"
    root = kind.__module__.split(".")[0]
    return root if root in ("cupy", "torch") else None


_framework_of_type: Callable[[type], str | None] = lru_cache(maxsize=256)(_name_framework)


def keeps_memory(x: Any) -> bool:
    """Whether an array owns the same memory for life; a torch tensor can be given another."""
    return _framework_of_type(type(x)) in ("numpy", "cupy")


def _framework_of(x: object) -> str:
    """Names the framework of `x`, importing nothing."""
    known = _framework_of_type(type(x))
    if known is not None:
        return known
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


_NUMPY = Origin("numpy", "cpu")


@lru_cache(maxsize=64)
def _cupy_origin(device: int) -> Origin:
    return Origin("cupy", f"cuda:{device}")


@lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    """`dtype.name`, which NumPy puts together anew each time it is asked."""
    name: str = dtype.name
    return name


def open_raw(x: Any) -> tuple[Any, str, Origin]:
    """(NumPy or CuPy data, dtype name, origin); bfloat16 data may still be of any 16-bit type."""
    framework = _framework_of(x)
    if framework == "numpy":
        data = np.asarray(x)
        return data, _dtype_name(data.dtype), _NUMPY
    if framework == "cupy":
        return x, _dtype_name(x.dtype), _cupy_origin(x.data.device_id)
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
    data, dtype, origin = open_raw(x)
    if dtype not in DTYPES:
        advice = "cast it first, for example x.astype('float32') or x.float()"
        if dtype.startswith("void"):
            advice = "raw 2-byte data has lost its type: view it as ml_dtypes.bfloat16 first"
        raise DtypeError(f"{what} is {dtype}; fp4kit takes {', '.join(DTYPES)}: {advice}")
    if origin.device_kind == "cpu":
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
    if _framework_of_type(type(x)) == "torch" and x.element_size() == 1:
        torch = loaded("torch")
        assert torch is not None
        x = x.view(torch.uint8)
    data, dtype, origin = open_raw(x)
    if data.dtype.itemsize != 1:
        raise DtypeError(
            f"{what} is {dtype}; codes and scales are uint8 arrays: use .view('uint8')"
        )
    return Raw(data if data.dtype == np.uint8 else data.view(np.uint8), "uint8", origin)


def ingest_scale(x: Any, what: str, like: Origin) -> Any:
    """A second-level scale (float or float32 array of any shape) as raw float32 on `like`'s device.

    A float is sent to the device (asynchronously); an array must already be there.

    Raises:
        DtypeError: for another element type, or an array on another device.
    """
    if isinstance(x, (int, float, np.floating, np.integer)) and not isinstance(x, bool):
        if like.device_kind == "cpu":
            return np.full(1, np.float32(x), np.float32)
        with device_scope(like):
            return keep_if_captured(array_module(like).full(1, np.float32(x), np.float32))
    data = contiguous(open_scale(x, what, like), like)
    return data if data.ndim == 1 else data.reshape(-1)


def open_scale(x: Any, what: str, like: Origin) -> Any:
    """The raw float32 data of a scale array that lies on `like`'s device, of any strides.

    Raises:
        DtypeError: for another element type or device.
    """
    data, dtype, origin = open_raw(x)
    if dtype != "float32":
        raise DtypeError(f"{what} is {dtype}; a second-level scale is a float or a float32 array")
    if origin.device != like.device:
        raise DtypeError(
            f"{what} lies on {origin.device}, the input on {like.device}; move it there first "
            "(fp4kit never copies between devices on its own)"
        )
    return data


def overwrite_scale(target: Any, source: Any) -> None:
    """Copies raw scales over raw scales of any shape and strides on the same device."""
    if not isinstance(target, np.ndarray) and target.size == source.size and is_contiguous(target):
        # The second level of a result is often the very memory that was passed as amax.
        if target.data.ptr != source.data.ptr:
            target.data.copy_from_device_async(source.data, source.nbytes)
        return
    target[...] = source.reshape(target.shape) if target.size == source.size else source


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
