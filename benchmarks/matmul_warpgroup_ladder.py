# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Times ways to divide products by warpgroups, on an H100 or H200, and checks each.

    python benchmarks/matmul_warpgroup_ladder.py [ROWSxDEPTH ...]

Measured and checked as matmul_ladder.py does it. A time is that of both kernels: the activations
put in order, and the product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

from ladder_products import SPEC, Bench, Weights, cublas_us, graph_us
from matmul_ladder import COPY, FORMS, SIZES, load_all

from fp4kit.cuda.matmul_shapes import PREPARED, ROWS
from fp4kit.cuda.matmul_small import Numbers
from fp4kit.cuda.matmul_warpgroup import (
    DIVISIONS,
    WarpgroupShape,
    arrange_columns_kernel,
    multiply_warpgroup_kernel,
    prepare,
)

TOKENS = [8, 16, 32, 64, 128, 256]
#: More of them than are in use: a tile of rows a warp.
ALL_DIVISIONS = [*DIVISIONS, (4, 1, 1), (2, 1, 2)]
MOST_SHARED = 227 * 1024


def variants(form: int, tokens: int) -> list[WarpgroupShape]:
    """Every shape that is timed for some rows of activations, with as many stages as there fit."""
    columns = next((each for each in (8, 16, 32, 64) if each >= tokens), 128)
    result = []
    for division, chunks in product(ALL_DIVISIONS, (1, 2) if form == ROWS else (1, 2, 3, 4)):
        shapes = [WarpgroupShape(*division, chunks, stages, columns) for stages in range(2, 7)]
        result += [each for each in shapes if each.shared(SPEC, form) <= MOST_SHARED][-1:]
    return result


def call(bench: Bench, form: int, shape: WarpgroupShape) -> Callable[[int], None]:
    """What launches the product with a copy of the weights."""
    import cupy

    made = prepare(0, SPEC, form, shape, bench.sizes, Numbers())
    image = cupy.empty(made.image_bytes, "uint8")
    x, out = bench.x.data.ptr, bench.out.data.ptr

    def run(number: int) -> None:
        made.arrange.launch(x, image.data.ptr)
        made.multiply.launch(
            *bench.weights.arrays(form, number), x, out, 0, 0, 0, 0, image.data.ptr
        )

    return run


def main() -> None:
    """Prints a table for each size and each number of rows."""
    given = [tuple(map(int, word.split("x"))) for word in sys.argv[1:]]
    wanted = {
        (form, shape): multiply_warpgroup_kernel(SPEC, form, shape)
        for form in (PREPARED, ROWS)
        for tokens in TOKENS
        for shape in variants(form, tokens)
    }
    arrange = [arrange_columns_kernel(form, shape) for form, shape in wanted]
    facts = load_all(list(dict.fromkeys([*wanted.values(), *arrange])))
    for rows, depth in given or SIZES:
        weights = Weights(rows, depth)
        floor = weights.bytes / COPY * 1e6
        print(f"\n== ({rows}, {depth}): {weights.bytes >> 20} MiB, {floor:.1f} us at copy speed")
        for tokens in TOKENS:
            bench = Bench(weights, tokens)
            peer = cublas_us(rows, depth, tokens)
            print(f"M = {tokens}: cuBLAS {peer:.1f} us")
            for form, name in FORMS.items():
                timed = []
                for shape in variants(form, tokens):
                    run = call(bench, form, shape)
                    wrong = bench.check(run)
                    timed.append((graph_us(bench.calls(run)), shape, wrong))
                for us, shape, wrong in sorted(timed):
                    words = "".join(f" {each}" for each in shape[:-1])
                    print(
                        f"   {name:9}{words:16} {us:7.2f} us  {floor / us:.3f} of copy  "
                        f"x{peer / us:.2f}  {facts[wanted[form, shape]]} {wrong}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
