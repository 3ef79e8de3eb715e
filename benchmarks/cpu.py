# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""CPU speed of fp4kit, side by side with torchao in one process.

Usage: python benchmarks/cpu.py [--shape 4096 14336] [--repeat 7] [--json] [--no-peers]

Rates are elements per second, the best of the repeats. fp4kit's quantize includes measuring the
amax and the check for NaN and infinity; torchao's `nvfp4_quantize` is handed its scale. Peers are
measured if torch and torchao are installed (`pip install fp4kit[peers]`) and a C++ compiler is
there for torch.compile. Repeats of all contestants are interleaved, so that a slow phase of the
machine hits them alike.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import time
import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
from peers import installed

import fp4kit

Case = Callable[[], object]


def weights(shape: tuple[int, int]) -> np.ndarray:
    """bfloat16 normal weights (M, K), seeded."""
    values = np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(0.02)
    return values.astype(ml_dtypes.bfloat16)


def fp4kit_cases(x: np.ndarray) -> dict[str, Case]:
    """Operations of fp4kit, each into a buffer that exists already, as a converter calls them."""
    cases: dict[str, Case] = {}
    result = np.empty_like(x)
    cases["copy bf16 (numpy)"] = lambda: np.copyto(result, x)
    cases["amax bf16"] = lambda: fp4kit.amax(x)
    for recipe in fp4kit.ALL_RECIPES:
        q = fp4kit.quantize(x, recipe=recipe)
        cases[f"quantize nvfp4 {recipe}"] = lambda recipe=recipe, q=q: fp4kit.quantize(
            x, recipe=recipe, out=q
        )
    for name in ("mxfp4", "mxfp8", "mxfp8_e5m2"):
        q = fp4kit.quantize(x, name)
        cases[f"quantize {name}"] = lambda name=name, q=q: fp4kit.quantize(x, name, out=q)
    q = fp4kit.quantize(x)
    cases["dequantize nvfp4 to bf16"] = lambda: fp4kit.dequantize(q, "bfloat16", out=result)
    wide = np.empty(x.shape, np.float32)
    cases["dequantize nvfp4 to f32"] = lambda: fp4kit.dequantize(q, "float32", out=wide)
    mx = fp4kit.quantize(x, "mxfp4")
    cases["dequantize mxfp4 to bf16"] = lambda: fp4kit.dequantize(mx, "bfloat16", out=result)
    cases["quantize_dequantize nvfp4"] = lambda: fp4kit.quantize_dequantize(x, out=result)
    cases["error_stats nvfp4"] = lambda: fp4kit.error_stats(x, q)
    single = x.astype(np.float32)
    q32 = fp4kit.quantize(single)
    cases["quantize nvfp4 te, f32 input"] = lambda: fp4kit.quantize(single, out=q32)
    m32 = fp4kit.quantize(single, "mxfp4")
    cases["quantize mxfp4, f32 input"] = lambda: fp4kit.quantize(single, "mxfp4", out=m32)
    return cases


#: Variants of quantize nvfp4, by name.
VARIANTS: dict[str, dict[str, object]] = {
    "columns": {"direction": "columnwise"},
    "rows and columns": {"direction": "both"},
    "2-D tiles": {"block_shape": "2d"},
    "per token": {"second_level": "per_token"},
    "rotated columns": {"direction": "columnwise", "rht": True},
    "stochastic": {"rounding": "stochastic", "seed": 1},
    "four_over_six": {"scale_search": "four_over_six"},
    "sweep": {"scale_search": "sweep"},
}


def variant_cases(x: np.ndarray) -> dict[str, Case]:
    """What is not plain, into buffers that exist already."""
    cases: dict[str, Case] = {}
    for name, options in VARIANTS.items():
        out = fp4kit.quantize(x, **options)
        cases[f"quantize nvfp4 {name}"] = lambda options=options, out=out: fp4kit.quantize(
            x, out=out, **options
        )
    q = fp4kit.quantize_residual(x, 256)
    cases["quantize with 256 residual channels"] = lambda: fp4kit.quantize_residual(x, 256)
    result = np.empty_like(x)
    cases["dequantize residuals to bf16"] = lambda: fp4kit.dequantize(q, "bfloat16", out=result)
    return cases


def torchao_cases(x: np.ndarray) -> dict[str, Case]:
    """NVFP4 of torchao on torch CPU: eager and compiled."""
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        NVFP4Tensor,
        nvfp4_quantize,
        per_tensor_amax_to_scale,
    )

    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    scale = per_tensor_amax_to_scale(tensor.abs().max())

    def quantize(t: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nvfp4_quantize(t, 16, s)

    def dequantize(t: NVFP4Tensor) -> torch.Tensor:
        return t.dequantize(torch.bfloat16)

    compiled_quantize = torch.compile(quantize)
    compiled_dequantize = torch.compile(dequantize)
    quantized = NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=scale)
    return {
        "torchao eager quantize (scale given)": lambda: quantize(tensor, scale),
        "torchao compiled quantize (scale given)": lambda: compiled_quantize(tensor, scale),
        "torchao eager dequantize to bf16": lambda: dequantize(quantized),
        "torchao compiled dequantize to bf16": lambda: compiled_dequantize(quantized),
    }


def measure(cases: dict[str, Case], repeat: int) -> dict[str, float]:
    """Best wall time of each case, repeats interleaved, one warm-up each."""
    best = dict.fromkeys(cases, float("inf"))
    for case in cases.values():
        case()
    for _ in range(repeat):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    """Measures and prints a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 14336))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    x = weights(tuple(options.shape))
    cases = fp4kit_cases(x) | variant_cases(x)
    peers = [] if options.no_peers else [n for n in ("torch", "torchao") if installed(n)]
    if len(peers) == 2:
        warnings.simplefilter("ignore")
        cases |= torchao_cases(x)
    seconds = measure(cases, options.repeat)
    rates = {name: x.size / value / 1e6 for name, value in seconds.items()}
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "shape": list(x.shape),
        "versions": {n: importlib.metadata.version(n) for n in ("fp4kit", "numba", *peers)},
    }
    if options.json:
        print(json.dumps({"machine": machine, "million_elements_per_second": rates}, indent=1))
        return
    print(machine)
    for name, rate in rates.items():
        print(f"{name:42s} {rate:10.0f} M elements/s")
    if len(peers) == 2:
        ours, back = rates["quantize nvfp4 te"], rates["dequantize nvfp4 to bf16"]
        for kind, mine in (("quantize (scale given)", ours), ("dequantize to bf16", back)):
            for mode in ("compiled", "eager"):
                ratio = mine / rates[f"torchao {mode} {kind}"]
                print(f"fp4kit / torchao {mode} {kind}: {ratio:.1f}x")


if __name__ == "__main__":
    main()
