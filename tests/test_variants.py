# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What variants of quantization mean, apart from bytes: transposes, tiles, errors, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fp4kit
from fp4kit.errors import NonFiniteError, OptionError, ShapeError
from fp4kit.formats import ALL_RECIPES, BLOCK_FORMATS, E2M1, E4M3
from fp4kit.reference import codecs, scale_search

F32 = np.float32


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def codes(q):
    """One code a byte, in the order of the stored matrix."""
    if BLOCK_FORMATS[q.format].codes_per_byte == 1:
        return q.packed
    return codecs.unpack_nibbles(q.packed, q.nibble_order)


# ------------------------------------------------------------------------------------------------
# Directions and tiles
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
def test_columnwise_fp4_is_the_quantized_transpose(format, layout, backend, assert_bits):
    x = normal((3, 32, 80))
    flat = x.reshape(96, 80)
    column = backend.quantize(x, format, direction="columnwise", scale_layout=layout)
    transpose = backend.quantize(flat.T, format, scale_layout=layout)
    assert_bits(column.packed, transpose.packed)
    assert_bits(column.block_scale, transpose.block_scale)
    assert column.shape == x.shape
    decoded = backend.dequantize(column)
    assert_bits(decoded.reshape(96, 80), np.ascontiguousarray(backend.dequantize(transpose).T))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
def test_columnwise_mxfp8_keeps_the_order_of_the_data(format, layout, backend, assert_bits):
    x = normal((70, 96))
    column = backend.quantize(x, format, direction="columnwise", pad=True, scale_layout=layout)
    transpose = backend.quantize(x.T, format, pad=True, scale_layout=layout)
    assert column.packed.shape == (96, 96)
    assert_bits(column.packed, transpose.packed.T)
    linear = layout == "linear"
    assert_bits(column.block_scale, transpose.block_scale.T if linear else transpose.block_scale)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize(
    "options", [{}, {"rounding": "stochastic", "seed": 9}, {"scale_search": "sweep"}]
)
def test_both_directions_of_a_tile_hold_the_same_values(format, options, backend, assert_bits):
    if options and (
        format.startswith("mxfp8") or (format == "mxfp4" and "scale_search" in options)
    ):
        pytest.skip("stochastic rounding is for FP4, searches for nvfp4")
    size = BLOCK_FORMATS[format].block_size
    x = normal((3 * size, 5 * size))
    row, column = backend.quantize(x, format, direction="both", block_shape="2d", **options)
    transposed = codes(column) if format.startswith("mxfp8") else codes(column).T
    assert_bits(codes(row), np.ascontiguousarray(transposed))
    assert_bits(backend.dequantize(row), backend.dequantize(column))
    # One scale per tile, stored once for each of its rows (columns).
    tiles = row.block_scale.reshape(3, size, 5)
    assert (tiles == tiles[:, :1]).all()
    of_column = column.block_scale.T if format.startswith("mxfp8") else column.block_scale
    assert_bits(np.ascontiguousarray(of_column[::size].T), np.ascontiguousarray(tiles[:, 0]))
    assert len(np.unique(tiles[:, 0])) > 1 or not format.startswith("nvfp4")


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_padded_tiles_are_those_of_the_padded_array(recipe, backend, assert_bits):
    x = normal((37, 50))
    whole = np.pad(x, [(0, 11), (0, 14)])
    for direction in ("rowwise", "columnwise"):
        q = backend.quantize(x, recipe=recipe, direction=direction, block_shape="2d", pad=True)
        full = backend.quantize(whole, recipe=recipe, direction=direction, block_shape="2d")
        vectors = len(q.packed)
        assert_bits(q.packed, full.packed[:vectors])
        assert_bits(q.block_scale, full.block_scale[:vectors])
        assert_bits(backend.dequantize(q), backend.dequantize(full)[:37, :50])


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("word", ["row_scaled", "per_token"])
def test_per_token_amaxes(word, direction, backend, assert_bits):
    x = normal((48, 64)) * np.geomspace(1e-3, 1e3, 48, dtype=F32)[:, None]
    x[5], x[:, 7] = 0, 0
    q = backend.quantize(x, direction=direction, second_level=word)
    assert_bits(q.amax, np.abs(x).max(axis=1 if direction == "rowwise" else 0))
    decoded = backend.dequantize(q)
    assert np.isfinite(decoded).all()
    assert not decoded[5].any()
    assert not decoded[:, 7].any()
    own = fp4kit.error_stats(x, q).sqnr if backend.name != "cuda" else 20
    assert own > 18
    if word == "row_scaled":
        given = backend.quantize(x, direction=direction, amax=q.amax)
        assert_bits(given.packed, q.packed)


