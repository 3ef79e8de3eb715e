# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Times of products on a GPU: short graph replays over weights that no cache holds.

A card at its power limit clocks down, so that everything here is short, and clocks stand beside
the figures.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cupy

Call = Callable[[], object]

#: Weights are taken in turn from copies of so many bytes together, at least `LEAST_COPIES`.
COLD_BYTES = 400 << 20
LEAST_COPIES = 3
REPLAYS = 7
#: Microseconds that a graph should take at least, and calls that it holds at most.
GRAPH_US, MOST_CALLS = 400.0, 64
COPY_BYTES = 1 << 30


def copies_of(nbytes: int) -> int:
    """Copies of weights of so many bytes."""
    return max(LEAST_COPIES, -(-COLD_BYTES // nbytes))


def calls_for(copies: int, estimate_us: float) -> int:
    """Calls of a graph: each copy in turn, as often as a replay is long enough to be timed."""
    wanted = max(copies, int(GRAPH_US / max(estimate_us, 1.0)))
    return max(min(wanted, MOST_CALLS), min(copies, MOST_CALLS))


def in_turn(call: Callable[[Any], object], items: Sequence[Any], count: int) -> list[Call]:
    """Calls with one of some items each, in turn."""
    return [partial(call, items[number % len(items)]) for number in range(count)]


def _median_us(replay: Call, calls: int) -> float:
    for _ in range(2):
        replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3 / calls)
    return statistics.median(times)


def graph_us(calls: Sequence[Call]) -> float:
    """Microseconds of a call: a CuPy graph of all calls, median of replays."""
    # A stream of its own does not wait for what makes the operands: their results would be written
    # where that still has its intermediate arrays.
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Whatever is compiled or loaded is so before.
        for call in calls[:LEAST_COPIES]:
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        return _median_us(lambda: graph.launch(stream), len(calls))


def torch_graph_us(calls: Sequence[Call]) -> float:
    """The same of calls of torch, captured by torch."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:LEAST_COPIES]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for number in range(REPLAYS + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


def host_us(call: Call, count: int = 200) -> float:
    """Microseconds of host time of a call, enqueued one after the other."""
    for _ in range(10):
        call()
    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    taken = time.perf_counter() - start
    cupy.cuda.runtime.deviceSynchronize()
    return taken / count * 1e6


def copy_bandwidth() -> float:
    """Bytes read and written a microsecond by a copy of the device."""
    source = cupy.zeros(COPY_BYTES, cupy.uint8)
    target = cupy.empty_like(source)

    def copy() -> None:
        target.data.copy_from_device_async(source.data, source.nbytes)

    return 2 * COPY_BYTES / _median_us(copy, 1)


def clocks() -> str:
    """Clock, power and why it is limited, as nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        return "no nvidia-smi"
    fields = "clocks.sm,clocks.mem,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()
