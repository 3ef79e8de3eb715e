# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every backend equals the reference, byte for byte and for every float input.

The full product of formats, recipes, rules, layouts, nibble orders, dtypes and shapes would take
minutes. Covered are: every format with every recipe or rule, with every dtype, with every shape;
each of these in two of the six (layout, nibble order) pairs, which pair depending on the shape,
so that every recipe and rule meets every pair. Functions of two dtypes are compiled for nine pairs
by the CPU backend, seconds each: three pairs that hold every dtype on either side always run here,
the others are marked slow (test_api_*.py and test_arrays.py run equal dtypes). The values of each
array mix ordinary blocks, zeros, ties, wide ranges and denormals; raw bit patterns (NaN and
infinity too) have tests of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

import fp4kit
from fp4kit.formats import (
    ALL_FORMATS,
    ALL_RECIPES,
    DTYPES,
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
)
from fp4kit.metrics import error_sums

F32 = np.float32
BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

#: Every way to choose a scale: name -> options of quantize.
OPTIONS: dict[str, dict[str, Any]] = {
    f"nvfp4-{name}": {"format": "nvfp4", "recipe": name} for name in ALL_RECIPES
}
OPTIONS |= {
    f"nvfp4-{name}-one_level": {"format": "nvfp4", "recipe": name, "second_level": False}
    for name, recipe in ALL_RECIPES.items()
    if recipe.optional_second_level
}
OPTIONS |= {
    f"{spec.name}-{rule}": {"format": spec.name, "scale_rule": rule}
    for spec in ALL_FORMATS.values()
    if not spec.has_second_level
    for rule in SCALE_RULES
}
TWO_LEVEL = [
    name for name in OPTIONS if name.startswith("nvfp4") and not name.endswith("one_level")
]
SHAPES = (
    (1, 16),
    (3, 48),
    (129, 80),
    (0, 64),
    (4, 0),
    (0, 0),
    (2, 3, 32),
    (2, 0, 64),
    (64,),
    (0,),
    (5, 3),
    (33, 16),
    (512, 60),
    (1, 1504),
    (3, 1504),
    (5, 2048),
)
PAIRS = tuple(itertools.product(SCALE_LAYOUTS, NIBBLE_ORDERS))
#: (input dtype, output dtype): see the module's docstring.
OUTPUT_OF = {"float32": "float16", "float16": "bfloat16", "bfloat16": "float32"}
DTYPE_PAIRS = [
    pytest.param(*pair, marks=() if OUTPUT_OF[pair[0]] == pair[1] else pytest.mark.slow)
    for pair in itertools.product(DTYPES, DTYPES)
]
#: What a second-level scale may be, however senseless.
EXTREMES = np.array(
    [
        6,
        1,
        0,
        -0.0,
        1e-45,
        1e-40,
        7.8e-36,
        7.9e-36,
        1e38,
        7.7e35,
        3.4e38,
        np.inf,
        np.nan,
        -6,
        -np.inf,
        2688,
        0.0022321429,
    ],
    F32,
)


def generator(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def values(shape: tuple[int, ...], dtype: str, *key: object) -> np.ndarray:
    """Finite values of many kinds, a different one in each stretch of 16 elements."""
    rng = generator(shape, dtype, *key)
    size = math.prod(shape)
    normal = rng.normal(size=size)
    stretch = np.arange(size) // 16 % 7
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0.0, -0.0], size)
    wide = normal * 2.0 ** rng.integers(-12, 8, size)
    tiny = normal * 2.0**-14
    choices = [normal, ties * rng.choice([-1, 1], size), wide, tiny, normal * 0, normal, normal * 9]
    with np.errstate(over="ignore"):
        return np.choose(stretch, choices).astype(F32).astype(NUMPY[dtype]).reshape(shape)


