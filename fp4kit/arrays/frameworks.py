# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How a caller's array is opened: NumPy, CuPy, torch, JAX, anything with DLPack, plain buffers.

Opening copies nothing (but a torch view that stands for the negated values of another tensor) and
imports no framework that the caller has not. What a framework itself refuses becomes one line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fp4kit.errors import DtypeError, shortened

from .dlpack import HOST_DEVICES, host_array
from .streams import known_stream, torch_pointer
from .torch_checks import check_subclass, check_tensor
from .torch_memory import TorchMemory

#: Refuses an element type by raising: it gets the type's name and the bytes of an element.
Accept = Callable[[str, int], None]
#: What frameworks raise where they cannot hand over an array.
FOREIGN_ERRORS = (RuntimeError, TypeError, ValueError, BufferError, AttributeError, AssertionError)
#: torch's element types that NumPy has too.
_SHARED_TYPES = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


@dataclass(frozen=True)
class Origin:
    """Where an array came from, and so where results go back to.

    Attributes:
        framework: `numpy`, `cupy`, `torch`, `jax` or `array_api` (any other with a namespace).
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

    @cached_property
    def torch_device(self) -> Any:
        """The device as torch has it: names are read anew with every tensor that is made."""
        torch = loaded("torch")
        assert torch is not None
        return torch.device(self.device)


_NUMPY = Origin("numpy", "cpu")


@lru_cache(maxsize=64)
def _cupy_origin(device: int) -> Origin:
    return Origin("cupy", f"cuda:{device}")


def loaded(name: str) -> ModuleType | None:
    """A framework's module if the process has imported it already."""
    return sys.modules.get(name)


def _name_framework(kind: type) -> str | None:
    """`numpy`, `masked`, `cupy` or `torch`, None where the object itself must be asked."""
    if issubclass(kind, np.ma.MaskedArray):
        return "masked"
    if issubclass(kind, (np.ndarray, np.generic)):
        return "numpy"
    for name, base in (("cupy", "ndarray"), ("torch", "Tensor")):
        module = loaded(name)
        if module is not None and issubclass(kind, getattr(module, base)):
            return name
    return None


framework_of_type: Callable[[type], str | None] = lru_cache(maxsize=256)(_name_framework)


def _framework_of(x: object, what: str) -> str:
    """Names the framework of `x`, importing nothing."""
    known = framework_of_type(type(x))
    if known is not None:
        return known
    jax = loaded("jax")
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    if isinstance(x, type):
        raise DtypeError(f"{what} is the class {x.__name__}, which is not an array; pass an array")
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return "dlpack"
    if isinstance(x, memoryview) or hasattr(x, "__array_interface__"):
        return "buffer"
    if type(x).__name__ == "PyCapsule":
        raise DtypeError(
            f"{what} is a bare DLPack capsule, which can be taken only once and does not say where "
            "it lies; pass the object that made it"
        )
    raise DtypeError(
        f"{type(x).__name__} is not an array fp4kit can read; pass a NumPy, CuPy, torch or JAX "
        "array, or any object with __dlpack__ (for a list: numpy.asarray(x, numpy.float32))"
    )


