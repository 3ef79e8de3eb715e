# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 sources: decoded values, any range of bytes, and what is refused from the headers alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4kit.checkpoint.views import base as views
from fp4kit.checkpoint.views import fp8 as fp8_views
from fp4kit.checkpoint.views.base import ViewOptions
from fp4kit.errors import FileFormatError
from fp4kit.reference import codecs

F8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300))


def codes_of(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def scales_of(shape, seed=1):
    return np.random.default_rng(seed).uniform(1e-3, 2.0, shape).astype(np.float32)


def decoded(codes, dtype, scale):
    with np.errstate(all="ignore"):
        return codes.view(F8[dtype]).astype(np.float32) * scale


def assert_same(found, expected):
    """Bit for bit, except that any NaN equals any other."""
    assert found.shape == expected.shape
    nan = np.isnan(expected)
    assert (np.isnan(found) == nan).all()
    assert (found.view(np.uint32)[~nan] == expected.view(np.uint32)[~nan]).all()


def spread(scale, shape, block):
    """The scale of every element of a tensor under a grid of blocks."""
    full = np.repeat(np.repeat(scale, block[0], -2), block[1], -1)
    return full[..., : shape[-2], : shape[-1]]


def grid_shape(shape, block):
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


@pytest.mark.parametrize("dtype", F8)
@pytest.mark.parametrize("scale", [1.0, 0.37, -2.5, 2.0**-126, 1e-40, 3e38, 0.0])
def test_every_code_times_a_scale_per_tensor(stored, dtype, scale):
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    source = stored.ArraySource(
        {"a.weight": (dtype, codes), "a.weight_scale": ("F32", np.float32([scale]))}
    )
    (view,) = fp8_views.find_views(source, ViewOptions({}))
    assert view.consumed == ("a.weight", "a.weight_scale")
    assert (view.tensor.name, view.tensor.spec.dtype) == ("a.weight", "F32")
    assert view.tensor.stored == 256 + 4
    assert_same(stored.read_all(view), decoded(codes, dtype, np.float32(scale)))


@settings(deadline=None)
@given(shape=SHAPES, lead=st.sampled_from([(), (3,)]), data=st.data())
def test_block_scales_over_any_shape(stored, shape, lead, data):
    """DeepSeek's layout, ragged blocks and stacked experts too; every way to name the block."""
    block = data.draw(st.sampled_from([(128, 128), (64, 32), (1, 128), (7, 5)]))
    dtype = data.draw(st.sampled_from(sorted(F8)))
    shape = (*lead, *shape)
    codes, scale = codes_of(shape), scales_of(grid_shape(shape, block))
    config = data.draw(
        st.sampled_from(
            [
                {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}},
                {
                    "quantization_config": {
                        "config_groups": {"g": {"weights": {"block_structure": list(block)}}}
                    }
                },
            ]
            + ([{}, {"quantization_config": {}}] if block == (128, 128) else [])
        )
    )
    source = stored.ArraySource({"x.weight_scale_inv": ("F32", scale), "x.weight": (dtype, codes)})
    (view,) = fp8_views.find_views(source, ViewOptions(config))
    expected = decoded(codes, dtype, spread(scale, shape, block))
    assert_same(stored.read_all(view), expected)
    # NaN bits differ between NumPy and the kernel, so ranges are compared with the view itself.
    stored.check_ranges(data, view, stored.read_all(view))


@pytest.mark.parametrize("lead", [(), (3,)])
def test_blocks_as_modelopt_shapes_them(stored, lead):
    """[O / 128, 1, I / 128, 1]; stacked ones alike."""
    shape = (*lead, 130, 256)
    codes, scale = codes_of(shape), scales_of(grid_shape(shape, (128, 128)))
    spaced = scale.reshape(*lead, scale.shape[-2], 1, scale.shape[-1], 1)
    source = stored.ArraySource({"x.weight": ("F8_E4M3", codes), "x.weight_scale": ("F32", spaced)})
    (view,) = fp8_views.find_views(source, ViewOptions({}))
    expected = decoded(codes, "F8_E4M3", spread(scale, shape, (128, 128)))
    assert_same(stored.read_all(view), expected)


@settings(deadline=None)
@given(shape=SHAPES, data=st.data())
def test_scales_per_tensor_channel_and_expert(stored, shape, data):
    lead = data.draw(st.sampled_from([(), (4,)]))
    shape = (*lead, *shape)
    kinds = {(): None, (1,): None, (*shape[:-1],): -1, (*shape[:-1], 1): -1}
    if lead:
        kinds |= {(4,): -2, (4, 1, 1): -2}
    scale_shape = data.draw(st.sampled_from(sorted(kinds)))
    name = data.draw(st.sampled_from(["F32", "BF16", "F16"]))
    dtype = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}[name]
    scale = scales_of(scale_shape).astype(dtype)
    raw = scale.view(np.uint16) if name == "BF16" else scale
    codes = codes_of(shape)
    source = stored.ArraySource(
        {"x.weight": ("F8_E4M3", codes), "x.weight_scale": (name, np.asarray(raw))}
    )
    (view,) = fp8_views.find_views(source, ViewOptions({}))
    wide = scale.astype(np.float32)
    trailing = {None: 0, -1: 1, -2: 2}[kinds[scale_shape]]
    if trailing:
        wide = wide.reshape(*shape[: len(shape) - trailing], *([1] * trailing))
    else:
        wide = wide.reshape(())
    assert_same(stored.read_all(view), decoded(codes, "F8_E4M3", wide))


