# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels that take any product, run on the host, are as exact as float32 sums can be."""

import numpy as np
import pytest

from fp4kit.backend.matmul import FloatOperand
from fp4kit.cuda import (
    ready as cuda_ready,
)
from fp4kit.cuda import (
    run as cuda_run,
)
from fp4kit.cuda.matmul_instances import any_kernel, numbers_source, quantized_source, source_of
from fp4kit.cuda.matmul_words import MOST_PRODUCTS
from fp4kit.formats import ALL_FORMATS, BLOCK_FORMATS, DTYPES, SCALE_LAYOUTS, SECOND_LEVEL_SCALES
from fp4kit.reference import codecs
from fp4kit.reference import matmul as reference
from matmul_jobs import RAW, check, grid_scales, job_of, moved, numbers, quantized

FORMATS = list(ALL_FORMATS)


@pytest.fixture(scope="module", autouse=True)
def built(kernels):
    """All kernels at once, which takes a third of the time."""
    b = [quantized_source(spec) for spec in ALL_FORMATS.values()]
    a = [*map(numbers_source, DTYPES), *b]
    kernels.build([any_kernel(one, other, MOST_PRODUCTS[0]) for one in a for other in b])


@pytest.fixture
def multiply(on_host):
    """Runs a job on the host's CUDA, checks the result and returns it."""

    def run(job, shift=0):
        given = moved(job, on_host.put, on_host.empty, shift)
        on_host.engine.matmul(given)
        found = np.asarray(given.out)
        check(job, found)
        return found

    return run


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_times_every_format(name, dtype, multiply):
    rng = np.random.default_rng(1)
    for rows, cols, depth, shift in ((3, 5, 16, 0), (17, 66, 150, 1), (70, 9, 64, 0)):
        a, b = numbers(rng, rows, depth, dtype), quantized(rng, name, cols, depth)
        multiply(job_of(a, b, dtype), shift)


@pytest.mark.parametrize("a_name", FORMATS)
@pytest.mark.parametrize("b_name", FORMATS)
def test_every_format_times_every_format(a_name, b_name, multiply):
    rng = np.random.default_rng(2)
    for rows, cols, depth, shift in ((5, 67, 80, 0), (18, 3, 47, 1)):
        a, b = quantized(rng, a_name, rows, depth), quantized(rng, b_name, cols, depth)
        multiply(job_of(a, b, alpha=0.25), shift)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_scale_layouts(name, layout, transposed, multiply):
    """Rows and blocks that are and are not whole tiles of a layout, in either operand."""
    if transposed and BLOCK_FORMATS[name].packs_nibbles:
        return  # packed columns are those of the transpose
    rng = np.random.default_rng(3)
    options = {"scale_layout": layout, "transposed": transposed}
    for rows, cols, depth in ((9, 130, 200), (129, 2, 64)):
        b = quantized(rng, name, cols, depth, **options)
        multiply(job_of(numbers(rng, rows, depth, "bfloat16"), b))
        multiply(job_of(quantized(rng, name, rows, depth, **options), b))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_nibble_orders(name, multiply):
    rng = np.random.default_rng(4)
    a, b = (quantized(rng, name, rows, 96, low_first=low) for rows, low in ((7, True), (9, False)))
    multiply(job_of(a, b))
    multiply(job_of(b, a))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_grid_scales(name, transposed, multiply):
    rng = np.random.default_rng(5)
    rows, cols, depth = 130, 65, 300
    operands = [
        quantized(rng, name, size, depth, scales=grid_scales(rng, size, depth), transposed=turned)
        for size, turned in ((rows, False), (cols, transposed))
    ]
    multiply(job_of(*operands))
    multiply(job_of(numbers(rng, 3, depth, "float16"), operands[1]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -2.5, 1e-44])
