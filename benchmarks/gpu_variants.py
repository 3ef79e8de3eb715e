# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GPU speed of fp4kit's variants as a share of the device's copy bandwidth, beside plain torch.

Usage: python benchmarks/gpu_variants.py [--log2-elements 28] [--repeat 10] [--only REGEX] [--json]
       [--json-file FILE] [--no-peers] [--no-compile]

bfloat16, N(0, 1). Shares count the bytes that must move once (each read of the input where the amax
is measured too), by the fastest copy of the same run; times are medians over batches between
events. What cannot be measured is listed with the reason. Beside it, where torch is installed: the
same results from plain torch operations, eager and compiled, and the packages that quantize rows.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers import compiler_reason, installed, peer_cases
from variant_cases import DTYPE, MEMBERS, Inputs, builders

from fp4kit import bench
from fp4kit.errors import BackendUnavailableError

#: Elements a second of ModelOpt's sweep of scales in Triton, on an H200.
MODELOPT_SWEEP = 6.6e9
#: Peers that quantize rows, in the same time as `quantize rows` if they were as fast.
ROW_PEERS = ("torchao eager quantize", "torchao compiled quantize", "comfy-kitchen quantize")
#: Pairs of cases that do as much work in different ways.
ALIKE = tuple(
    (f"quantize {MEMBERS} members, {name}{members}", f"quantize {name}")
    for name in ("rows", "rows, swizzled", "columns")
    for members in ("", ", whole tiles")
)


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression of the command line."""
    try:
        return re.compile(text)
    except re.error as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {problem}") from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--log2-elements", type=int, default=28, choices=range(16, 35), metavar="N")
    parser.add_argument("--repeat", type=int, default=10, help="batches; their median counts")
    parser.add_argument("--peer-repeat", type=int, default=3, help="the same for peers")
    parser.add_argument("--only", type=pattern, default=re.compile(""), metavar="REGEX",
                        help="cases whose names it is found in")  # fmt: skip
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--json-file", type=Path, help="write JSON as well")
    return parser.parse_args(arguments)


def peers(
    inputs: Inputs, options: argparse.Namespace, skipped: dict[str, str]
) -> Iterator[bench.Case]:
    """Everything that is not fp4kit; torch launches on the default stream, as CuPy does here."""
    if not installed("torch"):
        skipped["torch"] = "is not installed"
        return
    import torch

    device = inputs.machine.device
    if device == "cuda" and not torch.cuda.is_available():
        skipped["torch"] = f"{torch.__version__} cannot use the GPU"
        return
    from torch_cases import reference_cases

    reason = "--no-compile" if options.no_compile else compiler_reason(device)
    yield from reference_cases(inputs, options.only.search, reason, skipped)
    if device != "cuda":
        return
    for name in ("torchao", "comfy_kitchen"):
        if not installed(name):
            skipped[name] = "is not installed"
    for case in peer_cases(*inputs.x.shape):
        if case.name in ROW_PEERS and options.only.search(case.name):
            if "compiled" in case.name and reason is not None:
                skipped[case.name] = reason
            else:
                yield case


def measured(
    machine: bench.Machine, options: argparse.Namespace, skipped: dict[str, str]
) -> Iterator[bench.Timing]:
    """Times everything, the copies first.

    Args:
        machine: the device.
        options: the command line's.
        skipped: where the reasons of cases that cannot be timed go.
    """
    rows, columns = bench.shape_of(options.log2_elements)
    copies = bench.copy_timings(machine, rows, columns, options.repeat)
    yield from copies
    rate = max(timing.gigabytes_per_second for timing in copies)
    inputs = Inputs(machine, machine.random(rows, columns, DTYPE))
    for name, build in builders(inputs):
        if not options.only.search(name):
            continue
        try:
            case = build()
        except BackendUnavailableError as problem:
            skipped[name] = str(problem)
            continue
        yield bench.timed(machine, case, DTYPE, inputs.elements, options.repeat, rate)
    if options.no_peers:
        return
    for case in peers(inputs, options, skipped):
        yield bench.timed(machine, case, DTYPE, inputs.elements, options.peer_repeat, rate)


def elements_per_second(timing: bench.Timing) -> float:
    """Elements of the input by time."""
    return timing.elements / timing.microseconds * 1e6


def ratios(timings: Sequence[bench.Timing]) -> dict[str, float]:
    """What is worth comparing, as times of one by times of the other."""
    times = {timing.name: timing.microseconds for timing in timings}
    result = {}
    for name, other in ALIKE:
        if name in times and other in times:
            result[f"{name} / {other}"] = times[name] / times[other]
    for name, time in times.items():
        ours = "quantize rows" if name in ROW_PEERS else name.partition(": ")[2]
        if ours in times:
            result[f"{name} / fp4kit {ours}"] = time / times[ours]
    for timing in timings:
        if timing.name == "quantize sweep":
            faster = elements_per_second(timing) / MODELOPT_SWEEP
            result["ModelOpt sweep (6.6e9 elements/s on an H200) / fp4kit quantize sweep"] = faster
    return result


def line(timing: bench.Timing) -> str:
    """A row of the table."""
    return (
        f"  {timing.name:46s} {timing.microseconds / 1e3:9.3f} ms "
        f"{elements_per_second(timing) / 1e9:8.1f} G elements/s {timing.share_of_copy:6.3f} of copy"
    )


def run(machine: bench.Machine, options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything on a machine, prints it, and returns it for JSON."""
    skipped: dict[str, str] = {}
    timings = []
    shape = bench.shape_of(options.log2_elements)
    if not options.json:
        print(f"{machine.hardware}, {DTYPE} {shape}")
    for timing in measured(machine, options, skipped):
        timings.append(timing)
        if not options.json:
            print(line(timing), flush=True)
    compared = ratios(timings)
    document = {
        "card": machine.hardware,
        "shape": shape,
        "repeat": options.repeat,
        "versions": {n: version(n) for n in ("fp4kit", "torch", "torchao") if installed(n)},
        "timings": [
            {**asdict(timing), "elements_per_second": elements_per_second(timing)}
            for timing in timings
        ],
        "ratios": compared,
        "skipped": skipped,
    }
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        print("Times of the first by those of the second:")
        for name, ratio in compared.items():
            print(f"  {name:86s} {ratio:8.2f}")
        for name, reason in skipped.items():
            print(f"Not measured: {name}: {reason}")
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def main() -> None:
    """Measures on the GPU."""
    options = parse()
    run(bench.open_machine("cuda"), options)


if __name__ == "__main__":
    main()
