# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""On a GPU: one quantization captured in a CUDA graph, and what a replay takes.

python examples/cuda_graph.py
"""

import time

import fp4kit

SCHEME = fp4kit.Scheme("nvfp4", scale_layout="swizzled_128x4")
REPLAYS = 200


def main() -> None:
    """Times replays; without a GPU it says why there is nothing to do."""
    status = next(status for status in fp4kit.backend_status() if status.name == "cuda")
    if not status.available:
        print("skipped: no GPU here:", status.reason)
        return
    import cupy

    x = cupy.random.default_rng(0).standard_normal((128, 4096), dtype=cupy.float32)
    # Nothing waits for the device: the amax is given, and NaN is not looked for.
    options = {"amax": cupy.full(1, 5, cupy.float32), "nonfinite": "propagate"}
    q = fp4kit.quantize(x, SCHEME, **options)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        fp4kit.quantize(x, SCHEME, out=q, **options)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            graph.launch(stream)
        stream.synchronize()
    print(f"{(time.perf_counter() - start) / REPLAYS * 1e6:.1f} microseconds a replay")
    print(f"SQNR {fp4kit.error_stats(x, q).sqnr:.1f} dB")


if __name__ == "__main__":
    main()