def raw_bits(shape: tuple[int, ...], dtype: str, *key: object) -> np.ndarray:
    """Any bit pattern: NaN of any payload, infinity, denormals. Some rows stay finite."""
    rng = generator(shape, dtype, "bits", *key)
    unsigned = BITS[dtype]
    bits = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
    # Rows of one magnitude each: elsewhere the largest exponent hides everything else.
    exponent_bits = {"float32": 8, "float16": 5, "bfloat16": 8}[dtype]
    width = bits.dtype.itemsize * 8
    exponent = rng.integers(0, 1 << exponent_bits, (*shape[:-1], 1)).astype(unsigned)
    field = unsigned(((1 << exponent_bits) - 1) << (width - 1 - exponent_bits))
    focused = bits & ~field | (exponent << unsigned(width - 1 - exponent_bits))
    bits = np.where(rng.random((*shape[:-1], 1)) < 0.7, focused, bits).astype(unsigned)
    return bits.view(NUMPY[dtype])


# ------------------------------------------------------------------------------------------------
# Quantize
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_quantize(option, dtype, fast_backend, reference, assert_tensors):
    options = OPTIONS[option]
    for number, shape in enumerate(SHAPES):
        x = values(shape, dtype)
        for pair in (number % 6, (number * 5 + 3 + len(option)) % 6):
            layout, order = PAIRS[pair]
            extra = {"scale_layout": layout, "nibble_order": order, "pad": True}
            expected = reference.quantize(x, **options, **extra)
            assert_tensors(fast_backend.quantize(x, **options, **extra), expected)


def test_the_subset_meets_every_layout_and_order():
    for option in OPTIONS:
        met = set()
        for number in range(len(SHAPES)):
            met |= {number % 6, (number * 5 + 3 + len(option)) % 6}
        assert met == set(range(6))


