# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of products by warpgroups, run on the host, against exact arithmetic."""

from contextlib import contextmanager

import numpy as np
import pytest

from fp4kit.backend.matmul import FloatOperand, MatmulJob
from fp4kit.cuda import device as cuda_device
from fp4kit.cuda import matmul_warpgroup
from fp4kit.cuda.matmul_shapes import PREPARED, ROWS, Sizes
from fp4kit.cuda.matmul_warpgroup import WarpgroupShape
from fp4kit.formats import SCALE_LAYOUTS, SECOND_LEVEL_SCALES, get_format
from fp4kit.reference import codecs
from matmul_samples import check_product, placed, prepared, weights

#: Small shapes of every kind: warps with a tile and with two, slices, pieces of a step, columns.
SHAPES = (
    WarpgroupShape(1, 1, 1, 2, 8),
    WarpgroupShape(1, 1, 2, 2, 16),
    WarpgroupShape(1, 2, 2, 3, 32),
)
FORMATS = ("nvfp4", "mxfp4")
FORMS = (PREPARED, ROWS)
CASES = [(name, form, shape) for name in FORMATS for form in FORMS for shape in SHAPES]
#: Of other types than bfloat16: parts of a row.
OF_PARTS = {"float16": SHAPES[1]._replace(parts=2), "float32": SHAPES[1]._replace(parts=3)}
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@pytest.fixture(scope="module", autouse=True)
def _built(kernels):
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    parts = [("nvfp4", form, shape) for form in FORMS for shape in OF_PARTS.values()]
    instances = [
        each
        for name, form, shape in CASES + parts
        for each in (
            matmul_warpgroup.multiply_warpgroup_kernel(get_format(name), form, shape),
            matmul_warpgroup.arrange_columns_kernel(form, shape),
        )
    ]
    kernels.build(list(dict.fromkeys(instances)), flags)


@pytest.fixture
def multiply(on_host, monkeypatch):
    """Launches a product on the host, divided in a way."""

    @contextmanager
    def memory(size):
        image = on_host.empty((size,), np.uint8)
        yield image.data.ptr

    monkeypatch.setattr(matmul_warpgroup, "_prepared", matmul_warpgroup._prepared.__wrapped__)
    monkeypatch.setattr(matmul_warpgroup.run, "memory", memory)
    monkeypatch.setattr(matmul_warpgroup, "SMALL_DEPTH", 0)
    monkeypatch.setattr(matmul_warpgroup, "is_fastest", lambda *_: True)
    monkeypatch.setattr(cuda_device, "capability", lambda _: (9, 0))

    def run(job, shape, splits=1):
        division = matmul_warpgroup.Division(shape, splits)
        monkeypatch.setattr(matmul_warpgroup, "choose", lambda *_: division)
        given = {name: placed(getattr(job, name), on_host.put) for name in ("a", "b")}
        for name in ("bias", "c"):
            value = getattr(job, name)
            given[name] = None if value is None else on_host.put(value)
        out = on_host.empty(job.out.shape, job.out.dtype)
        ready = job._replace(**given, out=out)
        matmul_warpgroup.find(ready).run(ready)
        return out

    return run


def activations(tokens, depth, seed=1, dtype="bfloat16"):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, depth)).astype(np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-8, 8, (tokens, 1)))
    return FloatOperand(codecs.from_float32(x, dtype), dtype)


def job_of(x, operand, dtype="float32", **fields):
    out = np.zeros((x.rows, operand.rows), STORED[dtype])
    return MatmulJob(x, operand, out, dtype, **fields)


@pytest.mark.parametrize(("name", "form", "shape"), CASES)
def test_shapes(name, form, shape, multiply):
    for rows, depth, tokens in (
        (144, 768, shape.columns),  # thread blocks of different sizes
        (16, 128, 1),
        (80, 640, shape.columns + 3),  # two blocks of columns; the last step is not whole
    ):
        operand = weights(name, rows, depth)
        operand = prepared(operand) if form == PREPARED else operand
        job = job_of(activations(tokens, depth), operand)
        check_product(job, multiply(job, shape))


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_pieces_of_the_depth(form, splits, multiply):
    operand = weights("nvfp4", 144, 896)
    operand = prepared(operand) if form == PREPARED else operand
    for shape, tokens in ((SHAPES[2], 35), (SHAPES[1], 7)):
        job = job_of(activations(tokens, 896), operand)
        check_product(job, multiply(job, shape, splits))
        short = job_of(activations(tokens, 896), operand, "bfloat16")
        check_product(short, multiply(short, shape, splits))