def test_unusual_grid_scales(value, multiply):
    rng = np.random.default_rng(6)
    scales = grid_scales(rng, 66, 300)
    scales[0, 1] = value
    b = quantized(rng, "fp8", 66, 300, scales=scales)
    multiply(job_of(numbers(rng, 5, 300, "bfloat16"), b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_scale_byte(name, dtype, multiply):
    """Subnormal, negative, largest and NaN scales; a row of the result for each."""
    rng = np.random.default_rng(7)
    spec = BLOCK_FORMATS[name]
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
    depth = 3 * spec.block_size - 3
    b = quantized(rng, name, 256, depth, scales=scales)
    a = numbers(rng, 4, depth, dtype)
    small = np.ldexp(rng.standard_normal(depth), -14).astype(np.float32)
    a.data[1] = codecs.from_float32(small, dtype)
    multiply(job_of(a, b))
    multiply(job_of(b, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_code(name, dtype, multiply):
    """A row of the result for each code, NaN and infinity among them."""
    rng = np.random.default_rng(8)
    spec = ALL_FORMATS[name]
    depth = 2 * spec.block_size
    codes = np.zeros((1 << spec.element.bits, depth), np.uint8)
    codes[:, -1] = np.arange(len(codes))
    b = quantized(rng, name, len(codes), depth, codes=codes)
    multiply(job_of(numbers(rng, 3, depth, dtype), b))
    multiply(job_of(b, quantized(rng, name, 5, depth)))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_padding_is_nothing(name, multiply):
    """Codes and scales of padding do not count, whatever they are."""
    rng = np.random.default_rng(9)
    spec = BLOCK_FORMATS[name]
    depth = spec.block_size + 5
    codes = np.full((6, 2 * spec.block_size), (1 << spec.element.bits) - 1, np.uint8)
    codes[:, :depth] = 1
    b = quantized(rng, name, 6, depth, codes=codes)
    multiply(job_of(numbers(rng, 3, depth, "bfloat16"), b))


def raw_numbers(bits, dtype):
    return FloatOperand(bits.astype(f"u{RAW[dtype](0).nbytes}").view(RAW[dtype]), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_of_16_bits(dtype, multiply):
    """A third of them, each alone in its row, times 1 and times large and small values."""
    bits = np.zeros((1 << 16, 2), np.uint32)
    bits[:, 0] = np.arange(1 << 16)
    a = raw_numbers(bits[::3], dtype)
    rng = np.random.default_rng(10)
    b = quantized(
        rng, "nvfp4", 3, 2, codes=np.array([[2, 1], [7, 0], [0, 7]], np.uint8).repeat(8, 1)
    )
    multiply(job_of(a, b, dtype))


def test_float32_of_all_magnitudes(multiply):
    """Numbers that three parts hold and others, which take the product in float32."""
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 1 << 32, (64, 20), np.uint64).astype(np.uint32)
    bits[:, 1:] &= 0x3FFFFFFF  # large ones alone
    bits[:, 1:] = 0
    exponents = np.arange(64, dtype=np.uint32) * 4
    tiny = (exponents[:, None] << 23) | rng.integers(0, 1 << 23, (64, 20), np.uint32)
    for each in (bits, tiny.astype(np.uint32)):
        for name in ("mxfp8", "nvfp4"):
            b = quantized(rng, name, 4, 20)
            multiply(job_of(raw_numbers(each, "float32"), b, alpha=2.0**-20))


LEVELS = {"none": None, "scalar": 1, "rows": 12, "groups": 4}


@pytest.mark.parametrize("direction", SECOND_LEVEL_SCALES)
@pytest.mark.parametrize("of_b", LEVELS)
@pytest.mark.parametrize("of_a", LEVELS)
def test_levels(of_a, of_b, direction, multiply):
    rng = np.random.default_rng(12)

    def operand(count):
        level = None if count is None else rng.uniform(0.1, 5, count)
        if count is not None and count > 1:
            level[1:3] = (0, np.inf) if direction != "amax" else (0, 2)
        return quantized(
            rng, "nvfp4", 12, 64, level=level, level_name=direction, level_range=2688.0
        )

    multiply(job_of(operand(LEVELS[of_a]), operand(LEVELS[of_b]), alpha=-1.5))


def test_one_product_alone_is_rounded_as_documented(multiply):
    """With one product a sum there is no order: every byte is that of the reference."""
    rng = np.random.default_rng(13)
    for dtype in DTYPES:
        a, b = (
            quantized(rng, "nvfp4", rows, 1, level=rng.uniform(0.1, 5, rows), level_range=2688.0)
            for rows in (9, 11)
        )
        job = job_of(a, b, dtype, rng=rng, bias="float16", c="bfloat16", alpha=0.7)
        found = multiply(job)
        reference.matmul(job)
        np.testing.assert_array_equal(found.view(np.uint8), job.out.view(np.uint8))


@pytest.mark.parametrize("c", [None, *DTYPES])
@pytest.mark.parametrize("bias", [None, *DTYPES])
def test_what_is_added(bias, c, multiply):
    rng = np.random.default_rng(14)
    for out_dtype in DTYPES:
        a, b = numbers(rng, 6, 48, "bfloat16"), quantized(rng, "nvfp4", 7, 48)
        multiply(job_of(a, b, out_dtype, rng=rng, bias=bias, c=c, alpha=0.5))


def test_c_may_be_the_result(on_host):
    rng = np.random.default_rng(16)
    job = job_of(
        numbers(rng, 5, 32, "float32"), quantized(rng, "nvfp4", 66, 32), rng=rng, c="float32"
    )
    given = moved(job, on_host.put, on_host.empty)
    given = given._replace(out=given.c)
    on_host.engine.matmul(given)
    check(job, given.out)


def test_no_depth(multiply):
    rng = np.random.default_rng(17)
    a, b = numbers(rng, 3, 0, "bfloat16"), quantized(rng, "nvfp4", 5, 0)
    assert not multiply(job_of(a, b)).any()
    multiply(job_of(a, b, rng=rng, bias="float32"))


def test_pieces_of_the_depth(multiply, on_host, monkeypatch):
    monkeypatch.setattr(cuda_ready, "multiprocessors", lambda _: 5)
    rng = np.random.default_rng(18)
    for depth in (64 * 24, 64 * 17 + 3):
        a, b = numbers(rng, 3, depth, "bfloat16"), quantized(rng, "nvfp4", 70, depth, level=[3.0])
        on_host.launched.clear()
        multiply(job_of(a, b, "bfloat16", rng=rng, bias="float32", c="bfloat16"))
        assert [one.kernel for one in on_host.launched] == ["matmul_any", "matmul_finish"]


def test_without_tensor_cores(multiply, host_gpu, tmp_path, monkeypatch):
    """As on sm_75: everything in float32."""
    rng = np.random.default_rng(19)
    jobs = [
        job_of(numbers(rng, 5, 80, dtype), quantized(rng, name, 67, 80), dtype)
        for dtype, name in (("float32", "nvfp4"), ("bfloat16", "fp8"))
    ]
    plain = host_gpu.Kernels(tmp_path)
    wanted = [any_kernel(source_of(job.a), source_of(job.b), MOST_PRODUCTS[0]) for job in jobs]
    plain.build(wanted, ("-O0", "-w", "-DFP4KIT_TEST_WITHOUT_MMA"))
    monkeypatch.setattr(cuda_run, "launch", plain.launch)
    for job in jobs:
        multiply(job)
    assert plain.launched == wanted
