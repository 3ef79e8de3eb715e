# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Residual channels: parity, what they are good for, and refusals. Bytes: test_golden_variants."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import fp4kit
from fp4kit.api.residual import LAYOUTS, MODES
from fp4kit.errors import DtypeError, NonFiniteError, OptionError, ShapeError
from fp4kit.formats import DTYPES, NIBBLE_ORDERS, SCALE_LAYOUTS

F32 = np.float32
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_parity(fast_backend, reference, assert_bits, data):
    rows = data.draw(st.integers(0, 140))
    blocks = data.draw(st.integers(1, 12))
    channels = 16 * data.draw(st.integers(0, blocks))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    x = normal((rows, blocks * 16), seed) * 10.0 ** rng.integers(-6, 3, (rows, 1))
    x[rng.random(x.shape) < 0.1] = 0
    if seed % 4 == 0 and x.size:
        x[0, :3] = [np.nan, np.inf, -np.inf]
    dtype = data.draw(st.sampled_from(DTYPES))
    options = {
        "mode": data.draw(st.sampled_from(MODES)),
        "layout": data.draw(st.sampled_from(LAYOUTS)),
        "scale_layout": data.draw(st.sampled_from(SCALE_LAYOUTS)),
        "nibble_order": data.draw(st.sampled_from(NIBBLE_ORDERS)),
        "intermediate": data.draw(st.sampled_from([None, "float32", "bfloat16"])),
        "nonfinite": "propagate",
    }
    if data.draw(st.booleans()):
        options["reorder"] = rng.permutation(blocks * 16)
    if data.draw(st.booleans()):
        options["encode_scale"] = data.draw(st.sampled_from([448.0, 1.0, 0.0, np.inf]))
    with np.errstate(over="ignore"):
        x = x.astype(NUMPY[dtype])
    args = (fp4kit.quantize_residual, x, channels)
    got, want = fast_backend.call(*args, **options), reference.call(*args, **options)
    for name in ("packed", "block_scale", "encode_scale"):
        assert_bits(getattr(got, name), getattr(want, name), name)
    out = DTYPES[seed % 3]
    assert_bits(fast_backend.dequantize(want, out), reference.dequantize(want, out), out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reordered", [False, True])
def test_the_error_of_a_product_falls_with_the_residual_channels(layout, reordered, backend):
    """Channels of rising magnitude: the last ones make most of the error."""
    rng = np.random.default_rng(3)
    size = np.geomspace(0.01, 10, 128).astype(F32)
    a, w = normal((64, 128), 1) * size, normal((32, 128), 2)
    order = None
    if reordered:
        shuffled = rng.permutation(128)
        a, w = a[:, shuffled], w[:, shuffled]
        order = np.argsort(size[shuffled])
    exact = a.astype(np.float64) @ w.T.astype(np.float64)
    # The weight's own rounding is left out: its values count as exact, in both places.
    errors = []
    for channels in (0, 16, 32, 64, 128):
        options = {"layout": layout, "reorder": order, "intermediate": "float32"}
        act = backend.call(fp4kit.quantize_residual, a, channels, **options)
        weight = backend.call(fp4kit.quantize_residual, w, channels, mode="weight", **options)
        pair = [backend.dequantize(q.as_tensor()).astype(np.float64) for q in (act, weight)]
        decoded = backend.dequantize(weight).astype(np.float64)
        wanted = a.astype(np.float64) @ decoded.T
        errors.append(np.sqrt(np.mean((pair[0] @ pair[1].T - wanted) ** 2)))
        assert np.linalg.norm(wanted - exact) < 0.2 * np.linalg.norm(exact)
    assert all(later < sooner for sooner, later in itertools.pairwise(errors))
    assert errors[1] < 0.8 * errors[0]
    assert errors[-1] < 0.15 * errors[0]


def test_dequantize_adds_residuals_and_restores_the_order(backend):
    x = normal((5, 3, 64)).reshape(15, 64)
    order = np.random.default_rng(0).permutation(64)
    errors = []
    for channels in (0, 32, 64):
        q = backend.call(fp4kit.quantize_residual, x, channels, reorder=order)
        errors.append(np.abs(backend.dequantize(q) - x).mean(axis=0))
    restored = np.isin(np.arange(64), order[32:])
    assert errors[1][restored].mean() < 0.2 * errors[0][restored].mean()
    np.testing.assert_allclose(errors[1][~restored], errors[0][~restored])
    assert errors[2].mean() < 0.2 * errors[0].mean()


def test_a_zero_block_has_the_smallest_scale(backend):
    x = np.zeros((2, 32), F32)
    q = backend.call(fp4kit.quantize_residual, x, 16, scale_layout="linear")
    assert (q.block_scale == 1).all()
    assert not backend.dequantize(q).any()


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"residual_channels": 8}, ShapeError, "multiple of 16"),
    ({"residual_channels": 80}, ShapeError, "from 0 to 64"),
    ({"residual_channels": -16}, ShapeError, "from 0 to 64"),
    ({"residual_channels": "16"}, OptionError, "not a number"),
    ({"mode": "both"}, OptionError, "choose one of activation, weight"),
    ({"layout": "mixed"}, OptionError, "choose one of interleaved, appended"),
    ({"scale_layout": "tiled"}, OptionError, "swizzled_128x4"),
    ({"intermediate": "float16"}, OptionError, "choose one of float32, bfloat16"),
    ({"amax": 1.0, "encode_scale": 1.0}, OptionError, "not both"),
    ({"encode_scale": np.ones(2, F32)}, ShapeError, "one second-level scale"),
    ({"reorder": np.zeros(64, np.int64)}, ShapeError, "each channel"),
    ({"reorder": [0] * 64, "nonfinite": "propagate"}, ShapeError, "each channel"),
    ({"reorder": np.full(64, 64), "nonfinite": "propagate"}, ShapeError, "each channel"),
    ({"reorder": np.arange(32)}, ShapeError, "each channel"),
    ({"reorder": np.ones(64, F32)}, DtypeError, "whole numbers"),
])  # fmt: skip
def test_refusals(options, error, message):
    arguments = {"residual_channels": 16} | options
    with pytest.raises(error, match=message):
        fp4kit.quantize_residual(normal((4, 64)), **arguments)


def test_other_shapes_and_values_are_refused():
    with pytest.raises(ShapeError, match="multiple of 16"):
        fp4kit.quantize_residual(normal((4, 40)), 16)
    bad = normal((4, 64))
    bad[1, 2] = np.inf
    with pytest.raises(NonFiniteError, match=r"\(1, 2\)"):
        fp4kit.quantize_residual(bad, 16)
