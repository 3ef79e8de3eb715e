# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of the CPU backend against the reference, within what the order of sums may change."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4kit.backend.matmul import FloatOperand
from fp4kit.cpu import matmul as cpu_matmul
from fp4kit.cpu.backend import CpuBackend, CpuGridBackend
from fp4kit.formats import ALL_FORMATS, BLOCK_FORMATS, DTYPES, SCALE_LAYOUTS
from fp4kit.reference import matmul as reference
from matmul_operands import (
    assert_close,
    float_operand,
    floats,
    job_of,
    many_jobs,
    quantized,
    values_of,
)

BACKEND = CpuBackend()
EIGHT_BITS = [name for name, spec in ALL_FORMATS.items() if spec.element.bits == 8]
FOUR_BITS = [name for name in ALL_FORMATS if name not in EIGHT_BITS]
#: Rows of numbers: one, a tile, several tiles, panels.
ROWS = (1, 3, 9, 40)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def check(a, b, out_dtype="float32", **fields):
    job = job_of(a, b, out_dtype, **fields)
    BACKEND.matmul(job)
    assert_close(job)
    return job.out


def test_it_computes_by_ieee():
    for backend in (CpuBackend, CpuGridBackend):
        assert hasattr(backend.matmul, "__wrapped__")
        assert hasattr(backend.matmul_grouped, "__wrapped__")


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_every_format(name):
    for job in many_jobs([name]):
        BACKEND.matmul(job)
        assert_close(job)


