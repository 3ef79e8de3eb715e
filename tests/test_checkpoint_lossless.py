# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MXFP4 to NVFP4 without any change of values, over all exponents and under every recipe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job
from fp4kit.checkpoint.views import mxfp4 as mxfp4_views
from fp4kit.checkpoint.views.base import ViewOptions
from fp4kit.checkpoint.write import lossless
from fp4kit.errors import FileFormatError
from fp4kit.formats import ALL_RECIPES, E4M3
from sample_plans import sample_plan

#: Recipes whose second level is one factor; `te` keeps an amax, which is divided by 2688.
FACTOR_RECIPES = [name for name, recipe in ALL_RECIPES.items() if recipe.keeps != "amax"]
EVERY_CODE = np.arange(16, dtype=np.uint8) * 17


def decode_mxfp4(packed, scale, dtype="float32"):
    rows, cols = len(packed), packed.shape[1] * 2
    out = np.empty((rows, cols), np.float32)
    plan = sample_plan(rows, cols, "mxfp4")
    job = Job(plan, None, "float32", None, packed, scale)
    get_backend("reference").dequantize(job, out, "float32")
    return out


def decode_nvfp4(packed, scale, level, recipe, backend="reference"):
    rows, cols = len(packed), packed.shape[1] * 2
    out = np.empty((rows, cols), np.float32)
    plan = sample_plan(rows, cols, recipe=recipe, rows_per_scale=rows)
    second = {
        "decode_scale": level.decode,
        "encode_scale": level.encode,
    }[plan.recipe.keeps]
    job = Job(plan, None, "float32", np.array([second]), packed, scale)
    get_backend(backend).dequantize(job, out, "float32")
    return out


def textbook(packed, scale, level):
    """q * s * 2^m in float64, independent of any recipe."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1, 16)
    q = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    value = q * E4M3.values[scale].astype(np.float64)[..., None] * float(level.decode)
    with np.errstate(over="ignore"):
        return value.reshape(len(packed), -1).astype(np.float32)


def assert_equal(found, expected, zero_sign=True):
    if zero_sign:
        assert (found.view(np.uint32) == expected.view(np.uint32)).all()
    else:
        assert np.array_equal(found, expected)


def assert_lossless(packed, scale, backends=("reference",)):
    exponents = lossless.exponents_of(packed, scale)
    assert exponents.misfits == 0
    level = exponents.second_level
    assert level.decode * level.encode == 1
    assert level.decode >= np.finfo(np.float32).tiny <= level.encode
    bytes_ = lossless.block_scales(packed, scale, level)
    assert bytes_.shape == (len(scale), 2 * scale.shape[1])
    assert (bytes_ <= E4M3.max_code).all()
    expected = decode_mxfp4(packed, scale)
    assert_equal(textbook(packed, bytes_, level), expected)
    for recipe in FACTOR_RECIPES:
        for backend in backends:
            keeps = ALL_RECIPES[recipe].decodes_negative_zero
            found = decode_nvfp4(packed, bytes_, level, recipe, backend)
            assert_equal(found, expected, zero_sign=keeps)


def every_code_under(*bytes_):
    """Codes (1, 16 n) and scale bytes (1, n): every code in both halves, under each byte."""
    return np.tile(EVERY_CODE, len(bytes_))[None], np.array([bytes_], np.uint8)


@pytest.mark.parametrize("largest", range(255))
def test_all_exponents(largest):
    """Every scale byte as the largest, with every one that fits below it."""
    lowest = max(largest - 17, 0)
    assert_lossless(*every_code_under(*range(lowest, largest + 1)), ("reference", "cpu"))


@pytest.mark.parametrize("largest", range(1, 255))
def test_exactly_seventeen_powers_fit(largest):
    """One more does not, unless the second level stops at the smallest normal number."""
    exponents = lossless.exponents_of(*every_code_under(max(largest - 18, 0), largest))
    stops = largest - 127 < -118
    fits = largest < 18 or stops
    assert exponents.misfits == (0 if fits else 1)
    assert exponents.blocks == 2
    m = largest - 127 - 8
    assert exponents.second_level.exponent == (-126 if stops else m)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 6),
    largest=st.integers(17, 254),
    zeros=st.floats(0, 1),
    seed=st.integers(0, 1 << 30),
)
def test_any_tensor_that_fits(rows, groups, largest, zeros, seed):
    """Blocks of zeros may have any scale byte and lie anywhere."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, groups, 16), np.uint8)
    scale = rng.integers(largest - 17, largest + 1, (rows, groups), np.uint8)
    empty = rng.random((rows, groups)) < zeros
    blocks[empty] = rng.choice(np.array([0x00, 0x80, 0x08, 0x88], np.uint8), (int(empty.sum()), 16))
    scale[empty] = rng.integers(0, 255, int(empty.sum()), np.uint8)
    packed = blocks.reshape(rows, -1)
    exponents = lossless.exponents_of(packed, scale)
    assert exponents.zero_blocks >= empty.sum()
    assert_lossless(packed, scale)
    level = exponents.second_level
    bytes_ = lossless.block_scales(packed, scale, level)
    assert (bytes_.reshape(rows, groups, 2)[empty] == 0).all()


