# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows on a GPU: every shape in use, real sizes, equal bytes, graphs."""

import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.backend.matmul import FloatOperand, MatmulJob, RaggedMatmulJob
from fp4kit.backend.prepared import WeightsJob
from fp4kit.cuda import matmul_shapes, matmul_small
from fp4kit.cuda.matmul_shapes import PREPARED, ROWS
from fp4kit.formats import SCALE_LAYOUTS, get_format
from fp4kit.reference import codecs
from matmul_samples import check_product, placed, prepared, weights

CUDA = get_backend("cuda")
REASON = CUDA.unavailable_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
FORMATS = ("nvfp4", "mxfp4")


def activations(tokens, depth, seed=1):
    x = np.random.default_rng(seed).standard_normal((tokens, depth)).astype(np.float32)
    return FloatOperand(codecs.from_float32(x, "bfloat16"), "bfloat16")


def on_device(operand):
    import cupy

    return placed(operand, cupy.asarray)


def multiply(x, operand):
    """The job on the host with its result, which ten launches agree on."""
    import cupy

    out = cupy.empty((x.rows, operand.rows), np.uint16)
    job = MatmulJob(on_device(x), on_device(operand), out, "bfloat16")
    results = []
    for _ in range(10):
        out.fill(0xFFFF)
        matmul_small.find(job).run(job)
        results.append(out.get())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    return job._replace(a=x, b=operand, out=results[0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("form", [PREPARED, ROWS])
def test_every_shape_in_use(form, name, monkeypatch):
    spec = get_format(name)
    operand = weights(name, 464, 1664)
    operand = prepared(operand) if form == PREPARED else operand
    for shape in matmul_shapes.SHAPES[form]:
        fits = shape.shared(spec, form, 1664) <= 227 * 1024
        if not fits or not matmul_shapes.takes(spec, shape, 1):
            continue
        monkeypatch.setattr(matmul_small, "choose", lambda *_, shape=shape: shape)
        for tokens in {1, shape.tokens - 1, shape.tokens} - {0}:
            job = multiply(activations(tokens, 1664), operand)
            check_product(job, job.out)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("low_first", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_as_they_lie(name, low_first, layout):
    operand = weights(name, 272, 1024, layout=layout, low_first=low_first)
    for tokens in (1, 2, 5, 16, 33):
        job = multiply(activations(tokens, 1024), operand)
        check_product(job, job.out)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 31, 64])
@pytest.mark.parametrize(("rows", "depth"), [(4096, 4096), (1024, 5120), (2064, 14336), (48, 8)])
def test_sizes(rows, depth, tokens):
    operand = weights("nvfp4", rows, depth)
    x = activations(tokens, depth)
    job = multiply(x, prepared(operand))
    check_product(job, job.out)
    if depth % 128 == 0:
        job = multiply(x, operand)
        check_product(job, job.out)


@pytest.mark.parametrize("name", FORMATS)
def test_prepared_tiles(name):
    import cupy

    for rows, depth, layout in ((304, 1000, "swizzled_128x4"), (2048, 4096, "linear")):
        operand = weights(name, rows, depth, layout=layout)
        wanted = prepared(operand)
        codes, scales = cupy.asarray(operand.packed), cupy.asarray(operand.block_scale)
        tiles = cupy.empty(wanted.tiles.shape, np.uint8)
        job = WeightsJob(operand.format, rows, depth, codes, scales, layout, True, tiles)
        assert CUDA.prepare_weights(job)
        np.testing.assert_array_equal(tiles.get(), wanted.tiles)
        packed = cupy.empty(codes.shape, np.uint8)
        linear = cupy.empty((rows, operand.blocks), np.uint8)
        restored = job._replace(packed=packed, block_scale=linear, scale_layout="linear")
        CUDA.restore_weights(restored)
        np.testing.assert_array_equal(packed.get(), operand.packed)


@pytest.mark.parametrize("tokens", [2, 4])
def test_odd_scales(tokens):
    operand = weights("nvfp4", 272, 1024)
    operand.block_scale[37, 3] = 0x90
    job = multiply(activations(tokens, 1024), operand)
    check_product(job, job.out)


@pytest.mark.parametrize("mean", [1, 4, 20])
@pytest.mark.parametrize("form", [PREPARED, ROWS])
def test_members(form, mean):
    """Several for each thread block: without rows, with some, with more than it has room for."""
    import cupy

    rng = np.random.default_rng(mean)
    counts = rng.integers(0, 2 * mean + 1, 40)
    counts[[3, 7]] = 0, 70
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    operands = [weights("nvfp4", 1040, 1280, seed=seed) for seed in range(3)]
    stored = [on_device(prepared(one) if form == PREPARED else one) for one in operands]
    x = activations(int(offsets[-1]), 1280)
    out = cupy.empty((x.rows, 1040), np.uint16)
    members = tuple(stored[number % 3] for number in range(40))
    job = RaggedMatmulJob(on_device(x), members, cupy.asarray(offsets), out, "bfloat16")
    results = []
    for _ in range(10):
        out.fill(0xFFFF)
        assert matmul_small.launch_ragged(job)
        results.append(out.get())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    for number in np.flatnonzero(counts):
        rows = slice(offsets[number], offsets[number + 1])
        part = FloatOperand(x.data[rows], "bfloat16")
        whole = MatmulJob(part, operands[number % 3], results[0][rows], "bfloat16")
        check_product(whole, results[0][rows])


def test_a_graph():
    import cupy

    operand = weights("nvfp4", 512, 1024)
    tiles = on_device(prepared(operand))
    first, second = (activations(4, 1024, seed) for seed in (1, 2))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = on_device(first)
        out = cupy.empty((4, 512), np.uint16)
        job = MatmulJob(x, tiles, out, "bfloat16")
        matmul_small.find(job).run(job)
        stream.begin_capture()
        matmul_small.find(job).run(job)
        graph = stream.end_capture()
        x.data.set(second.data, stream=stream)
        graph.launch(stream)
        stream.synchronize()
    check_product(job._replace(a=second, b=operand), out.get())
