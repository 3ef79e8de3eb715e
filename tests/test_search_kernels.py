# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Searched scales of rows by the kernel of their own, run on the host, are the reference's."""

from dataclasses import replace

import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job
from fp4kit.cuda import search as cuda_search
from fp4kit.formats import DTYPES
from fp4kit.options import SEARCH_ERRORS
from fp4kit.reference import codecs
from sample_plans import sample_plan

F32 = np.float32
ROWS, COLS = 70, 112
SEARCHES = ("four_over_six", "sweep")


def plan_of(kind, error, layout="linear", nibbles="low_first", **options):
    return sample_plan(
        ROWS, COLS, rows_per_scale=ROWS, scale_layout=layout, nibble_order=nibbles,
        scale_search=kind, search_error=error, **options,
    )  # fmt: skip


def numbers():
    """Blocks of many sizes: ties of every grid, equal errors, zeros, and what is not finite."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((ROWS, COLS // 16, 16))
    x[:20] *= 2.0 ** rng.integers(-30, 1, (20, COLS // 16, 1))
    # Multiples of 1/4 under an amax of 6, 4 and 7: most elements are ties under some scale.
    ties = np.round(rng.uniform(-6, 6, (20, COLS // 16, 16)) * 4) / 4
    ties[..., 3] = rng.choice([6, 4, 7, 5.25], ties.shape[:2])
    x[20:40] = ties * 2.0 ** rng.integers(-9, 1, (20, COLS // 16, 1))
    x[40, :, :] = 0
    x[41, :, 1:] = 0  # one element alone
    x[42] = np.abs(x[42, :, :1])  # all equal
    x[43, ::2] *= 2.0**-130  # subnormal, or below what the division by 6 needs
    x[44] *= 2.0**-100
    x[45, :3] = 8.0  # saturated: the amax of the tensor is 6
    x[46, 0, 5], x[46, 1, 0], x[46, 2, 15], x[47, 3] = np.nan, np.inf, -np.inf, np.nan
    x[48, :, ::2] = -0.0
    return x.reshape(ROWS, COLS).astype(F32)


def quantized(engine, plan, x, dtype, second, put=np.asarray, empty=np.empty):
    """(codes, scales) of a backend, from float32 numbers."""
    packed, scale = empty(plan.packed_shape, np.uint8), empty(plan.scale_shape, np.uint8)
    raw = put(codecs.from_float32(x, dtype))
    engine.quantize(Job(plan, raw, dtype, put(np.array([second], F32)), packed, scale))
    return np.asarray(packed), np.asarray(scale)


def check(on_host, kernels, plan, dtype, second):
    """The kernel of searched rows ran, and gave the bytes of the reference and the CPU."""
    x = numbers()
    if 0 < second < np.inf:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            x = x * F32(second / 6)
    got = quantized(on_host.engine, plan, x, dtype, second, on_host.put, on_host.empty)
    assert kernels.launched[-1].kernel == "quantize_rowwise_search"
    for name in ("reference", "cpu"):
        expected = quantized(get_backend(name), plan, x, dtype, second)
        for part, wanted in zip(got, expected, strict=True):
            np.testing.assert_array_equal(part, wanted)


# Amaxes of a tensor: ordinary, not of few bits, and those that leave the paths of ordinary blocks.
SECONDS = (6.0, 6.123457, 2.0**90, 2.0**-90, 1e-38, 0.0, -6.0, np.inf, np.nan)


@pytest.mark.parametrize("error", SEARCH_ERRORS)
@pytest.mark.parametrize("kind", SEARCHES)
def test_bytes_of_the_reference(on_host, kernels, kind, error):
    for e4m3_max in (448, 256):
        for second in SECONDS:
            plan = plan_of(kind, error, e4m3_max=e4m3_max)
            check(on_host, kernels, plan, "bfloat16", second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SEARCHES)
def test_element_types(on_host, kernels, kind, dtype):
    check(on_host, kernels, plan_of(kind, "mse"), dtype, 6.0)


@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
def test_layouts(on_host, kernels, kind, layout):
    check(on_host, kernels, plan_of(kind, "mse", layout, "high_first"), "bfloat16", 6.0)


def test_others_go_to_tiles():
    plan = plan_of("sweep", "mse")
    assert cuda_search.searches_flat(plan, True)
    assert not cuda_search.searches_flat(plan, False)
    others = [
        replace(plan, cols=COLS + 8),
        replace(plan, rows_per_scale=1),
        replace(plan, scheme=plan.scheme.decoding),
        plan_of("sweep", "mse", block_shape="2d"),
        plan_of("sweep", "mse", rht=1, rht_rounding="none"),
        replace(plan, rows=2**31, rows_per_scale=2**31),
        plan_of("sweep", "mse", direction="columnwise"),
    ]
    for other in others:
        assert not cuda_search.searches_flat(other, True)
