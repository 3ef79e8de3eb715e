# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products by cuBLAS, with NumPy in its place: slabs, decoding, factors, what follows the sums."""

import ctypes

import numpy as np
import pytest

from fp4kit.backend.matmul import MatmulJob
from fp4kit.cuda import blas, matmul_choice, matmul_decode, matmul_library
from fp4kit.cuda import (
    matmul as cuda_matmul,
)
from fp4kit.cuda import (
    run as cuda_run,
)
from fp4kit.formats import BLOCK_FORMATS, DTYPES, SCALE_LAYOUTS, SECOND_LEVEL_SCALES
from fp4kit.reference import codecs
from matmul_jobs import RAW, check, grid_scales, job_of, moved, numbers, quantized
from matmul_samples import placed, prepared


def stored(matrix, rows, cols):
    """Rows of numbers at an address, as an array that can be written."""
    dtype = np.dtype(RAW[matrix.dtype])
    count = (rows - 1) * matrix.stride + cols
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(matrix.address)
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(
        flat, (rows, cols), (matrix.stride * dtype.itemsize, dtype.itemsize)
    )


#: (type of the operands, of the result, shape, whether there is a factor) of each GEMM.
CALLS = []


class HostGemm:
    """As blas.Gemm."""

    def __init__(self, device, stream, workspace):
        assert workspace % 16 == 0

    def multiply(self, a, b, out, shape, factor):
        assert a.dtype == b.dtype
        assert out.dtype in (a.dtype, "float32")
        assert not factor or factor % 4 == 0
        values = [
            codecs.to_float32(stored(one, rows, shape.depth), one.dtype)
            for one, rows in ((a, shape.rows), (b, shape.cols))
        ]
        alpha, beta = (ctypes.c_float * 2).from_address(factor) if factor else (1.0, 0.0)
        assert beta == 0
        with np.errstate(all="ignore"):
            sums = np.zeros((shape.rows, shape.cols), np.float32)
            for k in range(shape.depth):
                sums += np.multiply.outer(values[0][:, k], values[1][:, k])
            target = stored(out, shape.rows, shape.cols)
            values = np.float32(alpha) * sums
            target[...] = codecs.from_float32(values, out.dtype)
            # A NaN of another pattern than ours.
            target.view(f"u{target.itemsize}")[np.isnan(values)] = 256**target.itemsize - 1
        CALLS.append((a.dtype, out.dtype, tuple(shape), bool(factor)))


@pytest.fixture
def library(on_host, monkeypatch):
    """Runs a product by NumPy's GEMM, and returns what was multiplied."""
    monkeypatch.setattr(blas, "Gemm", HostGemm)
    monkeypatch.setattr(blas, "WORKSPACE_BYTES", 256)
    monkeypatch.setattr(blas, "is_available", lambda: True)
    for module in (cuda_matmul, matmul_decode):
        monkeypatch.setattr(module, "capability", lambda _: (9, 0))
    # They would take the few rows of these tests.
    monkeypatch.setattr(cuda_matmul.matmul_warpgroup, "find", lambda _: None)
    for name in ("LIBRARY_ROWS", "LIBRARY_ROWS_OF_FEW", "LIBRARY_COLUMNS", "LIBRARY_DEPTH"):
        monkeypatch.setattr(matmul_choice, name, 1)

    def run(job, shift=0, b=None):
        """`b`: the same operand in another form."""
        CALLS.clear()
        given = moved(job, on_host.put, on_host.empty, shift)
        if b is not None:
            given = given._replace(b=placed(b, on_host.put))
        on_host.launched.clear()
        on_host.engine.matmul(given)
        check(job, given.out)
        return list(CALLS)

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", "fp8", "fp8_e5m2"])
def test_numbers_times_codes(name, dtype, library):
    rng = np.random.default_rng(1)
    a, b = numbers(rng, 9, 83, dtype), quantized(rng, name, 21, 83, level=[0.5])
    assert library(job_of(a, b, dtype), 1) == [(dtype, dtype, (9, 21, 83), True)]
    assert library(job_of(a, b, "float32")) == [(dtype, "float32", (9, 21, 83), True)]


def test_sums_that_are_finished_afterwards(library):
    rng = np.random.default_rng(2)
    a = numbers(rng, 9, 80, "bfloat16")
    b = quantized(rng, "nvfp4", 21, 80, level=[0.5])
    rows = quantized(rng, "nvfp4", 9, 80, level=rng.uniform(1, 2, 9), level_range=2688.0)
    for job in (
        job_of(a, b, "bfloat16", rng=rng, bias="float16"),
        job_of(a, b, "bfloat16", rng=rng, c="bfloat16"),
        job_of(a, b, "float16"),
        job_of(rows, b, "bfloat16"),
    ):
        assert library(job) == [("bfloat16", "float32", (9, 21, 80), False)]


