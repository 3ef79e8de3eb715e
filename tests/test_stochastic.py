# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: the generator, what a result may be, and how often it is which."""

from __future__ import annotations

import numpy as np
import pytest

import fp4kit
from fp4kit.formats import E2M1
from fp4kit.reference import codecs, philox

F32 = np.float32
GRID = E2M1.magnitudes


def pinned(value, count):
    """Blocks of 16 with one 6, so that with amax 6 the multiplier is 1, else `value`."""
    x = np.full((count // 16, 16), value, F32)
    x[:, 0] = 6
    return x


def rounded(x, backend, **options):
    """What quantize makes of values under multiplier 1, as values; the pinning 6 left out."""
    q = backend.quantize(x, amax=6.0, rounding="stochastic", **options)
    values = E2M1.values[codecs.unpack_nibbles(q.packed, "low_first")]
    assert (values[:, 0] == 6).all()
    return values[:, 1:]


@pytest.mark.parametrize(("counter", "key", "words"), [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
])  # fmt: skip
def test_known_answers_of_philox(counter, key, words):
    """The vectors that the generator's authors publish (Random123, kat_vectors)."""
    got = philox.philox(tuple(np.array([word], np.uint32) for word in counter), key)
    assert tuple(int(word[0]) for word in got) == words


def test_the_way_along_the_codes_is_a_subnormal_product():
    """Every exponent from 0 to before 8: its first and last numbers, ties, and many between."""
    first = np.arange(0, 130, dtype=np.int64) << 23
    starts = np.concatenate([first + place for place in range(0, 1 << 23, 1 << 20)])
    near = np.arange(-300, 300)
    strided = np.arange(0, 130 << 23, 151)
    bits = np.concatenate([(starts[:, None] + near).ravel(), strided])
    magnitude = bits[(bits >= 0) & (bits < 130 << 23)].astype(np.uint32).view(F32)
    # Halfway between two steps of 2^-23, where the even one is taken.
    ties = (np.arange(1 << 16, dtype=F32) + F32(0.5)) * F32(2.0**-23)
    magnitude = np.concatenate([magnitude, ties, ties * 64, GRID])
    expected = (magnitude * F32(2.0**-126)).view(np.uint32)
    np.testing.assert_array_equal(philox.code_and_rest(magnitude), expected)
    # What is above the last 22 bits is the code rounded down.
    below = np.searchsorted(np.append(GRID, F32(8)), magnitude[-1000:], side="right") - 1
    np.testing.assert_array_equal(expected[-1000:] >> 22, below)


@pytest.mark.parametrize("value", [2.25, 0.1, 0.49, 1.3, 3.001, 4.7, 5.99, -2.25, -0.03])
def test_the_mean_is_the_value(value, backend):
    n = 1 << 20
    got = rounded(pinned(value, n + n // 15 + 16), backend, seed=2024).ravel()[:n]
    low = GRID[abs(F32(value)) >= GRID].max()
    high = GRID[abs(F32(value)) < GRID].min()
    assert set(np.unique(np.abs(got))) == {low, high}
    p = (abs(float(F32(value))) - low) / (high - low)
    error = (high - low) * np.sqrt(p * (1 - p) / n)
    assert abs(np.abs(got).mean(dtype=np.float64) - abs(float(F32(value)))) < 4 * error
    assert (np.sign(got[got != 0]) == np.sign(value)).all()


def test_every_code_is_a_fixed_point(backend, assert_bits):
    grid = np.concatenate([GRID, -GRID]).reshape(1, 16)
    x = np.repeat(grid, 64, axis=0) * 2.0 ** np.arange(-32, 32, dtype=F32)[:, None]
    nearest = backend.quantize(x, second_level="row_scaled")
    for seed in (0, 1, 2**64 - 1):
        got = backend.quantize(x, second_level="row_scaled", rounding="stochastic", seed=seed)
        assert_bits(got.packed, nearest.packed)
        assert_bits(got.block_scale, nearest.block_scale)
    ones = backend.quantize(np.ones((1, 16), F32), rounding="stochastic", seed=0)
    assert (backend.dequantize(ones) == 1).all()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_results_are_neighbours_and_scales_those_of_nearest(format, backend, assert_bits):
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(F32)
    nearest = backend.quantize(x, format)
    got = backend.quantize(x, format, rounding="stochastic", seed=7)
    assert_bits(got.block_scale, nearest.block_scale)
    magnitudes = [
        (codecs.unpack_nibbles(q.packed, "low_first") & 7).astype(int) for q in (nearest, got)
    ]
    difference = np.abs(magnitudes[0] - magnitudes[1])
    assert difference.max() == 1
    assert 0.1 < (difference == 1).mean() < 0.5


def test_special_values_are_as_in_nearest(backend):
    x = np.array([[np.nan, np.inf, -np.inf, 6, -0.0, 0.0, 100, -100] * 2], F32)
    q = backend.quantize(x, amax=6.0, rounding="stochastic", seed=3, nonfinite="propagate")
    codes = codecs.unpack_nibbles(q.packed, "low_first")[0, :8]
    nearest = backend.quantize(x, amax=6.0, nonfinite="propagate")
    wanted = codecs.unpack_nibbles(nearest.packed, "low_first")[0, :8]
    assert codes[[0, 1, 2, 4, 5]].tolist() == wanted[[0, 1, 2, 4, 5]].tolist()
    assert codes[:3].tolist() == [7, 7, 15]


def test_streams_differ_and_repeat(backend):
    x = pinned(2.5, 1 << 14)
    results = {
        name: rounded(x, backend, **options)
        for name, options in {
            "one": {"seed": 1},
            "again": {"seed": 1},
            "other seed": {"seed": 2},
            "high bits": {"seed": 1 + (1 << 32)},
            "other stream": {"seed": 1, "subsequence": 1},
        }.items()
    }
    assert (results["one"] == results["again"]).all()
    for name in ("other seed", "high bits", "other stream"):
        assert 0.45 < (results[name] == results["one"]).mean() < 0.55, name
    # Nor do the two directions of a tensor share their bits.
    square = np.full((256, 256), 2.5, F32)
    square[np.arange(256)[:, None] % 16 == np.arange(256) % 16] = 6
    both = backend.quantize(square, direction="both", amax=6.0, rounding="stochastic", seed=1)
    row, column = (codecs.unpack_nibbles(q.packed, "low_first") for q in both)
    assert 0.4 < (row == column)[square.T != 6].mean() < 0.6


def test_elements_of_a_group_are_independent_enough(backend):
    """Neighbours share random bits below the first eight: no visible correlation, fair variance."""
    got = rounded(pinned(2.5, 1 << 20), backend, seed=11) - 2.5
    correlation = np.corrcoef(got.T)
    assert np.abs(correlation - np.eye(15)).max() < 0.02
    assert got.sum(axis=1).var() == pytest.approx(15 * 0.25, rel=0.03)


def test_averages_beat_rounding_to_nearest(reference):
    x = np.random.default_rng(5).standard_normal((32, 64)).astype(F32)
    draws = [
        reference.dequantize(reference.quantize(x, rounding="stochastic", seed=seed))
        for seed in range(50)
    ]
    nearest = reference.dequantize(reference.quantize(x))
    mean = np.mean(draws, axis=0, dtype=np.float64)
    assert np.mean((mean - x) ** 2) < np.mean((nearest - x) ** 2)


def test_bytes_do_not_depend_on_threads(monkeypatch, assert_bits):
    x = np.random.default_rng(6).standard_normal((1024, 512)).astype(F32)
    results = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("FP4KIT_NUM_THREADS", threads)
        options = {"rounding": "stochastic", "seed": 3, "direction": "both", "rht": True}
        results.append(fp4kit.quantize(x, backend="cpu", **options))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_bits(got.packed, want.packed)
