# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The calls of cuBLAS, with a library of the same functions on the host in its place."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fp4kit.cuda import blas
from fp4kit.cuda.compile import kernel_directory
from fp4kit.formats import DTYPES, cuda_defines
from fp4kit.reference import codecs

COMPILER = shutil.which("g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no g++ to build the library with")
    output = tmp_path_factory.mktemp("blas") / "fake.so"
    source = Path(__file__).parent / "fake_blas.cpp"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{kernel_directory()}"]
    threads = "-DFP4KIT_THREADS=256"
    command = [COMPILER, *options, *cuda_defines(), threads, str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(output))


@pytest.fixture
def gemm(library, monkeypatch):
    monkeypatch.setattr(blas, "_found", lambda: (library, "a fake"))
    monkeypatch.setattr(blas, "_handle", blas._handle.__wrapped__)
    return blas.Gemm(0, 1, 256)


def matrix_of(array, dtype):
    return blas.Matrix(array.ctypes.data, dtype, array.shape[1])


@pytest.mark.parametrize("has_factor", [False, True])
@pytest.mark.parametrize("result", ["the same", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_product(dtype, result, has_factor, gemm):
    rng = np.random.default_rng(1)
    values = [rng.integers(-4, 5, shape).astype(np.float32) for shape in ((3, 24), (5, 24))]
    a, b = (codecs.from_float32(one, dtype) for one in values)
    out_dtype = dtype if result == "the same" else result
    # Rows of the result are longer than what is written.
    before = codecs.from_float32(np.full((3, 9), 99, np.float32), out_dtype)
    out = before.copy()
    factor = np.array([0.5, 0], np.float32)
    where = factor.ctypes.data if has_factor else 0
    matrices = [matrix_of(a, dtype), matrix_of(b, dtype), matrix_of(out, out_dtype)]
    # Fewer of the depth than there are.
    gemm.multiply(*matrices, blas.Shape(3, 5, 20), where)
    wanted = values[0][:, :20] @ values[1][:, :20].T * (0.5 if has_factor else 1)
    np.testing.assert_array_equal(codecs.to_float32(out, out_dtype)[:, :5], wanted)
    np.testing.assert_array_equal(out[:, 5:], before[:, 5:])


def test_refusals_are_errors(gemm):
    nothing = blas.Matrix(0, "float16", 8)
    with pytest.raises(blas.BlasError, match="cublasGemmEx returned cuBLAS status 3"):
        # float16 results of float32 operands.
        gemm.multiply(*[blas.Matrix(0, "float32", 8)] * 2, nothing, blas.Shape(0, 0, 8), 0)


def test_a_missing_library_says_so(monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")

    def fails(name):
        raise pathfinder.DynamicLibNotFoundError("no such file\nand much more")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", fails)
    monkeypatch.setattr(blas, "_found", blas._found.__wrapped__)
    assert not blas.is_available()
    assert blas.description() == (
        "not found (no such file); kernels of fp4kit's own multiply instead"
    )


def test_a_library_is_described(library, monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")
    found = SimpleNamespace(abs_path=library._name)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: found)
    monkeypatch.setattr(blas, "_found", blas._found.__wrapped__)
    assert blas.is_available()
    assert blas.description() == "13.14.15, for products of many rows"
