# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Times every way to divide small products among thread blocks, on a GPU, and checks each.

    python benchmarks/matmul_ladder.py             # four shapes, 1 to 64 rows: about two minutes
    python benchmarks/matmul_ladder.py quick       # two shapes, 1, 8 and 16 rows
    python benchmarks/matmul_ladder.py staged      # activations step by step, 8 to 64 rows
    python benchmarks/matmul_ladder.py resident    # those whose activations stay, 1 to 16 rows
    python benchmarks/matmul_ladder.py compile     # whether all compile, without a GPU

Weights rotate over copies of more than 400 MB, so that none comes from the L2 cache; times are
medians of replays of a graph. A variant is wrong if a result of about 100 rows is further from
float64 than the order of sums allows, or if ten runs do not give the same bytes. Shares are those
of `COPY` bytes a second that the bytes of the weights take. cuBLAS in bfloat16 is torch's.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ladder_products import SPEC, Bench, Weights, cublas_us, graph_us, operand_of

from fp4kit.backend.matmul import (
    FloatOperand,
    MatmulJob,
    PreparedOperand,
    RaggedMatmulJob,
)
from fp4kit.cuda import compile as cuda_module
from fp4kit.cuda import matmul_shapes, matmul_small
from fp4kit.cuda.matmul_shapes import MOST_SHARED, PREPARED, ROWS, Shape

#: Bytes a second of a copy on an H200, read and written together.
COPY = 4.2e12
SIZES = [(28672, 8192), (8192, 28672), (4096, 4096), (14336, 4096)]
TOKENS = [1, 2, 4, 8, 16, 32, 64]
FORMS = {PREPARED: "prepared", ROWS: "rows"}

#: (groups, tiles, slices, chunks, stages) by form: activations that stay, and step by step.
RESIDENT = {
    PREPARED: [
        (1, 2, 16, 2, 2),
        (1, 2, 8, 2, 2),
        (2, 1, 8, 4, 2),
        (1, 2, 8, 4, 2),
        (1, 1, 16, 2, 2),
        (1, 2, 16, 1, 2),
        (1, 2, 16, 1, 4),
        (1, 2, 8, 1, 4),
        (1, 2, 8, 2, 3),
        (1, 4, 8, 1, 2),
        (2, 2, 8, 2, 2),
        (1, 1, 16, 2, 4),
        (1, 1, 8, 4, 2),
        (1, 1, 8, 2, 4),
    ],
    ROWS: [
        (1, 2, 16, 2, 2),
        (1, 2, 8, 2, 2),
        (1, 2, 8, 2, 3),
        (1, 1, 16, 2, 2),
        (1, 2, 16, 1, 2),
        (1, 4, 8, 1, 2),
        (2, 2, 8, 2, 2),
        (2, 1, 8, 2, 3),
        (1, 1, 8, 2, 4),
    ],
}
#: Of both forms, if they fit shared memory.
STAGED = [
    *((14, 1, 1, 2, stages) for stages in (4, 3, 2)),
    *((14, 1, 1, 1, stages) for stages in (6, 4)),
    (14, 1, 1, 4, 2),
    (14, 1, 2, 1, 4),
    *((7, 2, 1, 2, stages) for stages in (4, 3)),
    (7, 2, 1, 1, 4),
    (7, 2, 2, 1, 4),
    (7, 1, 2, 2, 4),
    (7, 1, 2, 1, 4),
    *((4, 1, 4, 1, stages) for stages in (4, 3)),
    *((2, 1, 8, 1, stages) for stages in (4, 3)),
]
#: Of these, as many of the first are timed with copies by all lanes as well.
BY_LANES = 6