@pytest.mark.parametrize("option", TWO_LEVEL)
def test_second_level_of_every_form(option, fast_backend, reference, assert_tensors):
    options = OPTIONS[option]
    direction = ALL_RECIPES[options["recipe"]].direction
    x = values((4, 6, 32), "bfloat16", "forms")
    name = {"amax": "amax", "decode": "decode_scale", "encode": "encode_scale"}[direction]
    for given_scale in (
        {"amax": 3.5},
        {"amax": np.array([3.5], F32)},
        {"amax": np.array(3.5, F32)},
        {"amax": np.array([1, 2, 0, 9], F32)},
        {"amax": np.linspace(0, 40, 24, dtype=F32)},
        {"amax": np.linspace(0, 40, 24, dtype=F32).reshape(4, 6)},
        {name: 0.75},
        {name: np.array([0.75], F32)},
        {name: np.array([[0.1], [0.2], [300], [0.0]], F32)},
        {"amax": EXTREMES[:12]},
        {name: EXTREMES[-12:]},
    ):
        expected = reference.quantize(x, **options, **given_scale)
        got = fast_backend.quantize(x, **options, **given_scale)
        assert_tensors(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_quantize_any_bits(option, dtype, fast_backend, reference, assert_tensors):
    options = OPTIONS[option]
    x = raw_bits((1024, 64), dtype, option)
    expected = reference.quantize(x, nonfinite="propagate", **options)
    assert_tensors(fast_backend.quantize(x, nonfinite="propagate", **options), expected)
    if option not in TWO_LEVEL:
        return
    # One scale per row: the extremes again and again, and any bits between.
    scales = raw_bits((1024, 1), "float32", option).ravel()
    scales[::3] = np.resize(EXTREMES, scales[::3].size)
    direction = ALL_RECIPES[options["recipe"]].direction
    for name in {"amax", f"{direction}_scale"} - {"amax_scale"}:
        expected = reference.quantize(x, nonfinite="propagate", **options, **{name: scales})
        got = fast_backend.quantize(x, nonfinite="propagate", **options, **{name: scales})
        assert_tensors(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", ALL_FORMATS)
def test_quantize_every_16_bit_input_as_a_block_amax(
    format, dtype, fast_backend, reference, assert_tensors
):
    bits = np.arange(65536, dtype=np.uint16)
    x = np.zeros((65536, 32), NUMPY[dtype])
    x[:, 3] = bits.view(NUMPY[dtype])
    x[:, 17] = bits.view(NUMPY[dtype])
    for rule in SCALE_RULES if format != "nvfp4" else (None,):
        options = {"format": format, "scale_rule": rule, "nonfinite": "propagate"}
        expected = reference.quantize(x, **options)
        assert_tensors(fast_backend.quantize(x, **options), expected)


# ------------------------------------------------------------------------------------------------
# Dequantize
# ------------------------------------------------------------------------------------------------


def any_tensor(option: str, shape: tuple[int, int], scales: int) -> fp4kit.QuantizedTensor:
    """A tensor of random bytes: every code, every scale byte, any second-level scale."""
    options = OPTIONS[option]
    spec = ALL_FORMATS[options["format"]]
    rng = generator(option, shape)
    rows, cols = shape
    packed = rng.integers(0, 256, (rows, spec.packed_cols(cols))).astype(np.uint8)
    scale = rng.integers(0, 256, (rows, spec.num_blocks(cols))).astype(np.uint8)
    second = {}
    if option in TWO_LEVEL:
        direction = ALL_RECIPES[options["recipe"]].direction
        count = scales or 1
        value = np.exp2(rng.uniform(-12, 12, count)).astype(F32)
        if scales:
            value[::2] = raw_bits((value[::2].size, 1), "float32", option).ravel()
            value[::3] = np.resize(EXTREMES, value[::3].size)
        second[direction if direction == "amax" else f"{direction}_scale"] = value
    return fp4kit.QuantizedTensor(
        packed,
        scale,
        spec.name,
        shape,
        recipe=options.get("recipe"),
        scale_rule=options.get("scale_rule"),
        **second,
    )


def laid_out(q: fp4kit.QuantizedTensor, layout: str, order: str) -> fp4kit.QuantizedTensor:
    """The same tensor in another scale layout and nibble order."""
    packed = q.packed
    if order == "high_first" and ALL_FORMATS[q.format].codes_per_byte == 2:
        packed = packed << np.uint8(4) | packed >> np.uint8(4)
    scale = fp4kit.swizzle(q.block_scale, layout, backend="reference")
    return dataclasses.replace(
        q, packed=packed, block_scale=scale, scale_layout=layout, nibble_order=order
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_dequantize_any_bytes(option, fast_backend, reference, assert_bits):
    for shape, scales in (((129, 80), 0), ((600, 64), 600), ((5, 3), 5), ((3, 1504), 3)):
        linear = any_tensor(option, shape, scales)
        for dtype in DTYPES:
            expected = reference.dequantize(linear, dtype)
            for layout, order in PAIRS:
                q = laid_out(linear, layout, order)
                what = f"{shape} {layout} {order} {dtype}"
                assert_bits(fast_backend.dequantize(q, dtype), expected, what)


@pytest.mark.parametrize("option", OPTIONS)
def test_dequantize_every_code_under_every_scale(option, fast_backend, reference, assert_bits):
    spec = ALL_FORMATS[OPTIONS[option]["format"]]
    codes = np.arange(256, dtype=np.uint8)
    packed = np.tile(codes, (256, 1))
    blocks = 256 * spec.codes_per_byte // spec.block_size
    scale = np.repeat(codes[:, None], blocks, axis=1)
    template = any_tensor(option, (1, spec.block_size), 0)
    q = dataclasses.replace(
        template, packed=packed, block_scale=scale, shape=(256, 256 * spec.codes_per_byte)
    )
    for dtype in DTYPES:
        expected = reference.dequantize(q, dtype)
        assert_bits(fast_backend.dequantize(q, dtype), expected, dtype)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 0 in shape])
def test_dequantize_empty(shape, backend, assert_bits):
    for option in ("nvfp4-te", "mxfp4-even", "mxfp8-rceil"):
        for layout in SCALE_LAYOUTS:
            x = np.zeros(shape, F32)
            q = backend.quantize(x, **OPTIONS[option], scale_layout=layout)
            assert q.packed.size == 0
            assert q.block_scale.size == 0
            for dtype in DTYPES:
                assert_bits(backend.dequantize(q, dtype), np.zeros(shape, NUMPY[dtype]))


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPE_PAIRS)
@pytest.mark.parametrize("option", OPTIONS)
def test_quantize_dequantize_is_dequantize_of_quantize(
    option, dtype, out_dtype, fast_backend, reference, assert_bits
):
    options = {**OPTIONS[option], "pad": True}
    for shape in SHAPES:
        x = values(shape, dtype, "qdq")
        expected = reference.dequantize(reference.quantize(x, **options), out_dtype)
        for backend in (reference, fast_backend):
            got = backend.call(fp4kit.quantize_dequantize, x, dtype=out_dtype, **options)
            assert_bits(got, expected, f"{backend.name} {shape} {dtype} {out_dtype}")
    x = raw_bits((512, 64), dtype, "qdq", option)
    options = {**options, "nonfinite": "propagate"}
    expected = reference.dequantize(reference.quantize(x, **options), out_dtype)
    got = fast_backend.call(fp4kit.quantize_dequantize, x, dtype=out_dtype, **options)
    assert_bits(got, expected, "any bits")


