# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MXFP4 sources: decoded values, verbatim codes, gpt-oss' alternating rows, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4kit.checkpoint.views import base as views
from fp4kit.checkpoint.views import mxfp4 as mxfp4_views
from fp4kit.checkpoint.views.base import ViewOptions
from fp4kit.errors import FileFormatError, OptionError

GPT_OSS = {"model_type": "gpt_oss"}
P = "model.layers.0.mlp.experts"


def random_parts(shape, seed=0):
    """Codes (.., O, I/32, 16) and scale bytes (.., O, I/32) that do not overflow."""
    rng = np.random.default_rng(seed)
    lead = (*shape[:-1], shape[-1] // 32)
    return rng.integers(0, 256, (*lead, 16), np.uint8), rng.integers(0, 253, lead, np.uint8)


def decoded(blocks, scales):
    """With ml_dtypes, independent of fp4kit: float32 (.., I)."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    value = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    result = value * np.ldexp(1.0, scales.astype(int) - 127)[..., None]
    with np.errstate(over="ignore"):
        return result.reshape(*scales.shape[:-1], -1).astype(np.float32)


def packed_source(stored, blocks, scales, scale_dtype="U8"):
    packed = blocks.reshape(*scales.shape[:-1], -1)
    return stored.ArraySource(
        {"x.weight_scale": (scale_dtype, scales), "x.weight_packed": ("U8", packed)}
    )


@pytest.mark.parametrize("scale_dtype", ["U8", "F8_E8M0"])
def test_every_code_under_every_scale(stored, scale_dtype):
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (255, 1, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, 1)
    source = packed_source(stored, blocks, scales, scale_dtype)
    (view,) = mxfp4_views.find_views(source, ViewOptions({}))
    assert view.tensor.name == "x.weight"
    assert view.tensor.stored == 255 * 16 * 17
    expected = decoded(blocks, scales)
    assert (stored.read_all(view).view(np.uint32) == expected.view(np.uint32)).all()


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 5)),
    name=st.sampled_from(["x.weight_packed", "x_blocks"]),
    data=st.data(),
)
def test_any_range_of_any_shape(stored, shape, name, data):
    shape = (*shape[:2], shape[2] * 32)
    blocks, scales = random_parts(shape)
    if name == "x_blocks":
        source = stored.ArraySource({"x_blocks": ("U8", blocks), "x_scales": ("U8", scales)})
    else:
        source = packed_source(stored, blocks, scales)
    (view,) = mxfp4_views.find_views(source, ViewOptions({}))
    assert view.tensor.spec.shape == shape
    expected = decoded(blocks, scales)
    assert (stored.read_all(view).view(np.uint32) == expected.view(np.uint32)).all()
    stored.check_ranges(data, view, expected)


@settings(deadline=None)
@given(experts=st.integers(1, 4), half=st.integers(1, 9), groups=st.integers(1, 4), data=st.data())
def test_gpt_oss_experts(stored, experts, half, groups, data):
    """Even rows are gate, odd rows up; biases go the same way."""
    gate_up = random_parts((experts, 2 * half, groups * 32))
    down = random_parts((experts, groups * 32, 32), seed=1)
    rng = np.random.default_rng(2)
    bias = rng.integers(0, 60000, (experts, 2 * half), np.uint16)
    source = stored.ArraySource(
        {
            f"{P}.gate_up_proj_blocks": ("U8", gate_up[0]),
            f"{P}.gate_up_proj_bias": ("BF16", bias),
            f"{P}.gate_up_proj_scales": ("U8", gate_up[1]),
            f"{P}.down_proj_blocks": ("U8", down[0]),
            f"{P}.down_proj_scales": ("U8", down[1]),
            f"{P}.down_proj_bias": ("BF16", bias[:, :1].repeat(groups * 32, 1)),
        }
    )
    found = {
        view.tensor.name: view for view in mxfp4_views.find_views(source, ViewOptions(GPT_OSS))
    }
    assert len(found) == experts * 6
    whole = {"gate_proj": decoded(*gate_up)[:, 0::2], "up_proj": decoded(*gate_up)[:, 1::2]}
    whole["down_proj"] = decoded(*down)
    for expert in range(experts):
        for projection, expected in whole.items():
            view = found[f"{P}.{expert}.{projection}.weight"]
            assert (stored.read_all(view) == expected[expert]).all()
        for number, projection in enumerate(("gate_proj", "up_proj")):
            view = found[f"{P}.{expert}.{projection}.bias"]
            assert (stored.read_all(view, np.uint16) == bias[expert, number::2]).all()
        assert found[f"{P}.{expert}.down_proj.bias"].tensor.spec.shape == (groups * 32,)
    name = data.draw(st.sampled_from(sorted(found)))
    dtype = np.float32 if name.endswith("weight") else np.uint16
    stored.check_ranges(data, found[name], stored.read_all(found[name], dtype))
    consumed = {part for view in found.values() for part in view.consumed}
    assert consumed == set(source.tensors)


@settings(deadline=None)
@given(experts=st.integers(1, 3), out=st.integers(1, 300), groups=st.integers(1, 4), data=st.data())
def test_experts_left_fused(stored, experts, out, groups, data):
    """As transformers keeps the decoded ones: [E, in, out] for gpt-oss."""
    blocks, scales = random_parts((experts, out, groups * 32))
    source = stored.ArraySource(
        {f"{P}.down_proj_blocks": ("U8", blocks), f"{P}.down_proj_scales": ("U8", scales)}
    )
    expected = decoded(blocks, scales)
    (view,) = mxfp4_views.find_views(source, ViewOptions({"model_type": "new"}, fused=False))
    assert (stored.read_all(view) == expected).all()
    (view,) = mxfp4_views.find_views(source, ViewOptions(GPT_OSS, fused=False))
    assert view.tensor.name == f"{P}.down_proj"
    assert view.tensor.stored == blocks.nbytes + scales.nbytes
    expected = np.ascontiguousarray(expected.transpose(0, 2, 1))
    assert (stored.read_all(view).view(np.uint32) == expected.view(np.uint32)).all()
    stored.check_ranges(data, view, expected)


@settings(deadline=None)
@given(first=st.integers(0, 20), count=st.integers(0, 20), data=st.data())
def test_codes_are_verbatim(stored, first, count, data):
    blocks, scales = random_parts((1, 80, 64))
    source = stored.ArraySource(
        {f"{P}.gate_up_proj_blocks": ("U8", blocks), f"{P}.gate_up_proj_scales": ("U8", scales)}
    )
    parity = data.draw(st.sampled_from([0, 1]))
    view = mxfp4_views.find_views(source, ViewOptions(GPT_OSS))[parity]
    assert view.matrix == (40, 64)
    packed, scale = view.codes(first, first + count)
    rows = slice(parity + 2 * first, parity + 2 * (first + count), 2)
    assert (packed == blocks.reshape(80, 32)[rows]).all()
    assert (scale == scales[0, rows]).all()


def test_strided_rows_in_small_reads(stored, monkeypatch):
    blocks, scales = random_parts((2, 64, 96))
    source = stored.ArraySource(
        {f"{P}.gate_up_proj_blocks": ("U8", blocks), f"{P}.gate_up_proj_scales": ("U8", scales)}
    )
    found = mxfp4_views.find_views(source, ViewOptions(GPT_OSS))
    whole = [stored.read_all(view) for view in found]
    monkeypatch.setattr(views, "READ_BYTES", 1000)
    source.reads.clear()
    for view, expected in zip(found, whole, strict=True):
        assert (stored.read_all(view) == expected).all()
    assert max(count for _, _, count in source.reads) <= 1000


def test_layout_override(stored):
    blocks, scales = random_parts((2, 8, 32))
    source = stored.ArraySource(
        {f"{P}.gate_up_proj_blocks": ("U8", blocks), f"{P}.gate_up_proj_scales": ("U8", scales)}
    )
    expected = decoded(blocks, scales)
    for layout, rows in (("out_in", slice(0, 4)), ("interleaved", slice(0, 8, 2))):
        view = mxfp4_views.find_views(source, ViewOptions({"model_type": "new"}, layout))[0]
        assert (stored.read_all(view) == expected[0, rows]).all()
    with pytest.raises(OptionError, match="cannot be in_out; pass --experts-layout out_in or"):
        mxfp4_views.find_views(source, ViewOptions(GPT_OSS, "in_out"))
    with pytest.raises(OptionError, match=r"model type new is not known.*--experts-layout"):
        mxfp4_views.find_views(source, ViewOptions({"model_type": "new"}))
    with pytest.raises(OptionError, match=r"\(none in config.json\)"):
        mxfp4_views.find_views(source, ViewOptions({}))
    with pytest.raises(OptionError, match="experts_layout='x' is not known"):
        mxfp4_views.find_views(source, ViewOptions(GPT_OSS, "x"))


def test_nan_scale_is_an_error_when_read(stored):
    blocks, scales = random_parts((4, 64))
    scales[2, 1] = 255
    (view,) = mxfp4_views.find_views(packed_source(stored, blocks, scales), ViewOptions({}))
    assert (stored.read_range(view, 0, 512) == stored.read_range(view, 0, 512)).all()
    with pytest.raises(
        FileFormatError, match=r"'x.weight_scale': holds a NaN .*block 1 of row 2 of 'x.weight'"
    ):
        stored.read_all(view)


U8 = "U8"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x_blocks": (U8, (4, 2, 16))}, "'x_blocks': has no scale: 'x_scales' is not there"),
        ({"x_packed": (U8, (4, 16))}, "'x_packed': has no scale: 'x_scale' is not there"),
        ({"x_blocks": (U8, (4, 2, 16)), "x_scales": (U8, (4, 3))}, r"need \[4, 3, 16\]"),
        ({"x_blocks": (U8, (4, 2, 8)), "x_scales": (U8, (4, 2))}, r"need \[4, 2, 16\]"),
        ({"x_packed": (U8, (4, 16)), "x_scale": (U8, (4, 2))}, r"need \[4, 32\]"),
        ({"x_packed": (U8, (16,)), "x_scale": (U8, (1,))}, "does not fit its scales 'x_scale'"),
        ({"x_blocks": (U8, (4, 2, 16)), "x_scales": ("I8", (4, 2))}, "'x_scales': is I8"),
        (
            {
                f"{P}.gate_up_proj_blocks": (U8, (2, 3, 1, 16)),
                f"{P}.gate_up_proj_scales": (U8, (2, 3, 1)),
            },
            "has 3 rows an expert",
        ),
        (
            {
                f"{P}.down_proj_blocks": (U8, (2, 3, 1, 16)),
                f"{P}.down_proj_scales": (U8, (2, 3, 1)),
                f"{P}.down_proj_bias": ("F16", (2, 4)),
            },
            r"down_proj_bias': has shape \[2, 4\], .* needs \[2, 3\]",
        ),
    ],
)
def test_refused_before_any_data_is_read(stored, tensors, message):
    width = {"U8": np.uint8, "I8": np.int8, "F16": np.float16}
    source = stored.ArraySource(
        {name: (dtype, np.zeros(shape, width[dtype])) for name, (dtype, shape) in tensors.items()}
    )
    with pytest.raises(FileFormatError, match=message):
        mxfp4_views.find_views(source, ViewOptions(GPT_OSS))
    assert source.reads == []


def test_nvfp4_codes_are_not_taken_for_mxfp4(stored):
    source = stored.ArraySource(
        {
            "x.weight_packed": ("U8", np.zeros((4, 16), np.uint8)),
            "x.weight_scale": ("F8_E4M3", np.zeros((4, 2), np.uint8)),
            "y.weight_packed": ("I32", np.zeros((4, 16), np.int32)),
        }
    )
    assert mxfp4_views.find_views(source, ViewOptions({})) == []