@pytest.mark.parametrize(("name", "layout"), [*product(BLOCK_FORMATS, SCALE_LAYOUTS[1:])])
def test_swizzled_scales(name, layout, rng):
    for rows, shape in product(ROWS, ((300, 224), (5, 64), (130, 80))):
        check(
            float_operand(rows, shape[1], "float32", rng),
            quantized(name, *shape, rng, scale_layout=layout),
        )


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_transposed_operands(name, rng):
    for rows, layout in product(ROWS, SCALE_LAYOUTS):
        b = quantized(name, 37, 200, rng, transposed=True, scale_layout=layout)
        check(float_operand(rows, 200, "float32", rng), b)
    a = quantized(name, 5, 200, rng, transposed=True)
    check(a, quantized(name, 6, 200, rng, transposed=True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_grids_of_scales(name, transposed, rng):
    for rows, shape in product(ROWS, ((300, 130), (128, 128), (5, 1000))):
        b = quantized(name, *shape, rng, grid=True, transposed=transposed)
        check(float_operand(rows, shape[1], "float32", rng), b)
    a = quantized(name, 130, 260, rng, grid=True, transposed=transposed)
    check(a, quantized(name, 3, 260, rng, grid=True))


@pytest.mark.parametrize(("a_name", "b_name"), [*product(ALL_FORMATS, ALL_FORMATS)])
def test_two_quantized_operands(a_name, b_name, rng):
    a = quantized(a_name, 6, 170, rng, low_first=False)
    check(a, quantized(b_name, 7, 170, rng))


@pytest.mark.parametrize(("x_dtype", "out_dtype"), [*product(DTYPES, DTYPES)])
def test_types_of_numbers(x_dtype, out_dtype, rng):
    b = quantized("nvfp4", 9, 150, rng, low_first=False)
    for rows in ROWS:
        check(float_operand(rows, 150, x_dtype, rng), b, out_dtype)


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("name", FOUR_BITS)
def test_every_code_under_every_scale(name, rows, rng):
    spec = ALL_FORMATS[name]
    b = quantized(name, 256, spec.block_size, rng)
    codes = np.arange(spec.block_size) % 16
    b.packed[:] = codes[0::2] | (codes[1::2] << 4)
    b.block_scale[:, 0] = np.arange(256)
    with np.errstate(over="ignore"):
        values = values_of(b).astype(np.float32)
    # One product of each sum is not zero: whatever is finite is exact.
    for first in range(0, spec.block_size, rows):
        x = np.zeros((rows, spec.block_size), np.float32)
        ones = np.arange(min(rows, spec.block_size - first))
        x[ones, first + ones] = 1
        out = check(FloatOperand(x, "float32"), b)[ones]
        finite = np.isfinite(values).all(axis=1)
        np.testing.assert_array_equal(out[:, finite], values.T[first + ones][:, finite])
        assert np.isnan(out[:, ~finite]).all()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_code_of_eight_bits(name, rows, rng):
    spec = ALL_FORMATS[name]
    b = quantized(name, 256, 32, rng)
    b.packed[:] = 0
    b.packed[:, 3] = np.arange(256)
    if b.block_scale is not None:
        b.block_scale[:] = 127
    x = np.zeros((rows, 32), np.float32)
    x[:, 3] = 1
    out = check(FloatOperand(x, "float32"), b)
    np.testing.assert_array_equal(out, np.broadcast_to(spec.element.values, (rows, 256)))


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("number", [3e38, 2.0**115, 1e-38, 1e-45, 0.0, np.inf, np.nan])
def test_numbers_of_any_size(name, number, rng):
    x = floats((1, 300), "float32", rng)
    x[0, 7], x[0, 200] = number, -number
    b = quantized(name, 23, 300, rng)
    check(FloatOperand(x, "float32"), b)
    check(FloatOperand(np.full((1, 300), number, np.float32), "float32"), b)


def test_padding_does_not_count(rng):
    for name, depth in product(ALL_FORMATS, (1, 17, 129)):
        b = quantized(name, 6, depth, rng)
        spare = b.packed.copy()
        spare.reshape(6, -1)[:, -(-depth // b.format.codes_per_byte) :] = 0xFF
        if depth % 2 and b.format.packs_nibbles:
            spare[:, depth // 2] |= 0xF0
        for rows in (1, 4, 40):
            x = float_operand(rows, depth, "float32", rng)
            first, second = check(x, b), check(x, b._replace(packed=spare))
            assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_an_empty_depth(rows, rng):
    bias = floats((4,), "float32", rng)
    for name in ALL_FORMATS:
        out = check(float_operand(rows, 0, "float32", rng), quantized(name, 4, 0, rng), bias=bias)
        np.testing.assert_array_equal(out, np.broadcast_to(bias, (rows, 4)))


@pytest.mark.parametrize("name", ["amax", "decode_scale", "encode_scale"])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_what_follows_the_sums(name, out_dtype, rng):
    """One product has one order: with a depth of 1 the bytes are those of the reference."""
    for rows, cols, dtype in product((1, 8, 40), (1, 12), DTYPES):
        a = quantized("nvfp4", rows, 1, rng, level_name=name, level_range=2688.0)
        b = quantized("nvfp4", cols, 1, rng, level_name=name, level_range=1536.0)
        for levels in (1, 4):
            level = [
                np.abs(floats((levels if one.rows % levels == 0 else 1,), "float32", rng))
                for one in (a, b)
            ]
            level[1][0] = (np.nan, 0.0, 3e-39)[levels % 3]
            fields = {
                "bias": floats((cols,), dtype, rng),
                "bias_dtype": dtype,
                "c": floats((rows, cols), dtype, rng),
                "c_dtype": dtype,
                "alpha": 0.3,
            }
            operands = a._replace(level=level[0]), b._replace(level=level[1])
            ours, theirs = (job_of(*operands, out_dtype, **fields) for _ in range(2))
            BACKEND.matmul(ours)
            reference.matmul(theirs)
            assert ours.out.tobytes() == theirs.out.tobytes()


def test_the_output_may_be_what_is_added(rng):
    a, b = float_operand(3, 64, "float32", rng), quantized("nvfp4", 8, 64, rng)
    c = floats((3, 8), "float32", rng)
    apart = check(a, b, c=c)
    job = job_of(a, b)._replace(out=c, c=c)
    BACKEND.matmul(job)
    assert job.out.tobytes() == apart.tobytes()


@pytest.mark.parametrize("size", [(1, 24, 64), (40, 24, 64), (2, 900, 3000)])
def test_groups_are_products(size, rng):
    rows, cols, depth = size
    jobs = [
        job_of(float_operand(rows, depth, "float32", rng), quantized("mxfp4", cols, depth, rng))
        for _ in range(5)
    ]
    apart = [job._replace(out=np.zeros_like(job.out)) for job in jobs]
    BACKEND.matmul_grouped(tuple(jobs))
    for job, other in zip(jobs, apart, strict=True):
        BACKEND.matmul(other)
        assert job.out.tobytes() == other.out.tobytes()
    BACKEND.matmul_grouped(())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_threads_do_not_change_bytes(name, rng, monkeypatch):
    monkeypatch.setattr(cpu_matmul, "PRODUCTS", 1)
    for rows, cols in ((1, 1500), (4, 1501), (40, 1499)):
        a = float_operand(rows, 640, "float32", rng)
        b = quantized(name, cols, 640, rng, wild=name == "nvfp4")
        results = set()
        for threads in (1, 2, 3, 1):
            monkeypatch.setenv("FP4KIT_NUM_THREADS", str(threads))
            job = job_of(a, b)
            BACKEND.matmul(job)
            results.add(job.out.tobytes())
        assert len(results) == 1


def test_arrays_that_are_not_aligned(rng):
    a, b = float_operand(3, 65, "float32", rng), quantized("nvfp4", 8, 65, rng)
    raw = np.zeros(a.data.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(a.data.shape)
    raw[...] = a.data
    out = np.zeros(3 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(3, 8)
    job = job_of(FloatOperand(raw, "float32"), b)._replace(out=out)
    BACKEND.matmul(job)
    assert job.out.tobytes() == check(a, b).tobytes()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["nvfp4", "mxfp4", "mxfp8", "fp8"]),
    rows=st.integers(1, 45),
    cols=st.integers(1, 40),
    depth=st.integers(1, 700),
    seed=st.integers(0, 2**32 - 1),
    low_first=st.booleans(),
)
def test_any_shape(name, rows, cols, depth, seed, low_first):
    rng = np.random.default_rng(seed)
    b = quantized(name, cols, depth, rng, low_first=low_first, wild=seed % 3 == 0)
    check(float_operand(rows, depth, "float32", rng), b)
