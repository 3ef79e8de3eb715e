# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Torch tensors on the host that say they lie on a GPU, and launches that are only written down."""

from __future__ import annotations

import sys
from math import prod
from types import SimpleNamespace

import numpy as np
import torch

from fp4kit import arrays
from fp4kit.api import matmul as api_matmul
from fp4kit.arrays import capture, frameworks
from fp4kit.cuda import backend, blas, matmul, matmul_decode, matmul_small, matmul_warpgroup, run
from fp4kit.cuda import device as cuda_device
from fp4kit.cuda import ready as cuda_ready

#: Addresses of scratch, and of that of a graph.
SCRATCH, OF_GRAPH = 1 << 40, 1 << 41


class Array:
    """As CuPy's ndarray, without elements."""

    def __init__(self, shape, dtype, data, strides=None):
        self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), data
        whole = [prod(self.shape[axis + 1 :]) * self.itemsize for axis in range(len(self.shape))]
        self.strides = tuple(whole if strides is None else strides)
        self.flags = SimpleNamespace(c_contiguous=self.strides == tuple(whole))

    itemsize = property(lambda self: self.dtype.itemsize)
    size = property(lambda self: prod(self.shape))
    nbytes = property(lambda self: self.size * self.itemsize)
    ndim = property(lambda self: len(self.shape))

    def reshape(self, shape):
        wanted = (shape,) if isinstance(shape, int) else shape
        return Array(np.empty(self.shape, bool).reshape(wanted).shape, self.dtype, self.data)


def _word(argument):
    """What a kernel gets: bytes for what is passed by value, else a number."""
    if isinstance(argument, np.ndarray):
        return argument.tobytes()
    return argument.data.ptr if isinstance(argument, Array) else argument


class Stream:
    """As CuPy's: one is current."""

    def __init__(self, machine, ptr):
        self._machine, self.ptr = machine, ptr

    def __enter__(self):
        self._before, self._machine.current = self._machine.current, self

    def __exit__(self, *_):
        self._machine.current = self._before

    def is_capturing(self):
        return self._machine.captures == self.ptr


class Machine:
    """What is current, and what was launched.

    Attributes:
        device: number of CuPy's and torch's current device, where all tensors lie.
        torch_stream: torch's current stream.
        captures: the stream that is captured, or None.
        current: CuPy's current stream.
        log: (device, stream, what, its numbers) of each launch.
    """

    def __init__(self, monkeypatch):
        self.device, self.torch_stream, self.captures, self.log = 0, 0, None, []
        self.current = Stream(self, 0)
        set_item, put = monkeypatch.setitem, monkeypatch.setattr
        set_item(sys.modules, "cupy", self._cupy())
        put(torch.Tensor, "device", property(lambda _: torch.device("cuda", self.device)))
        make = torch.empty
        put(torch, "empty", lambda shape, dtype, device: make(shape, dtype=dtype))
        put(frameworks, "torch_pointer", lambda _: self.torch_stream)
        put(arrays, "known_stream", lambda pointer, _: Stream(self, pointer))
        put(capture, "_exchange", lambda mode: self.log.append("mode of captures"))
        put(api_matmul, "engine_for", lambda *_: backend.CudaBackend())
        for module in (cuda_device, matmul, matmul_decode):
            put(module, "capability", lambda _: (9, 0))
        put(cuda_ready, "Ready", self._ready)
        put(cuda_ready, "multiprocessors", lambda _: 132)
        put(cuda_ready, "_shared_memory", lambda _: (227 * 1024, 228 * 1024))
        put(cuda_ready, "resident_blocks", lambda *_: 132)
        # What is kept from launch to launch would write into the log of an earlier machine.
        put(cuda_ready, "dequantize", cuda_ready.dequantize.__wrapped__)
        put(matmul_small, "_ready", matmul_small._ready.__wrapped__)
        put(matmul_warpgroup, "_prepared", matmul_warpgroup._prepared.__wrapped__)
        put(run, "launch", self._launch)
        put(blas, "is_available", lambda: True)
        put(blas, "Gemm", self._gemm)

    def write(self, what, *numbers):
        """Notes a launch."""
        self.log.append((self.device, self.current.ptr, what, *numbers))

    def _cupy(self):
        runtime = SimpleNamespace(
            getDevice=lambda: self.device,
            memsetAsync=lambda *_: None,
            mallocAsync=lambda *_: OF_GRAPH,
            freeAsync=lambda address, _: self.write("free", address),
            driverGetVersion=lambda: 13000,
        )
        cuda = SimpleNamespace(
            runtime=runtime,
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            get_current_stream=lambda: self.current,
            UnownedMemory=lambda address, size, owner, device: (address, device, owner),
            MemoryPointer=lambda memory, offset: SimpleNamespace(
                ptr=memory[0] + offset, device_id=memory[1], owner=memory[2]
            ),
        )
        scratch = SimpleNamespace(ptr=SCRATCH, memset_async=lambda *_: None)
        return SimpleNamespace(
            ndarray=Array,
            empty=lambda shape, dtype: Array(np.empty(shape, bool).shape, dtype, scratch),
            cuda=cuda,
        )

    def _ready(self, device, launch, addresses, *, early=False):
        def launched(*pointers):
            assert len(pointers) == addresses
            assert device == self.device
            self.write(launch.instance.expression, launch.scalars, *pointers)

        return SimpleNamespace(launch=launched)

    def _launch(self, instance, grid, arguments, shared=0):
        self.write(instance.expression, grid, *map(_word, arguments))

    def _gemm(self, device, stream, workspace):
        assert (device, stream) == (self.device, self.current.ptr)
        return SimpleNamespace(multiply=lambda *given: self.write("gemm", workspace, *given))
