# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""CPU speed of products with quantized weights, beside NumPy, torch and llama.cpp in one process.

Usage: python benchmarks/matmul_cpu.py [--ggml DIR] [--shape N K] [--rows M ...] [--threads T]
       [--formats nvfp4 ...] [--repeat 9] [--json]

Weights are (N, K), activations float32 (M, K). For each M the table says milliseconds of
fp4kit's CPU backend and how many times as long the others take: NumPy's and torch's float32
product with the decoded matrix, and for M = 1 llama.cpp's `vec_dot`, which quantizes activations
to 8 bits. `--ggml` is the folder of libggml-base.so and libggml-cpu.so, built from
llama-cpp-python's source distribution. Without --shape three shapes are measured, of which the
last two are beyond most second-level caches; `--copies 16` takes so many matrices of each in turn,
so that none is in a cache when it is used.

Times are the best of the repeats, which are interleaved, so that a slow phase of the machine hits
all alike. With one thread (--threads 1) they are the time that the processor spent on the process:
others who share it are left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from ggml_dots import TYPES, Ggml, Product
from peers import installed

import fp4kit
from fp4kit.backend.matmul import FloatOperand, MatmulJob, QuantizedOperand
from fp4kit.cpu.backend import CpuBackend
from fp4kit.formats import get_format

Case = Callable[[], object]
SHAPES = ((1024, 4096), (4096, 14336), (14336, 4096))
ROWS = (1, 2, 4, 8, 16, 32, 128, 512)


def operand(q: fp4kit.QuantizedTensor) -> QuantizedOperand:
    """A quantized matrix as a backend takes it."""
    rows, depth = q.shape
    spec = get_format(q.format)
    return QuantizedOperand(
        spec, rows, depth, q.packed, None if spec.has_scale_grid else q.block_scale, "linear",
        True, False, None, None, "amax", 1.0,
    )  # fmt: skip


def processor() -> str:
    """The name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


class Weights:
    """Some matrices of a shape, quantized, and those decoded that NumPy and torch multiply."""

    def __init__(self, name: str, shape: tuple[int, int], copies: int) -> None:
        self.name, self.shape = name, shape
        rng = np.random.default_rng(0)
        scale = np.float32(0.02)
        self.decoded = [rng.standard_normal(shape, np.float32) * scale for _ in range(copies)]
        tensors = [fp4kit.quantize(w, name) for w in self.decoded]
        self.operands = [operand(q) for q in tensors]
        for w, q in zip(self.decoded, tensors, strict=True):
            fp4kit.dequantize(q, "float32", out=w)

    def cases(
        self, m: int, ggml: list[Product], pool: ThreadPoolExecutor | None
    ) -> dict[str, Case]:
        """What is timed for m rows of activations: each case multiplies with all matrices."""
        x = np.random.default_rng(1).standard_normal((m, self.shape[1]), np.float32)
        out = np.empty((m, self.shape[0]), np.float32)
        backend = CpuBackend()
        jobs = [MatmulJob(FloatOperand(x, "float32"), b, out, "float32") for b in self.operands]
        cases: dict[str, Case] = {
            "fp4kit": lambda: [backend.matmul(job) for job in jobs],
            "numpy": lambda: [np.matmul(x, w.T, out=out) for w in self.decoded],
        }
        if installed("torch"):
            import torch

            tensor, weights = torch.from_numpy(x), [torch.from_numpy(w) for w in self.decoded]
            cases["torch"] = lambda: [tensor @ w.T for w in weights]
        if ggml and m == 1:
            cases["ggml"] = lambda: [product(x[0], pool, pool_size(pool)) for product in ggml]
        return cases


def pool_size(pool: ThreadPoolExecutor | None) -> int:
    """Threads of a pool, 1 without one."""
    return 1 if pool is None else pool._max_workers


def measure(cases: dict[str, Case], repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Best time of each case in seconds, repeats interleaved, one warm-up each."""
    best = dict.fromkeys(cases, float("inf"))
    for case in cases.values():
        case()
    for _ in range(repeat):
        for name, case in cases.items():
            start = clock()
            case()
            best[name] = min(best[name], clock() - start)
    return best


def limit_threads(threads: int) -> None:
    """Tells everyone how many threads to use; BLAS was told by the environment."""
    os.environ["FP4KIT_NUM_THREADS"] = str(threads)
    if os.environ.get("OPENBLAS_NUM_THREADS") != str(threads):
        print(f"note: start with OPENBLAS_NUM_THREADS={threads}, or NumPy uses other threads")
    if installed("torch"):
        import torch

        torch.set_num_threads(threads)


def main() -> None:
    """Measures and prints a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ggml", type=Path)
    parser.add_argument("--shape", type=int, nargs=2)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limit_threads(options.threads)
    if options.ggml is None or not (options.ggml / "libggml-cpu.so").exists():
        print(f"llama.cpp is not measured: no libggml-cpu.so in --ggml {options.ggml}")
        library = None
    else:
        library = Ggml(options.ggml)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    pool = None if options.threads == 1 else ThreadPoolExecutor(options.threads)
    versions = {n: importlib.metadata.version(n) for n in ("fp4kit", "numba", "numpy")}
    machine = {"processor": processor(), "threads": options.threads, "copies": options.copies}
    print(machine | versions)
    results = []
    for name in options.formats:
        for shape in (tuple(options.shape),) if options.shape else SHAPES:
            weights = Weights(name, shape, options.copies)
            ggml = []
            if library is not None and name in TYPES:
                ggml = [Product(library, name, *shape) for _ in range(options.copies)]
            for m in options.rows:
                repeat = options.repeat if m < 100 else max(options.repeat // 3, 2)
                seconds = measure(weights.cases(m, ggml, pool), repeat, clock)
                ours = seconds.pop("fp4kit")
                rate = m * shape[0] * shape[1] * options.copies / ours / 1e9
                ratios = {peer: value / ours for peer, value in seconds.items()}
                results.append({"format": name, "shape": shape, "m": m, "rate": rate} | ratios)
                text = "  ".join(f"{peer} {ratio:5.2f}x" for peer, ratio in ratios.items())
                time_ = ours / options.copies * 1e3
                print(
                    f"{name:7s} {shape!s:14s} M={m:<4d} {time_:9.3f} ms {rate:6.1f} G/s  {text}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"machine": machine, "versions": versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
