# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GPU speed of products with quantized weights, beside cuBLAS, torch and humming.

Usage: python benchmarks/matmul.py [--quick] [--no-peers] [--paths] [--only SECTION ...]
       [--json-file FILE]

bfloat16 activations. Weights are taken in turn from more than 400 MB of copies; a figure is the
median of short CUDA-graph replays; "prepared" are weights of fp4kit.prepare. `share` is the time
that the weights' bytes take at copy bandwidth, measured in the same run, over the time of the
product. `--paths` times each path that could be chosen as well: what
fp4kit/cuda/matmul_choice.py should say. A few minutes; `--quick` one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cupy
import numpy as np
from product_peers import BF16, Humming, Library, float_weights, missing, torch_us
from product_timing import (
    calls_for,
    clocks,
    copies_of,
    copy_bandwidth,
    graph_us,
    host_us,
    in_turn,
    torch_graph_us,
)

import fp4kit
from fp4kit.cuda import blas, matmul_choice, matmul_small, matmul_warpgroup
from fp4kit.cuda import matmul as cuda_matmul

#: Rows of weights and depth: the linear layers of models of 8 and 70 billion parameters.
SHAPES = [(28672, 8192), (8192, 28672), (14336, 4096), (4096, 4096)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
QUICK_SHAPES, QUICK_ROWS = [(28672, 8192), (4096, 4096)], [1, 8, 16, 64, 256, 4096]
#: Of the formats beside nvfp4.
OTHER_ROWS = [1, 16, 64, 256, 4096]
OTHER_FORMATS = ["mxfp4", "mxfp8", "fp8"]
EXPERTS, EXPERT_SHAPE, TOKENS = 64, (1536, 4096), [64, 256, 1024, 8192]
SECTIONS = ("weights", "formats", "both", "grouped", "host")
#: Largest difference from the product of decoded weights, by the norm.
ALLOWED = 1e-2


def _library_from(stack: contextlib.ExitStack, rows: int) -> None:
    for name in ("LIBRARY_ROWS", "LIBRARY_ROWS_OF_FEW"):
        stack.enter_context(mock.patch.object(matmul_choice, name, rows))


@contextlib.contextmanager
def path(name: str) -> Iterator[None]:
    """Products by one path: `any`, `library`, or what is `chosen`."""
    with contextlib.ExitStack() as stack:
        if name != "chosen":
            for module in (matmul_small, matmul_warpgroup):
                stack.enter_context(mock.patch.object(module, "find", return_value=None))
            # What was chosen before is not asked again.
            stack.enter_context(mock.patch.object(cuda_matmul, "_find", cuda_matmul._choose))
        if name == "any":
            _library_from(stack, 1 << 30)
        if name == "library":
            _library_from(stack, 1)
        yield


def normal(shape: tuple[int, int], seed: int = 0) -> Any:
    """bfloat16 numbers of N(0, 1) / 8."""
    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / 8
    bits = values.view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16).view(BF16)


def values(name: str, array: Any) -> Any:
    """bfloat16 as float32, all of them finite."""
    result = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    lost = cupy.argwhere(~cupy.isfinite(result))
    assert not len(lost), f"{name}: {len(lost)} not finite, first {lost[:3].tolist()}"
    return result


def difference(found: Any, right: Any) -> float:
    """Norm of the difference by the norm."""
    got, wanted = values("found", found), values("right", right)
    return float(cupy.linalg.norm((got - wanted).ravel()) / cupy.linalg.norm(wanted.ravel()))


