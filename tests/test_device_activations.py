# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels' activations, built for the host, equal the reference bit for bit."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fp4kit.cuda import activations as cuda_activations
from fp4kit.cuda import launch as cuda_launch
from fp4kit.cuda.compile import kernel_directory, options
from fp4kit.cuda.geometry import THREADS
from fp4kit.reference import activations, codecs, scaling
from fp4kit.reference.activations import ACTIVATIONS, DERIVATIVES

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to build the headers with")
SUFFIX = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
#: What the library chooses for each piece, and the form for any value everywhere.
FORMS = {"chosen": 0, "any": 1}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    output = tmp_path_factory.mktemp("host") / "activations.so"
    defines = [option for option in options(9, 0) if option.startswith("-D")]
    source = Path(__file__).parent / "device_activations_host.cpp"
    command = [
        *(COMPILER, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        *("-ffp-contract=off", "-shared", "-fPIC", "-x", "c++", f"-I{kernel_directory()}"),
        *(*defines, str(source), "-o", str(output)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(output))
    loaded.wrong_reciprocals.restype = loaded.different_logistics.restype = ctypes.c_longlong
    return loaded


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def check(library, name, dtype, gate, factor):
    """Raw arrays of whole pieces, as the kernels take them."""
    with scaling.quiet():
        wide, other = (codecs.to_float32(values, dtype) for values in (gate, factor))
        if name == "swiglu":
            result = activations.activation(name, np.concatenate([wide, other]), None)
        elif name in DERIVATIVES:
            result = activations.activation(name, other, wide)
        else:
            result = activations.activation(name, wide, None)
        expected = codecs.from_float32(result, dtype)
    unsigned = f"u{gate.dtype.itemsize}"
    for form, number in FORMS.items():
        found = np.empty_like(gate)
        getattr(library, f"activate_{SUFFIX[dtype]}")(
            ctypes.c_int(ACTIVATIONS.index(name)),
            ctypes.c_longlong(gate.nbytes // 16),
            ctypes.c_int(number),
            *map(pointer, (gate, factor, found)),
        )
        np.testing.assert_array_equal(found.view(unsigned), expected.view(unsigned), form)


def raw(bits, dtype):
    """Bit patterns as raw elements of a type."""
    patterns = np.ascontiguousarray(bits)
    return patterns if dtype == "bfloat16" else patterns.view(dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_16_bit_pattern(library, name, dtype):
    """In order, so that whole pieces are of moderate size, and shuffled; NaN included."""
    rng = np.random.default_rng(0)
    patterns = np.arange(1 << 16, dtype=np.uint16)
    moderate = raw(rng.integers(0x3000, 0x4800, 1 << 16, np.uint16), dtype)
    check(library, name, dtype, raw(patterns, dtype), moderate)
    if name not in cuda_activations.WITH_FACTOR:
        return
    check(library, name, dtype, moderate, raw(patterns, dtype))
    for factor in (*raw(rng.permutation(patterns)[:20], dtype), raw(patterns[:1], dtype)[0]):
        check(library, name, dtype, raw(patterns, dtype), np.full(1 << 16, factor))
    both = [raw(rng.permutation(patterns), dtype) for _ in range(2)]
    check(library, name, dtype, *both)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float32(library, name):
    rng = np.random.default_rng(1)
    count = 1 << 18
    any_bits = [
        rng.integers(0, 1 << 32, count, np.uint32, endpoint=False).view(np.float32)
        for _ in range(2)
    ]
    check(library, name, "float32", *any_bits)
    check(library, name, "float32", *map(np.sort, any_bits))
    scale = rng.choice(np.array([1e-42, 1e-3, 1, 10], np.float32), count)
    normal = [(rng.standard_normal(count) * scale).astype(np.float32) for _ in range(2)]
    check(library, name, "float32", *normal)


@pytest.mark.parametrize("dtype", SUFFIX)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_numbers_around_the_limits(library, name, dtype):
    """Pieces of one magnitude, or with one element of another, on either side of each limit."""
    top = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    limits = codecs.from_float32(np.array([9.5, 80, 20, 87.3, 88.7, 150], np.float32), dtype)
    unsigned = np.dtype(f"u{limits.itemsize}")
    centres = [*limits.view(unsigned).tolist(), top, 2]
    steps = np.arange(-2, 3)
    values = np.concatenate([np.array(centre + steps, unsigned) for centre in centres])
    values = np.concatenate([values, values | unsigned.type(1 << (8 * limits.itemsize - 1))])
    piece = 16 // limits.itemsize
    ones = codecs.from_float32(np.ones(values.size * piece, np.float32), dtype).view(unsigned)
    same, single = np.repeat(values, piece), ones.copy()
    single[piece - 1 :: piece] = values
    for gate in (same, single):
        check(library, name, dtype, raw(gate, dtype), raw(ones, dtype))
        check(library, name, dtype, raw(ones, dtype), raw(gate, dtype))


def test_both_forms_of_the_logistic_function(library):
    """All floats up to 80, in steps that a test has time for."""
    end = int(np.float32(80).view(np.uint32)) + 1
    assert library.different_logistics(*map(ctypes.c_uint32, (0, end, 1021))) == 0
    assert library.different_logistics(*map(ctypes.c_uint32, (end - 1, end, 1))) == 0


def test_reciprocals_do_not_depend_on_the_guess(library):
    """But for the significand of all ones, for which compilers trust the hardware's as well."""
    last = np.zeros(1, np.uint32)
    assert library.wrong_reciprocals(pointer(last)) == 1
    assert last[0] == (1 << 23) - 1


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", SUFFIX)
def test_launches_cover_all_elements(name, dtype):
    """No more blocks than there are tiles, and the division is right for every index of a tile."""
    for rows, width in ((1, 1), (3, 8), (1000, 4096), (1025, 72), (1 << 20, 1 << 14)):
        for vector in (False, True):
            if vector and not cuda_activations.can_vector(name, width, dtype):
                continue
            launch = cuda_activations.activate_launch(name, dtype, rows, width, vector)
            size, row, magic, shift = launch.scalars
            unit = 16 // cuda_launch.ITEM_SIZES[dtype] if vector else 1
            covered = cuda_activations._unroll(name, vector) * THREADS
            (blocks,) = launch.grid
            assert size == rows * width
            assert (blocks - 1) * covered < max(1, size // unit) <= blocks * covered
            if name == "swiglu" and magic:
                last = blocks * covered - 1
                for place in {0, row - 1, row, 7 * row - 1, last - last % row, last}:
                    assert place * magic >> shift == place // row or place > last
        sums = cuda_activations.column_sums_launch(name, dtype, rows, width, True)
        across = -(-width * cuda_launch.ITEM_SIZES[dtype] // 128)
        assert sums.grid == (-(-rows // 1024) * across,)
        assert sums.scalars == (rows, width, width * (1 + (name == "swiglu")), across)
