# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of small products, run on the host, against exact arithmetic."""

from contextlib import contextmanager

import numpy as np
import pytest

from fp4kit.backend.matmul import FloatOperand, MatmulJob, RaggedMatmulJob
from fp4kit.backend.prepared import LEAST_SCALE_E8M0
from fp4kit.cuda import device as cuda_device
from fp4kit.cuda import matmul_shapes, matmul_small
from fp4kit.cuda.matmul_shapes import PREPARED, ROWS, Shape
from fp4kit.formats import SCALE_LAYOUTS, SECOND_LEVEL_SCALES, get_format
from fp4kit.reference import codecs
from matmul_samples import check_product, placed, prepared, values_of, weights

#: Small shapes of every kind: sliced, all activations at first, by steps; copies of both kinds.
SHAPES = {
    PREPARED: (
        Shape(1, 2, 2, 2, 2, 1, False),
        Shape(2, 1, 2, 1, 3, 1, False),
        Shape(1, 1, 4, 1, 2, 2, False, False),
        Shape(1, 2, 3, 2, 2, 8, False),
        Shape(1, 2, 2, 4, 2, 8, False, False),
        Shape(1, 4, 2, 1, 2, 16, False),
        Shape(2, 1, 2, 1, 3, 8, True),
        Shape(3, 1, 1, 1, 3, 16, True, False),
        Shape(1, 2, 2, 1, 2, 32, True, False),
        Shape(2, 2, 2, 1, 2, 32, True),
    ),
    ROWS: (
        Shape(1, 2, 2, 2, 2, 1, False),
        Shape(2, 1, 2, 2, 3, 2, False),
        Shape(1, 2, 3, 2, 2, 4, False),
        Shape(2, 2, 2, 1, 3, 8, False),
        Shape(2, 1, 2, 2, 3, 1, False, filled=True),
        Shape(2, 1, 4, 1, 2, 2, False, filled=True),
        Shape(1, 1, 4, 2, 2, 8, False, filled=True),
        Shape(2, 1, 1, 2, 2, 8, True),
        Shape(1, 2, 2, 1, 2, 16, True),
        Shape(3, 1, 1, 2, 3, 16, True, False),
    ),
}
FORMATS = ("nvfp4", "mxfp4")
CASES = [
    (name, form, shape)
    for name in FORMATS
    for form, shapes in SHAPES.items()
    for shape in shapes
    if matmul_shapes.takes(get_format(name), shape, 1)
]


@pytest.fixture(scope="module", autouse=True)
def _built(kernels):
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    kernels.build(
        [
            matmul_shapes.multiply_small_kernel(get_format(name), form, shape)
            for name, form, shape in CASES
        ]
        + [
            matmul_shapes.arrange_tokens_kernel(form, parts)
            for form in SHAPES
            for parts in matmul_small.PARTS.values()
        ],
        flags,
    )


@pytest.fixture
def device(on_host, monkeypatch):
    """`on_host`, with what launches of these products ask the device for."""

    @contextmanager
    def memory(size):
        image = on_host.empty((size,), np.uint8)
        yield image.data.ptr

    monkeypatch.setattr(matmul_small, "_ready", matmul_small._ready.__wrapped__)
    monkeypatch.setattr(matmul_small.run, "memory", memory)
    monkeypatch.setattr(cuda_device, "capability", lambda _: (9, 0))
    return on_host


@pytest.fixture
def multiply(device, monkeypatch):
    """Launches a product on the host by a kernel of a shape."""

    def run(job, shape):
        own = shape._replace(parts=matmul_small.PARTS[job.a.dtype])
        monkeypatch.setattr(matmul_small, "choose", lambda *_: own)
        placed = {name: placed_on(device, getattr(job, name)) for name in ("a", "b")}
        for name in ("bias", "c"):
            value = getattr(job, name)
            placed[name] = None if value is None else device.put(value)
        out = device.empty(job.out.shape, job.out.dtype)
        ready = job._replace(**placed, out=out)
        matmul_small.find(ready).run(ready)
        return out

    return run


def activations(tokens, depth, seed=1, dtype="bfloat16"):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, depth)).astype(np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-8, 8, (tokens, 1)))
    return FloatOperand(codecs.from_float32(x, dtype), dtype)


def job_of(x, operand, dtype="float32", **fields):
    stored = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    out = np.zeros((x.rows, operand.rows), stored)
    return MatmulJob(x, operand, out, dtype, **fields)


@pytest.mark.parametrize(("name", "form", "shape"), CASES)
def test_shapes(name, form, shape, multiply):
    tokens = shape.tokens
    for rows, depth, count in (
        (144, 768, tokens),
        (16, 128, max(tokens - 1, 1)),
        (80, 896, tokens),
    ):
        operand = weights(name, rows, depth)
        operand = prepared(operand) if form == PREPARED else operand
        job = job_of(activations(count, depth), operand)
        check_product(job, multiply(job, shape))


