# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Many products in one launch, and rows that a device array divides, on the host's CUDA."""

import numpy as np
import pytest

from fp4kit.backend.matmul import RaggedMatmulJob
from fp4kit.cuda import (
    device as cuda_device,
)
from fp4kit.cuda import (
    matmul_words as cuda_matmul_words,
)
from fp4kit.cuda import (
    ready as cuda_ready,
)
from matmul_jobs import RAW, check, grid_scales, job_of, moved, moved_operand, numbers, quantized


@pytest.fixture(params=["large", "small"])
def parameters(request, on_host, monkeypatch):
    """Whether kernels may have large parameters; few products fit one either way."""
    monkeypatch.setattr(cuda_device, "has_large_parameters", lambda: request.param == "large")
    monkeypatch.setattr(cuda_matmul_words, "MOST_PRODUCTS", (2, 5))
    monkeypatch.setattr(cuda_matmul_words, "MOST_WEIGHTS", (2, 5))
    return request.param


def products(rng, count):
    """Products of one kind of operands and all kinds of shapes."""
    for number in range(count):
        rows, cols, depth = (int(size) for size in rng.integers(1, (90, 140, 200)))
        a = numbers(rng, rows, depth, "bfloat16")
        b = quantized(rng, "nvfp4", cols, depth, level=rng.uniform(0.5, 2, 1))
        bias, c = (None, "float32", "bfloat16")[number % 3], (None, "float16")[number % 2]
        yield job_of(a, b, "bfloat16", rng=rng, bias=bias, c=c, alpha=number - 2.5)


def test_grouped(on_host, parameters):
    rng = np.random.default_rng(1)
    jobs = list(products(rng, 7))
    jobs += [job_of(quantized(rng, "mxfp8", 3, 64), quantized(rng, "mxfp8", 70, 64))]
    given = tuple(moved(job, on_host.put, on_host.empty) for job in jobs)
    on_host.engine.matmul_grouped(given)
    # By the kind of operands, as many as fit a parameter.
    assert len(on_host.launched) == (2 if parameters == "large" else 4) + 1
    for job, one in zip(jobs, given, strict=True):
        check(job, one.out)


def test_grouped_pieces_of_the_depth(on_host, monkeypatch):
    """Those of many elements are cut, those of few are not."""
    monkeypatch.setattr(cuda_ready, "multiprocessors", lambda _: 3)
    rng = np.random.default_rng(2)
    jobs = [
        job_of(numbers(rng, rows, depth, "float16"), quantized(rng, "mxfp4", 33, depth), "float16")
        for rows, depth in ((3, 1100), (5, 64), (2, 1600))
    ]
    given = tuple(moved(job, on_host.put, on_host.empty) for job in jobs)
    on_host.engine.matmul_grouped(given)
    assert [one.kernel for one in on_host.launched] == ["matmul_any", "matmul_finish"]
    for job, one in zip(jobs, given, strict=True):
        check(job, one.out)


def members_of(rng, count, cols, depth, name):
    return tuple(
        quantized(
            rng,
            name,
            cols,
            depth,
            level=rng.uniform(0.5, 2, 1),
            scales=grid_scales(rng, cols, depth) if name == "fp8" else None,
        )
        for _ in range(count)
    )


def ragged(on_host, a, members, offsets, bias=None, shift=0):
    """The result of a ragged product on the host's CUDA."""
    out = on_host.empty((a.rows, members[0].rows), RAW[a.dtype])
    job = RaggedMatmulJob(
        moved_operand(a, on_host.put),
        tuple(moved_operand(one, on_host.put, shift * (at % 2)) for at, one in enumerate(members)),
        *(on_host.put(offsets), out, a.dtype, 0.5),
        *(None if bias is None else on_host.put(bias), "float32"),
    )
    on_host.engine.matmul_ragged(job)
    return np.asarray(out)


def check_range(a, member, start, end, found, bias=None):
    if end > start:
        job = job_of(a._replace(data=a.data[start:end]), member, a.dtype, alpha=0.5)
        check(job._replace(bias=bias), found[start:end])


@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("name", "dtype"), [("nvfp4", "bfloat16"), ("mxfp8", "float32"), ("fp8", "float16")]
)
def test_ragged(name, dtype, wide, on_host, parameters):
    rng = np.random.default_rng(3)
    rows, cols, depth = 200, 70, 96
    a = numbers(rng, rows, depth, dtype)
    members = members_of(rng, 7, cols, depth, name)
    bias = rng.standard_normal((7, cols)).astype(np.float32)
    for offsets in (
        [0, 64, 64, 65, 129, 129, 190, 200],
        [0, 0, 0, 0, 200, 200, 200, 200],
        [3, 10, 11, 12, 13, 140, 141, 150],
    ):
        found = ragged(on_host, a, members, np.array(offsets, wide), bias, shift=1)
        for at, member in enumerate(members):
            check_range(a, member, offsets[at], offsets[at + 1], found, bias[at])
        untouched = np.full_like(found[:1], 0).view(np.uint8) + 0xCD
        for row in [*range(offsets[0]), *range(offsets[-1], rows)]:
            np.testing.assert_array_equal(found[row].view(np.uint8), untouched[0])


@pytest.mark.parametrize(
    "offsets",
    [[0, 1000, 2000, 3000], [-5, 20, 10, 60], [70, 60, 50, 40], [0, 10, 1 << 40, -(1 << 40)]],
)
def test_offsets_out_of_range(offsets, on_host):
    """Nothing is read or written that is not there, whatever the offsets say."""
    rng = np.random.default_rng(4)
    a = numbers(rng, 70, 32, "bfloat16")
    ragged(on_host, a, members_of(rng, 3, 20, 32, "nvfp4"), np.array(offsets, np.int64))