@pytest.mark.parametrize("scale_dtype", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("block", [(1, 32), (128, 128)])
def test_exponent_scales(stored, scale_dtype, block):
    """MXFP8, and DeepSeek's blocks with power-of-two scales."""
    shape = (130, 256)
    codes = codes_of(shape)
    exponents = np.random.default_rng(3).integers(0, 255, grid_shape(shape, block), np.uint8)
    source = stored.ArraySource(
        {"x.weight": ("F8_E4M3", codes), "x.weight_scale": (scale_dtype, exponents)}
    )
    (view,) = fp8_views.find_views(source, ViewOptions({}))
    scale = spread(codecs.decode_e8m0(exponents), shape, block)
    assert_same(stored.read_all(view), decoded(codes, "F8_E4M3", scale))


def test_small_pieces_give_the_same_bytes(stored, monkeypatch):
    shape = (300, 100)
    source = stored.ArraySource(
        {
            "x": ("F8_E4M3", codes_of(shape) & 0x77),
            "x_scale_inv": ("F32", scales_of((3, 1))),
        }
    )
    (view,) = fp8_views.find_views(source, ViewOptions({}))
    whole = stored.read_all(view)
    monkeypatch.setattr(views, "CHUNK_BYTES", 4096)
    source.reads.clear()
    assert (stored.read_all(view) == whole).all()
    assert max(count for _, _, count in source.reads) <= 1024


def test_many_threads_read_at_once(stored):
    source = stored.ArraySource(
        {
            "x": ("F8_E4M3", codes_of((512, 300)) & 0x77),
            "x_scale_inv": ("F32", scales_of((4, 3))),
        }
    )
    (view,) = fp8_views.find_views(source, ViewOptions({}))
    whole = stored.read_all(view).reshape(-1).view(np.uint8)
    ranges = [(first, 10_007) for first in range(0, len(whole) - 10_007, 9_001)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pair: stored.read_range(view, *pair), ranges))
    for (first, count), piece in zip(ranges, found, strict=True):
        assert (piece == whole[first : first + count]).all()


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0,), ()])
def test_empty_and_scalar_weights(stored, shape):
    source = stored.ArraySource(
        {"x": ("F8_E5M2", np.full(shape, 0x3C, np.uint8)), "x_scale": ("F32", np.float32([2]))}
    )
    (view,) = fp8_views.find_views(source, ViewOptions({}))
    assert (stored.read_all(view) == np.full(shape, 2, np.float32)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scale_that_is_not_finite_is_an_error_when_read(stored, bad):
    scale = np.ones((2, 1), np.float32)
    scale[1] = bad
    source = stored.ArraySource(
        {"x": ("F8_E4M3", codes_of((256, 8))), "x_scale_inv": ("F32", scale)}
    )
    (view,) = fp8_views.find_views(source, ViewOptions({}))
    assert len(stored.read_range(view, 0, 128 * 8 * 4)) == 4096
    with pytest.raises(FileFormatError, match=r"model: tensor 'x_scale_inv': holds a NaN or inf"):
        stored.read_all(view)


# -- refused from the headers alone --------------------------------------------------------------


def tensors(weight=(256, 256), dtype="F8_E4M3", **scales):
    result = {"x.weight": (dtype, np.zeros(weight, np.uint8))}
    for suffix, (scale_dtype, shape) in scales.items():
        width = {"F32": np.uint32, "F64": np.uint64, "U8": np.uint8}[scale_dtype]
        result[f"x.weight{suffix}"] = (scale_dtype, np.zeros(shape, width))
    return result


@pytest.mark.parametrize(
    ("stored_tensors", "config", "message"),
    [
        (tensors(), {}, r"'x.weight': is F8_E4M3 and has no scale: neither 'x.weight_scale_inv'"),
        (tensors(dtype="F8_E5M2"), {}, "has no scale"),
        (tensors(_scale_inv=("F32", (2, 2)), _scale=("F32", ())), {}, "has two scales"),
        (tensors(_scale_inv=("F64", (2, 2))), {}, "'x.weight_scale_inv': is F64; .*one of F32"),
        (tensors(_scale_inv=("F32", (2, 3))), {}, r"shape \[2, 3\], which fits a weight of shape"),
        (tensors(_scale=("F32", (255,))), {}, "per channel nor in blocks of 128 x 128"),
        (tensors(_scale=("F32", (256, 8))), {}, r"shape \[256, 8\]"),
        (tensors(_scale=("U8", (256,))), {}, r"shape \[256\]"),
        (
            tensors(_scale_inv=("F32", (2, 2))),
            {"quantization_config": {"weight_block_size": [64, 64]}},
            "blocks of 64 x 64; check weight_block_size",
        ),
        (
            tensors(_scale_inv=("F32", (2, 2))),
            {"quantization_config": {"weight_block_size": [128]}},
            r"block \[128\] is not \[rows, columns\]",
        ),
        (
            tensors(_scale_inv=("F32", (2, 2))),
            {"quantization_config": {"weight_block_size": [0, 128]}},
            "is not",
        ),
        (tensors(dtype="F8_E4M3FNUZ", _scale=("F32", ())), {}, "FNUZ, which cannot be decoded"),
    ],
)
def test_refused_before_any_data_is_read(stored, stored_tensors, config, message):
    source = stored.ArraySource(stored_tensors)
    with pytest.raises(FileFormatError, match=message):
        fp8_views.find_views(source, ViewOptions(config))
    assert source.reads == []


def test_block_scales_of_4_bit_codes_are_no_weights(stored):
    u8 = np.zeros((4, 8), np.uint8)
    scale = ("F8_E4M3", np.zeros((4, 1), np.uint8))
    source = stored.ArraySource(
        {
            "a.weight_packed": ("U8", u8),
            "a.weight_scale": scale,
            "b.weight": ("U8", u8),
            "b.weight_scale": scale,
            "c.weight": ("F32", np.zeros((2, 2), np.float32)),
        }
    )
    assert fp8_views.find_views(source, ViewOptions({})) == []
