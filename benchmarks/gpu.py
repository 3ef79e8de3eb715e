# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GPU speed of fp4kit as a share of the device's copy bandwidth, beside its peers.

Usage: python benchmarks/gpu.py [--log2-elements 26 28] [--repeat 20] [--json] [--no-peers]

Everything of fp4kit is what `fp4kit bench --device cuda` measures, in the same way; torch eager,
torchao and comfy-kitchen are measured beside it where they are installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict

import cupy
from peers import peer_cases

from fp4kit import bench
from fp4kit.formats import DTYPES


def peer_timings(
    machine: bench.Machine, log2_elements: int, repeat: int, copy_rate: float
) -> Iterator[bench.Timing]:
    """Times the peers; torch launches on the default stream, as CuPy does here."""
    rows, columns = bench.shape_of(log2_elements)
    for case in peer_cases(rows, columns):
        yield bench.timed(machine, case, "bfloat16", rows * columns, repeat, copy_rate)


def main() -> None:
    """Measures and prints a table per size (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--log2-elements", type=int, nargs="+", default=[26, 28])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = bench.open_machine("cuda")
    assert isinstance(machine, bench.Gpu)
    document = {"card": machine.hardware, "cupy": cupy.__version__, "timings": []}
    for exponent in options.log2_elements:
        timings = list(bench.measure(machine, exponent, options.dtypes, options.repeat))
        cupy.get_default_memory_pool().free_all_blocks()
        if not options.no_peers:
            copies = [timing for timing in timings if timing.name.startswith("copy")]
            rate = max(timing.gigabytes_per_second for timing in copies)
            timings += peer_timings(machine, exponent, options.repeat, rate)
        document["timings"] += [asdict(timing) for timing in timings]
        if not options.json:
            print(f"{machine.hardware}, 2^{exponent} elements")
            for timing in timings:
                print(
                    f"  {timing.name:34s} {timing.dtype:9s} {timing.microseconds:9.1f} us "
                    f"{timing.gigabytes_per_second:8.0f} GB/s {timing.share_of_copy:6.3f} of copy"
                )
    calls = list(bench.small_calls(machine))
    document["small_calls"] = [asdict(call) for call in calls]
    if options.json:
        print(json.dumps(document, indent=1))
        return
    for call in calls:
        print(
            f"{call.name}: {call.host_microseconds:.1f} us of host time, "
            f"{call.graph_microseconds:.1f} us per graph replay"
        )


if __name__ == "__main__":
    main()
