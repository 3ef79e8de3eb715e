# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels that decode, run on the host, give the bytes of the reference.

Codes, scale bytes and second levels are any bits at all: NaN, signs, and what no encoder writes.
"""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job
from fp4kit.cuda import launch as cuda_launch
from fp4kit.cuda import variants as cuda_variants
from fp4kit.formats import ALL_RECIPES, BLOCK_FORMATS, DTYPES, NVFP4, SCALE_LAYOUTS
from sample_plans import sample_plan

F32 = np.float32
RAW = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
SECONDS = [3.7, 1e-3, 448.0, 0.0, -2.5, np.inf, np.nan, 1e-38, 7e-36, 1e-42, 3e38, -1e-44]
#: Tiles in part, rows that are whole 16-byte pieces or not, blocks that are whole or not.
COLUMNS = {"direction": "columnwise"}
SHAPES = [(130, 72), (64, 128), (33, 67), (1, 5)]


def make_plan(format, recipe, shape, *, many=False, **fields):
    plan = sample_plan(*shape, format, recipe=recipe, **fields)
    return replace(plan, rows_per_scale=1 if many else plan.vectors)


def inputs(plan, rng, second):
    """Any codes and scale bytes, and a second level or several."""
    packed = rng.integers(0, 256, plan.packed_shape, np.uint8)
    byte = rng.integers(0, 256, plan.scale_shape, np.uint8)
    # Most have signs or are extreme: some plain ones too.
    ordinary = rng.random(byte.shape) < 0.5
    byte[ordinary] = rng.integers(100, 120, int(ordinary.sum()))
    if plan.format.has_second_level:
        byte[rng.random(byte.shape) < 0.1] |= 0x7F
    values = None
    if plan.has_second_level and plan.recipe is not None:
        values = np.resize(np.roll(np.array(SECONDS, F32), -second), plan.scales)
    return packed, byte, values


def check(host_gpu, kernels, plan, dtype, second=0, offsets=(0, 0)):
    """One call, whose codes and results begin so many bytes behind a boundary."""
    rng = np.random.default_rng(prod(plan.packed_shape) + second)
    packed, byte, values = inputs(plan, rng, second)
    want = np.empty((plan.rows, plan.cols), RAW[dtype])
    want = want.view(np.dtype(dtype)) if dtype != "bfloat16" else want
    get_backend("reference").dequantize(Job(plan, None, dtype, values, packed, byte), want, dtype)
    out = host_gpu.empty(want.shape, RAW[dtype], offsets[1])
    vector = cuda_launch.rows_are_vectors(plan.cols, dtype)
    codes = host_gpu.put(packed, offsets[0])
    vector = vector and codes.ctypes.data % 16 == 0 and out.ctypes.data % 16 == 0
    if plan.is_columnwise:
        launch = cuda_variants.dequantize_launch(plan, dtype)
    else:
        launch = cuda_launch.dequantize_launch(plan, dtype, plan.scales, vector)
    arrays = (codes, host_gpu.put(byte), 0 if values is None else host_gpu.put(values), out)
    kernels.launch(launch.instance, launch.grid, (*arrays, *launch.scalars))
    np.testing.assert_array_equal(out, want.view(RAW[dtype]))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_recipes_in_columns(host_gpu, kernels, recipe, many):
    dtype = DTYPES[list(ALL_RECIPES).index(recipe) % 3]
    for second in range(1 if many else len(SECONDS)):
        layout = SCALE_LAYOUTS[second % 3]
        plan = make_plan("nvfp4", recipe, (70, 68), many=many, scale_layout=layout, **COLUMNS)
        check(host_gpu, kernels, plan, dtype, second)
    for shape in SHAPES:
        plan = make_plan("nvfp4", recipe, shape, many=many, nibble_order="high_first", **COLUMNS)
        check(host_gpu, kernels, plan, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_formats_in_columns(host_gpu, kernels, format, dtype):
    recipe = "te" if format == "nvfp4" else None
    for layout in SCALE_LAYOUTS:
        for shape in SHAPES:
            plan = make_plan(format, recipe, shape, scale_layout=layout, **COLUMNS)
            check(host_gpu, kernels, plan, dtype)
    for offsets in ((1, 0), (4, 0), (0, 4)):
        plan = make_plan(format, recipe, (130, 72), **COLUMNS)
        check(host_gpu, kernels, plan, dtype, offsets=offsets)


def test_no_second_level_in_columns(host_gpu, kernels):
    for recipe in ("nvfuser", "torchao"):
        plan = make_plan("nvfp4", recipe, (33, 66), second_level="none", **COLUMNS)
        check(host_gpu, kernels, plan, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_another_largest_scale(host_gpu, kernels, direction, dtype):
    search = {"direction": direction, "scale_search": "four_over_six", "e4m3_max": 256}
    for many in (False, True):
        for second in range(1 if many else len(SECONDS)):
            for shape in ((33, 80), (20, 56), (5, 21))[: 3 if second < 2 else 1]:
                for layout in SCALE_LAYOUTS[:2]:
                    plan = make_plan("nvfp4", "te", shape, many=many, scale_layout=layout, **search)
                    check(host_gpu, kernels, plan, dtype, second)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_rows(host_gpu, kernels, format):
    recipe = "modelopt" if format == "nvfp4" else None
    for layout in SCALE_LAYOUTS[:2]:
        for shape in ((33, 96), (40, 72), (9, 37)):
            plan = make_plan(format, recipe, shape, scale_layout=layout, nibble_order="high_first")
            check(host_gpu, kernels, plan, "float16")


def test_many_tiles(host_gpu, kernels):
    """Several tiles down and across."""
    plan = make_plan("nvfp4", "te", (400, 200), scale_layout="swizzled_128x4", **COLUMNS)
    assert plan.format is NVFP4
    check(host_gpu, kernels, plan, "bfloat16")
