# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every backend gives the reference's bytes for every combination of variants, drawn at random."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import fp4kit
from fp4kit.formats import ALL_RECIPES, DTYPES, NIBBLE_ORDERS, SCALE_LAYOUTS, SCALE_RULES
from fp4kit.options import SEARCH_ERRORS

F32 = np.float32
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def draw_options(draw: Any) -> dict[str, Any]:
    """Options of quantize that do not contradict each other."""
    pick = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
    options: dict[str, Any] = {
        "format": pick("nvfp4", "nvfp4", "nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"),
        "direction": pick("rowwise", "columnwise", "both"),
        "block_shape": pick("1d", "1d", "2d"),
        "scale_layout": pick(*SCALE_LAYOUTS),
        "nibble_order": pick(*NIBBLE_ORDERS),
    }
    if options["format"] != "nvfp4":
        options["scale_rule"] = pick(*SCALE_RULES)
        kind = "stochastic" if options["format"] == "mxfp4" and draw(st.booleans()) else "plain"
    else:
        kind = pick("plain", "search", "stochastic", "per_token", "recipe")
    if kind == "recipe":
        options["recipe"] = pick(*ALL_RECIPES)
    if kind == "search":
        options["scale_search"] = pick("four_over_six", "sweep")
        options["search_error"] = pick(*SEARCH_ERRORS)
        options["e4m3_max"] = pick(448, 256)
    if kind == "stochastic":
        options["rounding"] = "stochastic"
        options["seed"] = draw(st.integers(0, 2**64 - 1))
        options["subsequence"] = draw(st.integers(0, 2**32 - 1))
    te = options["format"] == "nvfp4" and kind != "recipe"
    if te and options["block_shape"] == "1d" and kind != "search":
        options["second_level"] = pick(None, "row_scaled", "per_token")
    if te and kind == "search" and options["block_shape"] == "1d":
        options["second_level"] = pick(None, "row_scaled")
    fp4 = options["format"] in ("nvfp4", "mxfp4") and kind != "recipe"
    if fp4 and options["block_shape"] == "1d" and draw(st.booleans()):
        options["rht"] = pick(True, 0, 0xFFFF, draw(st.integers(0, 0xFFFF)))
        options["rht_rounding"] = pick("bf16", "none")
        if options["direction"] == "both":
            options["rht_direction"] = pick("rowwise", "columnwise", "both")
    return options


