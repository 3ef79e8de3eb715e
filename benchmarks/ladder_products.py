# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights and products of matmul_ladder.py: made, checked, timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np

from fp4kit.backend.matmul import PreparedOperand, QuantizedOperand
from fp4kit.backend.prepared import WeightsJob, tile_shape
from fp4kit.cuda import matmul_small
from fp4kit.cuda.matmul_shapes import PREPARED, Shape, Sizes
from fp4kit.cuda.matmul_small import Numbers
from fp4kit.formats import get_format
from fp4kit.reference import matmul as reference

ROTATED_BYTES = 400_000_000
SPEC = get_format("nvfp4")


def graph_us(calls: list[Callable[[], None]], replays: int = 7) -> float:
    """Microseconds of a call: the median of replays of a graph of all calls."""
    import cupy

    cupy.cuda.get_current_stream().synchronize()  # what makes the operands
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for call in calls[:2]:
            call()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        times = []
        for _ in range(replays):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1000 / len(calls))
    return statistics.median(times)


class Weights:
    """Copies of random weights in both forms, and some rows of them in float64."""

    def __init__(self, rows: int, depth: int, copies: int | None = None) -> None:
        """Makes them on the current device: more than the L2 cache holds, or so many copies."""
        import cupy

        from fp4kit.api.backends import get_backend

        self.rows, self.depth = rows, depth
        shape = tile_shape(SPEC, rows, depth)
        self.bytes = int(np.prod(shape))
        self.count = copies or max(3, -(-ROTATED_BYTES // self.bytes))
        rng = np.random.default_rng(7)
        self.codes, self.scales, self.tiles = [], [], []
        engine = get_backend("cuda")
        for _ in range(self.count):
            random = np.frombuffer(rng.bytes(rows * depth // 2), np.uint8)
            small = rng.integers(0, 127, (rows, depth // 16), dtype=np.uint8)
            small[5::64] %= 8  # rows of subnormal scales
            codes, scales = cupy.asarray(random.reshape(rows, depth // 2)), cupy.asarray(small)
            tiles = cupy.empty(shape, np.uint8)
            job = WeightsJob(SPEC, rows, depth, codes, scales, "linear", True, tiles)
            assert engine.prepare_weights(job)
            self.codes.append(codes)
            self.scales.append(scales)
            self.tiles.append(tiles)
        self.chosen = np.unique([*range(0, rows, max(1, rows // 96)), 5, 69, rows - 1])
        operand = QuantizedOperand(
            format=SPEC, rows=len(self.chosen), depth=depth,
            packed=self.codes[0].get()[self.chosen],
            block_scale=self.scales[0].get()[self.chosen],
            scale_layout="linear", low_first=True, transposed=False, grid_scale=None, level=None,
            level_name="amax", level_range=1.0,
        )  # fmt: skip
        step = SPEC.block_size
        exact = (
            reference.elements_of(operand, step) * reference.scales_of(operand, step)[:, :, None]
        )
        self.exact = exact.reshape(len(self.chosen), depth).astype(np.float64)

    def arrays(self, form: int, number: int) -> tuple[int, int]:
        """Addresses of (codes or tiles, scales) of a copy."""
        i = number % self.count
        if form == PREPARED:
            return self.tiles[i].data.ptr, 0
        return self.codes[i].data.ptr, self.scales[i].data.ptr


class Bench:
    """One product, by any shape."""

    def __init__(self, weights: Weights, tokens: int) -> None:
        """Makes activations, and what exact arithmetic gives for some rows."""
        import cupy

        self.weights, self.sizes = weights, Sizes(tokens, weights.rows, weights.depth)
        x = np.random.default_rng(3).standard_normal((tokens, weights.depth)).astype(np.float32)
        raw = (x.view(np.uint32) >> 16).astype(np.uint16)
        self.x = cupy.asarray(raw)
        values = (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        self.exact = values @ weights.exact.T
        self.bound = (weights.depth + 8) * 2.0**-23 * (abs(values) @ abs(weights.exact).T)
        self.bound += abs(self.exact) * 2.0**-8
        self.out = cupy.empty((tokens, weights.rows), np.uint16)

    def call(self, form: int, shape: Shape) -> Callable[[int], None]:
        """What launches the product with a copy of the weights."""
        import cupy

        made = matmul_small.ready_of(0, SPEC, form, shape, self.sizes, Numbers())
        image = cupy.empty(made.image_bytes, np.uint8)
        x, out = self.x.data.ptr, self.out.data.ptr

        def run(number: int) -> None:
            arrays = self.weights.arrays(form, number)
            made.launch_with(image.data.ptr, *arrays, x, out, 0, 0, 0, 0, 0, 0)

        return run

    def check(self, run: Callable[[int], None]) -> str:
        """What is wrong, or nothing."""
        self.out.fill(0xFFFF)
        run(0)
        chosen = self.out.get()[:, self.weights.chosen]
        got = (chosen.astype(np.uint32) << 16).view(np.float32)
        wrong = ~(abs(got.astype(np.float64) - self.exact) <= self.bound)
        first, words = self.out.copy(), []
        if bool(wrong.any()):
            words.append(f"{int(wrong.sum())} of {wrong.size} WRONG")
        for _ in range(10):
            self.out.fill(0xFFFF)
            run(0)
            if not bool((first == self.out).all()):
                words.append("DIFFERS FROM RUN TO RUN")
                break
        return ", ".join(words)

    def calls(self, run: Callable[[int], None]) -> list[Callable[[], None]]:
        """Calls over all copies: as many as take a millisecond or more."""
        count = max(self.weights.count, min(24, int(2.5e9 / self.weights.bytes)))
        return [partial(run, number) for number in range(count)]


def cublas_us(rows: int, depth: int, tokens: int) -> float:
    """Microseconds of torch's product in bfloat16, its weights rotated; nan without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return float("nan")
    count = max(3, -(-2 * ROTATED_BYTES // (2 * rows * depth)))
    weights = [torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(tokens, depth, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(tokens, rows, device="cuda", dtype=torch.bfloat16)
    for each in weights[:2]:
        torch.mm(x, each.t(), out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(max(count, 12)):
            torch.mm(x, weights[number % count].t(), out=out)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / max(count, 12))
    del weights, graph
    torch.cuda.empty_cache()
    return statistics.median(times[3:])


def operand_of(weights: Weights, form: int) -> PreparedOperand | QuantizedOperand:
    """The first copy of the weights."""
    if form == PREPARED:
        tiles = weights.tiles[0]
        return PreparedOperand(SPEC, weights.rows, weights.depth, tiles, True, None, "amax", 1.0)
    return QuantizedOperand(
        format=SPEC, rows=weights.rows, depth=weights.depth, packed=weights.codes[0],
        block_scale=weights.scales[0], scale_layout="linear", low_first=True, transposed=False,
        grid_scale=None, level=None, level_name="amax", level_range=1.0,
    )  # fmt: skip
