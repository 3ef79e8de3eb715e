# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""QuantizedTensor: what it checks, what it remembers, its second level.

Tests named after an id like A5 or B4 pin a fault, see test_reported_faults.py.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, OptionError, QuantizedTensor, ShapeError, arrays
from fp4kit.arrays import capture
from fp4kit.formats import ALL_RECIPES, DTYPES, SCALE_LAYOUTS
from sample_arrays import F32, NUMPY, gaussian

# ------------------------------------------------------------------------------------------------
# Equal calls: what is remembered never shows
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amax", [None, 7.0])
def test_results_are_reused_again_and_again(amax, backend, assert_bits):
    first, second = gaussian((4, 64), "bfloat16"), gaussian((4, 64), "bfloat16") * F32(3)
    out = backend.put(backend.quantize(first, amax=amax))
    for x in (second, first, second):
        x = x.astype(NUMPY["bfloat16"])
        expected = backend.quantize(x, amax=amax)
        device = backend.put(x)
        assert fp4kit.quantize(device, amax=amax, backend=backend.name, out=out) is out
        for name in ("packed", "block_scale", "amax"):
            assert_bits(backend.get(getattr(out, name)), getattr(expected, name))
        decoded = backend.get(fp4kit.dequantize(out, backend=backend.name))
        assert_bits(decoded, backend.call(fp4kit.dequantize, expected))


def test_a_result_that_fit_once_is_still_checked(q):
    x = gaussian((4, 64))
    fp4kit.quantize(x, backend="reference", out=q)
    with pytest.raises(OptionError, match="out was made for"):
        fp4kit.quantize(x[:2], backend="reference", out=q)
    with pytest.raises(OptionError, match="out was made for"):
        fp4kit.quantize(x, scale_layout="swizzled_128x4", backend="reference", out=q)
    fp4kit.quantize(x, backend="reference", out=q)
    q.block_scale.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        fp4kit.quantize(x, backend="reference", out=q)


def test_used_tensors_copy_like_new_ones(q, assert_tensors):
    fp4kit.quantize(gaussian((4, 64)), backend="reference", out=q)
    fp4kit.dequantize(q, backend="reference")
    assert set(vars(q)) == {field.name for field in dataclasses.fields(q)}
    copies = (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), dataclasses.replace(q))
    for other in copies:
        assert_tensors(other, q)
    independent = copies[1]
    fp4kit.quantize(gaussian((4, 64)) * F32(5), backend="reference", out=independent)
    fp4kit.dequantize(independent, backend="reference")
    assert independent.amax[0] == q.amax[0] * F32(5)


def test_changed_codes_are_decoded_anew(q):
    before = fp4kit.dequantize(q, backend="reference")
    q.packed[...] ^= 0x88
    np.testing.assert_array_equal(fp4kit.dequantize(q, backend="reference"), -before)
    strided = np.zeros((4, 64), np.uint8)
    view = dataclasses.replace(q, packed=strided[:, ::2])
    assert not fp4kit.dequantize(view, backend="reference").any()
    strided[:, ::2] = q.packed
    np.testing.assert_array_equal(fp4kit.dequantize(view, backend="reference"), -before)


def test_a_strided_scale_of_a_result_is_overwritten(q):
    scales = np.zeros(2, F32)[::2]
    out = dataclasses.replace(q, amax=scales)
    fp4kit.quantize(gaussian((4, 64)), amax=5.0, backend="reference", out=out)
    assert scales.tolist() == [5.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": ["nvfp4"]}, "format="),
        ({"recipe": ["te"]}, "recipe="),
        ({"nibble_order": {}}, "nibble_order="),
        ({"scale_layout": []}, "scale_layout="),
        ({"nonfinite": {}}, "nonfinite="),
    ],
)
def test_options_that_cannot_be_hashed(options, message):
    with pytest.raises(OptionError, match=message):
        fp4kit.quantize(np.ones((1, 16), F32), **options)


