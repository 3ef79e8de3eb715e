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
from typing import Any

from ladder_products import SPEC, Bench, Weights, cublas_us, graph_us
from matmul_ladder import COPY, FORMS, SIZES, load_all

from fp4kit.cuda.matmul_shapes import MOST_SHARED
from fp4kit.cuda.matmul_small import Numbers
from fp4kit.cuda.matmul_warpgroup import (
    MOST_SPLITS,
    Division,
    WarpgroupShape,
    arrange_columns_kernel,
    choose,
    multiply_warpgroup_kernel,
    prepare,
)

TOKENS = [8, 16, 32, 64, 128, 256, 512, 2048]
#: (groups, tiles of a warp), more of them than are in use.
BLOCKS = [(4, 1), (2, 2), (2, 1)]
PROCESSORS = 132


def shapes(form: int, tokens: int) -> list[WarpgroupShape]:
    """Every shape that is timed for some rows of activations, with as many stages as there fit."""
    columns = next((each for each in (16, 32, 64, 128) if each >= tokens), 256)
    result = []
    for block, chunks, count in product(BLOCKS, (1, 2), {columns, min(columns, 128)}):
        if block[0] * block[1] * count > 512 or (block[0] == 4 and count > 64):
            continue  # more sums than registers
        rings = [WarpgroupShape(*block, chunks, stages, count) for stages in range(2, 9)]
        result += [each for each in rings if each.shared(SPEC, form) <= MOST_SHARED][-1:]
    return result


def divisions(form: int, bench: Bench) -> list[Division]:
    """These with one piece of the depth, and as many as there are multiprocessors for."""
    result = []
    for shape in shapes(form, bench.sizes.tokens):
        row_blocks, column_blocks = shape.blocks(bench.sizes)
        most = min(PROCESSORS // (row_blocks * column_blocks), MOST_SPLITS)
        result += [Division(shape, splits) for splits in sorted({1, max(most, 1)})]
    return result


def call(bench: Bench, form: int, division: Division) -> Callable[[int], None]:
    """What launches the product with a copy of the weights."""
    import cupy

    made = prepare(0, SPEC, form, division, bench.sizes, Numbers())
    memory = cupy.empty(made.places[-1], "uint8")
    image = memory.data.ptr
    sums, arrived = (image + place for place in made.places[:2])
    x, out = bench.x.data.ptr, bench.out.data.ptr

    def run(number: int, memory: Any = memory) -> None:
        made.arrange.launch(x, image, arrived)
        weights = bench.weights.arrays(form, number)
        made.multiply.launch(*weights, x, out, 0, 0, 0, 0, image, sums, arrived)

    return run


def main() -> None:
    """Prints a table for each size and each number of rows."""
    given = [tuple(map(int, word.split("x"))) for word in sys.argv[1:]]
    wanted = {
        (form, shape): multiply_warpgroup_kernel(SPEC, form, shape)
        for form in FORMS
        for tokens in TOKENS
        for shape in shapes(form, tokens)
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
                chosen = choose(form, bench.sizes, PROCESSORS)
                timed = []
                for division in divisions(form, bench):
                    run = call(bench, form, division)
                    wrong = bench.check(run)
                    timed.append((graph_us(bench.calls(run)), division, wrong))
                for us, division, wrong in sorted(timed):
                    words = " ".join(str(each) for each in division.shape[:-1])
                    mark = "*" if division == chosen else " "
                    print(
                        f"  {mark}{name:9}{words:16} / {division.splits:<3} {us:7.2f} us  "
                        f"{floor / us:.3f} of copy  x{peer / us:.2f}  "
                        f"{facts[wanted[form, division.shape]]} {wrong}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
