# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GPU speed of fp4kit as a share of the device's copy bandwidth, measured in the same run.

Usage: python benchmarks/gpu.py [--log2-elements 26 28] [--repeat 20] [--json] [--quick]

The yardstick is a device-to-device copy of the same tensor (read and write counted). An
operation's bytes are those that must move: its input, codes, scales or output once each. Times
are medians of CUDA events around single launches on tensors far larger than the L2 cache.
torchao and comfy-kitchen are measured beside it where they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import cupy
import ml_dtypes

import fp4kit

Case = tuple[str, int, Callable[[], object]]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": cupy.float16, "float32": cupy.float32}
COLUMNS = 8192


@dataclass(frozen=True)
class Timing:
    """One measured operation."""

    name: str
    elements: int
    microseconds: float
    gigabytes_per_second: float
    share_of_copy: float


def time_us(function: Callable[[], object], repeat: int) -> float:
    """Median time of one call on the current stream, in microseconds."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeat):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1e3)
    return statistics.median(times)


def random_array(rows: int, dtype: str) -> cupy.ndarray:
    """Seeded normal values (rows, COLUMNS)."""
    generator = cupy.random.default_rng(0)
    values = generator.standard_normal((rows, COLUMNS), dtype=cupy.float32)
    return values.astype(DTYPES[dtype])


def fp4kit_cases(rows: int, dtype: str, quick: bool) -> list[Case]:
    """(name, bytes that must move, call) of every operation on one input type."""
    x = random_array(rows, dtype)
    known = fp4kit.amax(x)
    cases: list[Case] = [(f"amax {dtype}", x.nbytes, lambda: fp4kit.amax(x))]
    formats = [("nvfp4", "linear"), ("nvfp4", "swizzled_128x4")]
    if not quick:
        formats += [("mxfp4", "linear"), ("mxfp8", "linear"), ("mxfp8", "swizzled_128x4")]
    for name, layout in formats:
        given = {"amax": known} if name == "nvfp4" else {}
        options = {"scale_layout": layout, "nonfinite": "propagate", **given}
        q = fp4kit.quantize(x, name, **options)
        moved = q.packed.nbytes + q.block_scale.nbytes

        def run(name: str = name, options: dict = options, q: object = q) -> object:
            return fp4kit.quantize(x, name, out=q, **options)

        cases.append((f"quantize {name} {layout} {dtype}", x.nbytes + moved, run))
        back = cupy.empty_like(x)

        def decode(q: object = q, back: cupy.ndarray = back) -> object:
            return fp4kit.dequantize(q, dtype, out=back)

        cases.append((f"dequantize {name} {layout} to {dtype}", x.nbytes + moved, decode))
    measured = fp4kit.quantize(x, nonfinite="propagate")
    cases.append((
        f"quantize nvfp4 with amax measured {dtype}",
        2 * x.nbytes + measured.packed.nbytes + measured.block_scale.nbytes,
        lambda: fp4kit.quantize(x, out=measured, nonfinite="propagate"),
    ))  # fmt: skip
    fused = cupy.empty_like(x)
    cases.append((
        f"quantize_dequantize nvfp4 {dtype}",
        2 * x.nbytes,
        lambda: fp4kit.quantize_dequantize(x, amax=known, nonfinite="propagate", out=fused),
    ))  # fmt: skip
    return cases


def scale_cases() -> list[Case]:
    """Swizzle and unswizzle of 64 MiB of scales."""
    scales = cupy.random.default_rng(0).integers(0, 127, (1 << 17, 512), dtype=cupy.uint8)
    swizzled = fp4kit.swizzle(scales)
    return [
        ("swizzle 64 MiB of scales", 2 * scales.nbytes, lambda: fp4kit.swizzle(scales)),
        (
            "unswizzle 64 MiB of scales",
            2 * scales.nbytes,
            lambda: fp4kit.unswizzle(swizzled, scales.shape),
        ),
    ]


def peer_cases(rows: int) -> list[Case]:
    """NVFP4 and back with a known amax, by torchao (compiled) and comfy-kitchen (CUDA)."""
    cases: list[Case] = []
    if importlib.util.find_spec("torch") is None:
        return cases
    import torch

    torch.manual_seed(0)
    x = torch.randn(rows, COLUMNS, device="cuda", dtype=torch.bfloat16)
    moved = x.numel() * 2 + x.numel() // 2 + x.numel() // 16
    scale = (x.abs().max().float() / 2688).reshape(())
    if importlib.util.find_spec("torchao") is not None:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize

        quantize = torch.compile(lambda t, s: nvfp4_quantize(t, 16, s))
        decode = torch.compile(lambda t: t.dequantize(torch.bfloat16))
        q = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
        cases.append(("torchao compiled quantize", moved, lambda: quantize(x, scale)))
        cases.append(("torchao compiled dequantize", moved, lambda: decode(q)))
    if importlib.util.find_spec("comfy_kitchen") is not None:
        import comfy_kitchen

        codes, scales = comfy_kitchen.quantize_nvfp4(x, scale)
        cases.append((
            "comfy-kitchen quantize", moved, lambda: comfy_kitchen.quantize_nvfp4(x, scale)
        ))  # fmt: skip
        cases.append((
            "comfy-kitchen dequantize",
            moved,
            lambda: comfy_kitchen.dequantize_nvfp4(codes, scale, scales, torch.bfloat16),
        ))  # fmt: skip
    return cases


def copy_timings(rows: int, repeat: int) -> list[Timing]:
    """The yardstick: the faster of CuPy's copy kernel and the driver's memcpy has share 1."""
    source = random_array(rows, "bfloat16").view(cupy.uint16)
    target = cupy.empty_like(source)
    calls = {
        "copy (cupy)": lambda: cupy.copyto(target, source),
        "copy (memcpy)": lambda: target.data.copy_from_device_async(source.data, source.nbytes),
    }
    times = {name: time_us(call, repeat) for name, call in calls.items()}
    moved, best = 2 * source.nbytes, min(times.values())
    return [
        Timing(name, source.size, value, moved / value / 1e3, best / value)
        for name, value in times.items()
    ]


def measure(rows: int, dtypes: list[str], repeat: int, quick: bool, peers: bool) -> list[Timing]:
    """Measures everything at one size, the copy first."""
    results = copy_timings(rows, repeat)
    copy_rate = max(timing.gigabytes_per_second for timing in results)
    groups = [lambda d=d: fp4kit_cases(rows, d, quick) for d in dtypes] + [scale_cases]
    if peers:
        groups.append(lambda: peer_cases(rows))
    for group in groups:
        for name, moved, call in group():
            microseconds = time_us(call, repeat)
            rate = moved / microseconds / 1e3
            results.append(Timing(name, rows * COLUMNS, microseconds, rate, rate / copy_rate))
        cupy.get_default_memory_pool().free_all_blocks()
    return results


def main() -> None:
    """Measures and prints a table per size (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--log2-elements", type=int, nargs="+", default=[26, 28])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="nvfp4 only")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    card = properties["name"].decode()
    document = {"card": card, "cupy": cupy.__version__, "timings": []}
    for exponent in options.log2_elements:
        rows = (1 << exponent) // COLUMNS
        timings = measure(rows, options.dtypes, options.repeat, options.quick, not options.no_peers)
        document["timings"] += [asdict(timing) for timing in timings]
        if not options.json:
            print(f"{card}, 2^{exponent} elements ({rows} x {COLUMNS})")
            for timing in timings:
                print(
                    f"  {timing.name:48s} {timing.microseconds:9.1f} us "
                    f"{timing.gigabytes_per_second:8.0f} GB/s {timing.share_of_copy:6.3f} of copy"
                )
    if options.json:
        print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
