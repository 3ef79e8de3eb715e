# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend on the host: its kernels built with g++ (host_gpu.hpp), NumPy arrays for CuPy's.

Slow, and for small arrays: what a device does at once happens one thread after the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import types
import weakref
from pathlib import Path

import numpy as np

from fp4kit.cuda.compile import kernel_directory, options
from fp4kit.cuda.geometry import THREADS

COMPILER = shutil.which("g++")
#: What memory holds that nobody has written (also in host_gpu.hpp), and bytes of it around arrays.
PATTERN, GUARD = 0xCD, 64
#: As an H200 has it: bytes that a thread block may ask for, and of a multiprocessor.
SHARED_MEMORY = (227 * 1024, 228 * 1024)
#: {first address: the one after the last} of arrays that live.
_ranges = {}


class HostMemory:
    """As CuPy's MemoryPointer."""

    def __init__(self, array):
        self._array = array
        self.ptr = array.ctypes.data

    def memset_async(self, value, size):
        ctypes.memset(self.ptr, value, size)


class HostArray(np.ndarray):
    """A NumPy array with the attributes of a CuPy array that the backend uses."""

    device = types.SimpleNamespace(id=0)

    @property
    def data(self):
        return HostMemory(self)

    def get(self):
        return np.asarray(self)


def put(array, shift=0):
    """A copy, `shift` bytes past a 16-byte boundary."""
    result = empty(array.shape, array.dtype, shift)
    result[...] = array
    return result


def empty(shape, dtype, shift=0):
    """An array that nobody has written, `shift` bytes past a 16-byte boundary."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(size + 2 * GUARD + 16 + shift, PATTERN, np.uint8)
    start = GUARD - (memory.ctypes.data + GUARD) % -16 + shift
    address = memory.ctypes.data + start
    _ranges[address] = address + size
    weakref.finalize(memory, _give_back, address, size)
    return memory[start : start + size].view(dtype).reshape(shape).view(HostArray)


def _give_back(address, size):
    """What is read of an array afterwards is nothing that it held."""
    del _ranges[address]
    ctypes.memset(address, PATTERN, size)


def end_of_array(address):
    """Where the array ends that begins at an address; None if none that lives does."""
    return _ranges.get(address)


def _check_guards(ranges):
    """What lies around arrays is as it was."""
    guard = bytes([PATTERN]) * GUARD
    for begin, end in ranges:
        around = ctypes.string_at(begin - GUARD, GUARD), ctypes.string_at(end, GUARD)
        assert around == (guard, guard), "written outside of an array"


class _Event:
    done = True

    def __init__(self, **kwargs):
        pass

    def record(self, stream):
        pass


def fake_cupy():
    """A module that stands in for CuPy."""
    stream = types.SimpleNamespace(ptr=0)
    return types.SimpleNamespace(
        empty=empty,
        cuda=types.SimpleNamespace(
            Event=_Event,
            alloc_pinned_memory=bytearray,
            get_current_stream=lambda: stream,
            nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
            runtime=types.SimpleNamespace(
                driverGetVersion=lambda: 13000,
                getDevice=lambda: 0,
                memsetAsync=lambda target, value, size, stream: ctypes.memset(target, value, size),
                memcpyHostToDevice=1,
                memcpyAsync=lambda target, source, size, kind, of: ctypes.memmove(
                    target, source, size
                ),
            ),
        ),
    )


class _Launch(ctypes.Structure):
    """host_gpu::Launch."""

    _fields_ = (
        ("blocks", ctypes.c_longlong),
        ("threads", ctypes.c_longlong),
        ("shared", ctypes.c_longlong),
        ("words", ctypes.POINTER(ctypes.c_longlong)),
        ("ranges", ctypes.POINTER(ctypes.c_longlong)),
        ("range_count", ctypes.c_longlong),
    )


def _word_of(argument):
    """What host_gpu.hpp takes: a number, or where an array is, or what is passed by value."""
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    return int(argument)


class Kernels:
    """Instances built on demand, in a folder."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._built = {}
        self.launched = []

    def launch(self, instance, grid, arguments, shared=0, threads=THREADS):
        """As the backend's own launch; that the memory of wide tiles is asked for is not checked.

        Written memory must be inside of arrays, and in the shared memory asked for.
        """
        if instance not in self._built:
            self.build([instance])
        self.launched.append(instance)
        words = [_word_of(value) for value in arguments]
        number, library = self._built[instance]
        count = library.count(number)
        assert len(words) == count, f"{len(words)} arguments for {count} parameters"
        (blocks,) = grid
        ranges = sorted(_ranges.items())
        flat = [address for each in ranges for address in each]
        given = _Launch(
            *(blocks, threads, shared),
            (ctypes.c_longlong * count)(*words),
            (ctypes.c_longlong * len(flat))(*flat),
            len(ranges),
        )
        assert library.run(number, ctypes.byref(given)), "wrote shared memory not asked for"
        _check_guards(ranges)

    def ready(self, device, launch, addresses, *, early=False):
        """As the backend's Ready; its multiprocessors are the fixture's."""

        def run(*pointers):
            assert len(pointers) == addresses
            arguments = (*pointers, *launch.scalars)
            self.launch(launch.instance, launch.grid, arguments, launch.shared, launch.threads)

        return types.SimpleNamespace(launch=run)

    def build(self, instances, flags=("-O0", "-w")):
        """Builds instances at once, which takes less time than one after the other.

        Warnings take an eighth of the compiler's time.
        """
        files = sorted({instance.file for instance in instances})
        expressions = [instance.expression for instance in instances]
        name = hashlib.sha256("\n".join(expressions).encode()).hexdigest()[:16]
        source, output = self._folder / f"{name}.cpp", self._folder / f"{name}.so"
        source.write_text(
            '#include "host_gpu.hpp"\n'
            + "".join(f'#include "{kernel_directory() / file}"\n' for file in files)
            + "constexpr host_gpu::Kernel kKernels[] = {\n"
            + "".join(f"  host_gpu::make_kernel<&{each}>(),\n" for each in expressions)
            + "};\n"
            'extern "C" int count(int number) { return kKernels[number].parameters; }\n'
            'extern "C" int run(int number, const host_gpu::Launch* given) {\n'
            "  return host_gpu::launch(kKernels[number], *given);\n"
            "}\n",
            encoding="utf-8",
        )
        defines = [option for option in options(9, 0) if option.startswith("-D")]
        command = [
            *(COMPILER, "-std=c++17", *flags),
            *("-ffp-contract=off", "-fno-strict-aliasing"),
            *("-fno-extern-tls-init", "-shared", "-fPIC"),
            *(f"-I{kernel_directory()}", f"-I{Path(__file__).parent}"),
            *(*defines, str(source), "-o", str(output)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        library = ctypes.CDLL(str(output))
        self._built.update(
            (instance, (number, library)) for number, instance in enumerate(instances)
        )
