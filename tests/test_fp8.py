# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 under float32 scales: peers' bytes, every code and 16-bit input, edges, refusals."""

from __future__ import annotations

import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import Scheme
from fp4kit.errors import OptionError, ShapeError
from fp4kit.formats import DTYPES, E4M3, E5M2, GRID_RECIPES
from fp4kit.reference import codecs

GOLDEN = np.load(Path(__file__).parent / "golden" / "fp8" / "values.npz")
FLOATS = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
KINDS = [(one.name, each) for one in GRID_RECIPES.values() for each in one.granularities]
#: Shapes that are and are not whole 16-byte pieces, blocks of 128, and rows for a thread block.
SHAPES = [(1, 1), (3, 5), (130, 272), (257, 128), (2, 4112), (7, 1)]
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def golden(name, dtype):
    return GOLDEN[f"input/{dtype}/x"].view(FLOATS[dtype])


def noise(dtype, shape, seed=0):
    """Every pattern of bits, NaN and infinity among them."""
    width = FLOATS[dtype].itemsize
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << (8 * width), shape, dtype=f"u{width}")
    return bits.view(FLOATS[dtype])


def normal(dtype, shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(FLOATS[dtype])


def spread(scale, granularity, shape, columnwise=False):
    """The scale of each element."""
    rows, cols = shape
    if granularity == "block":
        return scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :cols]
    return np.broadcast_to(scale.reshape((1, -1) if columnwise else (-1, 1)), shape)


# ------------------------------------------------------------------------------------------------
# Bytes of the peers
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("recipe", "granularity"), KINDS)
def test_peers_bytes(recipe, granularity, dtype, backend, assert_bits):
    x = GOLDEN[f"input/{dtype}/x"].view(FLOATS[dtype])
    q = backend.quantize(x, "fp8", recipe=recipe, granularity=granularity)
    codes, scale = (GOLDEN[f"{recipe}/{granularity}/{dtype}/{part}"] for part in ("codes", "scale"))
    assert_bits(q.block_scale.reshape(scale.shape), scale)
    assert_bits(q.packed, codes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("format", "cast"), [("fp8", "e4m3fn"), ("fp8_e5m2", "e5m2")])
def test_every_16_bit_input_is_cast_as_torch_does(format, cast, dtype, backend, assert_bits):
    x = np.arange(-(2**15), 2**15).astype(np.int16).view(FLOATS[dtype]).reshape(256, 256)
    one = np.ones(1, np.float32)
    q = backend.quantize(x, format, decode_scale=one, nonfinite="propagate")
    codes = GOLDEN[f"cast/{cast}/{dtype}"].reshape(256, 256).copy()
    values = np.abs(x.astype(np.float32))
    # Here NaN has one code, and what is too large for E5M2 saturates instead of becoming infinite.
    codes[np.isnan(values)] = 0x7F
    if format == "fp8_e5m2":
        large = values >= 57344
        codes[large] = np.where(np.signbit(x[large]), 0xFB, 0x7B)
    assert_bits(q.packed, codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "element"), [("fp8", E4M3), ("fp8_e5m2", E5M2)])
def test_every_code_decodes_to_its_value_times_the_scale(
    format, element, dtype, backend, dtypes, assert_bits
):
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for scale in (1.0, 0.3, 2.0**-130):
        scales = np.array([scale], np.float32)
        q = fp4kit.QuantizedTensor(packed, scales, format, (16, 16))
        with np.errstate(all="ignore"):
            values = element.values[packed] * scales[0]
        expected = codecs.from_float32(values, dtype).view(dtypes[dtype])
        assert_bits(backend.dequantize(q, dtype), expected)


