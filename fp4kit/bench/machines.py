# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The devices that are measured, and how time is taken on each."""

from __future__ import annotations

import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from fp4kit.arrays import array_module
from fp4kit.arrays.frameworks import Origin
from fp4kit.cpu.threads import run as run_threads

#: Calls between two CUDA events: the device must not wait for the host between them.
BATCH = 10
SMALL_CALLS = 200


class Machine(ABC):
    """A device that is measured."""

    device: str
    hardware: str
    xp: Any

    @abstractmethod
    def time_us(self, call: Callable[[], object], repeat: int) -> float:
        """Median time of one call in microseconds."""

    @abstractmethod
    def copies(self, target: Any, source: Any) -> dict[str, Callable[[], object]]:
        """The ways to copy an array, by name."""

    def random(self, rows: int, columns: int, dtype: str) -> Any:
        """Seeded normal values of an element type."""
        generator = self.xp.random.default_rng(0)
        values = generator.standard_normal((rows, columns), dtype=self.xp.float32)
        if dtype == "bfloat16":
            import ml_dtypes

            return values.astype(ml_dtypes.bfloat16)
        return values.astype(dtype)


class Cpu(Machine):
    """The host's cores."""

    device = "cpu"
    xp = np

    def __init__(self) -> None:
        self.hardware = platform.processor() or platform.machine()

    def time_us(self, call: Callable[[], object], repeat: int) -> float:  # noqa: D102
        call()  # compiles
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6

    def copies(self, target: Any, source: Any) -> dict[str, Callable[[], object]]:  # noqa: D102
        def piece(begin: int, end: int) -> None:
            np.copyto(target[begin:end], source[begin:end])

        return {
            "copy (numpy)": lambda: np.copyto(target, source),
            "copy (all threads)": lambda: run_threads(piece, *source.shape),
        }


class Gpu(Machine):
    """CuPy's current device."""

    device = "cuda"

    def __init__(self) -> None:
        self.xp = array_module(Origin("cupy", "cuda:0"))
        runtime = self.xp.cuda.runtime
        self.hardware = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()

    def time_us(self, call: Callable[[], object], repeat: int) -> float:
        """Median over events around batches: launches and gaps do not count for long kernels.

        A call ahead of each batch keeps the device busy until the batch's first one has arrived.
        """
        for _ in range(3):
            call()
        times = []
        for _ in range(repeat):
            start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
            call()
            start.record()
            for _ in range(BATCH):
                call()
            stop.record()
            stop.synchronize()
            times.append(self.xp.cuda.get_elapsed_time(start, stop) / BATCH)
        return float(statistics.median(times)) * 1e3

    def copies(self, target: Any, source: Any) -> dict[str, Callable[[], object]]:  # noqa: D102
        # As integers: CuPy has no copy kernel of its own for bfloat16.
        to, origin = target.view(np.uint16), source.view(np.uint16)
        return {
            "copy (cupy)": lambda: self.xp.copyto(to, origin),
            "copy (memcpy)": lambda: to.data.copy_from_device_async(origin.data, origin.nbytes),
        }

    def host_us(self, call: Callable[[], object]) -> float:
        """Host time of one call in microseconds, the device keeping up."""
        for _ in range(20):
            call()
        device = self.xp.cuda.Device()
        times = []
        for _ in range(5):
            device.synchronize()
            start = time.perf_counter()
            for _ in range(SMALL_CALLS):
                call()
            times.append((time.perf_counter() - start) / SMALL_CALLS)
        device.synchronize()
        return statistics.median(times) * 1e6

    def graph_us(self, call: Callable[[], object]) -> float:
        """Time per replay of a CUDA graph of one call, in microseconds."""
        with self.xp.cuda.Stream(non_blocking=True) as stream:
            call()
            stream.synchronize()
            stream.begin_capture()
            call()
            graph = stream.end_capture()
            for _ in range(20):
                graph.launch(stream)
            stream.synchronize()
            start = time.perf_counter()
            for _ in range(SMALL_CALLS):
                graph.launch(stream)
            stream.synchronize()
            return (time.perf_counter() - start) / SMALL_CALLS * 1e6