@pytest.mark.parametrize("pointer", [0, 7])
def test_f10_captured_floats_outlive_the_call(pointer, monkeypatch):
    """A replayed graph reads the buffer that a float was sent to."""

    class Stream:
        ptr = pointer

        def is_capturing(self):
            assert self.ptr, "the null stream must not be asked"
            return True

    runtime = SimpleNamespace(getDevice=lambda: 0)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, full=np.full))
    monkeypatch.setattr(capture, "_captured", [])
    scale = arrays.ingest_scale(6.0, "amax", arrays.Origin("cupy", "cuda:0"))
    assert any(kept is scale for kept in capture._captured) == bool(pointer)


# ------------------------------------------------------------------------------------------------
# QuantizedTensor
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def q():
    return fp4kit.quantize(gaussian((4, 64)), backend="reference")


def test_quantized_tensors_are_frozen(q):
    for field in dataclasses.fields(q):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(q, field.name, None)


def test_shapes_and_sizes(q):
    assert q.packed.shape == (4, 32)
    assert q.block_scale.shape == (4, 4)
    assert (q.packed.dtype, q.block_scale.dtype, q.amax.dtype) == (np.uint8, np.uint8, F32)
    assert q.nbytes == 4 * 32 + 16 + 4
    assert q.bits_per_element == 8 * q.nbytes / 256
    assert repr(q) == "QuantizedTensor('nvfp4', shape=(4, 64), 4.62 bits per element)"


@pytest.mark.parametrize(
    ("format", "bits"), [("nvfp4", 4.5), ("mxfp4", 4.25), ("mxfp8", 8.25), ("mxfp8_e5m2", 8.25)]
)
def test_bits_per_element(format, bits):
    shape = (128, 4096)
    q = fp4kit.quantize(np.zeros(shape, F32), format, backend="reference")
    extra = 32 / math.prod(shape) if format == "nvfp4" else 0
    assert q.bits_per_element == bits + extra
    empty = fp4kit.quantize(np.zeros((0, 32), F32), format, backend="reference")
    assert empty.bits_per_element == 0.0


def test_source_dtype_is_recorded():
    for dtype in DTYPES:
        assert fp4kit.quantize(gaussian((2, 32), dtype), backend="reference").source_dtype == dtype