def test_per_token_rows_below_the_least_amax_decode_as_they_were_encoded(backend):
    x = np.full((2, 16), 1e-14, F32)
    decoded = backend.dequantize(backend.quantize(x, second_level="per_token"))
    np.testing.assert_allclose(decoded, x, rtol=0.1)


# ------------------------------------------------------------------------------------------------
# Rotation
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [True, 0, 0x1234, 0xFFFF])
def test_rotation_is_the_matrix_product(mask, backend):
    x = normal((32, 48))
    bits = 0xD7E8 if mask is True else mask
    sign = np.where(bits >> np.arange(16) & 1, -1.0, 1.0)
    matrix = np.array([[(-1) ** (r & c).bit_count() for c in range(16)] for r in range(16)])
    wanted = (x.reshape(-1, 16).astype(np.float64) @ (np.diag(sign) @ matrix) / 4).reshape(x.shape)
    got = backend.call(fp4kit.hadamard_transform, x, mask)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    columns = backend.call(
        fp4kit.hadamard_transform, np.ascontiguousarray(x.T), mask, direction="columnwise"
    )
    np.testing.assert_allclose(columns.T, wanted, atol=1e-6)
    back = backend.call(fp4kit.hadamard_transform, got, mask, inverse=True)
    np.testing.assert_allclose(back, x, atol=1e-6)


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_dequantize_undoes_the_rotation_on_request(format, direction, backend):
    x = normal((64, 96))
    x[::16, ::16] = 30
    q = backend.quantize(x, format, direction=direction, rht=True)
    rotated = backend.call(fp4kit.hadamard_transform, x, direction=direction)
    for wanted, undo in ((rotated, False), (x, True)):
        got = backend.dequantize(q, undo_rht=undo)
        assert np.linalg.norm(got - wanted) < 0.2 * np.linalg.norm(wanted)
    assert fp4kit.error_stats(x, q, backend="reference").sqnr > 14


def test_the_amax_is_that_after_the_rotation(backend):
    x = np.ones((16, 16), F32)
    row, column = backend.quantize(x, direction="both", rht=0)
    assert float(row.amax[0]) == 1
    assert float(column.amax[0]) == 4
    given = backend.quantize(x, direction="both", rht=0, amax=(2.0, 8.0))
    assert [float(q.amax[0]) for q in given] == [2, 8]


# ------------------------------------------------------------------------------------------------
# Searches
# ------------------------------------------------------------------------------------------------

SAMPLES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "student": lambda rng, n: rng.standard_t(3, n),
    "log-normal": lambda rng, n: rng.lognormal(0, 1, n) * rng.choice([-1, 1], n),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_searches_lower_the_error(name, backend):
    x = SAMPLES[name](np.random.default_rng(1), 1 << 16).astype(F32).reshape(256, 256)

    def mse(**options):
        back = backend.dequantize(backend.quantize(x, **options)).astype(np.float64)
        return np.mean((back - x) ** 2)

    plain = mse()
    # The few largest blocks make most of the error of log-normal values, and gain least.
    sweep = mse(scale_search="sweep", e4m3_max=256)
    four_over_six = mse(scale_search="four_over_six", e4m3_max=256)
    assert sweep < {"normal": 0.8, "student": 0.85, "log-normal": 0.9}[name] * plain
    assert sweep < four_over_six < 0.95 * plain


def test_a_sweep_misses_the_best_of_all_scales_in_at_most_a_thousandth_of_blocks(fast_backend):
    x = np.concatenate([sample(np.random.default_rng(2), 1 << 17) for sample in SAMPLES.values()])
    x = x.astype(F32).reshape(-1, 16)
    q = fast_backend.quantize(x, scale_search="sweep", e4m3_max=256)
    amax, scheme = np.broadcast_to(q.amax[:, None], (len(x), 1)), q.scheme

    def errors(byte):
        choice = scale_search.Choice(byte, scale_search.factor_of(byte, amax, scheme))
        return scale_search.total_error(x[:, None, :], choice, amax, scheme)

    own, best = errors(q.block_scale), np.full((len(x), 1), np.inf, F32)
    for code in range(1, E4M3.max_code + 1):
        best = np.minimum(best, errors(np.full((len(x), 1), code, np.uint8)))
    assert (own <= best).mean() >= 0.999


