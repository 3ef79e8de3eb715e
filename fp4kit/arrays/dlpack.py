# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Host arrays of any DLPack producer, without a copy; bfloat16 as well, which NumPy does not take.

The struct behind a capsule is read here (DLPack 1.x, `dlpack.h`; also the unversioned one before
it). The capsule itself is kept for as long as the array lives; it frees the memory in the end.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

#: Device types whose memory the processor reads: CPU, pinned for CUDA or ROCm.
HOST_DEVICES = (1, 3, 11)
_READ_ONLY = 1
#: Letters of NumPy's type strings by DLPack's type code; bfloat16 (4) goes as its bits.
_LETTERS = {0: "i", 1: "u", 2: "f", 4: "u", 5: "c", 6: "b"}
_BFLOAT = 4


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _View:
    """What NumPy makes an array of: it keeps the capsule, and so the memory."""

    def __init__(self, capsule: Any, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


def _export(x: Any) -> Any:
    """The capsule of a producer, of version 1 where it knows about versions."""
    try:
        return x.__dlpack__(max_version=(1, 0))
    except TypeError:
        # As the array API says: a producer from before versions does not know the argument.
        return x.__dlpack__()


def host_array(x: Any) -> tuple[Any, str]:
    """A NumPy array over the memory of a DLPack producer on the host, and its element type's name.

    Args:
        x: object with `__dlpack__`, of any strides; bfloat16 becomes uint16.

    Raises:
        BufferError: if its type or version is not one that can be read.
    """
    capsule = _export(x)
    name = _name_of(capsule)
    read_only = False
    if name == b"dltensor_versioned":
        managed = _Versioned.from_address(_pointer_of(capsule, name))
        if managed.major != 1:
            raise BufferError(f"DLPack version {managed.major}.{managed.minor} is not known")
        tensor, read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    elif name == b"dltensor":
        tensor = _Tensor.from_address(_pointer_of(capsule, name))
    else:
        raise BufferError(f"a capsule named {name!r} is not one of DLPack")
    letter = _LETTERS.get(tensor.code)
    if letter is None or tensor.lanes != 1 or tensor.bits % 8 or not tensor.bits:
        raise BufferError(
            f"DLPack type {tensor.code} of {tensor.bits} bits and {tensor.lanes} lanes has no "
            "equal in NumPy"
        )
    size = tensor.bits // 8
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * size for axis in range(tensor.ndim))
    interface = {
        "version": 3,
        "typestr": f"={letter}{size}",
        "shape": shape,
        "strides": strides,
        "data": ((tensor.data or 0) + tensor.byte_offset, read_only),
    }
    if 0 in shape:
        # There may be no memory at all.
        return np.zeros(shape, f"={letter}{size}"), _named(tensor, letter, size)
    return np.asarray(_View(capsule, interface)), _named(tensor, letter, size)


def _named(tensor: _Tensor, letter: str, size: int) -> str:
    return "bfloat16" if tensor.code == _BFLOAT else np.dtype(f"{letter}{size}").name
