# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How the numba kernels are compiled and kept.

numba's own cache unpickles whatever lies in its folder, and looks only at the file that defines a
kernel, but these kernels inline functions from several files. Machine code is kept by
:mod:`fp4kit.cpu.kernel_cache` instead, in a folder whose name carries a hash of all sources.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llvmlite
import numba as untyped_numba
from numba.core import compiler as untyped_compiler
from numba.core import serialize as untyped_serialize
from numba.core.caching import NullCache

from . import kernel_cache

numba: Any = untyped_numba
compiler: Any = untyped_compiler
serialize: Any = untyped_serialize
VERSIONS = (numba.__version__, llvmlite.__version__, platform.python_version())


class KernelCache(NullCache):
    """The cache of one kernel: a file for each signature and processor."""

    def __init__(
        self, function: Callable[..., Any], parts: tuple[Any, ...], *, announced: bool
    ) -> None:
        self._announced = announced
        self._name = f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"
        # Kernels that are made of parts differ in those parts alone.
        self._name = "-".join([self._name, *(part.__name__ for part in parts)])

    def _file(self, signature: Any, codegen: Any) -> str:
        key = repr((self._name, signature, codegen.magic_tuple(), VERSIONS))
        return f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.kernel"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept kernel of a signature, or None: then numba compiles it."""
        target_context.refresh()
        payload = kernel_cache.read(self._file(sig, target_context.codegen()))
        if payload is None:
            if self._announced:
                kernel_cache.compiling()
            return None
        return compiler.CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps a compiled kernel."""
        kernel_cache.write(self._file(sig, data.codegen), serialize.dumps(data._reduce()))


def _in_a_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function in a thread of its own.

    torch.compile follows every call of its own thread, numba's compiler too, and breaks on it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    return call


def jit_of(
    *parts: Any, announced: bool = True, allocates: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a kernel on first call: without the GIL, IEEE arithmetic, kept on disk.

    Args:
        parts: functions that it calls and that its name and module do not tell.
        announced: whether that takes so long that whoever waits should be told.
        allocates: whether it makes arrays. Otherwise nothing counts references to arrays: those
            of a bundle would be counted again for every tile, 5 to 10 % of the time.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        # Kernels are called from Python alone: no wrapper for C.
        kernel = _compiled(function, fastmath=False, no_cfunc_wrapper=True, _nrt=allocates)
        kernel._cache = KernelCache(function, parts, announced=announced)
        kernel._compile_for_args = _in_a_thread(kernel._compile_for_args)
        return kernel

    return decorate


#: :func:`jit_of` for a kernel that is compiled in a moment.
jit = jit_of(announced=False)


def jit_inner(function: Callable[..., Any]) -> Any:
    """A function that only kernels call, and whose code becomes part of theirs.

    It gets no wrappers for Python and no file of its own.
    """
    return _compiled(function, fastmath=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def jit_inner_sums(function: Callable[..., Any]) -> Any:
    """:func:`jit_inner`, but sums may be reordered so that they vectorize: for statistics only."""
    fastmath = {"reassoc", "contract"}
    return _compiled(function, fastmath=fastmath, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def jit_part(function: Callable[..., Any]) -> Any:
    """A part of a kernel: numba copies its statements to where it is called.

    Nothing is compiled for it alone, so it suits what one kernel calls once. Its result comes from
    its only `return`, at the end.
    """
    return numba.njit(function, inline="always")


def _compiled(function: Callable[..., Any], fastmath: bool | set[str], **more: bool) -> Any:
    return numba.njit(function, nogil=True, error_model="numpy", fastmath=fastmath, **more)