@pytest.mark.parametrize("adds", [False, True])
def test_slabs(adds, library, on_host, monkeypatch):
    """Scratch of few rows of either operand, the last of them ragged."""
    monkeypatch.setattr(matmul_library, "SCRATCH_BYTES", 256 + 6000)
    monkeypatch.setattr(matmul_library, "SLAB_ROWS", 4)
    monkeypatch.setattr(matmul_library, "SLAB_STEP", 8)
    rng = np.random.default_rng(3)
    a = quantized(rng, "mxfp8", 9, 96, level=[1.5], transposed=True)
    b = quantized(rng, "nvfp4", 50, 96, level=rng.uniform(1, 2, 5 if adds else 1))
    job = job_of(a, b, "bfloat16", rng=rng, c="float32" if adds else None)
    calls = library(job)
    shapes = [shape for _, _, shape, _ in calls]
    assert {rows for rows, _, _ in shapes} == {4, 1}
    assert len({cols for _, cols, _ in shapes}) == 2
    assert sum(rows * cols for rows, cols, _ in shapes) == 9 * 50


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("a_kind", ["bfloat16", "nvfp4"])
def test_scratch_is_bounded(a_kind, adds):
    rng = np.random.default_rng(10)
    budget = 1 << 20
    for _ in range(300):
        rows, cols, depth = (int(2.0**power) for power in rng.uniform(0, (15, 17, 14)))
        b = quantized(rng, "nvfp4", 1, 16)._replace(rows=cols, depth=depth)
        if a_kind == "nvfp4":
            a = quantized(rng, "nvfp4", 1, 16)._replace(rows=rows, depth=depth)
        else:
            a = numbers(rng, 1, 1, a_kind)
            a = a._replace(data=np.broadcast_to(a.data, (rows, depth)))
        bias = np.zeros(1, np.float32) if adds else None
        job = MatmulJob(a, b, None, "bfloat16", 1.0, bias)
        slabs = matmul_library.slabs_of(job, budget)
        assert 1 <= slabs.rows <= rows
        assert 1 <= slabs.cols <= cols
        # A row of each operand must fit in any case; parts begin on 256 bytes.
        least = 4 * slabs.stride + 4
        assert slabs.places[-1] <= max(budget, least) + 5 * 256
        assert list(slabs.places) == sorted(slabs.places)