# ------------------------------------------------------------------------------------------------
# amax, swizzle, error sums
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(dtype, fast_backend, reference, assert_bits):
    shapes = [(), (0,), (1,), (3,), (17,), (5, 7), (3, 0), (2, 3, 5), (300_001,)]
    for shape in shapes:
        x = values(shape, dtype, "amax")
        assert_bits(fast_backend.call(fp4kit.amax, x), reference.call(fp4kit.amax, x), str(shape))
        assert reference.call(fp4kit.amax, x)[0] == np.abs(x.astype(F32)).max(initial=0)
    for number in range(20):
        x = raw_bits((number + 1, 37), dtype, "amax", number)
        assert_bits(fast_backend.call(fp4kit.amax, x), reference.call(fp4kit.amax, x))
    special = np.array([[np.nan, -np.inf], [np.nan, np.nan], [-0.0, np.nan], [-3, 2]], F32)
    for row in special.astype(NUMPY[dtype]):
        assert_bits(fast_backend.call(fp4kit.amax, row), reference.call(fp4kit.amax, row))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_swizzle(layout, fast_backend, reference, assert_bits):
    shapes = [(1, 1), (3, 3), (9, 1), (127, 7), (128, 4), (129, 5), (5, 128), (130, 47), (2, 3, 6)]
    for shape in [*shapes, (0, 4), (4, 0), (7,)]:
        scales = generator(shape).integers(1, 256, shape).astype(np.uint8)
        expected = reference.call(fp4kit.swizzle, scales, layout)
        assert_bits(fast_backend.call(fp4kit.swizzle, scales, layout), expected, str(shape))
        for backend in (reference, fast_backend):
            back = backend.call(fp4kit.unswizzle, expected, shape, layout)
            assert_bits(back, scales, f"{backend.name} {shape}")


def assert_sums(got: Any, want: Any) -> None:
    """Counts are equal, float64 sums agree to 1e-12 of the terms' size."""
    scale = {"sum_xy": math.sqrt(want.sum_x2) * math.sqrt(want.sum_y2)}
    for field in dataclasses.fields(want):
        one, other = getattr(got, field.name), getattr(want, field.name)
        if isinstance(other, int) or field.name == "max_abs_error":
            assert one == other or (one != one and other != other), field.name
        elif math.isfinite(other):
            size = abs(scale.get(field.name, other))
            assert abs(one - other) <= 1e-12 * size, field.name
        else:
            assert one == other or (one != one and other != other), field.name


@pytest.mark.parametrize("option", OPTIONS)
def test_error_sums(option, fast_backend, reference):
    options = {**OPTIONS[option], "pad": True}
    for shape, dtype in itertools.product([(129, 80), (5, 3), (512, 60), (0, 64), (40,)], DTYPES):
        x = values(shape, dtype, "sums")
        q = reference.quantize(x, scale_layout=SCALE_LAYOUTS[len(shape)], **options)
        expected = reference.call(error_sums, x, q)
        assert_sums(fast_backend.call(error_sums, x, q), expected)