class Report:
    """What was measured: printed as it comes, and kept."""

    def __init__(self) -> None:
        self.rate = copy_bandwidth()
        self.records: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}

    def add(self, section: str, **facts: Any) -> None:
        """A measurement."""
        self.records.append({"section": section, **facts})

    def title(self, text: str, columns: list[str]) -> None:
        """Begins a table."""
        print(f"\n{text} [{clocks()}]\n")
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def row(self, *cells: Any) -> None:
        """A row of it."""
        words = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        print(f"| {' | '.join(words)} |", flush=True)

    def peer(self, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """What a peer makes, or None and the reason: another package may raise anything."""
        if name in self.skipped:
            return None
        try:
            return make(*arguments)
        except Exception as problem:
            self.skipped[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
            return None

    def peer_us(self, name: str, measure: Callable[..., float], *arguments: Any) -> float:
        """A peer's time, or NaN and the reason."""
        taken = self.peer(name, measure, *arguments)
        return float("nan") if taken is None else float(taken)


def ours_us(x: Any, weights: list[Any], out: Any, rate: float) -> float:
    """Microseconds of fp4kit's product, cold weights."""
    work = 2e-6 * out.size * x.shape[1] / 600
    estimate = work + weights[0].nbytes / rate
    count = calls_for(len(weights), estimate)
    return graph_us(in_turn(lambda q: fp4kit.matmul(x, q, out=out), weights, count))


def quantized_copies(w: Any, scheme: str, **options: Any) -> list[Any]:
    """As many quantized copies as no cache holds."""
    first = fp4kit.quantize(w, scheme, **options)
    rest = copies_of(first.nbytes) - 1
    return [first, *(fp4kit.quantize(w, scheme, **options) for _ in range(rest))]


def weights_only(report: Report, options: argparse.Namespace) -> None:
    """nvfp4 weights, every number of rows, beside the peers."""
    library = Library() if blas.is_available() else None
    paths = ["chosen", "any", "library"] if options.paths else ["chosen"]
    for shape in options.shapes:
        w = normal(shape)
        weights = quantized_copies(w, "nvfp4", recipe="modelopt")
        floats = float_weights(fp4kit.dequantize(weights[0], dtype="bfloat16"))
        humming = report.peer("humming", Humming, weights[0]) if options.peers else None
        tiles = [fp4kit.prepare(one) for one in weights]
        floor = weights[0].nbytes / report.rate
        names = [name for name in paths if name != "library" or library is not None]
        title = f"nvfp4 weights {shape}, {floor:.1f} us at copy bandwidth"
        columns = ["rows", "cuBLAS us", *(f"{name} us" for name in names), "share", "x cuBLAS"]
        columns += ["prepared us", "share", "x cuBLAS", "torch us", "humming us", "difference"]
        report.title(title, columns)
        for rows in options.rows:
            x = normal((rows, shape[1]), seed=rows)
            out, right = (cupy.empty((rows, shape[0]), BF16) for _ in range(2))
            nan = float("nan")
            dense = nan if library is None else library.us(x, floats, right)
            times = {}
            for name in names:
                with path(name):
                    times[name] = ours_us(x, weights, out, report.rate)
            prepared = ours_us(x, tiles, out, report.rate)
            off = nan
            if library is not None:
                values("activations", x)
                library.multiply(x, floats[0], right)
                for one in (tiles[0], weights[0]):
                    fp4kit.matmul(x, one, out=out)
                    off = difference(out, right)
                    assert off < ALLOWED, f"{shape}, {rows} rows: off by {off}"
            torch_time = humming_time = nan
            if options.peers:
                torch_time = report.peer_us("torch", torch_us, x, floats, right)
            if humming is not None:
                humming_time = report.peer_us("humming", humming.us, x)
            ours = times["chosen"]
            report.row(
                *(rows, dense, *times.values(), floor / ours, dense / ours),
                *(prepared, floor / prepared, dense / prepared),
                *(torch_time, humming_time, f"{off:.1e}"),
            )
            report.add(
                "weights", shape=shape, rows=rows, cublas=dense, torch=torch_time,
                humming=humming_time, floor=floor, clocks=clocks(), prepared=prepared, **times,
            )  # fmt: skip
        weights, tiles, floats, humming = [], [], [], None
        cupy.get_default_memory_pool().free_all_blocks()


def other_formats(report: Report, options: argparse.Namespace) -> None:
    """Weights of other formats, and scales in another order."""
    shape = (14336, 4096)
    w = normal(shape)
    rows = [one for one in OTHER_ROWS if one in options.rows]
    report.title(f"Other formats, weights {shape}", ["weights", "rows", "us", "share"])
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in OTHER_FORMATS]
    cases += [("nvfp4", {"scale_layout": "swizzled_128x4"}), ("fp8", {"granularity": "block"})]
    for name, given in cases:
        weights = quantized_copies(w, name, **given)
        for count in rows:
            x, out = normal((count, shape[1]), seed=count), cupy.empty((count, shape[0]), BF16)
            taken = ours_us(x, weights, out, report.rate)
            title = " ".join([name, *given.values()])
            report.row(title, count, taken, weights[0].nbytes / report.rate / taken)
            report.add("formats", weights=title, rows=count, chosen=taken)


def both_quantized(report: Report, options: argparse.Namespace) -> None:
    """Activations in nvfp4 with a level for each token."""
    columns = ["weights", "rows", "product us", "quantize + product us", "cuBLAS us", "x cuBLAS"]
    report.title("Both operands nvfp4, activations per token", columns)
    library = Library() if blas.is_available() else None
    for shape in ((4096, 4096), (14336, 4096)):
        w = normal(shape)
        weights, floats = quantized_copies(w, "nvfp4"), float_weights(w)
        for count in (one for one in (16, 256, 4096) if one in options.rows):
            x, out = normal((count, shape[1]), seed=count), cupy.empty((count, shape[0]), BF16)
            a = fp4kit.quantize(x, second_level="per_token")
            product = ours_us(a, weights, out, report.rate)

            def whole(q: Any, x: Any = x, a: Any = a, out: Any = out) -> None:
                fp4kit.quantize(x, second_level="per_token", nonfinite="propagate", out=a)
                fp4kit.matmul(a, q, out=out)

            both = graph_us(in_turn(whole, weights, len(weights)))
            dense = float("nan") if library is None else library.us(x, floats, out)
            report.row(shape, count, product, both, dense, dense / both)
            report.add("both", shape=shape, rows=count, product=product, whole=both, cublas=dense)


def grouped(report: Report, options: argparse.Namespace) -> None:
    """Experts: rows divided by the host and by the device."""
    rows, depth = EXPERT_SHAPE
    experts = [
        fp4kit.quantize(normal(EXPERT_SHAPE, seed=number), "nvfp4") for number in range(EXPERTS)
    ]
    floor = sum(one.nbytes for one in experts) / report.rate
    columns = ["tokens", "host offsets us", "device offsets us", "share", "bf16 torch us"]
    title = f"{EXPERTS} experts of {EXPERT_SHAPE}, {floor:.1f} us at copy bandwidth"
    report.title(title, columns)
    for tokens in TOKENS[: 2 if options.quick else None]:
        x = normal((tokens, depth), seed=tokens)
        sizes = np.random.default_rng(0).multinomial(tokens, [1 / EXPERTS] * EXPERTS).tolist()
        ends = np.cumsum([0, *sizes])
        out = cupy.empty((tokens, rows), BF16)
        offsets = cupy.asarray(ends.astype(np.int32))
        host = graph_us(
            [lambda: fp4kit.matmul_grouped(x, experts, first_dims=sizes, out=out)] * 3  # noqa: B023
        )
        device = graph_us(
            [lambda: fp4kit.matmul_grouped(x, experts, row_offsets=offsets, out=out)] * 3  # noqa: B023
        )
        peer = float("nan")
        if options.peers:
            peer = report.peer_us("torch grouped", torch_grouped_us, x, offsets)
        report.row(tokens, host, device, floor / min(host, device), peer)
        report.add("grouped", tokens=tokens, host=host, device=device, torch=peer)


def torch_grouped_us(x: Any, offsets: Any) -> float:
    """The grouped product of torch in bfloat16, weights cold by their size."""
    import torch

    rows, depth = EXPERT_SHAPE
    weights = torch.randn(EXPERTS, rows, depth, device="cuda", dtype=torch.bfloat16)
    a = torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    ends = torch.from_dlpack(offsets)[1:].contiguous()
    turned = weights.transpose(1, 2)
    return torch_graph_us([lambda: torch._grouped_mm(a, turned, offs=ends)] * 3)


def host_time(report: Report, options: argparse.Namespace) -> None:
    """What a call costs the host."""
    report.title("Host time of a call", ["call", "us"])
    q = fp4kit.quantize(normal((4096, 4096)), "nvfp4")
    experts = [fp4kit.quantize(normal((64, 4096)), "nvfp4") for _ in range(EXPERTS)]
    for rows in (1, 4096):
        x, out = normal((rows, 4096)), cupy.empty((rows, 4096), BF16)
        for name in ("chosen", "any"):
            with path(name):
                taken = host_us(lambda: fp4kit.matmul(x, q, out=out))  # noqa: B023
            report.row(f"matmul, {rows} rows, {name}", taken)
            report.add("host", call=f"matmul {rows} {name}", us=taken)
    x, offsets = normal((EXPERTS, 4096)), cupy.arange(EXPERTS + 1)
    for name, given in (
        ("host", {"first_dims": [1] * EXPERTS}),
        ("device", {"row_offsets": offsets}),
    ):
        taken = host_us(lambda: fp4kit.matmul_grouped(x, experts, **given))  # noqa: B023
        report.row(f"matmul_grouped, {EXPERTS} experts, offsets of the {name}", taken)
        report.add("host", call=f"matmul_grouped {name}", us=taken)


RUNNERS = dict(
    zip(SECTIONS, (weights_only, other_formats, both_quantized, grouped, host_time), strict=True)
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two shapes, six numbers of rows")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--paths", action="store_true", help="each path that could be chosen")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--json-file", type=Path)
    options = parser.parse_args(arguments)
    options.shapes = QUICK_SHAPES if options.quick else SHAPES
    options.rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    return options


def main() -> None:
    """Measures and prints tables."""
    options = parse()
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    report = Report()
    print(f"{name}, copy {report.rate / 1e6:.3f} TB/s, cuBLAS {blas.description()}")
    if options.peers:
        for peer in ("torch", "humming"):
            reason = missing(peer)
            if reason is not None:
                report.skipped[peer] = reason
    for section in options.only:
        RUNNERS[section](report, options)
    for peer, reason in report.skipped.items():
        print(f"\n{peer}: {reason}")
    if options.json_file:
        document = {"card": name, "copy": report.rate, "records": report.records}
        options.json_file.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