@pytest.mark.parametrize("added", [None, "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_that_16_bits_do_not_hold(dtype, added, library, on_host):
    """The smallest scales: the product is made anew in float32, which the device decides."""
    rng = np.random.default_rng(5)
    scales = np.full((21, 3), 120, np.uint8)
    scales[3] = 0
    a = numbers(rng, 9, 96, dtype)
    job = job_of(a, quantized(rng, "mxfp8", 21, 96, scales=scales), "float32", rng=rng, c=added)
    for alpha in (1.0, 2.0**60):
        library(job._replace(alpha=alpha))
    assert on_host.launched[-1].kernel == "matmul_any"
    on_host.launched.clear()
    library(job._replace(b=quantized(rng, "nvfp4", 21, 96)))
    assert "matmul_any" not in [one.kernel for one in on_host.launched]


def test_c_that_is_the_result_is_read_once(library, on_host):
    """Where a product might be made anew, cuBLAS must not have written over c."""
    rng = np.random.default_rng(6)
    a = numbers(rng, 9, 96, "bfloat16")
    for name, kernel in (("mxfp8", "matmul_any"), ("nvfp4", "dequantize_rowwise")):
        job = job_of(a, quantized(rng, name, 21, 96), "float32", rng=rng, c="float32")
        given = moved(job, on_host.put, on_host.empty)
        given = given._replace(out=given.c)
        on_host.launched.clear()
        on_host.engine.matmul(given)
        check(job, given.out)
        assert on_host.launched[0].kernel == kernel


def test_bfloat16_without_tensor_cores_for_it(library, monkeypatch):
    for module in (cuda_matmul, matmul_decode):
        monkeypatch.setattr(module, "capability", lambda _: (7, 5))
    rng = np.random.default_rng(9)
    b = quantized(rng, "nvfp4", 20, 64)
    assert not library(job_of(numbers(rng, 5, 64, "bfloat16"), b))
    assert library(job_of(numbers(rng, 5, 64, "float16"), b))


def test_scales_of_rows_and_columns_are_not_decoded(library):
    rng = np.random.default_rng(7)
    b = quantized(rng, "fp8", 130, 140, scales=grid_scales(rng, 130, 140))
    assert not library(job_of(numbers(rng, 5, 140, "bfloat16"), b))
    assert not library(job_of(numbers(rng, 5, 140, "float32"), b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(dtype, library):
    """NaN has one pattern, though a GEMM's may have another."""
    rng = np.random.default_rng(8)
    a = numbers(rng, 4, 64, dtype)
    a.data[1, 3] = codecs.from_float32(np.full(1, np.nan, np.float32), dtype)[0]
    a.data[2, 5] = codecs.from_float32(np.full(1, np.inf, np.float32), dtype)[0]
    scales = np.full((9, 4), 0x38, np.uint8)
    scales[2, 1] = 0x7F
    library(job_of(a, quantized(rng, "nvfp4", 9, 64, scales=scales, level=[2.0]), dtype))


def launched_kernels(on_host):
    return [one.kernel for one in on_host.launched]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_prepared_weights(name, dtype, library, on_host):
    """Decoded as they lie, where the type holds all values; ragged tiles, all kinds of results."""
    rng = np.random.default_rng(12)
    for rows, depth in ((16, 128), (45, 200), (21, 83)):
        a, b = numbers(rng, 9, depth, dtype), quantized(rng, name, rows, depth, level=[0.5])
        tiles = prepared(b)
        assert library(job_of(a, b, dtype), b=tiles) == [(dtype, dtype, (9, rows, depth), True)]
        restored = "restore_weights" in launched_kernels(on_host)
        assert restored == ((name, dtype) == ("mxfp4", "float16"))
        assert restored != ("decode_prepared" in launched_kernels(on_host))
        job = job_of(a, b, "float32", rng=rng, bias="float32", c=dtype, alpha=0.7)
        assert library(job, b=tiles) == [(dtype, "float32", (9, rows, depth), False)]


@pytest.mark.parametrize("level_name", SECOND_LEVEL_SCALES)
def test_levels_of_prepared_weights(level_name, library):
    rng = np.random.default_rng(13)
    a = quantized(rng, "nvfp4", 9, 128, level=rng.uniform(1, 2, 9), level_range=2688.0)
    for levels in (1, 4):
        level = rng.uniform(1, 2, levels)
        b = quantized(rng, "nvfp4", 48, 128, level=level, level_name=level_name)
        library(job_of(a, b, "bfloat16"), b=prepared(b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_every_scale_byte_of_prepared_weights(name, dtype, library, on_host):
    rng = np.random.default_rng(14)
    depth = 5 * BLOCK_FORMATS[name].block_size
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 5, axis=1)
    b = quantized(rng, name, 256, depth, scales=scales)
    assert not prepared(b).is_plain
    library(job_of(numbers(rng, 3, depth, dtype), b, "float32"), b=prepared(b))
    if (name, dtype) != ("mxfp4", "float16"):
        assert "restore_weights" not in launched_kernels(on_host)


def test_slabs_of_prepared_weights(library, monkeypatch):
    """Also such that begin within a tile."""
    rng = np.random.default_rng(15)
    a, b = numbers(rng, 9, 192, "bfloat16"), quantized(rng, "nvfp4", 90, 192)
    for columns in (40, 17):
        monkeypatch.setattr(matmul_library, "SCRATCH_BYTES", 256 + columns * 192 * 2)
        calls = library(job_of(a, b, "bfloat16"), b=prepared(b))
        count = -(-90 // columns)
        assert next(shape[1] for _, _, shape, _ in calls) == -(-90 // count)
        assert len(calls) == count


def test_which_prepared_weights_are_restored(on_host, monkeypatch):
    """At odd addresses, or without products of pairs."""
    rng = np.random.default_rng(16)
    b = quantized(rng, "nvfp4", 33, 128)
    given = moved(job_of(numbers(rng, 9, 128, "bfloat16"), b), on_host.put, on_host.empty)
    tiles = prepared(b)
    for capability, shift, takes in (((8, 0), 0, True), ((7, 5), 0, False), ((8, 0), 4, False)):
        monkeypatch.setattr(matmul_decode, "capability", lambda _, it=capability: it)
        there = tiles._replace(tiles=on_host.put(tiles.tiles, shift))
        assert matmul_library.takes_prepared(given._replace(b=there)) == takes


@pytest.mark.parametrize("low_first", [True, False])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_rows_of_fp4(name, layout, low_first, library, on_host, monkeypatch):
    """As `dequantize` does where a slab begins with a tile of scales; slabs begin anywhere."""
    rng = np.random.default_rng(23)
    a = numbers(rng, 3, 288, "bfloat16")
    options = {"scale_layout": layout, "low_first": low_first, "level": [0.5]}
    b = quantized(rng, name, 150, 288, **options)
    for slab in (150, 64, 41):
        monkeypatch.setattr(matmul_library, "SCRATCH_BYTES", 256 + slab * 288 * 2)
        for shift in (0, 1):
            library(job_of(a, b, "bfloat16"), shift)
            kernels = launched_kernels(on_host)
            assert "dequantize_rowwise" in kernels
            assert ("matmul_decode" in kernels) == (layout != "linear" and slab < 150)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_every_scale_byte_of_rows(name, dtype, library):
    rng = np.random.default_rng(24)
    depth = 6 * BLOCK_FORMATS[name].block_size
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 6, axis=1)
    b = quantized(rng, name, 256, depth, scales=scales)
    library(job_of(numbers(rng, 3, depth, dtype), b, "float32"))


def test_slabs_are_about_as_large():
    rng = np.random.default_rng(17)
    a, b = numbers(rng, 1, 8192, "bfloat16"), quantized(rng, "nvfp4", 1, 16)
    a = a._replace(data=np.broadcast_to(a.data, (512, 8192)))
    budget = matmul_library.SCRATCH_BYTES - 32 * 2**20
    for cols, slab in ((28672, 14336), (30000, 10240), (14336, 14336), (1000, 1000)):
        job = MatmulJob(a, b._replace(rows=cols, depth=8192), None, "bfloat16")
        assert matmul_library.slabs_of(job, budget).cols == slab


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_wherever_it_is(dtype, library, on_host):
    """Results at any address: pieces of 16 bytes and what is around them; halves of words."""
    rng = np.random.default_rng(18)
    for cols in (1, 19, 301):
        for row in (0, 2):
            for shift in (0, 1, 7):
                a = numbers(rng, 3, 34, dtype)
                a.data[row, 5] = codecs.from_float32(np.full(1, np.nan, np.float32), dtype)[0]
                job = job_of(a, quantized(rng, "nvfp4", cols, 34), dtype)
                out = on_host.empty((3, cols), RAW[dtype], shift * a.data.itemsize)
                on_host.engine.matmul(moved(job, on_host.put, on_host.empty)._replace(out=out))
                check(job, out)
                assert launched_kernels(on_host)[-1] == "matmul_nan"


@pytest.mark.parametrize("level", [np.nan, np.inf])
def test_a_factor_that_makes_nan(level, library):
    """Zero times infinity."""
    rng = np.random.default_rng(20)
    a, b = numbers(rng, 40, 32, "bfloat16"), quantized(rng, "nvfp4", 300, 32, level=[level])
    a.data[7] = 0
    library(job_of(a, b, "bfloat16"))


def test_sums_that_overflow(library):
    """Infinity minus infinity, of finite numbers and scales."""
    rng = np.random.default_rng(21)
    a = numbers(rng, 40, 32, "bfloat16")
    a.data[3] = codecs.from_float32(np.full(1, 2.0**127, np.float32), "bfloat16")[0]
    library(job_of(a, quantized(rng, "mxfp4", 300, 32), "bfloat16"))
    b = quantized(rng, "mxfp4", 300, 32, scales=np.full((300, 1), 250, np.uint8))
    library(job_of(numbers(rng, 40, 32, "bfloat16"), b, "bfloat16"))


@pytest.fixture
def captured(on_host, monkeypatch):
    """As if a graph were captured: {address: memory} taken, and what was given back."""
    import cupy

    taken, given_back = {}, []

    def allocate(size, stream):
        array = on_host.empty(size, np.uint8)
        taken[array.ctypes.data] = array
        return array.ctypes.data

    def view(address, shape):
        array = next(one for start, one in taken.items() if start <= address < start + one.size)
        first = address - array.ctypes.data
        return array[first : first + int(np.prod(shape))].reshape(shape)

    runtime = cupy.cuda.runtime
    monkeypatch.setattr(runtime, "mallocAsync", allocate, raising=False)
    monkeypatch.setattr(runtime, "freeAsync", lambda at, _: given_back.append(at), raising=False)
    monkeypatch.setattr(cuda_run, "is_capturing", lambda: True)
    monkeypatch.setattr(cuda_run, "scratch", None)
    monkeypatch.setattr(cuda_run, "_bytes_at", view)
    return taken, given_back


def test_scratch_of_a_graph_is_its_own(library, captured):
    """Allocated and given back as steps of it: nothing is kept for good."""
    taken, given_back = captured
    rng = np.random.default_rng(11)
    assert library(job_of(numbers(rng, 5, 64, "bfloat16"), quantized(rng, "mxfp8", 20, 64)))
    assert given_back == list(taken)


@pytest.mark.parametrize("by_library", [True, False])
def test_what_is_restored_in_a_graph_is_its_own(by_library, library, captured, monkeypatch):
    taken, given_back = captured
    monkeypatch.setattr(blas, "is_available", lambda: by_library)
    rng = np.random.default_rng(25)
    a, b = numbers(rng, 5, 100, "float16"), quantized(rng, "mxfp4", 20, 100)
    assert bool(library(job_of(a, b, "float16"), b=prepared(b))) == by_library
    assert sorted(given_back) == sorted(taken)
    assert len(taken) == 1 + by_library