@pytest.mark.parametrize("search", ["four_over_six", "sweep"])
@pytest.mark.parametrize("error", ["mse", "mae"])
def test_no_block_gets_worse_than_without_a_search(search, error, backend):
    x = normal((64, 256), 3)
    plain = backend.quantize(x)
    found = backend.quantize(x, scale_search=search, search_error=error)
    power = 2 if error == "mse" else 1
    of_blocks = [
        (np.abs(backend.dequantize(q).astype(np.float64) - x) ** power).reshape(64, 16, 16).sum(-1)
        for q in (plain, found)
    ]
    # The candidates hold what recipe te chooses, but for its order of operations.
    worse = of_blocks[1] > of_blocks[0] * (1 + 1e-5)
    assert worse.mean() < 0.01


def test_ties_keep_the_scale_of_recipe_te(backend, assert_bits):
    x = np.zeros((4, 64), F32)
    x[1, ::5] = 6
    x[2] = np.nan
    plain = backend.quantize(x, nonfinite="propagate")
    for search in ("four_over_six", "sweep"):
        found = backend.quantize(x, scale_search=search, nonfinite="propagate")
        assert_bits(found.block_scale[[0, 2]], plain.block_scale[[0, 2]])


# ------------------------------------------------------------------------------------------------
# What does not combine
# ------------------------------------------------------------------------------------------------

