# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The flat kernels, run on the host with either rounding, give the bytes of the CPU backend."""

import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job
from fp4kit.cuda import ready as cuda_ready
from fp4kit.reference import codecs
from sample_plans import sample_plan

F32 = np.float32
SEED = (2**64 - 12345, 2**32 - 7)


def values(shape, dtype):
    """Numbers of many magnitudes, as raw elements; some are not finite, some rows are zero."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 6, shape)
    x[::5, ::3] = 0
    x[::7] = -0.0
    x.flat[rng.integers(0, x.size, 9)] = [np.nan, np.inf, -np.inf] * 3
    return codecs.from_float32(x.astype(F32), dtype)


def make_plan(rows, cols, format="nvfp4", rounding="stochastic", **options):
    options = {"rows_per_scale": rows, "rounding": rounding, **options}
    return sample_plan(rows, cols, format, **options)


def quantized(engine, put, empty, plan, x, dtype):
    second = None
    if plan.has_second_level:
        # Far below the amax: elements of the largest scale saturate.
        second = put(np.linspace(20, 30, plan.scales).astype(F32))
    packed, scale = empty(plan.packed_shape, np.uint8), empty(plan.scale_shape, np.uint8)
    engine.quantize(Job(plan, put(x), dtype, second, packed, scale, SEED))
    return np.asarray(packed), np.asarray(scale)


def assert_as_cpu(on_host, plan, dtype, assert_bits, put=None):
    x = values((plan.rows, plan.cols), dtype)
    got = quantized(on_host.engine, put or on_host.put, on_host.empty, plan, x, dtype)
    want = quantized(get_backend("cpu"), np.asarray, np.empty, plan, x, dtype)
    for mine, other in zip(got, want, strict=True):
        assert_bits(mine, other)


#: The grid is filled and a thread takes several lanes; whole tiles of scales across, and not.
@pytest.mark.parametrize("cols", [256, 224])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_layouts(on_host, kernels, assert_bits, rounding, layout, cols):
    plan = make_plan(150, cols, rounding=rounding, scale_layout=layout)
    assert_as_cpu(on_host, plan, "bfloat16", assert_bits)
    tiled = layout == "swizzled_128x4" and cols == 256
    (launched,) = kernels.launched
    assert launched.kernel == ("quantize_rowwise_swizzled" if tiled else "quantize_rowwise")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_formats_and_types(on_host, kernels, assert_bits, dtype, format):
    plan = make_plan(96, 320, format, nibble_order="high_first")
    assert_as_cpu(on_host, plan, dtype, assert_bits)
    assert kernels.launched[-1].kernel == "quantize_rowwise"


@pytest.mark.parametrize("why", ["ragged", "second levels", "misaligned", "rotated"])
def test_what_takes_tiles(on_host, kernels, monkeypatch, assert_bits, why):
    monkeypatch.setattr(cuda_ready, "has_shared_memory", lambda *_: False)
    options = {
        "ragged": {"cols": 200},
        "second levels": {"rows_per_scale": 8},
        "rotated": {"rht": 1, "rht_rounding": "none"},
    }.get(why, {})
    plan = make_plan(16, **{"cols": 64, **options})

    def shifted(array):
        return on_host.put(array, array.itemsize)

    assert_as_cpu(on_host, plan, "bfloat16", assert_bits, shifted if why == "misaligned" else None)
    assert kernels.launched[-1].kernel == "quantize_tiles"
