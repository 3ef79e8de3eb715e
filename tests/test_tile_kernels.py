# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel of tiles, run on the host in both widths, gives the bytes of the CPU backend."""

from dataclasses import replace

import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job
from fp4kit.cuda import ready as cuda_ready
from fp4kit.cuda import variants as cuda_variants
from fp4kit.reference import codecs
from sample_plans import sample_plan

F32 = np.float32


def values(shape, dtype):
    """Numbers of many magnitudes, as raw elements; some are not finite, some rows are zero."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 6, shape)
    x[::5, ::3] = 0
    x[::7] = -0.0
    x.flat[rng.integers(0, x.size, 3)] = [np.nan, np.inf, -np.inf]
    return codecs.from_float32(x.astype(F32), dtype)


CASES = {
    "plain": {},
    "swizzled": {"layout": "swizzled_128x4"},
    "8x4": {"layout": "swizzled_8x4", "nibbles": "high_first"},
    "tiles": {"block_shape": "2d"},
    "tiles swizzled": {"block_shape": "2d", "layout": "swizzled_128x4", "nibbles": "high_first"},
    "stochastic": {"rounding": "stochastic"},
    "stochastic tiles": {"rounding": "stochastic", "block_shape": "2d"},
    "rotated": {"rht": 0xD7E8, "rht_rounding": "bf16"},
    "per token": {"second_level": "per_token"},
    "mxfp4": {"format": "mxfp4"},
    "mxfp4 tiles": {"format": "mxfp4", "block_shape": "2d"},
    "mxfp8": {"format": "mxfp8"},
    "mxfp8 tiles": {"format": "mxfp8", "block_shape": "2d"},
    "modelopt": {"recipe": "modelopt"},
    "four_over_six": {"scale_search": "four_over_six", "search_error": "mse"},
    "four_over_six scaled": {
        "scale_search": "four_over_six", "search_error": "mae_scaled", "e4m3_max": 256,
    },
    "sweep": {"scale_search": "sweep", "search_error": "mae"},
    "sweep tiles": {"scale_search": "sweep", "search_error": "mse", "block_shape": "2d"},
}  # fmt: skip


def assert_as_cpu(on_host, plans, dtype, shift=0):
    """Plans of the rows, of the columns, or of both; scales `shift` bytes past an alignment."""
    rows, cols = plans[0].rows, plans[0].cols
    x = values((rows, cols), dtype)
    results = {}
    for engine, put in ((get_backend("cpu"), np.asarray), (on_host.engine, on_host.put)):
        arrays = []
        for plan in plans:
            second = None
            if plan.recipe is not None:
                amax = np.linspace(5, 7, plan.scales).astype(F32)
                second = put(amax if plan.recipe.keeps == "amax" else amax / F32(2688))
            empty, past = (np.empty, ()) if put is np.asarray else (on_host.empty, (shift,))
            packed = empty(plan.packed_shape, np.uint8)
            scale = empty(plan.scale_shape, np.uint8, *past)
            arrays.append(Job(plan, put(x), dtype, second, packed, scale, (7, 3)))
        if len(plans) == 1:
            engine.quantize(arrays[0])
        else:
            engine.quantize_both(*arrays)
        results[engine.name] = [
            np.asarray(part) for job in arrays for part in (job.packed, job.block_scale)
        ]
    for got, expected in zip(results["cuda"], results["cpu"], strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("directions", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_the_cpu(on_host, kernels, width, name, directions):
    options = dict(CASES[name])
    options["scale_layout"] = options.pop("layout", "linear")
    options["nibble_order"] = options.pop("nibbles", "low_first")
    rows, cols = (144, 208) if "rht" in options else (150, 200)
    dtype = "float16" if name == "mxfp8" else "bfloat16"
    plans = []
    for direction in ("rowwise", "columnwise"):
        plan = sample_plan(rows, cols, direction=direction, **options)
        per_token = plan.scheme.second_level == "per_token"
        plans.append(replace(plan, rows_per_scale=1 if per_token else plan.vectors))
    wanted = [plan for plan in plans if directions in ("both", plan.scheme.direction)]
    assert_as_cpu(on_host, wanted, dtype)
    if len(wanted) == 1 and wanted[0].is_plain:
        return  # rows have kernels of their own
    searches = "scale_search" in options
    assert ("kWide" in kernels.launched[-1].expression) == (width == "wide" and not searches)


def whole_plans(block, axes, rows=512, cols=384, layout="linear", **options):
    return [
        sample_plan(
            rows, cols, rows_per_scale=rows if direction == "rowwise" else cols,
            direction=direction, block_shape=block, scale_layout=layout, **options,
        )
        for direction in axes
    ]  # fmt: skip


def launched(kernels, name):
    """Whether a kernel was launched whose instance has a name in it."""
    return any(name in instance.expression for instance in kernels.launched)


@pytest.fixture
def repeated(monkeypatch):
    """Also small squares get their linear scales by a kernel of its own."""
    monkeypatch.setattr(cuda_variants, "REPEATED_ELEMENTS", 1)


BOTH = ("rowwise", "columnwise")
DIRECTIONS = pytest.mark.parametrize(
    "axes", [("rowwise",), ("columnwise",), BOTH], ids=["rowwise", "columnwise", "both"]
)


#: Three stacks of four tiles, of which the last one is taken tile by tile.
@pytest.mark.parametrize("axes", [("columnwise",), BOTH], ids=["columnwise", "both"])
def test_whole_stacks(on_host, kernels, axes):
    assert_as_cpu(on_host, whole_plans("1d", axes), "bfloat16")
    assert launched(kernels, "Full")


@pytest.mark.usefixtures("repeated")
@DIRECTIONS
def test_whole_squares(on_host, kernels, axes):
    assert_as_cpu(on_host, whole_plans("2d", axes, 256, 640), "bfloat16")
    assert launched(kernels, "Full") == (axes == BOTH)
    assert launched(kernels, "repeat_scales") == (axes == BOTH)


@DIRECTIONS
@pytest.mark.parametrize("block", ["1d", "2d"])
def test_whole_swizzled_tiles(on_host, kernels, block, axes):
    plans = whole_plans(block, axes, 384, 256, "swizzled_128x4")
    assert_as_cpu(on_host, plans, "float16")
    assert launched(kernels, "Full") == (block == "2d" or "columnwise" in axes)
    assert not launched(kernels, "repeat_scales")


def test_small_squares_need_one_launch(on_host, kernels):
    assert_as_cpu(on_host, whole_plans("2d", BOTH), "bfloat16")
    assert not launched(kernels, "Full")
    assert not launched(kernels, "repeat_scales")


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("axes", [("columnwise",), BOTH], ids=["columnwise", "both"])
def test_whole_matrices_rounded_stochastically(on_host, kernels, axes, layout):
    plans = whole_plans("1d", axes, layout=layout, rounding="stochastic")
    assert_as_cpu(on_host, plans, "bfloat16")
    assert launched(kernels, "Full") == (axes != BOTH)


#: A grid of a block for each tile.
def test_whole_matrices_in_one_wave(on_host, kernels, monkeypatch):
    monkeypatch.setattr(cuda_ready, "resident_blocks", lambda *_: 100)
    assert_as_cpu(on_host, whole_plans("1d", BOTH), "bfloat16")
    assert launched(kernels, "Full")


#: Stacks that are not whole; scales that do not lie on 16 bytes.
@pytest.mark.parametrize(
    ("layout", "rows", "shift"),
    [
        ("linear", 256, 0),
        ("linear", 512, 8),
        ("swizzled_128x4", 192, 0),
        ("swizzled_128x4", 256, 4),
    ],
)
def test_nearly_whole_matrices(on_host, kernels, layout, rows, shift):
    assert_as_cpu(on_host, whole_plans("1d", BOTH, rows, 128, layout), "bfloat16", shift)
    assert not launched(kernels, "Full")