def _refused(what: str, framework: str, error: Exception) -> DtypeError:
    """One line for what a framework raised."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return DtypeError(
        f"{framework} does not hand {what} over: {shortened(lines[0], 200)}; pass a plain array"
    )


def shape_of(x: Any, what: str) -> tuple[int, ...]:
    """The shape that an array says it has.

    Raises:
        DtypeError: if it has none.
    """
    try:
        return tuple(x.shape)
    except FOREIGN_ERRORS:
        raise DtypeError(
            f"{what} is a {type(x).__name__}, which is not an array with a shape; pass one of "
            "NumPy, CuPy, torch or JAX (for a list: numpy.asarray)"
        ) from None


@lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    """`dtype.name`, which NumPy puts together anew each time it is asked."""
    name: str = dtype.name
    return name


def _open_numpy(x: Any, what: str, accept: Accept) -> tuple[Any, str, Origin]:
    data = np.asarray(x)
    name = _dtype_name(data.dtype)
    accept(name, data.dtype.itemsize)
    return data, name, _NUMPY


def _open_masked(x: Any, what: str, accept: Accept) -> tuple[Any, str, Origin]:
    opened = _open_numpy(x.data, what, accept)
    hidden = int(np.count_nonzero(np.ma.getmaskarray(x)))
    if hidden:
        raise DtypeError(
            f"{what} is a masked array with {hidden} masked elements, and codes have no mask; say "
            "what they count as with x.filled(value)"
        )
    return opened


def _open_buffer(x: Any, what: str, accept: Accept) -> tuple[Any, str, Origin]:
    try:
        data = np.asarray(x)
    except FOREIGN_ERRORS as error:
        raise _refused(what, type(x).__name__, error) from None
    return _open_numpy(data, what, accept)


def _open_cupy(x: Any, what: str, accept: Accept) -> tuple[Any, str, Origin]:
    name = _dtype_name(x.dtype)
    accept(name, x.dtype.itemsize)
    return x, name, _cupy_origin(x.data.device_id)


def _cupy_view(x: Any, device: int) -> Any:
    """A CuPy array of a torch tensor's memory, without the detour of DLPack; None if it has none.

    No stream waits for another: both frameworks work on torch's current one.
    """
    import cupy

    count = x.numel()
    if not count:
        return None
    item = x.element_size()
    strides = tuple(stride * item for stride in x.stride())
    span = sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True)) + item
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), span, x, device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    dtype = np.dtype(str(x.dtype).removeprefix("torch."))
    return cupy.ndarray(tuple(x.shape), dtype, pointer, strides)


class _TorchType(NamedTuple):
    """An element type of torch: name, bytes, those bytes as a type that NumPy has, and as its own.

    `bits` is None where NumPy has the type itself.
    """

    name: str
    item_size: int
    bits: Any
    raw: np.dtype[Any]


@lru_cache(maxsize=64)
def _torch_type(dtype: Any) -> _TorchType:
    torch = loaded("torch")
    assert torch is not None
    name = str(dtype).removeprefix("torch.")
    if name in _SHARED_TYPES:
        return _TorchType(name, dtype.itemsize, None, np.dtype(name))
    wide = dtype.itemsize == 2
    bits, raw = (torch.int16, np.int16) if wide else (torch.uint8, np.uint8)
    return _TorchType(name, dtype.itemsize, bits, np.dtype(raw))


@lru_cache(maxsize=256)
def _torch_origin(device: int, stream: int) -> Origin:
    return Origin("torch", f"cuda:{device}", stream=stream)


def torch_array(
    shape: tuple[int, ...], dtype: str, origin: Origin, *, light: bool = False
) -> tuple[Any, Any]:
    """A new torch tensor on a GPU, which is not empty: as a raw array, and itself.

    Args:
        shape: its shape.
        dtype: its element type.
        origin: the device.
        light: see :func:`open_raw`.
    """
    torch = loaded("torch")
    assert torch is not None
    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind, device=origin.torch_device)
    _, _, bits, raw = _torch_type(kind)
    if light:
        return TorchMemory(tensor, raw), tensor
    return _cupy_view(tensor if bits is None else tensor.view(bits), origin.device_number), tensor


def _open_torch(x: Any, what: str, accept: Accept, light: bool = False) -> tuple[Any, str, Origin]:
    torch = loaded("torch")
    assert torch is not None
    try:
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            check_subclass(x, torch, what)
            with torch._C.DisableTorchFunctionSubclass():
                x = x.as_subclass(torch.Tensor)
        check_tensor(x, torch, what)
        dtype, item_size, bits, raw = _torch_type(x.dtype)
        accept(dtype, item_size)
        on_host, device = x.device.type == "cpu", x.device.index or 0
        if light and not on_host and x.is_contiguous() and x.numel() and not x.is_neg():
            return TorchMemory(x, raw), dtype, _torch_origin(device, torch_pointer(device))
        x = x.detach()
        if x.is_neg():
            # The memory holds the values of the other sign: torch copies, on their device.
            x = x.resolve_neg()
        if bits is not None:
            x = x.view(bits)
        if on_host:
            return x.numpy(), dtype, Origin("torch", "cpu")
        import cupy

        stream = torch_pointer(device)
        data = _cupy_view(x, device)
        if data is None:
            with cupy.cuda.Device(device), known_stream(stream, device):
                data = cupy.from_dlpack(x)
        return data, dtype, _torch_origin(device, stream)
    except DtypeError:
        raise
    except FOREIGN_ERRORS as error:
        raise _refused(what, "torch", error) from None


def _open_jax(x: Any, what: str, accept: Accept) -> tuple[Any, str, Origin]:
    jax = loaded("jax")
    assert jax is not None
    if isinstance(x, jax.core.Tracer):
        raise DtypeError("a traced JAX array holds no data; call fp4kit outside jax.jit")
    if x.is_deleted():
        raise DtypeError(f"{what} is a JAX array that was deleted or donated; pass a live one")
    devices = x.devices()
    if len(devices) != 1:
        raise DtypeError(
            f"the JAX array lies on {len(devices)} devices; quantize each addressable shard alone"
        )
    device = next(iter(devices))
    dtype = str(x.dtype)
    accept(dtype, x.dtype.itemsize)
    if device.platform == "cpu":
        return np.asarray(x), dtype, Origin("jax", "cpu")
    import cupy

    bits = jax.lax.bitcast_convert_type(x, jax.numpy.uint16) if dtype == "bfloat16" else x
    data = cupy.from_dlpack(bits)
    return data, dtype, Origin("jax", f"cuda:{data.device.id}")


def _open_dlpack(x: Any, what: str, accept: Accept) -> tuple[Any, str, Origin]:
    """Results go back to the array-API namespace of `x`; without one, to NumPy or CuPy."""
    try:
        namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
        kind, number = x.__dlpack_device__()
        on_host = int(kind) in HOST_DEVICES
        if on_host:
            data, dtype = host_array(x)
        else:
            import cupy

            data = cupy.from_dlpack(x)
            dtype = data.dtype.name
    except FOREIGN_ERRORS as error:
        raise _refused(what, type(x).__name__, error) from None
    accept(dtype, data.dtype.itemsize)
    if namespace is not None and hasattr(namespace, "from_dlpack"):
        return data, dtype, Origin("array_api", "cpu" if on_host else f"cuda:{number}", namespace)
    return data, dtype, _NUMPY if on_host else _cupy_origin(int(number))


_OPEN = {
    "numpy": _open_numpy,
    "masked": _open_masked,
    "cupy": _open_cupy,
    "jax": _open_jax,
    "dlpack": _open_dlpack,
    "buffer": _open_buffer,
}


def open_raw(x: Any, what: str, accept: Accept, *, light: bool = False) -> tuple[Any, str, Origin]:
    """(NumPy or CuPy data, element type's name, origin) of a caller's array.

    bfloat16 data may still be of any 16-bit type.

    Args:
        x: the array.
        what: the argument's name, for messages.
        accept: refuses element types by raising :class:`DtypeError`.
        light: contiguous torch tensors on a GPU may come as :class:`TorchMemory`.

    Raises:
        DtypeError: if it is no array, holds no elements that can be read in place, or is of an
            element type that is not accepted.
    """
    framework = _framework_of(x, what)
    if framework == "torch":
        return _open_torch(x, what, accept, light)
    return _OPEN[framework](x, what, accept)