def test_nothing_but_zeros():
    packed = np.full((3, 32), 0x80, np.uint8)
    scale = np.array([[0, 254], [1, 2], [127, 127]], np.uint8)
    exponents = lossless.exponents_of(packed, scale)
    assert (exponents.largest, exponents.misfits, exponents.zero_blocks) == (None, 0, 6)
    assert exponents.second_level.decode == exponents.second_level.encode == 1
    assert_lossless(packed, scale)


def test_misfits_are_counted_and_refused():
    packed, scale = every_code_under(100, 101, 119, 118, 100)
    packed = packed.copy()
    packed[0, -16:] = 0x88  # the last block is zero and does not count
    exponents = lossless.exponents_of(packed, scale)
    assert exponents.misfits == 2
    assert exponents.largest == 119 - 127
    with pytest.raises(AssertionError, match="does not fit"):
        lossless.block_scales(packed, scale, exponents.second_level)


def test_one_nonzero_code_counts_wherever_it_is():
    for place in range(32):
        for code in range(1, 16):
            packed = np.zeros((1, 32), np.uint8)
            packed[0, 16 + place // 2] = code << (4 * (place % 2))
            assert lossless.nonzero_blocks(packed).tolist() == [[False, code != 8]]


def test_a_group_shares_the_largest_exponent(stored):
    """gate and up of one expert, from alternating rows of one tensor, read in chunks."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(1, 8, (1, 40, 2, 16), np.uint8)
    scales = rng.integers(110, 120, (1, 40, 2), np.uint8)
    scales[0, 1::2] = 105
    scales[0, 7, 1] = 121
    prefix = "layers.0.mlp.experts"
    source = stored.ArraySource(
        {
            f"{prefix}.gate_up_proj_blocks": ("U8", blocks),
            f"{prefix}.gate_up_proj_scales": ("U8", scales),
        }
    )
    gate, up = mxfp4_views.find_views(source, ViewOptions({"model_type": "gpt_oss"}))
    assert lossless.scan(gate).largest == int(scales[0, 0::2].max()) - 127
    assert lossless.scan(up).largest == 121 - 127
    group = lossless.scan_group([gate, up])
    assert group.blocks == 80
    assert group.misfits == 0
    level = group.second_level
    assert level.exponent == 121 - 127 - 8
    for view in (gate, up):
        packed, scale = view.codes(0, 20)
        bytes_ = lossless.block_scales(packed, scale, level)
        assert_equal(textbook(packed, bytes_, level), stored.read_all(view))


def test_scan_is_the_same_in_small_slabs(stored, monkeypatch):
    rng = np.random.default_rng(1)
    source = stored.ArraySource(
        {
            "x.weight_packed": ("U8", rng.integers(0, 256, (50, 64), np.uint8)),
            "x.weight_scale": ("U8", rng.integers(0, 255, (50, 4), np.uint8)),
        }
    )
    (view,) = mxfp4_views.find_views(source, ViewOptions({}))
    whole = lossless.scan(view)
    monkeypatch.setattr(lossless, "SCAN_BYTES", 200)
    source.reads.clear()
    piecewise = lossless.scan(view)
    assert (piecewise.counts == whole.counts).all()
    assert piecewise.zero_blocks == whole.zero_blocks
    assert max(count for _, _, count in source.reads) <= 200


def test_nan_scale_is_named(stored):
    scale = np.full((4, 2), 120, np.uint8)
    scale[3, 0] = 255
    source = stored.ArraySource(
        {
            "x.weight_packed": ("U8", np.zeros((4, 32), np.uint8)),
            "x.weight_scale": ("U8", scale),
        }
    )
    (view,) = mxfp4_views.find_views(source, ViewOptions({}))
    with pytest.raises(FileFormatError, match=r"x.weight_scale.*NaN scale.*block 0 of row 3"):
        lossless.scan(view)
