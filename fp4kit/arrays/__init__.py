# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out: raw ones for the backends, and results in the caller's framework.

`ingest` turns a caller's array into a raw one (NumPy or CuPy; bfloat16 as its uint16 bits) without
copying it and without leaving its device; `emit` hands a raw result back in the caller's
framework. A framework is looked at only if the caller has already imported it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fp4kit.errors import DtypeError, OptionError, brief
from fp4kit.float_mode import by_ieee
from fp4kit.formats import DTYPES, FormatSpec

from .capture import allocations_allowed, is_capturing
from .capture import keep_if_captured as keep_if_captured
from .frameworks import Origin, framework_of_type, loaded, open_raw
from .streams import known_stream

RAW_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
#: The scope of a call whose device and stream are current already.
_NO_SCOPE: AbstractContextManager[None] = nullcontext()


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


def array_module(origin: Origin) -> Any:
    """NumPy for host arrays, CuPy for device arrays."""
    if origin.device_kind == "cpu":
        return np
    import cupy

    return cupy


def device_scope(origin: Origin) -> AbstractContextManager[Any]:
    """Makes the array's device, and the caller's stream, current while work is launched."""
    if origin.device_kind == "cpu":
        return _NO_SCOPE
    import cupy

    number, stream = origin.device_number, origin.stream
    on_device = cupy.cuda.runtime.getDevice() == number
    # The null stream is never captured, so that there is nothing to allow either.
    if on_device and (stream is None or stream == cupy.cuda.get_current_stream().ptr == 0):
        return _NO_SCOPE
    scope = ExitStack()
    if not on_device:
        scope.enter_context(cupy.cuda.Device(number))
    if stream is not None:
        scope.enter_context(known_stream(stream, number))
        if is_capturing():
            scope.enter_context(allocations_allowed())
    return scope


def is_current_device(number: int) -> bool:
    """Whether a GPU is CuPy's current device."""
    import cupy

    return bool(cupy.cuda.runtime.getDevice() == number)


def scratch(shape: int | tuple[int, ...], dtype: Any, origin: Origin) -> Any:
    """A raw array for what a call needs between its steps."""
    array = array_module(origin).empty(shape, dtype)
    return array if origin.device_kind == "cpu" else keep_if_captured(array)


def is_contiguous(data: Any) -> bool:
    """Whether raw data is C-contiguous."""
    if isinstance(data, np.ndarray):
        return data.flags.c_contiguous
    return bool(data.flags.c_contiguous)


def contiguous(data: Any, origin: Origin) -> Any:
    """Raw data itself if it is C-contiguous, else a copy on its device."""
    if origin.device_kind == "cpu":
        return np.ascontiguousarray(data)
    if is_contiguous(data):
        return data
    with device_scope(origin):
        bits = data.view(np.uint16) if data.dtype.itemsize == 2 else data
        return device_copy(bits)


def device_copy(data: Any) -> Any:
    """A C-contiguous copy of a device array of any strides, kept alive if a graph is captured.

    CuPy's own functions transpose with cuBLAS, which need not be installed.
    """
    import cupy

    result = cupy.empty(data.shape, data.dtype)
    result[...] = data
    return keep_if_captured(result)


def keeps_memory(x: Any) -> bool:
    """Whether an array owns the same memory for life; a torch tensor can be given another."""
    return framework_of_type(type(x)) in ("numpy", "cupy")


def _accept_floats(what: str, dtype: str, itemsize: int) -> None:
    if dtype not in DTYPES:
        advice = "cast it first, for example x.astype('float32') or x.float()"
        if dtype == "void16":
            advice = "raw 2-byte data has lost its type: view it as ml_dtypes.bfloat16 first"
        elif dtype.startswith("void"):
            advice = "pass one field of it"
        raise DtypeError(f"{what} is {dtype}; fp4kit takes {', '.join(DTYPES)}: {advice}")