# ------------------------------------------------------------------------------------------------
# Backends agree
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("recipe", "granularity"), KINDS)
@pytest.mark.parametrize("format", ["fp8", "fp8_e5m2"])
def test_backends_give_the_bytes_of_the_reference(
    format, recipe, granularity, dtype, fast_backend, reference, assert_bits
):
    directions = ("rowwise", "columnwise") if granularity == "channel" else ("rowwise",)
    for shape in SHAPES:
        for make in (normal, noise):
            x = make(dtype, shape)
            for direction in directions:
                options = {
                    "recipe": recipe,
                    "granularity": granularity,
                    "direction": direction,
                    "nonfinite": "propagate",
                }
                ours, theirs = (
                    one.quantize(x, format, **options) for one in (fast_backend, reference)
                )
                assert_bits(ours.block_scale, theirs.block_scale)
                assert_bits(ours.packed, theirs.packed)
                for out in DTYPES:
                    decoded = (one.dequantize(theirs, out) for one in (fast_backend, reference))
                    assert_bits(*decoded)


def test_misaligned_views_give_the_same_bytes(backend, assert_bits):
    x = normal("bfloat16", (66, 257))
    for granularity in ("tensor", "channel", "block"):
        view = backend.quantize(x[1:, 1:], "fp8", granularity=granularity)
        copy = backend.quantize(x[1:, 1:].copy(), "fp8", granularity=granularity)
        assert_bits(view.packed, copy.packed)
        assert_bits(view.block_scale, copy.block_scale)


# ------------------------------------------------------------------------------------------------
# What granularities and arguments mean
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularity", "shape"), [("tensor", (1,)), ("channel", (4, 65, 1)), ("block", (3, 2))]
)
def test_leading_dimensions_are_rows(granularity, shape, backend, assert_bits):
    x = normal("float32", (4, 65, 200))
    q = backend.quantize(x, "fp8", granularity=granularity)
    flat = backend.quantize(x.reshape(260, 200), "fp8", granularity=granularity)
    assert q.packed.shape == q.shape == x.shape
    assert q.block_scale.shape == shape
    assert q.block_scale.dtype == np.float32
    assert_bits(q.packed.reshape(260, 200), flat.packed)
    assert_bits(q.block_scale.reshape(-1), flat.block_scale.reshape(-1))
    error = np.abs(backend.dequantize(q) - x)
    # A code is off by at most a 16th of it, or half a subnormal step of 2^-9.
    scale = spread(flat.block_scale, granularity, (260, 200)).reshape(x.shape)
    assert (error <= np.maximum(np.abs(x) / 16, scale * 2.0**-10) * 1.000001).all()


def test_columnwise_channels_are_columns(backend, assert_bits):
    x = normal("bfloat16", (96, 70)) * np.geomspace(0.01, 10, 70).astype(ml_dtypes.bfloat16)
    column = backend.quantize(x, "fp8", granularity="channel", direction="columnwise")
    transpose = backend.quantize(np.ascontiguousarray(x.T), "fp8", granularity="channel")
    assert column.packed.shape == (96, 70)
    assert column.block_scale.shape == (1, 70)
    assert_bits(np.ascontiguousarray(column.packed.T), transpose.packed)
    assert_bits(column.block_scale.reshape(-1), transpose.block_scale.reshape(-1))
    both = backend.quantize(x, "fp8", granularity="channel", direction="both")
    assert_bits(both.columnwise.packed, column.packed)
    assert_bits(both.rowwise.packed, backend.quantize(x, "fp8", granularity="channel").packed)
    decoded = [backend.dequantize(column), backend.dequantize(transpose).T.copy()]
    assert_bits(*decoded)


def test_given_scales(backend, assert_bits):
    x = normal("float32", (40, 48))
    amax = np.array([896], np.float32)
    q = backend.quantize(x, "fp8", amax=amax)
    assert q.block_scale.tolist() == [2.0]
    assert_bits(q.packed, backend.quantize(x, "fp8", decode_scale=amax / 448).packed)
    rows = np.abs(x).max(1, keepdims=True)
    measured = backend.quantize(x, "fp8", granularity="channel")
    given = backend.quantize(x, "fp8", granularity="channel", amax=rows)
    assert_bits(given.packed, measured.packed)
    # Too small a scale saturates; none that counts is 1.
    small = backend.quantize(x, "fp8", decode_scale=np.array([1e-9], np.float32))
    assert set(np.unique(small.packed & 0x7F)) == {0x7E}
    for useless in (0, -1, np.inf, np.nan):
        scale = np.array([useless], np.float32)
        assert backend.quantize(x, "fp8", decode_scale=scale).block_scale.tolist() == [1.0]
        assert backend.quantize(x, "fp8", amax=scale).block_scale[0] > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("recipe", "granularity"), KINDS)