@st.composite
def calls(draw: Any) -> tuple[tuple[int, ...], str, dict[str, Any], int]:
    """(shape, dtype, options, seed of the values)."""
    options = draw_options(draw)
    rotated = "rht" in options
    rows, cols = (draw(st.integers(1, 40 if draw(st.booleans()) else 300)) for _ in range(2))
    if rotated:
        rows, cols = -(-rows // 16) * 16, -(-cols // 16) * 16
    lead = 2 if rows % 2 == 0 and draw(st.booleans()) else 1
    shape = (lead, rows // lead, cols) if lead == 2 else (rows, cols)
    return shape, draw(st.sampled_from(DTYPES)), options, draw(st.integers(0, 2**32 - 1))


def values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Ordinary blocks, zeros, ties, wide ranges and denormals, also NaN and infinity at times."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    kind = np.repeat(rng.integers(0, 6, -(-size // 8)), 8)[:size]
    normal = rng.normal(size=size)
    ties = rng.choice([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5, 6, 0.0, -0.0], size)
    wide = normal * 2.0 ** rng.integers(-30, 12, size)
    x = np.choose(kind, [normal, normal, ties, wide, normal * 0, normal * 1e-6])
    if seed % 5 == 0:
        x[rng.integers(0, size, 3)] = [np.nan, np.inf, -np.inf]
    if seed % 5 == 1:
        x = x * 1e-38
    if seed % 5 == 2 and dtype != "float16":
        x = x * 1e36
    with np.errstate(over="ignore"):
        return x.astype(F32).astype(NUMPY[dtype]).reshape(shape)


def each(result: Any) -> tuple[fp4kit.QuantizedTensor, ...]:
    return tuple(result) if isinstance(result, fp4kit.DirectionPair) else (result,)


@settings(max_examples=200, deadline=None)
@given(calls())
def test_random_combinations(fast_backend, reference, assert_tensors, assert_bits, call):
    shape, dtype, options, seed = call
    x = values(shape, dtype, seed)
    options = options | {"pad": True, "nonfinite": "propagate"}
    expected = each(reference.quantize(x, **options))
    got = each(fast_backend.quantize(x, **options))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert_tensors(one, other)
    out = DTYPES[seed % 3]
    for q in expected:
        for undo in (False, True):
            assert_bits(
                fast_backend.dequantize(q, out, undo_rht=undo),
                reference.dequantize(q, out, undo_rht=undo),
                f"dequantize to {out}",
            )


@settings(max_examples=60, deadline=None)
@given(calls(), st.booleans())
def test_fake_quantization_is_both_calls(backend, assert_bits, call, undo):
    shape, dtype, options, seed = call
    x, out = values(shape, dtype, seed), DTYPES[seed % 3]
    options = options | {"pad": True, "nonfinite": "propagate"}
    for name in ("scale_layout", "nibble_order", "rht_direction"):
        options.pop(name, None)
    if options["direction"] == "both":
        options["direction"] = "rowwise" if seed % 2 else "columnwise"
    expected = backend.dequantize(backend.quantize(x, **options), out, undo_rht=undo)
    got = backend.call(fp4kit.quantize_dequantize, x, dtype=out, undo_rht=undo, **options)
    assert_bits(got, expected)
    target = backend.put(np.zeros_like(expected))
    again = fp4kit.quantize_dequantize(
        backend.put(x), dtype=out, undo_rht=undo, out=target, backend=backend.name, **options
    )
    assert again is target
    assert_bits(backend.get(target), expected)


@settings(max_examples=40, deadline=None)
@given(calls())
def test_both_is_each(backend, assert_tensors, call):
    """direction="both" gives the bytes of two calls."""
    shape, dtype, options, seed = call
    x = values(shape, dtype, seed)
    rotated = options.get("rht_direction", "columnwise") if "rht" in options else "none"
    common = options | {"pad": True, "nonfinite": "propagate"}
    common.pop("rht_direction", None)
    direction = {} if rotated == "none" else {"rht_direction": rotated}
    both = backend.quantize(x, **(common | direction | {"direction": "both"}))
    for name, got in zip(("rowwise", "columnwise"), both, strict=True):
        alone = common | {"direction": name}
        if rotated not in (name, "both"):
            alone = {k: v for k, v in alone.items() if k not in ("rht", "rht_rounding")}
        assert_tensors(got, backend.quantize(x, **alone))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("inverse", [False, True])
def test_hadamard_transform(direction, inverse, dtype, fast_backend, reference, assert_bits):
    for number, shape in enumerate([(16, 16), (32, 304), (144, 16), (2, 8, 272)]):
        x = values(shape, dtype, zlib.crc32(repr((shape, dtype)).encode()) // 5 * 5 + 3)
        for rounding in ("bf16", "none"):
            options = {
                "direction": direction,
                "inverse": inverse,
                "rounding": rounding,
                "dtype": DTYPES[number % 3],
            }
            args = (fp4kit.hadamard_transform, x, 0x1234 * (number + 1) & 0xFFFF)
            assert_bits(
                fast_backend.call(*args, **options), reference.call(*args, **options), str(options)
            )


@pytest.mark.parametrize(
    "options",
    [
        {"direction": "columnwise"},
        {"direction": "both", "block_shape": "2d"},
        {"format": "mxfp8", "direction": "both"},
        {"direction": "both", "second_level": "per_token"},
        {"rounding": "stochastic", "seed": 5},
        {"scale_search": "sweep"},
    ],
)
def test_views_and_out(options, fast_backend, assert_tensors):
    """Any strides give the bytes of the contiguous copy; out= is filled in place."""
    base = values((96, 3, 128), "float32", 3)
    for x in (base[:, 1], base[::-1, 2, ::2].copy()[:, ::-1], base[:, 0].T):
        contiguous = np.ascontiguousarray(x)
        expected = fast_backend.quantize(contiguous, **options)
        got = fast_backend.quantize(x, **options)
        blank = fast_backend.quantize(np.zeros_like(contiguous), **options)
        out = fast_backend.put(blank)
        again = fp4kit.quantize(
            fast_backend.put(contiguous), backend=fast_backend.name, out=out, **options
        )
        assert again is out
        for one, two, three in zip(*map(each, (got, expected, fast_backend.get(out))), strict=True):
            assert_tensors(one, two)
            assert_tensors(three, two)


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_empty(rows, direction, format, backend):
    shape = (rows, 0) if rows else (0, 64)
    q = backend.quantize(
        np.zeros(shape, F32), format, direction=direction, block_shape="2d", pad=True
    )
    assert backend.dequantize(q).shape == shape
    assert q.packed.size == q.block_scale.size == 0
    fake = backend.call(
        fp4kit.quantize_dequantize,
        np.zeros(shape, F32),
        format,
        direction=direction,
        block_shape="2d",
        pad=True,
    )
    assert fake.shape == shape


def test_options_of_results_survive_replacement(backend):
    q = backend.quantize(
        values((32, 32), "float32", 3), direction="columnwise", scale_search="sweep"
    )
    assert (q.scheme.scale_search, q.scheme.search_error) == ("sweep", "mse")
    assert dataclasses.replace(q).scheme == q.scheme
    assert "direction='columnwise'" in repr(q)
