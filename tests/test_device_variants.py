# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels' arithmetic of variants, built for the host, equals the reference bit for bit."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fp4kit.cuda.compile import kernel_directory, options
from fp4kit.cuda.launch import seed_arguments
from fp4kit.formats import E2M1, E4M3
from fp4kit.options import DEFAULT_SIGN_MASK, SEARCH_ERRORS
from fp4kit.reference import codecs, philox, rotation, scale_search, scaling
from fp4kit.scheme import Scheme
from sample_plans import sample_plan

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to build the headers with")
GROUPS = 4000


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    output = tmp_path_factory.mktemp("host") / "variants.so"
    defines = [option for option in options(9, 0) if option.startswith("-D")]
    source = Path(__file__).parent / "device_variants_host.cpp"
    command = [
        *(COMPILER, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        *("-ffp-contract=off", "-shared", "-fPIC", "-x", "c++", f"-I{kernel_directory()}"),
        *(*defines, str(source), "-o", str(output)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(output))


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def seed_words(key, stream):
    """What kernels take of a seed."""
    plan = sample_plan(16, 16, rounding="stochastic")
    return np.array(seed_arguments(plan, (key, stream)), np.int64)


def groups_of_numbers():
    """Groups of many magnitudes, with zeros, subnormals, ties and what is not finite."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((GROUPS, 16)).astype(np.float32)
    values[::3] *= np.ldexp(np.float32(1), rng.integers(-140, 120, (len(values[::3]), 1)))
    values[1::7] = np.round(values[1::7] * 4) / 4
    values[5] = 0
    values[6, 3] = np.inf
    values[7, 4] = np.nan
    values[8, ::2] = -0.0
    return values


def bits(array):
    """Bit patterns with every NaN the same."""
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


@pytest.mark.parametrize("rounding", ["none", "bf16"])
@pytest.mark.parametrize("mask", [0, DEFAULT_SIGN_MASK, 0xFFFF, 1])
def test_rotation(library, mask, rounding):
    values = groups_of_numbers()
    found = np.empty_like(values)
    library.rotate(
        ctypes.c_longlong(GROUPS),
        pointer(values),
        ctypes.c_uint32(mask),
        ctypes.c_int(rounding == "bf16"),
        pointer(found),
    )
    with scaling.quiet():
        expected = rotation.rotate(values, mask, rounding)
    np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize(("key", "stream"), [(0, 0), (1, 0), (2**64 - 1, 2**32 - 1), (77, 5)])
@pytest.mark.parametrize("direction", [0, 1])
def test_random_numbers(library, key, stream, direction):
    found = np.empty((GROUPS, 16), np.uint32)
    library.random_bits(
        ctypes.c_longlong(GROUPS),
        ctypes.c_ulonglong(0),
        pointer(seed_words(key, stream)),
        ctypes.c_uint32(direction),
        pointer(found),
    )
    expected = philox.random_bits(GROUPS, (key, stream), direction)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("careful", [True, False])
def test_stochastic_rounding(library, careful):
    rng = np.random.default_rng(6)
    scaled = np.concatenate(
        [
            rng.uniform(-8, 8, 200_000).astype(np.float32),
            np.ldexp(rng.uniform(-1, 1, 20_000), rng.integers(-140, 0, 20_000)).astype(np.float32),
            np.arange(-7, 7.25, 0.25, np.float32),
            np.array([0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-42, -1e-42], np.float32),
        ]
    )
    if not careful:
        scaled = scaled[np.abs(scaled) < 8]
    scaled = np.tile(scaled, 2)
    random = rng.integers(0, 2**24, len(scaled), np.uint32)
    # Both ends, and exactly what is missing to the code above, or one less.
    random[1::8], random[2::8] = 0, 2**24 - 1
    with np.errstate(invalid="ignore", over="ignore"):
        fraction = np.nan_to_num(np.abs(scaled[3::8]) * 2 % 1)
    random[3::8] = (2**24 - np.floor(fraction * 2**24)).astype(np.uint32) & 0xFFFFFF
    random[4::8] = (random[3::8][: len(random[4::8])] - np.uint32(1)) & np.uint32(0xFFFFFF)
    scaled[4::8] = scaled[3::8][: len(scaled[4::8])]
    found = np.empty(len(scaled), np.uint8)
    library.stochastic(
        ctypes.c_longlong(len(scaled)),
        pointer(scaled),
        pointer(random),
        ctypes.c_int(careful),
        pointer(found),
    )
    np.testing.assert_array_equal(found, philox.round_stochastically(scaled, random))


@pytest.mark.parametrize("ordinary", [True, False])
def test_stochastic_groups(library, ordinary):
    values = groups_of_numbers()
    amax = np.nanmax(np.abs(np.where(np.isfinite(values), values, 0)), axis=1)
    largest = np.float32(6.3 if ordinary else 11)
    with scaling.quiet():
        factor = np.where(amax > 1e-30, largest / amax, 1).astype(np.float32)
    found = np.empty((GROUPS, 2), np.uint32)
    library.stochastic_groups(
        ctypes.c_longlong(GROUPS),
        pointer(values),
        pointer(factor),
        ctypes.c_int(ordinary),
        ctypes.c_ulonglong(0),
        pointer(seed_words(9, 0)),
        pointer(found),
    )
    with scaling.quiet():
        scaled = values * factor[:, None]
    code = philox.round_stochastically(scaled, philox.random_bits(GROUPS, (9, 0), 0))
    packed = code[:, ::2] | code[:, 1::2] << 4
    np.testing.assert_array_equal(found.view(np.uint8), packed)


@pytest.mark.parametrize("e4m3_max", [448, 256])
def test_decode_factors(library, e4m3_max):
    rng = np.random.default_rng(8)
    corners = [0, -0.0, 1e-45, 4.5e-36, 4.6e-36, 7.8e-36, 7.9e-36, 3.4e38, np.inf, np.nan, -6, 1536]
    ordinary = np.ldexp(rng.uniform(1, 2, 300), rng.integers(-149, 128, 300))
    second = np.concatenate([np.array(corners), ordinary]).astype(np.float32)
    found = np.empty((len(second), 256), np.float32)
    library.te_factors(
        ctypes.c_longlong(len(second)),
        pointer(second),
        ctypes.c_float(6 * e4m3_max),
        pointer(found),
    )
    q = codecs.decode(np.arange(256, dtype=np.uint8), E4M3)
    with scaling.quiet():
        expected = scaling.te_decode_factor(q[None], second[:, None], e4m3_max)
    np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("exponent", [-100, 0, 127])
def test_sixths(library, exponent):
    """Every mantissa: between these exponents nothing under- or overflows."""
    values = ((exponent + 127) << 23 | np.arange(1 << 23, dtype=np.uint32)).view(np.float32)
    found = np.empty_like(values)
    library.sixths(ctypes.c_longlong(len(values)), pointer(values), pointer(found))
    np.testing.assert_array_equal(found, values / np.float32(6))


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("error", SEARCH_ERRORS)
@pytest.mark.parametrize("kind", ["four_over_six", "sweep"])
def test_search(library, kind, error, e4m3_max):
    values = groups_of_numbers()
    scheme = Scheme("nvfp4", scale_search=kind, search_error=error, e4m3_max=e4m3_max)
    rng = np.random.default_rng(7)
    with scaling.quiet():
        amax = np.nanmax(np.abs(np.where(np.isnan(values), 0, values)), axis=1)
        # The tensor's amax is the block's, or up to 2^20 times that.
        second = amax * np.ldexp(np.float32(1), rng.integers(0, 20, GROUPS)).astype(np.float32)
        second = second.astype(np.float32)
        expected = scale_search.search(
            values[:, None, :], amax[:, None].astype(np.float32), second[:, None], scheme
        )
    byte = np.empty(GROUPS, np.uint8)
    factor = np.empty(GROUPS, np.float32)
    codes = np.empty((GROUPS, 2), np.uint32)
    library.search_scales(
        ctypes.c_longlong(GROUPS),
        pointer(values),
        pointer(second),
        ctypes.c_float(6 * e4m3_max),
        ctypes.c_int(SEARCH_ERRORS.index(error)),
        ctypes.c_int(1 if kind == "four_over_six" else 2),
        pointer(byte),
        pointer(factor),
        pointer(codes),
    )
    np.testing.assert_array_equal(byte, expected.byte[:, 0])
    np.testing.assert_array_equal(bits(factor), bits(expected.factor[:, 0]))
    with scaling.quiet():
        code = codecs.encode(values * factor[:, None], E2M1)
    np.testing.assert_array_equal(codes.view(np.uint8), code[:, ::2] | code[:, 1::2] << 4)
