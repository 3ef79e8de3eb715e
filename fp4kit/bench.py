# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How fast every operation is on this machine, beside a copy of the same tensor.

An operation's bytes are those that must move once: its input, codes, scales and output. The
yardstick is the fastest plain copy of a bfloat16 tensor of as many elements, read and write
counted, measured in the same run.
"""

from __future__ import annotations

import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fp4kit.scheme import Scheme, as_scheme

from .api import quantize as api
from .api import quantize_dequantize as fake
from .api import scale_ops
from .api.backends import select
from .arrays import array_module
from .arrays.frameworks import Origin
from .backend.interface import Request
from .cpu.threads import run as run_threads
from .formats import ALL_FORMATS

#: Row length of the tensors, if they have enough elements.
COLUMNS = 8192
#: Calls between two CUDA events: the device must not wait for the host between them.
BATCH = 10
SCALE_BYTES = 64 << 20
#: The call whose host time counts: small enough that the device is never the limit.
SMALL_SHAPE = (128, 4096)
SMALL_CALLS = 200


@dataclass(frozen=True)
class Case:
    """One operation, ready to be called again and again.

    Attributes:
        name: operation, format and the like.
        nbytes: bytes that must move.
        call: runs it; on a GPU it only enqueues it.
    """

    name: str
    nbytes: int
    call: Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """A measured operation.

    Attributes:
        name: the case's name.
        dtype: element type of the float side.
        elements: elements of the float tensor, or scale bytes.
        microseconds: time of one call.
        gigabytes_per_second: bytes that must move by time.
        share_of_copy: that, by the rate of the copy.
    """

    name: str
    dtype: str
    elements: int
    microseconds: float
    gigabytes_per_second: float
    share_of_copy: float


@dataclass(frozen=True)
class SmallCall:
    """What one small call costs on a GPU: quantize of SMALL_SHAPE, `out=` and amax given.

    Attributes:
        name: what is called.
        host_microseconds: host time per call, enqueued one after the other.
        graph_microseconds: time per replay of a CUDA graph that holds one call.
    """

    name: str
    host_microseconds: float
    graph_microseconds: float


@dataclass(frozen=True)
class DeviceResult:
    """Everything measured on one device.

    Attributes:
        device: `cpu` or `cuda`.
        hardware: its name.
        timings: in the order measured; those called `copy` first for every size.
        small_calls: empty on the CPU.
    """

    device: str
    hardware: str
    timings: list[Timing] = field(default_factory=list)
    small_calls: list[SmallCall] = field(default_factory=list)


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


def float_cases(machine: Machine, rows: int, columns: int, dtype: str) -> Iterator[Case]:
    """Every operation on floats; the arrays of a case may go when the next one is asked for."""
    x = machine.random(rows, columns, dtype)
    known = api.amax(x)
    yield Case("amax", x.nbytes, lambda: api.amax(x))
    back = machine.xp.empty_like(x)
    kinds = [(name, "linear") for name in ALL_FORMATS]
    kinds[1:1] = [("nvfp4", "swizzled_128x4")]
    for name, layout in kinds:
        given = {"amax": known} if ALL_FORMATS[name].has_second_level else {}
        scheme = as_scheme(name, {"scale_layout": layout})
        options: Any = {"nonfinite": "propagate", **given}
        q = api.quantize(x, scheme, **options)
        moved = x.nbytes + q.packed.nbytes + q.block_scale.nbytes

        def encode(scheme: Scheme = scheme, options: Any = options, q: Any = q) -> object:
            return api.quantize(x, scheme, out=q, **options)

        def decode(q: Any = q) -> object:
            return api.dequantize(q, dtype, out=back)

        title = name if layout == "linear" else f"{name} {layout}"
        yield Case(f"quantize {title}", moved, encode)
        yield Case(f"dequantize {title}", moved, decode)
        if given and layout == "linear":
            yield Case(
                f"quantize {name}, amax measured",
                moved + x.nbytes,
                partial(api.quantize, x, out=q, nonfinite="propagate"),
            )
    yield Case(
        "quantize_dequantize nvfp4",
        2 * x.nbytes,
        lambda: fake.quantize_dequantize(x, amax=known, nonfinite="propagate", out=back),
    )


def scale_cases(machine: Machine, nbytes: int = SCALE_BYTES) -> Iterator[Case]:
    """Swizzle and unswizzle of scales alone."""
    columns = min(512, nbytes)
    generator = machine.xp.random.default_rng(0)
    scales = generator.integers(0, 127, (nbytes // columns, columns), dtype=np.uint8)
    swizzled = scale_ops.swizzle(scales)
    yield Case("swizzle 128x4", 2 * nbytes, lambda: scale_ops.swizzle(scales))
    yield Case("unswizzle 128x4", 2 * nbytes, lambda: scale_ops.unswizzle(swizzled, scales.shape))


def small_calls(machine: Gpu) -> Iterator[SmallCall]:
    """What a small call costs, for formats with and without a second level."""
    x = machine.random(*SMALL_SHAPE, "bfloat16")
    known = api.amax(x)
    for name in ("nvfp4", "mxfp8"):
        given = {"amax": known} if ALL_FORMATS[name].has_second_level else {}
        options: Any = {"nonfinite": "propagate", **given}
        scheme = as_scheme(name, {})
        q = api.quantize(x, scheme, **options)

        def call(scheme: Scheme = scheme, options: Any = options, q: Any = q) -> object:
            return api.quantize(x, scheme, out=q, **options)

        shape = "x".join(map(str, SMALL_SHAPE))
        yield SmallCall(f"quantize {name} {shape}", machine.host_us(call), machine.graph_us(call))


def shape_of(log2_elements: int) -> tuple[int, int]:
    """Rows and columns of 2^n elements, whole blocks in a row."""
    columns = min(COLUMNS, 1 << max(log2_elements // 2, 5))
    return (1 << log2_elements) // columns, columns


def copy_timings(machine: Machine, rows: int, columns: int, repeat: int) -> list[Timing]:
    """The yardsticks; the fastest one has share 1."""
    source = machine.random(rows, columns, "bfloat16")
    calls = machine.copies(machine.xp.empty_like(source), source)
    times = {name: machine.time_us(call, repeat) for name, call in calls.items()}
    moved, best = 2 * source.nbytes, min(times.values())
    return [
        Timing(name, "bfloat16", source.size, value, moved / value / 1e3, best / value)
        for name, value in times.items()
    ]


def timed(
    machine: Machine, case: Case, dtype: str, elements: int, repeat: int, copy_rate: float
) -> Timing:
    """Measures a case.

    Args:
        machine: where it runs.
        case: what to call.
        dtype: element type of its float side.
        elements: how many of them.
        repeat: measurements, of which the median counts.
        copy_rate: the yardstick, in gigabytes per second.
    """
    microseconds = machine.time_us(case.call, repeat)
    rate = case.nbytes / microseconds / 1e3
    return Timing(case.name, dtype, elements, microseconds, rate, rate / copy_rate)


def measure(
    machine: Machine, log2_elements: int, dtypes: Sequence[str], repeat: int
) -> Iterator[Timing]:
    """Measures every operation at one size, the copies first."""
    rows, columns = shape_of(log2_elements)
    elements = rows * columns
    copies = copy_timings(machine, rows, columns, repeat)
    yield from copies
    rate = max(timing.gigabytes_per_second for timing in copies)

    for dtype in dtypes:
        for case in float_cases(machine, rows, columns, dtype):
            yield timed(machine, case, dtype, elements, repeat, rate)
    # Not less than 64 MiB on a GPU: fewer scales would stay in its cache.
    count = SCALE_BYTES if machine.device == "cuda" else min(SCALE_BYTES, elements)
    for case in scale_cases(machine, count):
        yield timed(machine, case, "uint8", count, repeat, rate)


def open_machine(device: str) -> Machine:
    """The machine for `cpu` or `cuda`.

    Raises:
        BackendUnavailableError: if the device cannot be used, with the reason.
    """
    number = "cuda:0" if device == "cuda" else "cpu"
    select(Request("quantize", number, "bfloat16", Scheme("nvfp4")), None)
    return Gpu() if device == "cuda" else Cpu()


def run(device: str, sizes: Sequence[int], dtypes: Sequence[str], repeat: int = 10) -> DeviceResult:
    """Measures every operation on a device.

    Args:
        device: `cpu` or `cuda`.
        sizes: log2 of the numbers of elements.
        dtypes: element types of the float tensors.
        repeat: measurements, of which the median counts.

    Raises:
        BackendUnavailableError: if the device cannot be used, with the reason.
    """
    machine = open_machine(device)
    result = DeviceResult(device, machine.hardware)
    for size in sizes:
        result.timings.extend(measure(machine, size, dtypes, repeat))
    if isinstance(machine, Gpu):
        result.small_calls.extend(small_calls(machine))
    return result
