# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Devices of host memory: the GPU pipeline as it is, with the CPU backend behind it."""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fp4kit.io.stream import device, gpu_memory, gpu_pipeline


class FakeEvent:
    """Done when a task of a stream is."""

    def __init__(self, future):
        self._future = future

    def synchronize(self):
        self._future.result()


class FakeStream:
    """Runs copies in a thread of its own, late, as a device would; kernels run at once."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1)

    def run(self, task):
        def late():
            time.sleep(random.random() * 2e-3)
            task()

        return self._pool.submit(late)

    def wait_event(self, event):
        self._pool.submit(event.synchronize)

    def synchronize(self):
        self._pool.submit(lambda: None).result()


class FakeCuda:
    """As :class:`fp4kit.io.stream.gpu_memory.Cuda`; memory never written holds a pattern."""

    def __init__(self, origin):
        pass

    @contextlib.contextmanager
    def scope(self, stream=None):
        if stream is not None:
            stream.synchronize()  # kernels of the CPU backend run in the caller's thread
        yield

    def stream(self):
        return FakeStream()

    def record(self, stream):
        return FakeEvent(stream.run(lambda: None))

    def pinned(self, count):
        return np.full(count, 0xAB, np.uint8)

    def memory(self, count):
        return np.full(count, 0xCD, np.uint8)

    def free_bytes(self):
        return 1 << 33

    def gather(self, values):
        return np.concatenate(values)

    def upload(self, host, device, stream):
        stream.run(lambda: device.__setitem__(slice(None), host))

    def download(self, device, host, stream):
        stream.run(lambda: host.__setitem__(slice(None), device))


def install(monkeypatch):
    """Has `cuda` and `cuda:N` be such devices, with buffers and reads of small sizes."""
    monkeypatch.setattr(gpu_pipeline, "Cuda", FakeCuda)
    monkeypatch.setattr(gpu_memory, "slot_size", lambda count: -(-count // 1024) * 1024)
    monkeypatch.setattr(gpu_pipeline, "slot_size", lambda count: -(-count // 1024) * 1024)
    monkeypatch.setattr(gpu_pipeline, "PIECE_BYTES", 512)
    original = device.DeviceBackend.__init__

    def on_gpu(self, name, *args):
        original(self, "cpu", *args)
        self.on_gpu = name.startswith("cuda")

    monkeypatch.setattr(device.DeviceBackend, "__init__", on_gpu)
