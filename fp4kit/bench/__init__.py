# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How fast every operation is on this machine, beside a copy of the same tensor.

An operation's bytes are those that must move once: its input, codes, scales and output. The
yardstick is the fastest plain copy of a bfloat16 tensor of as many elements, read and write
counted, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp4kit.api.backends import select
from fp4kit.backend.interface import Request
from fp4kit.scheme import Scheme

from .cases import SCALE_BYTES, Case, float_cases, scale_cases, small_calls
from .machines import Cpu, Gpu, Machine
from .products import product_cases
from .results import DeviceResult, SmallCall, Timing

__all__ = [
    "Case",
    "Cpu",
    "DeviceResult",
    "Gpu",
    "Machine",
    "SmallCall",
    "Timing",
    "copy_timings",
    "float_cases",
    "measure",
    "open_machine",
    "run",
    "scale_cases",
    "shape_of",
    "small_calls",
    "timed",
]

#: Row length of the tensors, if they have enough elements.
COLUMNS = 8192


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
        for cases in (float_cases, product_cases):
            for case in cases(machine, rows, columns, dtype):
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
