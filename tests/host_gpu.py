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
from pathlib import Path

import numpy as np

from fp4kit.backends.cuda_module import kernel_directory, options

COMPILER = shutil.which("g++")
#: What memory holds that nobody has written.
PATTERN = 0xCD


class HostMemory:
    """As CuPy's MemoryPointer."""

    def __init__(self, array):
        self._array = array
        self.ptr = array.ctypes.data

    def memset_async(self, value, size):
        ctypes.memset(self.ptr, value, size)


class HostArray(np.ndarray):
    """A NumPy array with the attributes of a CuPy array that the backend uses."""

    @property
    def data(self):
        return HostMemory(self)


def put(array):
    """A copy whose memory begins on 16 bytes."""
    result = empty(array.shape, array.dtype)
    result[...] = array
    return result


def empty(shape, dtype):
    """An array that nobody has written; its memory begins on 16 bytes."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(size + 16, PATTERN, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + size].view(dtype).reshape(shape).view(HostArray)


class _Event:
    done = True

    def __init__(self, **kwargs):
        pass

    def record(self, stream):
        pass


def fake_cupy():
    """A module that stands in for CuPy."""
    stream = types.SimpleNamespace(ptr=0)
    # Memory that a device frees is good for what was launched before: here it is not freed.
    kept = []

    def allocate(shape, dtype):
        kept.append(empty(shape, dtype))
        return kept[-1]

    return types.SimpleNamespace(
        empty=allocate,
        cuda=types.SimpleNamespace(
            Event=_Event,
            alloc_pinned_memory=bytearray,
            get_current_stream=lambda: stream,
            runtime=types.SimpleNamespace(
                getDevice=lambda: 0,
                memcpyHostToDevice=1,
                memcpyAsync=lambda target, source, size, kind, of: ctypes.memmove(
                    target, source, size
                ),
            ),
        ),
    )


class Kernels:
    """Instances built on demand, in a folder."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._built = {}
        self.launched = []

    def launch(self, instance, grid, arguments, shared=0):
        """As the backend's own launch; shared memory is there without being asked for."""
        if instance not in self._built:
            self._built[instance] = self._build(instance)
        self.launched.append(instance)
        words = [value.data.ptr if hasattr(value, "data") else value for value in arguments]
        words = [int(word) for word in words]
        count, run = self._built[instance]
        assert len(words) == count, f"{len(words)} arguments for {count} parameters"
        (blocks,) = grid
        run(ctypes.c_longlong(blocks), (ctypes.c_longlong * count)(*words))

    def ready(self, device, launch, addresses):
        """As the backend's Ready; its multiprocessors are the fixture's."""

        def run(*pointers):
            assert len(pointers) == addresses
            self.launch(launch.instance, launch.grid, (*pointers, *launch.scalars))

        return types.SimpleNamespace(launch=run)

    def _build(self, instance):
        name = hashlib.sha256(instance.expression.encode()).hexdigest()[:16]
        source, output = self._folder / f"{name}.cpp", self._folder / f"{name}.so"
        source.write_text(
            '#include "host_gpu.hpp"\n'
            f'#include "{kernel_directory() / instance.file}"\n'
            f"constexpr auto kKernel = &{instance.expression};\n"
            'extern "C" int count() { return host_gpu::parameters(kKernel); }\n'
            'extern "C" void run(long long blocks, const long long* words) {\n'
            "  host_gpu::words = words;\n"
            "  host_gpu::body = [] { host_gpu::call(kKernel); };\n"
            "  gridDim.x = static_cast<unsigned>(blocks);\n"
            "  for (unsigned block = 0; block < gridDim.x; ++block) {\n"
            "    blockIdx.x = block;\n"
            "    host_gpu::run_block();\n"
            "  }\n"
            "}\n",
            encoding="utf-8",
        )
        defines = [option for option in options(9, 0) if option.startswith("-D")]
        command = [
            *(COMPILER, "-std=c++17", "-O0", "-w", "-ffp-contract=off", "-fno-strict-aliasing"),
            *("-shared", "-fPIC", f"-I{kernel_directory()}", f"-I{Path(__file__).parent}"),
            *(*defines, str(source), "-o", str(output)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        library = ctypes.CDLL(str(output))
        return library.count(), library.run