@pytest.mark.parametrize("dtype", OF_PARTS)
@pytest.mark.parametrize("form", FORMS)
def test_other_types(form, dtype, multiply):
    operand = weights("nvfp4", 80, 384)
    operand = prepared(operand) if form == PREPARED else operand
    for tokens in (1, 5, 9):
        job = job_of(activations(tokens, 384, dtype=dtype), operand)
        check_product(job, multiply(job, OF_PARTS[dtype]))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("low_first", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_as_they_lie(name, low_first, layout, multiply):
    operand = weights(name, 144, 384, layout=layout, low_first=low_first)
    job = job_of(activations(13, 384), operand)
    for shape in SHAPES[1:]:
        check_product(job, multiply(job, shape))


def test_sizes_that_end_inside_tiles(multiply):
    for rows, depth in ((40, 200), (8, 8), (33, 136)):
        operand = prepared(weights("nvfp4", rows, depth))
        job = job_of(activations(7, depth), operand)
        check_product(job, multiply(job, SHAPES[1]))


@pytest.mark.parametrize("direction", SECOND_LEVEL_SCALES)
def test_what_follows_the_sums(direction, multiply):
    rng = np.random.default_rng(5)
    level = rng.uniform(0.5, 2, 80).astype(np.float32)
    facts = {"level_name": direction, "level_range": 2688.0 if direction == "amax" else 1.0}
    operand = prepared(weights("nvfp4", 80, 256, level=level, **facts))
    x = activations(11, 256)
    bias = codecs.from_float32(rng.standard_normal(80).astype(np.float32), "float16")
    c = codecs.from_float32(rng.standard_normal((11, 80)).astype(np.float32), "bfloat16")
    extra = {"bias": bias, "bias_dtype": "float16", "c": c, "c_dtype": "bfloat16", "alpha": 0.75}
    job = job_of(x, operand, "bfloat16", **extra)
    check_product(job, multiply(job, SHAPES[2]))


@pytest.mark.parametrize("byte", [0x80, 0x90, 0xFE])
def test_odd_scales_take_the_slow_way(byte, multiply):
    operand = weights("nvfp4", 80, 256)
    operand.block_scale[37, 3] = byte
    job = job_of(activations(4, 256), operand)
    for shape in SHAPES:
        for splits in (1, 2):
            check_product(job, multiply(job, shape, splits))


def test_a_scale_that_is_nan(multiply):
    operand = weights("nvfp4", 80, 256)
    operand.block_scale[37, 3] = 0x7F
    out = np.asarray(multiply(job_of(activations(4, 256), operand), SHAPES[0]))
    assert np.isnan(out[:, 37]).all()
    assert np.isfinite(np.delete(out, 37, axis=1)).all()


def test_the_choice():
    """Those of the ladder on an H200."""
    for form, rows, depth, tokens, columns, row_tiles, splits in (
        (PREPARED, 28672, 8192, 64, 64, 16, 1),
        (PREPARED, 8192, 28672, 32, 32, 16, 4),
        (PREPARED, 8192, 28672, 128, 128, 8, 2),
        (ROWS, 28672, 8192, 512, 256, 8, 1),
        (ROWS, 4096, 4096, 64, 64, 8, 4),
        (PREPARED, 4096, 4096, 512, 128, 8, 1),
        (PREPARED, 14336, 4096, 16, 16, 8, 1),
    ):
        sizes = Sizes(tokens, rows, depth)
        shape, found = matmul_warpgroup.choose(form, sizes, 132)
        assert (shape.columns, shape.row_tiles, found) == (columns, row_tiles, splits), sizes


def test_what_others_do_faster():
    for tokens, parts, fits, wanted in (
        *((8, 1, True, False), (8, 1, False, True), (9, 1, True, True)),
        *((1024, 1, False, True), (1025, 1, False, False), (1024, 2, False, False)),
        (3072, 3, False, True),
    ):
        sizes = Sizes(tokens, 28672, 8192, parts)
        assert matmul_warpgroup.is_fastest(sizes, fits) == wanted


def test_few_rows_always_fit_where_nothing_else_is_asked():
    """Below SMALL_DEPTH `choose` would say the same."""
    from fp4kit.cuda import matmul_shapes

    for name in FORMATS:
        for form in FORMS:
            for tokens in range(1, matmul_warpgroup.SMALL_COLUMNS + 1):
                sizes = Sizes(tokens, 28672, matmul_warpgroup.SMALL_DEPTH)
                shape = matmul_shapes.choose(get_format(name), form, sizes, 132, 227 * 1024)
                assert shape is not None


def test_shapes_in_use_fit_shared_memory():
    for shape in matmul_warpgroup.SHAPES:
        for name in FORMATS:
            for form in FORMS:
                assert shape.shared(get_format(name), form) <= 227 * 1024