def test_zeros_nan_and_infinity(recipe, granularity, dtype, backend):
    zero = backend.quantize(
        np.zeros((3, 4), FLOATS[dtype]), "fp8", recipe=recipe, granularity=granularity
    )
    expected = EPSILON[dtype] if recipe == "compressed-tensors" else 1.0
    assert (zero.block_scale == expected).all()
    assert not zero.packed.any()
    x = np.array([[np.nan, np.inf, -np.inf, -0.0, 1, np.nan]], FLOATS[dtype])
    options = {"recipe": recipe, "granularity": granularity}
    q = backend.quantize(x, "fp8", nonfinite="propagate", **options)
    assert q.packed[0, :4].tolist() == [0x7F, 0x7E, 0xFE, 0x80]
    assert np.isfinite(q.block_scale).all()
    with pytest.raises(fp4kit.errors.NonFiniteError, match="2 NaN and 2 infinite"):
        backend.quantize(x, "fp8", **options)
    tiny = np.full((1, 4), 1e-45 if dtype == "float32" else 6e-8, FLOATS[dtype])
    q = backend.quantize(tiny, "fp8", **options)
    assert (q.block_scale > 0).all()
    assert np.isfinite(backend.dequantize(q)).all()


def test_empty_arrays(backend):
    for shape in ((0, 5), (3, 0)):
        for granularity in ("tensor", "channel", "block"):
            x = np.empty(shape, np.float32)
            q = backend.quantize(x, "fp8", granularity=granularity)
            assert q.packed.shape == shape
            expected = EPSILON["float32"] if granularity == "channel" else 1
            assert (q.block_scale == expected).all()
            assert backend.dequantize(q).shape == shape


@pytest.mark.parametrize(("recipe", "granularity"), KINDS)
def test_quantize_dequantize_and_error_stats(recipe, granularity, backend, assert_bits):
    x = normal("bfloat16", (150, 96))
    options = {"recipe": recipe, "granularity": granularity}
    q = backend.quantize(x, "fp8", **options)
    decoded = backend.dequantize(q, "bfloat16")
    assert_bits(backend.call(fp4kit.quantize_dequantize, x, "fp8", **options), decoded)
    stats = fp4kit.error_stats(x, fp4kit.quantize(x, "fp8", **options))
    assert 30 < stats.sqnr < 34
    assert stats.saturated == ((q.packed & 0x7F) == 0x7E).mean()
    assert stats.bits_per_element == 8 + 32 * q.block_scale.size / x.size


def test_a_result_is_reused(backend, assert_bits):
    first, second = normal("float32", (64, 64)), normal("float32", (64, 64), seed=1)
    for granularity in ("tensor", "channel", "block"):
        q = fp4kit.quantize(first, "fp8", granularity=granularity)
        assert fp4kit.quantize(second, "fp8", granularity=granularity, out=q) is q
        fresh = fp4kit.quantize(second, "fp8", granularity=granularity)
        assert_bits(q.packed, fresh.packed)
        assert_bits(q.block_scale, fresh.block_scale)


# ------------------------------------------------------------------------------------------------
# Schemes
# ------------------------------------------------------------------------------------------------


