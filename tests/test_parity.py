# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every backend equals the reference, byte for byte and for every float input.

The full product of formats, recipes, rules, layouts, nibble orders, dtypes and shapes would take
minutes. Covered are: every format with every recipe or rule, with every dtype, with every shape;
each of these in two of the six (layout, nibble order) pairs, which pair depending on the shape,
so that every recipe and rule meets every pair. For pairs of dtypes see parity_cases.py. The values
of each array mix ordinary blocks, zeros, ties, wide ranges and denormals; raw bit patterns (NaN and
infinity too) have tests of their own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

import fp4kit
from fp4kit.api.metrics import error_sums
from fp4kit.formats import (
    ALL_RECIPES,
    BLOCK_FORMATS,
    DTYPES,
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
)
from parity_cases import (
    BITS,
    DTYPE_PAIRS,
    EXTREMES,
    OPTIONS,
    PAIRS,
    SHAPES,
    TWO_LEVEL,
    assert_sums,
    generator,
    raw_bits,
    values,
)
from sample_arrays import F32, NUMPY

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
    direction = ALL_RECIPES[options["recipe"]].keeps
    x = values((4, 6, 32), "bfloat16", "forms")
    name = direction
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
    direction = ALL_RECIPES[options["recipe"]].keeps
    for name in {"amax", direction}:
        expected = reference.quantize(x, nonfinite="propagate", **options, **{name: scales})
        got = fast_backend.quantize(x, nonfinite="propagate", **options, **{name: scales})
        assert_tensors(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", BLOCK_FORMATS)
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
    spec = BLOCK_FORMATS[options["format"]]
    rng = generator(option, shape)
    rows, cols = shape
    packed = rng.integers(0, 256, (rows, spec.packed_cols(cols))).astype(np.uint8)
    scale = rng.integers(0, 256, (rows, spec.num_blocks(cols))).astype(np.uint8)
    second = {}
    if option in TWO_LEVEL:
        direction = ALL_RECIPES[options["recipe"]].keeps
        count = scales or 1
        value = np.exp2(rng.uniform(-12, 12, count)).astype(F32)
        if scales:
            value[::2] = raw_bits((value[::2].size, 1), "float32", option).ravel()
            value[::3] = np.resize(EXTREMES, value[::3].size)
        second[direction] = value
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
    if order == "high_first" and BLOCK_FORMATS[q.format].codes_per_byte == 2:
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
    spec = BLOCK_FORMATS[OPTIONS[option]["format"]]
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
