# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What stands between stored tensors and what is written: views in their places, and rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4kit.arrays import RAW_DTYPES
from fp4kit.checkpoint.views import logical
from fp4kit.checkpoint.views import mxfp4 as mxfp4_views
from fp4kit.checkpoint.views.base import Overlay, ViewOptions
from fp4kit.checkpoint.views.logical import Cast
from fp4kit.cpu.matrices import round_float32
from fp4kit.errors import FileFormatError
from fp4kit.reference import codecs

DTYPES = ("bfloat16", "float16", "float32")
SIZES = st.integers(1, 6)


def gpt_oss(stored, experts, out, blocks, seed=0):
    """(source, views, decoded) of fused experts as gpt-oss has them, kept fused."""
    rng = np.random.default_rng(seed)
    name = "model.layers.0.mlp.experts.down_proj"
    source = stored.ArraySource(
        {
            "before": ("F32", np.zeros(3, np.float32)),
            f"{name}_blocks": ("U8", rng.integers(0, 256, (experts, out, blocks, 16), np.uint8)),
            f"{name}_scales": ("U8", rng.integers(110, 140, (experts, out, blocks), np.uint8)),
            "after": ("F32", np.zeros(3, np.float32)),
        }
    )
    return source, mxfp4_views.find_views(
        source, ViewOptions({"model_type": "gpt_oss"}, fused=False)
    )


# ------------------------------------------------------------------------------------------------
# Rounding
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_the_codecs(dtype):
    """Every 16-bit beginning with the ends that decide ties, subnormals and overflow."""
    ends = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | ends).reshape(-1)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    values = np.append(values, np.float32(np.nan))
    with np.errstate(over="ignore", under="ignore"):
        expected = codecs.from_float32(values, dtype).astype(RAW_DTYPES[dtype])
    for count in (0, 1, 2, 3, len(values)):
        out = np.empty(count * expected.itemsize, np.uint8)
        round_float32(values[len(values) - count :], dtype, out)
        assert out.tobytes() == expected[len(expected) - count :].tobytes()


@settings(deadline=None, max_examples=50)
@given(data=st.data(), experts=SIZES, out=st.integers(1, 90), blocks=SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_range_of_a_cast(stored, dtype, data, experts, out, blocks):
    """However the range is cut into pieces, it is that of the rounded whole."""
    _, (view,) = gpt_oss(stored, experts, out, blocks)
    rounded = codecs.from_float32(stored.read_all(view), dtype)
    cast = Cast(view, dtype)
    assert (cast.tensor.dtype, cast.tensor.spec.shape) == (dtype, (experts, 32 * blocks, out))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logical, "WIDE_BYTES", data.draw(st.sampled_from([1, 700, 1 << 20])))
        stored.check_ranges(data, cast, rounded)


def test_a_cast_slab_reads_matrices_few_times(stored):
    """Columns of a matrix cost a pass over all of it: one for the chunk, not one a megabyte."""
    experts, out, blocks = 3, 1440, 24
    source, (view,) = gpt_oss(stored, experts, out, blocks)
    size = experts * out * blocks * 32 * 4
    source.reads.clear()
    stored.read_range(Cast(view, "bfloat16"), 0, size // 2)
    codes = sum(count for name, _, count in source.reads if name.endswith("_blocks"))
    assert codes == experts * out * blocks * 16


# ------------------------------------------------------------------------------------------------
# Views in the place of stored tensors
# ------------------------------------------------------------------------------------------------


@given(dropped=st.sets(st.sampled_from(["before", "after"])))
def test_views_stand_where_their_parts_did(stored, dropped):
    source, views = gpt_oss(stored, 2, 4, 1)
    overlay = Overlay(source, views, dropped)
    names = ["before", "model.layers.0.mlp.experts.down_proj", "after"]
    assert list(overlay.tensors) == [name for name in names if name not in dropped]
    for name, tensor in overlay.tensors.items():
        out = np.empty(tensor.spec.nbytes, np.uint8)
        overlay.read(name, 0, out.data)
        expected = stored.read_all(views[0]) if name in overlay.views else source.arrays[name]
        assert out.tobytes() == expected.tobytes()


def test_a_view_of_the_name_of_a_stored_tensor_is_refused(stored):
    source, views = gpt_oss(stored, 2, 4, 1)
    name = views[0].tensor.name
    both = stored.ArraySource({name: ("F32", np.zeros(2, np.float32))})
    source.tensors |= both.tensors
    with pytest.raises(FileFormatError, match=f"'{name}'.*'{name}_blocks' stands for a tensor"):
        Overlay(source, views)
    assert list(Overlay(source, views, {name}).views) == [name]