REFUSED = [
    ({"direction": "diagonal"}, "choose one of rowwise, columnwise, both"),
    ({"block_shape": "3d"}, "choose one of 1d, 2d"),
    ({"amax": "per_tensor"}, "row_scaled and per_token are values of second_level"),
    ({"scale_search": "best"}, "choose one of four_over_six, sweep"),
    ({"scale_search": "sweep", "search_error": "max"}, "choose one of mse"),
    ({"search_error": "mse"}, "belong to a scale_search"),
    ({"e4m3_max": 256}, "belong to a scale_search"),
    ({"scale_search": "sweep", "e4m3_max": 300}, "choose 448 or 256"),
    ({"scale_search": "sweep", "recipe": "modelopt"}, "recipe te"),
    ({"scale_search": "sweep", "rounding": "stochastic", "seed": 1}, "cannot be combined"),
    ({"scale_search": "sweep", "second_level": "per_token"}, "cannot be combined"),
    ({"scale_search": "sweep", "format": "mxfp4"}, "recipe te of nvfp4"),
    ({"rounding": "up"}, "choose one of nearest, stochastic"),
    ({"rounding": "stochastic"}, "needs seed"),
    ({"rounding": "stochastic", "seed": -1}, "needs seed"),
    ({"rounding": "stochastic", "seed": 1 << 64}, "needs seed"),
    ({"rounding": "stochastic", "seed": 1, "subsequence": 1 << 32}, "needs subsequence"),
    ({"seed": 1}, "belong to rounding='stochastic'"),
    ({"rounding": "stochastic", "seed": 1, "recipe": "comfy"}, "recipe te"),
    ({"rounding": "stochastic", "seed": 1, "format": "mxfp8"}, "E2M1"),
    ({"rht": 1 << 16}, "sign mask of 16 bits"),
    ({"rht": "yes"}, "sign mask of 16 bits"),
    ({"rht": True, "block_shape": "2d"}, "must serve both"),
    ({"rht": True, "format": "mxfp8"}, "E2M1"),
    ({"rht": True, "recipe": "torchao"}, "recipe te"),
    ({"rht": True, "rht_direction": "columnwise"}, "is not quantized under direction='rowwise'"),
    ({"rht_direction": "rowwise"}, "belongs to rht"),
    ({"rht_rounding": "bf16"}, "belongs to rht"),
    ({"rht": True, "rht_rounding": "f16"}, "choose one of bf16, none"),
    ({"direction": "both", "rht": True, "amax": 3.0}, "pair"),
    ({"direction": "both", "amax": (1.0, 2.0, 3.0)}, "pair"),
    ({"second_level": "per_token", "block_shape": "2d"}, "2-D tile"),
    ({"second_level": "row_scaled", "block_shape": "2d"}, "2-D tile"),
    ({"second_level": "per_token", "format": "mxfp4"}, "mxfp4 has none"),
    ({"second_level": "per_token", "recipe": "nvfuser"}, "recipe te"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refusals_say_why(options, message):
    with pytest.raises(OptionError, match=message):
        fp4kit.quantize(normal((32, 32)), **options)


@pytest.mark.parametrize(("shape", "options", "message"), [
    ((17, 32), {"direction": "columnwise"}, "number of rows"),
    ((17, 32), {"direction": "both"}, "number of rows"),
    ((17, 32), {"block_shape": "2d"}, "number of rows"),
    ((32, 17), {"direction": "columnwise", "block_shape": "2d"}, "last axis"),
    ((32, 17), {"direction": "both"}, "last axis"),
    ((17, 32), {"direction": "columnwise", "rht": True, "pad": True}, "whole groups of 16"),
    ((32, 24), {"rht": True, "pad": True}, "whole groups of 16"),
    ((32, 32), {"block_shape": "2d", "amax": np.ones(4, F32)}, "cut 2-D tiles"),
    ((32, 48), {"direction": "columnwise", "amax": np.ones(32, F32)}, "48 columns"),
])  # fmt: skip
def test_shapes_that_do_not_fit(shape, options, message):
    with pytest.raises(ShapeError, match=message):
        fp4kit.quantize(normal(shape), **options)


def test_nonfinite_input_is_named_for_every_variant():
    x = normal((32, 32))
    x[3, 4] = np.nan
    for options in (
        {"direction": "both"},
        {"rht": True},
        {"second_level": "per_token"},
        {"block_shape": "2d"},
    ):
        with pytest.raises(NonFiniteError, match=r"1 NaN and 0 infinite.*\(3, 4\)"):
            fp4kit.quantize(x, **options)


def test_plain_calls_have_no_variant():
    x = normal((32, 32))
    for options in ({}, {"direction": "rowwise"}, {"rht": False}, {"second_level": "row_scaled"}):
        assert fp4kit.quantize(x, **options).scheme.is_plain
    row, column = fp4kit.quantize(x, direction="both")
    assert row.scheme.is_plain
    assert column.direction == "columnwise"


@pytest.mark.parametrize(("options", "message"), [
    ({"direction": "both"}, "takes one direction, rowwise or columnwise"),
    ({"rounding": "stochastic"}, "needs seed"),
    ({"second_level": "per_token", "block_shape": "2d"}, "no both"),
    ({"format": "mxfp8", "rht": True}, "not mxfp8"),
])  # fmt: skip
def test_fake_quantization_refuses_what_quantize_does(options, message):
    with pytest.raises(OptionError) as caught:
        fp4kit.quantize_dequantize(np.ones((32, 32), F32), **options)
    assert message in str(caught.value)


def test_wrong_variant_and_shapes_of_a_tensor_are_refused():
    column = fp4kit.quantize(normal((32, 48)), direction="columnwise")
    with pytest.raises(ShapeError, match="packed has shape"):
        fp4kit.QuantizedTensor(
            column.packed, column.block_scale, "nvfp4", (32, 48), amax=column.amax
        )
    with pytest.raises(OptionError, match="recipe te"):
        fp4kit.QuantizedTensor(
            column.packed, column.block_scale, "nvfp4", (32, 48), recipe="nvfuser",
            direction="columnwise", scale_search="sweep",
        )  # fmt: skip


def test_error_stats_of_a_columnwise_tensor_are_those_of_the_transpose():
    x = normal((64, 48), 7)
    for name in ("reference", "cpu"):
        column = fp4kit.error_stats(
            x, fp4kit.quantize(x, direction="columnwise"), backend=name
        ).to_dict()
        rows = np.ascontiguousarray(x.T)
        transposed = fp4kit.error_stats(rows, fp4kit.quantize(rows), backend=name).to_dict()
        for key, value in transposed.items():
            assert column[key] == pytest.approx(value, rel=1e-12), key


def test_products_of_per_token_operands():
    """D = amax_a[i] * amax_b[j] * (codes and block scales) / 2688^2, as numerics.md gives it."""
    a, b = normal((16, 64), 1), normal((8, 64), 2)
    operands = [fp4kit.quantize(x, second_level="per_token") for x in (a, b)]
    raw = [
        E2M1.values[codes(q)] * np.repeat(E4M3.values[q.block_scale], 16, axis=1).astype(np.float64)
        for q in operands
    ]
    alpha = [q.amax.astype(np.float64) / 2688 for q in operands]
    product = (alpha[0][:, None] * alpha[1]) * (raw[0] @ raw[1].T)
    decoded = [fp4kit.dequantize(q).astype(np.float64) for q in operands]
    np.testing.assert_allclose(product, decoded[0] @ decoded[1].T, rtol=1e-5)
    assert list(itertools.chain(product.shape)) == [16, 8]