def variants(form: int, tokens: int, only: str = "") -> list[Shape]:
    """Every shape that is timed for some rows of activations, or those of one kind.

    Beside those of activations step by step are the first of those whose activations stay.
    """
    room = next(each for each in (1, 2, 8, 16, 32, 64) if each >= tokens)
    result = []
    if room <= 16:
        own = 4 if 2 < tokens <= 4 else room
        result += [Shape(*given, own, False) for given in RESIDENT[form]]
        if only == "staged":
            result = result[1:5]
        elif form == PREPARED:
            result += [shape._replace(bulk=False) for shape in result[:BY_LANES]]
        if only != "staged" and form == ROWS:
            result += [Shape(*given, own, False, filled=True) for given in matmul_shapes.FILLED]
    if room >= 8 and only != "resident":
        # Rows have lanes for the scales of two pieces.
        staged = [
            Shape(*given, room, True) for given in STAGED if form == PREPARED or given[3] <= 2
        ]
        result += staged
        if form == PREPARED:
            result.append(staged[0]._replace(bulk=False))
    return result


def compile_instance(instance: cuda_module.Instance) -> tuple[bytes, str]:
    """(cubin, lowered name) of a kernel, for an sm_90, without a GPU."""
    from cuda.bindings import nvrtc

    def read(size_of: Any, copy: Any) -> bytes:
        _, size = size_of(program)
        buffer = bytearray(size)
        copy(program, buffer)
        return bytes(buffer)

    source = cuda_module.source_text(instance.file)
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), instance.file.encode(), 0, [], [])
    nvrtc.nvrtcAddNameExpression(program, instance.expression.encode())
    chosen = [*cuda_module.options(9, 0), *cuda_module.CUPY_OPTIONS, "-arch=sm_90"]
    encoded = [option.encode() for option in chosen]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode())
    _, name = nvrtc.nvrtcGetLoweredName(program, instance.expression.encode())
    return read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), name.decode()


def load_all(instances: list[cuda_module.Instance]) -> dict[cuda_module.Instance, str]:
    """Compiles kernels in parallel and gives them to the backend; what each takes, in words."""
    import cupy

    facts = {}
    with ProcessPoolExecutor() as pool, tempfile.TemporaryDirectory() as folder:
        built = pool.map(compile_instance, instances)
        for number, (instance, (cubin, name)) in enumerate(zip(instances, built, strict=True)):
            path = Path(folder) / f"{number}.cubin"
            path.write_bytes(cubin)
            kernel = cupy.RawModule(path=str(path)).get_function(name)
            cuda_module._loaded[0, instance] = kernel.kernel
            local = kernel.local_size_bytes
            facts[instance] = f"{kernel.num_regs} registers" + (f", {local} spilt" if local else "")
    return facts


def host_us(bench: Bench, form: int) -> float:
    """Microseconds of the host for a whole launch of a job, chosen and checked anew."""
    import cupy

    b = operand_of(bench.weights, form)
    job = MatmulJob(FloatOperand(bench.x, "bfloat16"), b, bench.out, "bfloat16")
    matmul_small.find(job).run(job)
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    for _ in range(100):
        matmul_small.find(job).run(job)
    spent = time.perf_counter() - start
    cupy.cuda.Device().synchronize()
    return spent * 1e4


