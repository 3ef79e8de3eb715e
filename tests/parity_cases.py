# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of parity run over, and values of many kinds.

Functions of two dtypes are compiled for nine pairs by the CPU backend, seconds each: three pairs
that hold every dtype on either side always run here, the others are marked slow (test_api_*.py and
test_arrays.py run equal dtypes).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from typing import Any

import numpy as np
import pytest

from fp4kit.formats import (
    ALL_RECIPES,
    BLOCK_FORMATS,
    DTYPES,
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
)
from sample_arrays import F32, NUMPY

BITS = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
#: Every way to choose a scale: name -> options of quantize.
OPTIONS: dict[str, dict[str, Any]] = {
    f"nvfp4-{name}": {"format": "nvfp4", "recipe": name} for name in ALL_RECIPES
}
OPTIONS |= {
    f"nvfp4-{name}-one_level": {"format": "nvfp4", "recipe": name, "second_level": "none"}
    for name, recipe in ALL_RECIPES.items()
    if recipe.optional_second_level
}
OPTIONS |= {
    f"{spec.name}-{rule}": {"format": spec.name, "scale_rule": rule}
    for spec in BLOCK_FORMATS.values()
    if not spec.has_second_level
    for rule in SCALE_RULES
}
TWO_LEVEL = [
    name for name in OPTIONS if name.startswith("nvfp4") and not name.endswith("one_level")
]
SHAPES = (
    (1, 16),
    (3, 48),
    (129, 80),
    (0, 64),
    (4, 0),
    (0, 0),
    (2, 3, 32),
    (2, 0, 64),
    (64,),
    (0,),
    (5, 3),
    (33, 16),
    (512, 60),
    (1, 1504),
    (3, 1504),
    (5, 2048),
)
PAIRS = tuple(itertools.product(SCALE_LAYOUTS, NIBBLE_ORDERS))
#: (input dtype, output dtype): see the module's docstring.
OUTPUT_OF = {"float32": "float16", "float16": "bfloat16", "bfloat16": "float32"}
DTYPE_PAIRS = [
    pytest.param(*pair, marks=() if OUTPUT_OF[pair[0]] == pair[1] else pytest.mark.slow)
    for pair in itertools.product(DTYPES, DTYPES)
]
#: What a second-level scale may be, however senseless.
EXTREMES = np.array(
    [
        6,
        1,
        0,
        -0.0,
        1e-45,
        1e-40,
        7.8e-36,
        7.9e-36,
        1e38,
        7.7e35,
        3.4e38,
        np.inf,
        np.nan,
        -6,
        -np.inf,
        2688,
        0.0022321429,
    ],
    F32,
)


def generator(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def values(shape: tuple[int, ...], dtype: str, *key: object) -> np.ndarray:
    """Finite values of many kinds, a different one in each stretch of 16 elements."""
    rng = generator(shape, dtype, *key)
    size = math.prod(shape)
    normal = rng.normal(size=size)
    stretch = np.arange(size) // 16 % 7
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0.0, -0.0], size)
    wide = normal * 2.0 ** rng.integers(-12, 8, size)
    tiny = normal * 2.0**-14
    choices = [normal, ties * rng.choice([-1, 1], size), wide, tiny, normal * 0, normal, normal * 9]
    with np.errstate(over="ignore"):
        return np.choose(stretch, choices).astype(F32).astype(NUMPY[dtype]).reshape(shape)


def raw_bits(shape: tuple[int, ...], dtype: str, *key: object) -> np.ndarray:
    """Any bit pattern: NaN of any payload, infinity, denormals. Some rows stay finite."""
    rng = generator(shape, dtype, "bits", *key)
    unsigned = BITS[dtype]
    bits = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
    # Rows of one magnitude each: elsewhere the largest exponent hides everything else.
    exponent_bits = {"float32": 8, "float16": 5, "bfloat16": 8}[dtype]
    width = bits.dtype.itemsize * 8
    exponent = rng.integers(0, 1 << exponent_bits, (*shape[:-1], 1)).astype(unsigned)
    field = unsigned(((1 << exponent_bits) - 1) << (width - 1 - exponent_bits))
    focused = bits & ~field | (exponent << unsigned(width - 1 - exponent_bits))
    bits = np.where(rng.random((*shape[:-1], 1)) < 0.7, focused, bits).astype(unsigned)
    return bits.view(NUMPY[dtype])


def assert_sums(got: Any, want: Any) -> None:
    """Counts are equal, float64 sums agree to 1e-12 of the terms' size."""
    scale = {"sum_xy": math.sqrt(want.sum_x2) * math.sqrt(want.sum_y2)}
    for field in dataclasses.fields(want):
        one, other = getattr(got, field.name), getattr(want, field.name)
        if isinstance(other, int) or field.name == "max_abs_error":
            assert one == other or (one != one and other != other), field.name
        elif math.isfinite(other):
            size = abs(scale.get(field.name, other))
            assert abs(one - other) <= 1e-12 * size, field.name
        else:
            assert one == other or (one != one and other != other), field.name