def test_recipe_and_granularity_follow_from_each_other():
    assert Scheme("fp8").parts[0].granularity == "tensor"
    assert Scheme("fp8").parts[0].recipe == "modelopt"
    assert Scheme("fp8", granularity="channel").parts[0].recipe == "compressed-tensors"
    assert Scheme("fp8", granularity="block").parts[0].recipe == "deepseek"
    assert Scheme("fp8", recipe="deepseek").parts[0].granularity == "block"
    assert Scheme("fp8", recipe="compressed-tensors").parts[0].granularity == "channel"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "te"}, "recipe='te'"),
        ({"recipe": "deepseek", "granularity": "tensor"}, "deepseek has granularity block"),
        ({"granularity": "row"}, "granularity='row' is not known"),
        ({"scale_rule": "even"}, "scale_rule='even'"),
        ({"second_level": "tensor"}, "second_level='tensor' is for nvfp4; fp8 has none"),
        ({"scale_layout": "swizzled_128x4"}, "scale_layout='swizzled_128x4'"),
        ({"block_shape": "2d"}, "block_shape='2d'"),
        ({"rounding": "stochastic"}, "rounding='stochastic' is for E2M1 elements"),
        ({"scale_search": "sweep"}, "scale_search='sweep'"),
        ({"rht": True}, "rht rotates before E2M1"),
        ({"direction": "columnwise"}, "has no direction"),
        ({"granularity": "block", "direction": "both"}, "has no direction"),
    ],
)
def test_what_fp8_has_not_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Scheme("fp8", **options)


def test_granularity_is_for_fp8():
    with pytest.raises(OptionError, match="granularity='channel' is for fp8"):
        Scheme("mxfp8", granularity="channel")


def test_scales_of_another_number_are_refused():
    x = normal("float32", (4, 6))
    with pytest.raises((OptionError, ShapeError), match="3 scales"):
        fp4kit.quantize(x, "fp8", granularity="channel", amax=np.ones(3, np.float32))
    with pytest.raises(OptionError, match="block"):
        fp4kit.quantize(x, "fp8", granularity="block", amax=np.ones(1, np.float32))
    with pytest.raises(OptionError, match="takes amax or decode_scale, not encode_scale"):
        fp4kit.quantize(x, "fp8", encode_scale=np.ones(1, np.float32))


def test_groups_are_refused():
    with pytest.raises(OptionError, match="fp8"):
        fp4kit.quantize_grouped(np.ones((4, 32), np.float32), "fp8", first_dims=[2, 2])


# ------------------------------------------------------------------------------------------------
# Tensors
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularity", "index"),
    [
        ("tensor", np.s_[1, 5:9, 3:]),
        ("channel", np.s_[1, 5:9, 3:]),
        ("channel", np.s_[2]),
        ("block", np.s_[1:3, :, 128:256]),
        ("block", np.s_[2:2]),
    ],
)
def test_parts_decode_to_the_parts_of_what_is_decoded(granularity, index, assert_bits):
    q = fp4kit.quantize(normal("float32", (4, 128, 300)), "fp8", granularity=granularity)
    assert_bits(q[index].dequantize(), np.ascontiguousarray(q.dequantize()[index]))


def test_parts_that_cut_blocks_are_refused():
    q = fp4kit.quantize(normal("float32", (256, 300)), "fp8", granularity="block")
    for index in (np.s_[5:], np.s_[:, :100]):
        with pytest.raises(OptionError, match="cut through blocks of 128"):
            q[index]


def test_columnwise_parts(assert_bits):
    x = normal("float32", (64, 50))
    q = fp4kit.quantize(x, "fp8", granularity="channel", direction="columnwise")
    assert_bits(q[3:20, 7:30].dequantize(), np.ascontiguousarray(q.dequantize()[3:20, 7:30]))


def test_tensors_behave(assert_bits):
    x = normal("float32", (64, 50))
    q, again = (fp4kit.quantize(x, "fp8", granularity="channel") for _ in range(2))
    assert q == again
    assert q != fp4kit.quantize(x, "fp8")
    assert q.nbytes == 64 * 50 + 4 * 64
    assert_bits(q.codes(), q.packed)
    assert_bits(q.block_scale_values(), q.block_scale)
    assert_bits(np.asarray(q), q.dequantize())
    assert repr(q).startswith("QuantizedTensor('fp8', recipe='compressed-tensors'")
    assert pickle.loads(pickle.dumps(q)) == q
