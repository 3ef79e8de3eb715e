# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products by warpgroups on a GPU of compute capability 9.0: every shape in use, types, graphs."""

from itertools import product

import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.backend.matmul import FloatOperand, MatmulJob
from fp4kit.cuda import matmul_warpgroup
from fp4kit.cuda.matmul_shapes import PREPARED, ROWS
from fp4kit.formats import SCALE_LAYOUTS
from fp4kit.reference import codecs
from matmul_samples import check_product, placed, prepared, weights

CUDA = get_backend("cuda")
REASON = CUDA.unavailable_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
FORMATS = ("nvfp4", "mxfp4")
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@pytest.fixture(autouse=True)
def _has_warpgroups():
    from fp4kit.cuda import device

    if device.capability(0) != matmul_warpgroup.CAPABILITY:
        pytest.skip("products by warpgroups need compute capability 9.0")


@pytest.fixture
def every_size(monkeypatch):
    """Sizes of which other kernels are faster, too."""
    monkeypatch.setattr(matmul_warpgroup, "SMALL_DEPTH", 0)
    monkeypatch.setattr(matmul_warpgroup, "is_fastest", lambda *_: True)
    matmul_warpgroup._prepared.cache_clear()
    yield
    matmul_warpgroup._prepared.cache_clear()


def activations(tokens, depth, seed=1, dtype="bfloat16"):
    x = np.random.default_rng(seed).standard_normal((tokens, depth)).astype(np.float32)
    return FloatOperand(codecs.from_float32(x, dtype), dtype)


def on_device(operand):
    import cupy

    return placed(operand, cupy.asarray)


def multiply(x, operand, dtype="bfloat16", **fields):
    """The job on the host with its result, which ten launches agree on."""
    import cupy

    out = cupy.empty((x.rows, operand.rows), STORED[dtype])
    on_host = MatmulJob(x, operand, out, dtype, **fields)
    added = {
        name: cupy.asarray(value) for name, value in fields.items() if isinstance(value, np.ndarray)
    }
    job = on_host._replace(a=on_device(x), b=on_device(operand), **added)
    results = []
    for _ in range(10):
        out.view(np.uint8).fill(0xFF)
        matmul_warpgroup.find(job).run(job)
        results.append(out.get())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    return on_host._replace(out=results[0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("form", [PREPARED, ROWS])
def test_every_shape_in_use(form, name, monkeypatch):
    operand = weights(name, 464, 1664)
    operand = prepared(operand) if form == PREPARED else operand
    for shape, splits in product(matmul_warpgroup.SHAPES, (1, 3)):
        division = matmul_warpgroup.Division(shape, splits)
        monkeypatch.setattr(matmul_warpgroup, "choose", lambda *_, division=division: division)
        matmul_warpgroup._prepared.cache_clear()
        for tokens in {9, shape.columns - 1, shape.columns, shape.columns + 3}:
            job = multiply(activations(tokens, 1664), operand)
            check_product(job, job.out)
    matmul_warpgroup._prepared.cache_clear()


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("low_first", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_as_they_lie(name, low_first, layout, every_size):
    operand = weights(name, 272, 8192, layout=layout, low_first=low_first)
    for tokens in (17, 33, 64):
        job = multiply(activations(tokens, 8192), operand)
        check_product(job, job.out)


@pytest.mark.parametrize("tokens", [17, 31, 32, 33, 64])
@pytest.mark.parametrize(("rows", "depth"), [(4096, 4096), (1024, 5120), (2064, 14336), (48, 8)])
def test_sizes(rows, depth, tokens, every_size):
    operand = weights("nvfp4", rows, depth)
    x = activations(tokens, depth)
    job = multiply(x, prepared(operand))
    check_product(job, job.out)
    if depth % 128 == 0:
        job = multiply(x, operand)
        check_product(job, job.out)


@pytest.mark.parametrize(("dtype", "most"), [("float16", 32), ("float32", 21)])
@pytest.mark.parametrize("form", [PREPARED, ROWS])
def test_other_types(form, dtype, most, every_size):
    operand = weights("nvfp4", 272, 6144)
    operand = prepared(operand) if form == PREPARED else operand
    for tokens in (9, most):
        job = multiply(activations(tokens, 6144, dtype=dtype), operand, "float32")
        check_product(job, job.out)


def test_what_is_added(every_size):
    rng = np.random.default_rng(5)
    operand = weights("nvfp4", 272, 6144)
    bias = rng.standard_normal(272).astype(np.float32)
    c = rng.standard_normal((40, 272)).astype(np.float32)
    job = multiply(activations(40, 6144), operand, "float32", bias=bias, c=c, alpha=0.5)
    check_product(job, job.out)


def test_odd_scales(every_size):
    operand = weights("nvfp4", 272, 6144)
    operand.block_scale[37, 3] = 0x90
    job = multiply(activations(20, 6144), operand)
    check_product(job, job.out)


def test_a_graph(every_size):
    import cupy

    operand = weights("nvfp4", 512, 6144)
    tiles = on_device(prepared(operand))
    first, second = (activations(40, 6144, seed) for seed in (1, 2))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = on_device(first)
        out = cupy.empty((40, 512), np.uint16)
        job = MatmulJob(x, tiles, out, "bfloat16")
        matmul_warpgroup.find(job).run(job)
        stream.begin_capture()
        matmul_warpgroup.find(job).run(job)
        graph = stream.end_capture()
        x.data.set(second.data, stream=stream)
        graph.launch(stream)
        stream.synchronize()
    check_product(job._replace(a=second, b=operand), out.get())