def print_members(count: int = 64, rows: int = 2048, depth: int = 4096) -> None:
    """Weights with 1 to 8 rows of activations each, beside one product of the same bytes."""
    import cupy

    weights = Weights(count * rows, depth, copies=1)
    floor = weights.bytes / COPY * 1e6
    counts = np.random.default_rng(4).integers(1, 9, count)
    offsets = cupy.asarray(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    whole, few = Bench(weights, int(counts.sum())), Bench(weights, 8)
    row_tiles = rows // 16
    x, out = FloatOperand(whole.x, "bfloat16"), cupy.empty((int(counts.sum()), rows), np.uint16)
    for form, form_name in FORMS.items():
        one = operand_of(weights, form)
        members = []
        for number in range(count):
            part, tiles = (slice(number * size, (number + 1) * size) for size in (rows, row_tiles))
            if isinstance(one, PreparedOperand):
                members.append(one._replace(rows=rows, tiles=one.tiles[tiles]))
            else:
                codes, scales = one.packed[part], one.block_scale[part]
                members.append(one._replace(rows=rows, packed=codes, block_scale=scales))
        ragged = RaggedMatmulJob(x, tuple(members), offsets, out, "bfloat16")
        single = MatmulJob(FloatOperand(few.x, "bfloat16"), one, few.out, "bfloat16")
        assert matmul_small.launch_ragged(ragged)
        matmul_small.find(single).run(single)
        times = [
            graph_us([partial(function, job)] * 6)
            for function, job in (
                (matmul_small.launch_ragged, ragged),
                (matmul_small.find(single).run, single),
            )
        ]
        print(
            f"{count} members ({rows}, {depth}) of 1 to 8 rows, {form_name}: {times[0]:.1f} us, "
            f"{floor / times[0]:.3f} of copy; one product of 8 rows {times[1]:.1f} us"
        )


def main() -> None:
    """Prints a table for each size and each number of rows."""
    quick = "quick" in sys.argv
    only = next((word for word in ("resident", "staged") if word in sys.argv), "")
    sizes, tokens = (SIZES[:3:2], [1, 8, 16]) if quick else (SIZES, TOKENS)
    if only == "resident":
        tokens = [count for count in TOKENS if count <= 16]
    if only == "staged":
        sizes, tokens = [SIZES[0], *SIZES[2:]], TOKENS[3:]
    least = min(depth for _, depth in sizes)
    wanted = {
        (form, shape): matmul_shapes.multiply_small_kernel(SPEC, form, shape)
        for form in FORMS
        for count in tokens
        for shape in variants(form, count, only)
        if shape.shared(SPEC, form, least) <= MOST_SHARED
    }
    wanted |= {(form, None): matmul_shapes.arrange_tokens_kernel(form, 1) for form in FORMS}
    start = time.time()
    if "compile" in sys.argv:
        with ProcessPoolExecutor() as pool:
            list(pool.map(compile_instance, wanted.values()))
        print(f"{len(wanted)} kernels in {time.time() - start:.0f} s")
        return
    facts = load_all(list(wanted.values()))
    print(f"{len(wanted)} kernels in {time.time() - start:.0f} s")
    for rows, depth in sizes:
        weights = Weights(rows, depth)
        floor = weights.bytes / COPY * 1e6
        print(f"\n== ({rows}, {depth}): {weights.bytes >> 20} MiB, {floor:.1f} us at copy speed")
        for count in tokens:
            bench = Bench(weights, count)
            peer = math.nan if only == "resident" else cublas_us(rows, depth, count)
            print(f"M = {count}: cuBLAS {peer:.1f} us")
            for form, form_name in FORMS.items():
                timed = []
                chosen = matmul_shapes.choose(SPEC, form, bench.sizes, 132, MOST_SHARED)
                for shape in variants(form, count, only):
                    if shape.shared(SPEC, form, depth) > MOST_SHARED:
                        continue
                    run = bench.call(form, shape)
                    wrong = bench.check(run)
                    timed.append((graph_us(bench.calls(run)), shape, wrong))
                for us, shape, wrong in sorted(timed):
                    words = "".join(f" {int(each)}" for each in shape)
                    mark = "*" if shape == chosen else " "
                    fact = facts[wanted[form, shape]]
                    print(
                        f"  {mark}{form_name:9}{words:22} {us:7.2f} us  {floor / us:.3f} of copy  "
                        f"x{peer / us:.2f}  {fact} {wrong}"
                    )
        for form, form_name in FORMS.items():
            print(f"host time, {form_name}: {host_us(Bench(weights, 1), form):.1f} us")
        print(f"[{time.time() - start:.0f} s]", flush=True)

    if only != "resident":
        print_members()
        print(f"[{time.time() - start:.0f} s]")


if __name__ == "__main__":
    main()