def shape_of(form, tokens):
    """The first shape with room."""
    return next(each for each in SHAPES[form] if each.tokens >= tokens)


@pytest.mark.parametrize("tokens", range(1, 19))
@pytest.mark.parametrize("form", [PREPARED, ROWS])
def test_tokens(form, tokens, multiply):
    operand = weights("nvfp4", 64, 384, seed=tokens)
    operand = prepared(operand) if form == PREPARED else operand
    shape = next((each for each in SHAPES[form] if each.tokens >= tokens), None)
    if shape is None:
        pytest.skip("no shape of these tests has room")
    job = job_of(activations(tokens, 384), operand)
    check_product(job, multiply(job, shape))


@pytest.mark.parametrize(("dtype", "most"), [("float16", 16), ("float32", 10)])
@pytest.mark.parametrize("form", [PREPARED, ROWS])
def test_other_activations(form, dtype, most, multiply):
    """As sums of two or three rows of bfloat16, exactly."""
    parts = matmul_small.PARTS[dtype]
    operand = weights("nvfp4", 64, 384)
    operand = prepared(operand) if form == PREPARED else operand
    for tokens in range(1, most):
        fitting = [each for each in SHAPES[form] if each.tokens >= tokens * parts]
        if fitting:
            x = activations(tokens, 384, dtype=dtype)
            # Far apart, so that later parts matter.
            x.data[:, ::2] *= x.data.dtype.type(2.0**-9)
            job = job_of(x, operand)
            check_product(job, multiply(job, fitting[0]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_activations_that_are_not_finite(dtype, multiply):
    operand = weights("nvfp4", 32, 256)
    x = activations(3, 256, dtype=dtype)
    x.data[0, 5], x.data[1, 9], x.data[2, 200] = np.inf, np.nan, -np.inf
    if dtype == "float32":
        x.data[1:2, 9].view(np.uint32)[...] = 0x7F800001
    stored = prepared(operand)
    shape = next(each for each in SHAPES[PREPARED] if each.tokens >= 9)
    got = np.asarray(multiply(job_of(x, stored), shape))
    with np.errstate(invalid="ignore"):
        for token, k in ((0, 5), (2, 200)):
            wanted = values_of(operand)[:, k] * x.data[token, k].astype(np.float32)
            np.testing.assert_array_equal(got[token], wanted)
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize("rows", [16, 17, 33, 64])
@pytest.mark.parametrize("depth", [128, 8, 136, 640, 1000])
def test_ragged_sizes_of_prepared_weights(rows, depth, multiply):
    operand = prepared(weights("nvfp4", rows, depth))
    for tokens, dtype in ((1, "bfloat16"), (3, "float32"), (9, "bfloat16")):  # pairs, one by one
        job = job_of(activations(tokens, depth), operand, dtype)
        check_product(job, multiply(job, shape_of(PREPARED, tokens)))


@pytest.mark.parametrize("low_first", [True, False])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_as_they_lie(name, layout, low_first, multiply):
    operand = weights(name, 208, 512, layout=layout, low_first=low_first)
    for tokens in (2, 4, 8, 16):
        job = job_of(activations(tokens, 512), operand)
        check_product(job, multiply(job, shape_of(ROWS, tokens)))


def every_code_and_scale(name):
    """One row for each scale byte that is plain, with every code in each block."""
    spec = get_format(name)
    most = 127 if name == "nvfp4" else 136
    rows = -(-most // 16) * 16
    codes = np.tile(np.uint8([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]), (rows, 8))
    scales = np.zeros((rows, 128 // spec.block_size), np.uint8)
    scales[:most] = np.arange(most, dtype=np.uint8)[:, None]
    return weights(name, rows, 128)._replace(packed=codes, block_scale=scales)


@pytest.mark.parametrize("form", [PREPARED, ROWS])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_under_every_scale(name, form, multiply):
    """Single elements of the depth: results are the weights themselves, exact in binary32."""
    operand = every_code_and_scale(name)
    if form == PREPARED and name == "mxfp4":
        # Smaller ones are not for these kernels.
        np.maximum(operand.block_scale, LEAST_SCALE_E8M0, out=operand.block_scale)
    wanted = values_of(operand)
    operand = prepared(operand) if form == PREPARED else operand
    for tokens in (1, 2, 8):
        shape = next(each for *key, each in CASES if key == [name, form] and each.tokens >= tokens)
        for first in range(0, 64, tokens):
            x = np.zeros((tokens, 128), np.float32)
            x[range(tokens), range(first, first + tokens)] = 1
            a = FloatOperand(codecs.from_float32(x, "bfloat16"), "bfloat16")
            got = np.asarray(multiply(job_of(a, operand), shape))
            expected = wanted[:, first : first + tokens].T
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize(("name", "byte"), [("nvfp4", 0xB8), ("nvfp4", 0x80), ("mxfp4", 140)])
def test_scales_that_are_not_plain_take_the_slow_way(name, byte, tokens, multiply):
    operand = weights(name, 64, 512)
    operand.block_scale[37, 3] = byte
    job = job_of(activations(tokens, 512), operand)
    shape = next(each for each in SHAPES[ROWS] if each.tokens >= max(tokens, 2))
    check_product(job, multiply(job, shape))
    assert not prepared(operand).is_plain


@pytest.mark.parametrize(("name", "byte"), [("nvfp4", 0x7F), ("nvfp4", 0xFF), ("mxfp4", 0xFF)])
def test_nan_scales(name, byte, multiply):
    operand = weights(name, 64, 512)
    operand.block_scale[37, 3] = byte
    for tokens in (2, 4):
        job = job_of(activations(tokens, 512), operand)
        got = np.asarray(multiply(job, shape_of(ROWS, tokens)))
        nans = np.isnan(got)
        assert nans[:, 37].all()
        assert nans.sum() == tokens
        # The canonical NaN.
        assert (got.view(np.uint32)[nans] == 0x7FC00000).all()


@pytest.mark.parametrize("form", [PREPARED, ROWS])
@pytest.mark.parametrize("value", [2.0**33, 2.0**-70, np.inf, np.nan])
def test_activations_that_cannot_be_raised(form, value, multiply):
    """The sliced kernels multiply activations by 2^96, if that loses nothing."""
    operand = weights("nvfp4", 64, 256)
    x = activations(2, 256)
    ordinary = codecs.to_float32(x.data, "bfloat16")
    changed = ordinary.copy()
    if abs(value) < 1:
        changed[1] *= value
    else:
        changed[1, 77] = value
    a = FloatOperand(codecs.from_float32(changed, "bfloat16"), "bfloat16")
    stored = prepared(operand) if form == PREPARED else operand
    job = job_of(a, stored)
    got = np.asarray(multiply(job, next(each for each in SHAPES[form] if each.tokens == 2)))
    if np.isfinite(value):
        check_product(job, got)
        return
    column = values_of(operand)[:, 77]
    with np.errstate(invalid="ignore"):
        wanted = np.where(np.isnan(value) | (column == 0), np.nan, column * value)
    np.testing.assert_array_equal(got[1], wanted.astype(np.float32))
    only = job_of(FloatOperand(a.data[:1], "bfloat16"), stored)
    check_product(only, got[:1])


@pytest.mark.parametrize("level_name", SECOND_LEVEL_SCALES)
@pytest.mark.parametrize("count", [1, 4, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_levels(dtype, count, level_name, multiply):
    rng = np.random.default_rng(9)
    level = rng.uniform(0.1, 4, count).astype(np.float32)
    if count > 1 and level_name != "amax":
        level[1] = 0  # counts as 1
    ranges = 2688.0 if level_name == "amax" else 1.0
    of_level = {"level": level, "level_name": level_name, "level_range": ranges}
    operand = weights("nvfp4", 64, 256, **of_level)
    for tokens, form in ((2, PREPARED), (3, ROWS), (12, PREPARED)):
        stored = prepared(operand) if form == PREPARED else operand
        job = job_of(activations(tokens, 256), stored, dtype, alpha=0.75)
        check_product(job, multiply(job, shape_of(form, tokens)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bias_addend_and_types(dtype, multiply):
    rng = np.random.default_rng(11)
    operand = prepared(weights("nvfp4", 80, 256))
    for tokens, bias_dtype, c_dtype in ((1, "float32", "bfloat16"), (11, "float16", "float32")):
        bias = codecs.from_float32(rng.standard_normal(80).astype("f4") * 99, bias_dtype)
        c = codecs.from_float32(rng.standard_normal((tokens, 80)).astype("f4") * 99, c_dtype)
        fields = {"bias": bias, "bias_dtype": bias_dtype, "c": c, "c_dtype": c_dtype}
        job = job_of(activations(tokens, 256), operand, dtype, alpha=2.0**-6, **fields)
        check_product(job, multiply(job, shape_of(PREPARED, tokens)))


def test_launches_are_kept_for_one_factor():
    """Zeros of both signs are equal, and give zeros of other signs."""
    operand = weights("nvfp4", 80, 256)
    factors = (0.0, -0.0, 1.0, 0.75, -0.75)
    kept = {
        matmul_small.numbers_of(job_of(activations(1, 256), operand, alpha=factor)): factor
        for factor in factors
    }
    assert [repr(factor) for factor in kept.values()] == [repr(factor) for factor in factors]
    ones = matmul_small.numbers_of(job_of(activations(1, 256), operand, alpha=1.0))
    assert ones.alpha_bits == matmul_small.Numbers().alpha_bits


@pytest.mark.parametrize(
    ("name", "dtype"), [("nvfp4", "bfloat16"), ("mxfp4", "bfloat16"), ("nvfp4", "float32")]
)
@pytest.mark.parametrize("form", [PREPARED, ROWS])
@pytest.mark.parametrize("wide", [False, True])
def test_ragged(wide, form, name, dtype, device, monkeypatch):
    """Members without rows, more rows than a kernel has room for, rows of no member."""
    monkeypatch.setattr(
        matmul_small, "_table", lambda _, words: device.put(np.array(words, np.uint64))
    )
    shape = next(each for each in SHAPES[form] if each.staged)
    shape = shape._replace(parts=matmul_small.PARTS[dtype])
    monkeypatch.setattr(matmul_small, "choose_for_members", lambda *_: shape)
    counts = [3, 0, 8, 21, 0, 1]
    offsets = np.cumsum([2, *counts]).astype(np.int64 if wide else np.int32)
    rng = np.random.default_rng(5)
    members = [
        weights(name, 80, 384, seed=seed, level=rng.uniform(1, 2, 80).astype(np.float32))
        for seed in range(len(counts))
    ]
    bias = rng.standard_normal((len(counts), 80)).astype(np.float32) * 99
    x = activations(40, 384, dtype=dtype)
    stored = [prepared(each) if form == PREPARED else each for each in members]
    placed = tuple(placed_on(device, each) for each in stored)
    out = device.put(np.full((40, 80), 7, np.float32))
    job = RaggedMatmulJob(
        placed_on(device, x), placed, device.put(offsets), out, "float32", 0.5, device.put(bias)
    )
    assert matmul_small.launch_ragged(job)
    got = np.asarray(out)
    for number, (member, begin) in enumerate(zip(members, offsets, strict=False)):
        rows = slice(begin, offsets[number + 1])
        if counts[number]:
            part = FloatOperand(x.data[rows], dtype)
            whole = job_of(part, member, alpha=0.5, bias=bias[number])
            check_product(whole, got[rows])
    assert (got[:2] == 7).all()
    assert (got[offsets[-1] :] == 7).all()
    nothing = placed_on(device, FloatOperand(x.data[:0], dtype))
    assert matmul_small.launch_ragged(job._replace(a=nothing, out=device.empty((0, 80), "f4")))


@pytest.mark.parametrize("byte", [0, 1, 2, 8, 134, 135, 136])
@pytest.mark.parametrize("tokens", [2, 4])
def test_scales_at_the_ends(tokens, byte, multiply):
    """E8M0: what bfloat16 does not hold takes the slow way, blocks of zeros do not."""
    operand = weights("mxfp4", 64, 512)
    operand.block_scale[...] = byte
    operand.packed[:16] = 0
    shape = next(each for each in SHAPES[ROWS] if each.tokens == tokens)
    job = job_of(activations(tokens, 512), operand)
    check_product(job, multiply(job, shape))


def placed_on(on_host, operand):
    """An operand with its arrays where kernels find them."""
    return placed(operand, on_host.put)


def test_what_is_left_to_others(on_host, monkeypatch):
    monkeypatch.setattr(matmul_small, "_ready", matmul_small._ready.__wrapped__)
    monkeypatch.setattr(cuda_device, "capability", lambda _: (9, 0))
    placed = {
        name: placed_on(on_host, operand)
        for name, operand in {
            "rows": weights("nvfp4", 48, 256),
            "odd rows": weights("nvfp4", 40, 256),
            "odd depth": weights("nvfp4", 48, 192),
            "tiles": prepared(weights("nvfp4", 48, 256)),
        }.items()
    }
    a = FloatOperand(on_host.put(activations(65, 256).data), "bfloat16")
    few = a._replace(data=a.data[:4])
    narrow = FloatOperand(on_host.put(activations(4, 192).data), "bfloat16")
    shifted = FloatOperand(on_host.put(activations(4, 256).data, shift=2), "bfloat16")
    wide = FloatOperand(on_host.put(np.ones((22, 256), np.float32)), "float32")
    refused = [
        (a, placed["tiles"]),
        (few, placed["odd rows"]),
        (narrow, placed["odd depth"]),
        (shifted, placed["tiles"]),
        (wide, placed["rows"]),
        (few, placed["tiles"]._replace(is_plain=False)),
    ]
    for x, operand in refused:
        assert matmul_small.find(job_of(x, operand)) is None
    monkeypatch.setattr(cuda_device, "capability", lambda _: (7, 5))
    assert matmul_small.find(job_of(few, placed["tiles"])) is None