def test_leading_axes_are_kept(backend):
    for shape in ((64,), (3, 64), (2, 3, 64), (2, 1, 3, 64)):
        q = backend.quantize(gaussian(shape))
        assert q.shape == shape
        assert q.packed.shape == (*shape[:-1], 32)
        assert q.block_scale.shape == (*shape[:-1], 4)
        assert backend.dequantize(q).shape == shape


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a28_a_missing_second_level_is_refused(recipe):
    q = fp4kit.quantize(gaussian((4, 64)), recipe=recipe, backend="reference")
    direction, _ = q.second_level
    name = direction
    if ALL_RECIPES[recipe].optional_second_level:
        one_level = dataclasses.replace(q, **{name: None})
        assert one_level.second_level is None
        return
    with pytest.raises(OptionError, match=rf"recipe {recipe} needs its second-level scale"):
        dataclasses.replace(q, **{name: None})


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a27_a_second_level_in_another_direction_is_refused(recipe):
    q = fp4kit.quantize(gaussian((4, 64)), recipe=recipe, backend="reference")
    names = {name: name for name in ("amax", "decode_scale", "encode_scale")}
    direction, value = q.second_level
    for other, name in names.items():
        if other == direction:
            continue
        fields = {**vars(q), names[direction]: None, name: value}
        with pytest.raises(OptionError, match="convert_second_level"):
            QuantizedTensor(**fields)
        with pytest.raises(OptionError, match="more than one second-level scale"):
            QuantizedTensor(**{**fields, names[direction]: value})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"shape": (4, 32)}, ShapeError, r"packed has shape \(4, 32\), but nvfp4 .*take \(4, 16\)"),
        ({"shape": (2, 64)}, ShapeError, r"packed has shape"),
        ({"shape": (256,)}, ShapeError, r"take \(128,\)"),
        ({"shape": ()}, ShapeError, "at least one dimension"),
        ({"packed": np.zeros((4, 31), np.uint8)}, ShapeError, r"packed has shape \(4, 31\)"),
        ({"packed": np.zeros((4, 64), np.uint8)}, ShapeError, "packed has shape"),
        ({"block_scale": np.zeros((4, 2), np.uint8)}, ShapeError, r"take \(4, 4\)"),
        ({"block_scale": np.zeros((4, 5), np.uint8)}, ShapeError, "block_scale has shape"),
        ({"block_scale": np.zeros((128, 4), np.uint8)}, ShapeError, "linear scales"),
        ({"block_scale": np.zeros(16, np.uint8)}, ShapeError, "block_scale has shape"),
        ({"scale_layout": "swizzled_128x4"}, ShapeError, r"swizzled_128x4 .*take \(128, 4\)"),
        ({"scale_layout": "swizzled_8x4"}, ShapeError, r"take \(8, 4\)"),
        ({"scale_layout": "blocked"}, OptionError, "choose one of linear"),
        ({"nibble_order": "swapped"}, OptionError, "choose one of low_first"),
        ({"format": "fp4"}, OptionError, "choose one of nvfp4"),
        ({"format": "mxfp4"}, OptionError, "is for nvfp4; mxfp4 takes scale_rule"),
        ({"recipe": "unknown"}, OptionError, "choose one of te"),
        ({"scale_rule": "even"}, OptionError, "takes a recipe"),
        ({"amax": np.zeros(0, F32)}, ShapeError, "0 second-level scales do not divide 4 rows"),
        ({"amax": np.zeros(3, F32)}, ShapeError, "3 second-level scales do not divide 4 rows"),
    ],
)
def test_b16_b18_inconsistent_tensors_are_refused(q, changed, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(q, **changed)


def test_b18_swizzled_scales_need_their_recorded_layout(backend, assert_bits):
    x = gaussian((130, 80))
    linear = backend.quantize(x)
    for layout in SCALE_LAYOUTS[1:]:
        q = backend.quantize(x, scale_layout=layout)
        assert_bits(backend.dequantize(q), backend.dequantize(linear))
        with pytest.raises(ShapeError):
            dataclasses.replace(q, scale_layout="linear")


def test_mx_tensors_take_a_rule_or_the_usual_one():
    q = fp4kit.quantize(gaussian((2, 64)), "mxfp4", backend="reference")
    assert dataclasses.replace(q, scale_rule=None).scale_rule == "even"
    with pytest.raises(OptionError, match="choose one of floor"):
        dataclasses.replace(q, scale_rule="round")


def test_arrays_of_other_element_types_are_refused(q):
    wrong = dataclasses.replace(q, packed=q.packed.astype(np.int32))
    with pytest.raises(DtypeError, match=r"packed is int32; codes and scales are uint8"):
        fp4kit.dequantize(wrong, backend="reference")
    wrong = dataclasses.replace(q, amax=q.amax.astype(np.float64))
    with pytest.raises(DtypeError, match=r"float64; a second-level scale is a float or a float32"):
        fp4kit.dequantize(wrong, backend="reference")


def test_float8_views_are_read_as_bytes(q, assert_bits):
    typed = dataclasses.replace(q, block_scale=q.block_scale.view(ml_dtypes.float8_e4m3fn))
    expected = fp4kit.dequantize(q, backend="reference")
    assert_bits(fp4kit.dequantize(typed, backend="reference"), expected)


# ------------------------------------------------------------------------------------------------
# The second level
# ------------------------------------------------------------------------------------------------


def test_a27_conversions_of_amax_6(backend):
    q = backend.put(backend.quantize(np.full((1, 16), 6, F32)))
    assert backend.get(fp4kit.convert_second_level(q, "amax")).tolist() == [6.0]
    assert backend.get(fp4kit.convert_second_level(q, "encode_scale")).tolist() == [448.0]
    decode = backend.get(fp4kit.convert_second_level(q, "decode_scale"))
    assert decode.tolist() == [float(F32(0.0022321429))]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a27_recipes_keep_their_own_direction(recipe, backend):
    q = backend.quantize(np.full((1, 16), 6, F32), recipe=recipe)
    direction, value = q.second_level
    assert direction == ALL_RECIPES[recipe].keeps
    wanted = {"amax": 6.0, "decode_scale": 0.0022321429, "encode_scale": 448.0}[direction]
    assert value.tolist() == [float(F32(wanted))]
    assert (q.amax is None) + (q.decode_scale is None) + (q.encode_scale is None) == 2


def test_a27_a_round_trip_of_conversions_is_exact_for_powers_of_two(backend):
    for exponent in range(-100, 100):
        amax = F32(2688 * 2.0**exponent)
        q = backend.quantize(np.full((1, 16), 1, F32), amax=float(amax))
        encode = backend.get(fp4kit.convert_second_level(backend.put(q), "encode_scale"))
        other = fp4kit.QuantizedTensor(
            q.packed, q.block_scale, "nvfp4", q.shape, recipe="nvfuser", encode_scale=encode
        )
        back = backend.get(fp4kit.convert_second_level(backend.put(other), "amax"))
        assert back.tolist() == [float(amax)]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, np.nan, -1.0, 1e-45])