@pytest.mark.parametrize("options", [
    {"scale_search": "four_over_six", "e4m3_max": 256},
    {"scale_search": "sweep", "e4m3_max": 256, "axis": "column", "scale_layout": "swizzled_128x4"},
    {"scale_search": "four_over_six", "e4m3_max": 256, "axis": "column", "block": "2d"},
    {"scale_search": "four_over_six", "e4m3_max": 256, "amax": "row_scaled"},
    {"axis": "column", "recipe": "nvfuser", "nibble_order": "high_first"},
    {"axis": "column", "amax": "per_token"},
    {"axis": "column", "format": "mxfp8"},
])  # fmt: skip
def test_error_sums_of_variants(options, fast_backend, reference):
    for shape, dtype in itertools.product([(129, 80), (5, 3), (2, 24, 60)], DTYPES):
        # Amaxes whose encode scale is clamped under one range and not under the other, too.
        for factor in (1, 2.0**-120):
            x = (values(shape, dtype, "sums").astype(F32) * F32(factor)).astype(NUMPY[dtype])
            q = reference.quantize(x, pad=True, **options)
            expected = reference.call(error_sums, x, q)
            assert_sums(fast_backend.call(error_sums, x, q), expected)


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPE_PAIRS)
def test_error_sums_of_arrays(dtype, out_dtype, fast_backend, reference):
    for shape in [(129, 80), (5, 3), (3,), (), (0, 64), (512, 60), (600, 500)]:
        x = values(shape, dtype, "sums")
        y = values(shape, out_dtype, "sums")
        expected = reference.call(error_sums, x, y)
        assert_sums(fast_backend.call(error_sums, x, y), expected)


