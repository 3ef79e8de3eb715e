# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels' headers, built for the host, equal the reference for every bit pattern.

This runs the software conversions that GPUs below the hardware ones use; the instructions
themselves are compared on a GPU (test_parity.py).
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fp4kit import layout
from fp4kit.backend.jobs import Job
from fp4kit.cuda import launch as cuda_launch
from fp4kit.cuda.compile import kernel_directory, options
from fp4kit.formats import (
    ALL_RECIPES,
    BLOCK_FORMATS,
    DTYPES,
    E2M1,
    E4M3,
    E5M2,
    SCALE_LAYOUTS,
    SCALE_RULES,
    SECOND_LEVEL_SCALES,
)
from fp4kit.reference import codecs, scaling
from fp4kit.reference.backend import ReferenceBackend
from sample_plans import sample_plan

ELEMENTS = (E2M1, E4M3, E5M2)
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to build the headers with")
VARIANTS = [(recipe, True) for recipe in ALL_RECIPES.values()] + [
    (recipe, False) for recipe in ALL_RECIPES.values() if recipe.optional_second_level
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    output = tmp_path_factory.mktemp("host") / "numerics.so"
    defines = [option for option in options(9, 0) if option.startswith("-D")]
    source = Path(__file__).parent / "device_numerics_host.cpp"
    command = [
        *(COMPILER, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
        *("-ffp-contract=off", "-shared", "-fPIC", "-x", "c++", f"-I{kernel_directory()}"),
        *(*defines, str(source), "-o", str(output)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(output))
    for function in (loaded.divide, loaded.wrong_quotients):
        function.restype = ctypes.c_longlong
    return loaded


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def size(array):
    return ctypes.c_longlong(len(array))


def around(values, steps=3):
    """float32 values and their neighbours on both sides, with both signs."""
    bits = np.unique(np.abs(np.asarray(values, np.float32))).view(np.uint32).astype(np.int64)
    near = (bits[:, None] + np.arange(-steps, steps + 1)).ravel()
    near = near[(near >= 0) & (near <= 0x7F800000)].astype(np.uint32).view(np.float32)
    return np.concatenate([near, -near])


def every_kind_of_float():
    """All bfloat16 and float16 patterns, every boundary of every type, and random bits."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(1)
    random = rng.integers(0, 1 << 32, 400_000, dtype=np.uint64).astype(np.uint32)
    pieces = [
        codecs.bfloat16_bits_to_float32(patterns),
        patterns.view(np.float16).astype(np.float32),
        random.view(np.float32),
        rng.normal(0, 4, 100_000).astype(np.float32),
        around([np.float32(2.0) ** e for e in range(-149, 128)]),
        np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32),
    ]
    for element in ELEMENTS:
        table = element.magnitudes
        pieces += [around(table), around((table[:-1] + table[1:]) / np.float32(2))]
    return np.concatenate(pieces)


def assert_same_floats(got, wanted):
    """Equal bits, but any NaN equals any NaN."""
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


@pytest.mark.parametrize("number", range(3), ids=[element.name for element in ELEMENTS])
def test_encode(library, number):
    with np.errstate(all="ignore"):
        values = np.ascontiguousarray(every_kind_of_float())
        wanted = codecs.encode(values, ELEMENTS[number])
    got = np.empty(len(values), np.uint8)
    library.encode(number, size(values), pointer(values), pointer(got))
    np.testing.assert_array_equal(got, wanted)


def test_decode(library):
    got = np.empty(256, np.float32)
    codes = np.arange(256, dtype=np.uint8)
    for number, element in enumerate(ELEMENTS):
        library.decode(number, pointer(got))
        assert_same_floats(got, codecs.decode(codes & np.uint8((1 << element.bits) - 1), element))
    library.decode(3, pointer(got))
    assert_same_floats(got, codecs.decode_e8m0(codes))
    library.decode(4, pointer(got))
    assert_same_floats(got, scaling.mx_element_factor(codes))


def test_16_bit_types(library):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    widened = np.empty(1 << 16, np.float32)
    library.half_to_floats(size(patterns), pointer(patterns), pointer(widened))
    with np.errstate(all="ignore"):
        assert_same_floats(widened, patterns.view(np.float16).astype(np.float32))
        values = every_kind_of_float()
        halves = np.unique(np.abs(patterns.view(np.float16).astype(np.float32)))
        halves = halves[np.isfinite(halves)]
        middle = (halves[1:] + halves[:-1]) / 2
        values = np.concatenate([values, around(middle, 1), [65519.9, 65520.0]]).astype(np.float32)
        wanted = [codecs.from_float32(values, "float16").view(np.uint16)]
        wanted.append(codecs.from_float32(values, "bfloat16"))
    nan = np.isnan(values)
    wanted[0][nan] = 0x7E00
    for number in (0, 1):
        got = np.empty(len(values), np.uint16)
        library.floats_to_16(number, size(values), pointer(values), pointer(got))
        np.testing.assert_array_equal(got, wanted[number])


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_mx_block_scale(library, rule):
    with np.errstate(all="ignore"):
        amax = np.abs(every_kind_of_float())
        amax = amax[~np.isnan(amax)]
        for number, element in enumerate(ELEMENTS):
            got = np.empty(len(amax), np.uint8)
            arguments = size(amax), pointer(amax), pointer(got)
            library.block_scales_mx(number, SCALE_RULES.index(rule), *arguments)
            np.testing.assert_array_equal(got, scaling.mx_block_scale(amax, element, rule))


def edge_scales():
    """Second-level values: ordinary ones, and everything around the ends of the range."""
    rng = np.random.default_rng(2)
    ends = [7.8993e-36, 2688.0, 1.0, 6.0, 1e-12, 3e38, 1.2e-38, 1e-40, 7.6e35, 2.0**-128, 1e-45]
    ordinary = np.exp(rng.uniform(-80, 80, 3000)).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -3.0], np.float32)
    return np.concatenate([around(ends), ordinary, special]).astype(np.float32)


@pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=lambda recipe: recipe.name)
def test_second_level(library, recipe):
    amax = edge_scales()
    for number, dtype in enumerate(DTYPES):
        got = np.empty(len(amax), np.float32)
        arguments = size(amax), pointer(amax), pointer(got)
        library.second_levels(number, recipe.index, *arguments)
        with scaling.quiet():
            assert_same_floats(got, scaling.second_level_from_amax(amax, recipe, dtype))


def test_convert_second_level(library):
    values = edge_scales()
    for i, source in enumerate(SECOND_LEVEL_SCALES):
        for k, target in enumerate(SECOND_LEVEL_SCALES):
            got = np.empty(len(values), np.float32)
            library.convert_levels(i, k, size(values), pointer(values), pointer(got))
            with scaling.quiet():
                assert_same_floats(got, scaling.convert_second_level(values, source, target))


def test_recipe_facts(library):
    for recipe in ALL_RECIPES.values():
        wanted = (
            recipe.divides
            + 2 * recipe.keeps_negative_zero
            + 4 * recipe.decodes_negative_zero
            + 8 * recipe.rounds_factor
            + 16 * SECOND_LEVEL_SCALES.index(recipe.keeps)
        )
        assert library.recipe_flags(recipe.index) == wanted, recipe.name


def hard_blocks(dtype, block_size, second):
    """Blocks whose amaxes and elements meet every edge, one second-level value each."""
    rng = np.random.default_rng(3)
    count = len(second)
    values = rng.standard_normal((count, block_size)).astype(np.float32)
    # Magnitudes near the second level, far below it and anywhere.
    reach = np.where(np.isfinite(second) & (second != 0), np.abs(second), 1).astype(np.float32)
    wide = np.exp(rng.uniform(-85, 85, count)).astype(np.float32)
    kind = rng.integers(0, 4, count)
    near = reach * rng.uniform(0.1, 1, count).astype(np.float32)
    size_of = np.select([kind == 0, kind == 1, kind == 2], [near, near * 1e-3, near * 1e-6], wide)
    values *= size_of[:, None].astype(np.float32)
    spots = rng.random(values.shape)
    values[spots < 0.02] = 0.0
    values[(spots >= 0.02) & (spots < 0.04)] = -0.0
    values[rng.random(count) < 0.02] = 0.0
    rare = rng.random(values.shape)
    values[rare < 0.002] = np.nan
    values[(rare >= 0.002) & (rare < 0.003)] = -np.nan
    values[(rare >= 0.003) & (rare < 0.004)] = np.inf
    values[(rare >= 0.004) & (rare < 0.005)] = -np.inf
    values[rng.random(count) < 0.01] = np.nan
    # E2M1 ties, exact wherever the scale is a power of two.
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * (block_size // 8), np.float32)
    tied = rng.random(count) < 0.1
    values[tied] = ties * rng.choice([-1, 1], block_size).astype(np.float32)
    return codecs.from_float32(values, dtype)


def run_blocks(library, dtype, plan, x, second):
    count = plan.rows
    words = plan.format.block_size * plan.format.element.bits // 32
    byte, codes = np.empty(count, np.uint8), np.empty((count, words), np.uint32)
    factor, first, last = (np.empty(count, np.float32) for _ in range(3))
    decoded = np.empty((count, plan.format.block_size), np.float32)
    error = library.run(
        DTYPES.index(dtype),
        list(BLOCK_FORMATS).index(plan.format.name),
        plan.recipe.index if plan.recipe else 0,
        int(second is not None),
        size(byte),
        pointer(x),
        pointer(second) if second is not None else None,
        SCALE_RULES.index(plan.scale_rule) if plan.scale_rule else 0,
        *(pointer(array) for array in (byte, factor, codes, first, last, decoded)),
    )
    assert error == 0
    return byte, factor, codes.view(np.uint8), first, last, decoded


def check_blocks(library, dtype, plan, x, second):
    reference = ReferenceBackend()
    byte, factor, codes, first, last, decoded = run_blocks(library, dtype, plan, x, second)
    packed = np.empty(plan.packed_shape, np.uint8)
    block_scale = np.empty(plan.scale_shape, np.uint8)
    job = Job(plan, x, dtype, second, packed, block_scale)
    reference.quantize(job)
    np.testing.assert_array_equal(byte, block_scale[:, 0])
    with scaling.quiet():
        if plan.recipe is None:
            assert_same_floats(factor, scaling.mx_element_factor(byte))
        else:
            column = None if second is None else second[:, None]
            rows = byte[:, None]
            wanted = scaling.nvfp4_element_factor(rows, plan.recipe, column)
            assert_same_floats(factor, np.ascontiguousarray(wanted[:, 0]))
            pair = scaling.nvfp4_decode_factors(rows, plan.recipe, column, dtype)
            for got, side in zip((first, last), pair, strict=True):
                assert_same_floats(got, np.ascontiguousarray(side[:, 0]))
    np.testing.assert_array_equal(codes, packed)
    raw = np.empty_like(x)
    reference.dequantize(job, raw, dtype)
    assert_same_floats(decoded, codecs.to_float32(raw, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("recipe", "has_second"), VARIANTS, ids=lambda v: getattr(v, "name", v))
def test_nvfp4_blocks(library, dtype, recipe, has_second):
    second = edge_scales()
    if recipe.keeps != "amax":
        with scaling.quiet():
            second = scaling.second_level_from_amax(second, recipe, dtype)
        second = np.concatenate([second, edge_scales()])
    second = np.tile(second, 4)
    spec = BLOCK_FORMATS["nvfp4"]
    with np.errstate(all="ignore"):
        reach = second if recipe.keeps == "amax" else np.full_like(second, 6)
        x = hard_blocks(dtype, spec.block_size, reach)
    plan = sample_plan(
        len(x),
        spec.block_size,
        spec.name,
        recipe=recipe.name,
        second_level="tensor" if has_second else "none",
    )
    check_blocks(library, dtype, plan, x, second if has_second else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_mx_blocks(library, dtype, rule, name):
    spec = BLOCK_FORMATS[name]
    with np.errstate(all="ignore"):
        x = hard_blocks(dtype, spec.block_size, np.tile(edge_scales(), 2))
    check_blocks(
        library, dtype, sample_plan(len(x), spec.block_size, spec.name, scale_rule=rule), x, None
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "recipe", "has_second"),
    [("nvfp4", *variant) for variant in VARIANTS]
    + [(name, None, False) for name in ("mxfp4", "mxfp8", "mxfp8_e5m2")],
    ids=lambda v: getattr(v, "name", v),
)
def test_any_codes_under_any_scale_byte(library, dtype, name, recipe, has_second):
    """Quantize writes no negative or NaN scale, but files may hold them; results to the bit."""
    rng = np.random.default_rng(6)
    spec = BLOCK_FORMATS[name]
    second = np.tile(np.concatenate([edge_scales()[::17], edge_scales()[-6:]]), 256)
    count = len(second)
    second = np.ascontiguousarray(second.reshape(256, -1).T.ravel())
    byte = (np.arange(count) % 256).astype(np.uint8)
    plan = sample_plan(
        count,
        spec.block_size,
        spec.name,
        recipe=getattr(recipe, "name", None),
        second_level="tensor" if has_second else "none",
    )
    packed = rng.integers(0, 256, plan.packed_shape, dtype=np.uint8)
    if spec.codes_per_byte == 2:
        packed[:, :8] = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)
        packed = np.take_along_axis(
            packed, rng.permuted(np.tile(np.arange(packed.shape[1]), (count, 1)), axis=1), 1
        )
    bits = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}[dtype]
    got = np.empty((count, spec.block_size), bits)
    error = library.decode_given(
        DTYPES.index(dtype),
        list(BLOCK_FORMATS).index(name),
        recipe.index if recipe else 0,
        int(has_second),
        *(size(byte), pointer(second), pointer(byte), pointer(packed), pointer(got)),
    )
    assert error == 0
    raw = got.copy() if dtype == "bfloat16" else got.copy().view(dtype)
    values = second if has_second else None
    job = Job(plan, None, dtype, values, packed, byte[:, None])
    ReferenceBackend().dequantize(job, raw, dtype)
    wanted = raw.view(bits).copy()
    canonical = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}[dtype]
    wanted[np.isnan(codecs.to_float32(raw, dtype))] = canonical
    np.testing.assert_array_equal(got, wanted)


def test_words_with_nan_codes_are_found(library):
    """Quantize never writes them into finite data, but files may hold them."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (1 << 16, 4), dtype=np.uint8)
    for number, element in enumerate(ELEMENTS[1:]):
        got = np.empty(len(codes), np.uint8)
        library.words_with_nan(number, size(codes), pointer(codes), pointer(got))
        np.testing.assert_array_equal(got, np.isnan(codecs.decode(codes, element)).any(axis=1))


@pytest.mark.parametrize("layout_name", SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1), (129, 5), (300, 8), (9, 3)])
def test_scale_offsets(library, layout_name, shape):
    rows, cols = shape
    stored_cols = layout.padded_scale_shape(rows, cols, layout_name)[1]
    got = np.empty((rows, cols), np.int64)
    number = SCALE_LAYOUTS.index(layout_name)
    sizes = (ctypes.c_longlong(value) for value in (rows, cols, stored_cols))
    library.scale_offsets(number, *sizes, pointer(got))
    np.testing.assert_array_equal(got, layout.scale_offsets(rows, cols, layout_name))


def test_fast_division(library):
    rng = np.random.default_rng(4)
    largest = 2**31 - 1
    divisors = [1, 2, 3, 5, 7, 448, 1023, 1024, 65537, 2**30, 2**30 + 1, largest - 1, largest]
    divisors += rng.integers(1, largest, 200).tolist()
    for divisor in (*divisors, 2**31, 2**40):
        magic, shift = cuda_launch.fast_division(divisor, largest)
        assert 0 < magic < 2**32
        edges = [0, 1, divisor - 1, divisor, divisor + 1, largest // divisor * divisor, largest]
        for n in [*edges, *rng.integers(0, largest, 50).tolist()]:
            if n <= largest:
                arguments = (ctypes.c_longlong(int(v)) for v in (n, divisor, magic, shift))
                assert library.divide(*arguments) == n // divisor
    magic, shift = cuda_launch.fast_division(7, 2**33)
    arguments = (ctypes.c_longlong(v) for v in (2**33, 7, magic, shift))
    assert library.divide(*arguments) == 2**33 // 7


def test_quotients_by_six(library):
    """Of all significands, below the smallest scale's amax and above it, and the last floats."""
    for first, count in ((0x3C000000, 8 << 23), (0x7F000000, 0x7FFFFF)):
        assert library.wrong_quotients(ctypes.c_uint(first), ctypes.c_uint(count)) == 0