def _refuse_copies(x: Any, data: Any, dtype: str, what: str) -> None:
    """Refuses to write to an array that `ingest` reads through a copy.

    Raises:
        DtypeError: for the other byte order, and torch views of negated values.
    """
    if not data.dtype.isnative:
        raise DtypeError(f"{what} is {data.dtype.str}; it must be {dtype} in native byte order")
    if framework_of_type(type(x)) == "torch" and x.is_neg():
        raise DtypeError(f"{what} is a torch view of negated values; pass one that is none")


def ingest(x: Any, what: str = "x", *, in_place: bool = False, light: bool = False) -> Raw:
    """A raw, uncopied view of a float32, float16 or bfloat16 array.

    Values of the other byte order, and torch views of negated values, are copied on their device.

    Args:
        x: array of any framework, shape and strides.
        what: the argument's name, for messages.
        in_place: it will be written to, so copies are refused.
        light: a torch tensor on a GPU may come as `torch_memory.TorchMemory`: for a backend that
            reads no more of arrays than that has.

    Raises:
        DtypeError: for any other element type or object, with the fix.
    """
    data, dtype, origin = open_raw(x, what, partial(_accept_floats, what), light=light)
    if in_place:
        _refuse_copies(x, data, dtype, what)
    if origin.device_kind == "cpu":
        if dtype == "bfloat16":
            data = data.view(np.uint16)
        elif data.dtype.byteorder == ">":
            data = data.astype(data.dtype.newbyteorder("="))
    return Raw(data, dtype, origin)


def _accept_bytes(what: str, dtype: str, itemsize: int) -> None:
    if itemsize != 1:
        raise DtypeError(
            f"{what} is {dtype}; codes and scales are uint8 arrays: use .view('uint8')"
        )


def ingest_bytes(x: Any, what: str) -> Raw:
    """A raw view of a uint8 array (codes or scale bytes); 1-byte float types are viewed as bytes.

    Raises:
        DtypeError: if the elements are not single bytes.
    """
    data, _, origin = open_raw(x, what, partial(_accept_bytes, what))
    return Raw(data if data.dtype == np.uint8 else data.view(np.uint8), "uint8", origin)


def ingest_scales(x: Any, what: str, spec: FormatSpec) -> Raw:
    """A raw view of the block scales of a format: bytes, or float32 numbers.

    Raises:
        DtypeError: if they are something else.
    """
    if spec.scales.dtype == "uint8":
        return ingest_bytes(x, what)
    scales = ingest(x, what, in_place=True)
    if scales.dtype != spec.scales.dtype:
        raise DtypeError(f"{what} is {scales.dtype}; scales of {spec.name} are {spec.scales.dtype}")
    return scales


@by_ieee
def _float32(value: Any, what: str) -> Any:
    """A number as float32; one that is too large is infinite, as an array's would be."""
    try:
        with np.errstate(over="ignore"):
            return np.float32(value)
    except OverflowError:
        raise OptionError(f"{what} is {brief(value)}, which no float holds") from None


def ingest_scale(x: Any, what: str, like: Origin) -> Any:
    """A second-level scale (float or float32 array of any shape) as raw float32 on `like`'s device.

    A float is sent to the device (asynchronously); an array must already be there.

    Raises:
        DtypeError: for another element type, or an array on another device.
    """
    if isinstance(x, (int, float, np.floating, np.integer)) and not isinstance(x, bool):
        value = _float32(x, what)
        if like.device_kind == "cpu":
            return np.full(1, value, np.float32)
        with device_scope(like):
            return keep_if_captured(array_module(like).full(1, value, np.float32))
    data = open_scale(x, what, like)
    if not data.dtype.isnative:
        data = data.astype(np.float32)
    data = contiguous(data, like)
    return data if data.ndim == 1 else data.reshape(-1)


def _accept_float32(what: str, dtype: str, itemsize: int) -> None:
    if dtype != "float32":
        raise DtypeError(f"{what} is {dtype}; a second-level scale is a float or a float32 array")


def open_scale(x: Any, what: str, like: Origin) -> Any:
    """The raw float32 data of a scale array that lies on `like`'s device, of any strides.

    Raises:
        DtypeError: for another element type or device.
    """
    data, _, origin = open_raw(x, what, partial(_accept_float32, what))
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
