# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic by IEEE 754 whatever mode the caller's thread is in.

Shared libraries built with -ffast-math switch the thread that loads them, and all threads that it
starts later, to treating subnormal numbers as zero: a known trap of Python packages. Codes, scales
and decoded values of small numbers would depend on it. Here that mode, and the direction of
rounding, are set aside while fp4kit computes on the processor, and then given back.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import struct
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .errors import BackendUnavailableError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Class = TypeVar("Class", bound=type)

ONE = 1.0
#: A subnormal number: times one it is zero if operands or results are flushed. It comes from its
#: bits, as Python's parser computes: in such a thread it reads 5e-324 as zero, and what it compiles
#: then is kept for later runs.
(SUBNORMAL,) = struct.unpack("<d", b"\1\0\0\0\0\0\0\0")
#: Less than half a unit in the last place of 1: added or subtracted, it is rounded away.
LITTLE = 1e-17
#: Room for the largest `fenv_t` there is, in 8-byte words.
ENVIRONMENT_WORDS = 64
#: What <fenv.h> calls FE_DFL_ENV, where it is a number.
DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)


def is_ieee() -> bool:
    """Whether this thread keeps subnormal numbers and rounds to nearest."""
    return SUBNORMAL * ONE != 0.0 and ONE + LITTLE == ONE == ONE - LITTLE


@functools.cache
def _library() -> Any:
    """The C library's functions on the float environment, or None.

    They keep the interpreter lock: nothing in them waits.
    """
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.PyDLL(None)
    return library if hasattr(library, "fesetenv") else ctypes.PyDLL("libm.so.6")


def _reset() -> ctypes.Array[Any]:
    """Sets the default mode and returns the one before.

    Raises:
        BackendUnavailableError: if that is not possible here.
    """
    saved = (ctypes.c_uint64 * ENVIRONMENT_WORDS)()
    library = _library()
    if library is not None:
        library.fegetenv(saved)
        library.fesetenv(DEFAULT_ENVIRONMENT)
    if not is_ieee():
        reason = (
            "this thread's processor treats subnormal numbers as zero or does not round to "
            "nearest, probably set by a library built with -ffast-math, and fp4kit cannot change "
            "that on this system; load that library after fp4kit's work, or in another process"
        )
        raise BackendUnavailableError("compute in this thread", {"cpu": reason})
    return saved


def by_ieee(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Makes a function compute by IEEE 754, in whatever mode the calling thread is."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if is_ieee():
            return function(*args, **kwargs)
        saved = _reset()
        try:
            return function(*args, **kwargs)
        finally:
            _library().fesetenv(saved)

    return call


def computes_by_ieee(*abstract: type) -> Callable[[Class], Class]:
    """Applies :func:`by_ieee` to every public method of a class.

    Args:
        abstract: base classes whose methods are left as they are: that a method is theirs says
            that the class lacks it.
    """

    def decorate(owner: Class) -> Class:
        for base in owner.__mro__:
            if base is object or base in abstract:
                continue
            for name, method in vars(base).items():
                own = getattr(owner, name) is getattr(base, name)
                if own and not name.startswith("_") and inspect.isfunction(method):
                    setattr(owner, name, by_ieee(method))
        return owner

    return decorate
