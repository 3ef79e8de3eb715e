# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a run of the benchmark found."""

from __future__ import annotations

from dataclasses import dataclass, field


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