def test_error_sums_of_nonfinite_values(fast_backend, reference):
    for first, second in (
        (np.nan, 1.0),
        (np.inf, 1.0),
        (np.inf, np.inf),
        (1.0, np.nan),
        (-np.inf, np.inf),
    ):
        for size in (2, 33, 1000):
            x, y = np.ones((1, size), F32), np.ones((1, size), F32)
            x[0, size // 2], y[0, size // 2] = first, second
            with np.errstate(invalid="ignore"):
                expected = reference.call(error_sums, x, y)
            assert_sums(fast_backend.call(error_sums, x, y), expected)


# ------------------------------------------------------------------------------------------------
# Views
# ------------------------------------------------------------------------------------------------

#: Views that NumPy and CuPy can both make: name -> function of (module, base of shape (8, 256)).
VIEWS: dict[str, Any] = {
    "column slice": lambda xp, a: a[:, 16:112],
    "row slice": lambda xp, a: a[3:7],
    "column step": lambda xp, a: a[:, ::2],
    "row step": lambda xp, a: a[::3],
    "transposed": lambda xp, a: a.reshape(64, 32).T,
    "rows reversed": lambda xp, a: a[::-1],
    "columns reversed": lambda xp, a: a[:, ::-1],
    "both reversed, stepped": lambda xp, a: a[::-2, ::-2],
    "row broadcast": lambda xp, a: xp.broadcast_to(a[1], (5, 256)),
    "scalar broadcast": lambda xp, a: xp.broadcast_to(a[:1, :1], (2, 64)),
    "axes moved": lambda xp, a: a.reshape(4, 16, 32).transpose(1, 0, 2),
    "middle slice": lambda xp, a: a.reshape(2, 8, 128)[:, 3:, :],
    "misaligned start": lambda xp, a: a.reshape(-1)[1:257].reshape(1, 256),
    "odd start": lambda xp, a: a.reshape(-1)[3 : 3 + 96].reshape(3, 32),
    "column of rows": lambda xp, a: a[:, 5:37][::2],
    "one row": lambda xp, a: a[2],
    "fortran": lambda xp, a: xp.asfortranarray(a),
    "empty": lambda xp, a: a[2:2],
}
VIEW_OPTIONS = ("nvfp4-te", "nvfp4-modelopt", "mxfp4-even", "mxfp8-rceil")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_views_equal_their_copies(view, dtype, backend, reference, assert_tensors, assert_bits):
    base = values((8, 256), dtype, "views")
    xp, device_base = np, base
    if backend.on_gpu:
        import cupy as xp

        device_base = backend.put(base)
    x, copied = VIEWS[view](xp, device_base), np.array(VIEWS[view](np, base), order="C")
    assert_bits(backend.call(fp4kit.amax, x), reference.call(fp4kit.amax, copied))
    for option in VIEW_OPTIONS:
        expected = reference.quantize(copied, **OPTIONS[option])
        got = backend.quantize(x, **OPTIONS[option])
        assert_tensors(got, expected)
        out = OUTPUT_OF[dtype]
        fake = backend.call(fp4kit.quantize_dequantize, x, dtype=out, **OPTIONS[option])
        assert_bits(fake, reference.dequantize(expected, out))
        assert_sums(backend.call(error_sums, x, got), reference.call(error_sums, copied, expected))


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_quantized_arrays(view, backend, reference, assert_bits):
    base = generator(view).integers(0, 127, (8, 256)).astype(np.uint8)
    xp, device_base = np, base
    if backend.on_gpu:
        import cupy as xp

        device_base = backend.put(base)
    packed, copied = VIEWS[view](xp, device_base), np.array(VIEWS[view](np, base), order="C")
    shape = (*copied.shape[:-1], copied.shape[-1] * 2)
    scale = np.array(VIEWS[view](np, base)[..., ::8], order="C")
    q = fp4kit.QuantizedTensor(
        packed, VIEWS[view](xp, device_base)[..., ::8], "nvfp4", shape, amax=np.array([3], F32)
    )
    expected = dataclasses.replace(q, packed=copied, block_scale=scale)
    assert_bits(backend.dequantize(q), reference.dequantize(expected))
    assert_bits(
        backend.call(fp4kit.swizzle, packed), reference.call(fp4kit.swizzle, copied), "swizzle"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_big_endian_host_arrays(dtype, fast_backend, reference, assert_tensors):
    if fast_backend.on_gpu:
        pytest.skip("device arrays are never big-endian")
    x = values((7, 96), dtype, "endian")
    swapped = x.astype(x.dtype.newbyteorder(">"))
    assert swapped.tobytes() != x.tobytes()
    for option in VIEW_OPTIONS:
        expected = reference.quantize(x, **OPTIONS[option])
        assert_tensors(fast_backend.quantize(swapped, **OPTIONS[option]), expected)
        assert_tensors(reference.quantize(swapped, **OPTIONS[option]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_host_arrays_at_any_address(
    offset, dtype, fast_backend, reference, assert_tensors, assert_bits
):
    if fast_backend.on_gpu:
        pytest.skip("a device array is aligned to its element size")
    x = values((3, 96), dtype, "address")
    buffer = np.zeros(x.nbytes + offset, np.uint8)
    buffer[offset:] = np.frombuffer(x.tobytes(), np.uint8)
    misaligned = buffer[offset:].view(x.dtype).reshape(x.shape)
    for option in VIEW_OPTIONS:
        q = reference.quantize(x, **OPTIONS[option])
        assert_tensors(fast_backend.quantize(misaligned, **OPTIONS[option]), q)
        # Results written to such an address arrive there.
        name = OUTPUT_OF[dtype]
        expected = reference.dequantize(q, name)
        out = np.zeros(expected.nbytes + offset, np.uint8)[offset:].view(expected.dtype)
        out = out.reshape(x.shape)
        assert fast_backend.dequantize(q, name, out=out) is out
        assert_bits(out, expected, "dequantize into a misaligned array")
        out[...] = 0
        options = {**OPTIONS[option], "dtype": name, "out": out}
        fast_backend.call(fp4kit.quantize_dequantize, misaligned, **options)
        assert_bits(out, expected, "quantize_dequantize into a misaligned array")


def test_read_only_inputs(backend, assert_tensors):
    x = values((4, 64), "float32", "readonly")
    expected = backend.quantize(x)
    x.flags.writeable = False
    assert_tensors(backend.quantize(x), expected)


# ------------------------------------------------------------------------------------------------
# Any shape, any values
# ------------------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any]]:
    """An array of any bits and of any shape, and options for it."""
    dtype = draw(st.sampled_from(DTYPES))
    lead = draw(st.lists(st.integers(0, 5), max_size=2))
    shape = (*lead, draw(st.integers(0, 70)))
    bits = draw(hnp.arrays(BITS[dtype], shape))
    option = draw(st.sampled_from(sorted(OPTIONS)))
    options = {**OPTIONS[option], "pad": True, "nonfinite": "propagate"}
    options["scale_layout"] = draw(st.sampled_from(SCALE_LAYOUTS))
    options["nibble_order"] = draw(st.sampled_from(NIBBLE_ORDERS))
    if option in TWO_LEVEL and draw(st.booleans()):
        one = st.one_of(st.sampled_from(EXTREMES.tolist()), st.floats(width=32))
        rows = math.prod(lead)
        count = draw(st.sampled_from([1, rows])) if rows else 1
        scales = draw(st.lists(one, min_size=count, max_size=count))
        options["amax"] = np.array(scales, F32)
    return bits.view(NUMPY[dtype]), options


@given(call=calls(), out_dtype=st.sampled_from(DTYPES))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_call(call, out_dtype, fast_backend, reference, assert_tensors, assert_bits):
    x, options = call
    expected = reference.quantize(x, **options)
    got = fast_backend.quantize(x, **options)
    assert_tensors(got, expected)
    decoded = reference.dequantize(expected, out_dtype)
    assert decoded.shape == x.shape
    assert_bits(fast_backend.dequantize(got, out_dtype), decoded)


@given(
    shape=st.tuples(st.integers(0, 300), st.integers(0, 40)),
    layout=st.sampled_from(SCALE_LAYOUTS),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_unswizzle_inverts_swizzle(shape, layout, seed, backend, assert_bits):
    scales = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    stored = backend.call(fp4kit.swizzle, scales, layout)
    assert np.count_nonzero(stored) == np.count_nonzero(scales)
    assert_bits(backend.call(fp4kit.unswizzle, stored, shape, layout), scales)


# ------------------------------------------------------------------------------------------------
# Size
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", ["1", "3"])
def test_bytes_do_not_depend_on_the_number_of_threads(
    threads, monkeypatch, fast_backend, reference, assert_tensors, assert_bits
):
    monkeypatch.setenv("FP4KIT_NUM_THREADS", threads)
    x = values((1040, 1024), "bfloat16", "threads")
    per_row = np.abs(x.astype(F32)).max(axis=1)
    for option, extra in (
        ("nvfp4-te", {}),
        ("nvfp4-te", {"amax": per_row}),
        ("mxfp8-rceil", {"scale_layout": "swizzled_128x4"}),
    ):
        expected = reference.quantize(x, **OPTIONS[option], **extra)
        got = fast_backend.quantize(x, **OPTIONS[option], **extra)
        assert_tensors(got, expected)
        decoded = reference.dequantize(expected, "bfloat16")
        assert_bits(fast_backend.dequantize(got, "bfloat16"), decoded)
        assert_sums(fast_backend.call(error_sums, x, got), reference.call(error_sums, x, expected))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_more_than_2_to_the_31_elements(layout, fast_backend, reference, assert_bits):
    """About 6 GB: the last rows of (65537, 32768) are compared, and the rows about 2^31."""
    rows, cols = 65537, 32768
    x = np.zeros((rows, cols), np.uint16)
    checked = [0, 1, 32767, 32768, 65535, 65536]
    for row in checked:
        x[row] = values((cols,), "bfloat16", row).view(np.uint16)
    x = x.view(ml_dtypes.bfloat16)
    x[-1, -1] = largest = 8192.0
    device_x = fast_backend.put(x)
    assert fast_backend.call(fp4kit.amax, device_x)[0] == largest
    q = fp4kit.quantize(device_x, backend=fast_backend.name, scale_layout=layout)
    expected = reference.quantize(x[checked], amax=largest)
    packed = fast_backend.get(q.packed)
    assert_bits(packed[checked], expected.packed, "packed")
    stored = fast_backend.get(q.block_scale)
    linear = fp4kit.unswizzle(stored, (rows, cols // 16), layout, backend="reference")
    assert_bits(linear[checked], expected.block_scale, "block_scale")
    assert not packed[2:32767].any()
    x[-1, -2] = np.nan
    device_x = fast_backend.put(x)
    with pytest.raises(fp4kit.NonFiniteError, match=r"1 NaN and 0 .*\(65536, 32766\)"):
        fp4kit.quantize(device_x, backend=fast_backend.name)
    del x, device_x, packed, linear, stored
    decoded = fp4kit.dequantize(q, "bfloat16", backend=fast_backend.name)
    last = fast_backend.get(decoded[-2:])
    assert_bits(last, reference.dequantize(expected, "bfloat16")[-2:], "dequantized")