def test_a2_no_conversion_gives_zero_infinity_or_nan(recipe, value):
    q = fp4kit.quantize(gaussian((2, 32)), recipe=recipe, backend="reference")
    direction, array = q.second_level
    name = direction
    dead = dataclasses.replace(q, **{name: np.full_like(array, value)})
    for target in ("decode_scale", "encode_scale"):
        if target == direction:
            continue
        converted = fp4kit.convert_second_level(dead, target)
        assert np.isfinite(converted).all()
        if value != 1e-45 and not (direction == "amax" and np.isnan(value)):
            assert converted.tolist() == [1.0]


def test_converting_what_is_not_there_is_refused(q):
    with pytest.raises(OptionError, match="choose one of amax, decode_scale, encode_scale"):
        fp4kit.convert_second_level(q, "inverse")
    one_level = fp4kit.quantize(
        gaussian((2, 32)), recipe="nvfuser", second_level="none", backend="reference"
    )
    with pytest.raises(OptionError, match="has no second-level scale to convert"):
        fp4kit.convert_second_level(one_level, "amax")


def test_amax_may_be_given_in_every_form(backend, assert_tensors):
    x = gaussian((4, 64))
    expected = backend.quantize(x, amax=3.0)
    for value in (3, F32(3), np.float64(3), np.array(3, F32), np.array([3], F32)):
        assert_tensors(backend.quantize(x, amax=value), expected)
    measured = backend.quantize(x, amax=backend.call(fp4kit.amax, x))
    assert_tensors(measured, backend.quantize(x))


def test_amax_in_a_form_that_is_refused(backend):
    x = backend.put(gaussian((4, 64)))
    for value in (np.array([3.0]), np.array([3]), np.array([3], np.float16)):
        with pytest.raises(DtypeError, match="a second-level scale is a float or a float32 array"):
            fp4kit.quantize(x, amax=backend.put(value), backend=backend.name)
    for value in ([3.0], True):
        with pytest.raises(DtypeError):
            fp4kit.quantize(x, amax=value, backend=backend.name)
    with pytest.raises(OptionError, match="values of second_level"):
        fp4kit.quantize(x, amax="3", backend=backend.name)
    with pytest.raises(ShapeError, match="3 second-level scales do not divide the 4 rows"):
        fp4kit.quantize(x, amax=backend.put(np.ones(3, F32)), backend=backend.name)


def test_one_amax_per_expert_equals_each_expert_alone(backend, assert_bits):
    x = gaussian((3, 5, 64)) * np.array([1, 100, 0], F32)[:, None, None]
    for recipe in ALL_RECIPES:
        amaxes = np.array([backend.call(fp4kit.amax, expert)[0] for expert in x])
        q = backend.quantize(x, recipe=recipe, amax=amaxes)
        for number, expert in enumerate(x):
            alone = backend.quantize(expert, recipe=recipe)
            assert_bits(q.packed[number], alone.packed)
            assert_bits(q.block_scale[number], alone.block_scale)
            assert_bits(q.second_level[1][number : number + 1], alone.second_level[1])
            assert_bits(backend.dequantize(q)[number], backend.dequantize(alone))
