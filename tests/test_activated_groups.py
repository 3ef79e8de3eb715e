# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of activated members: one kernel on the host, and the public function on a GPU."""

from math import prod

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend
from fp4kit.api.grouped_tensor import grouped_plan
from fp4kit.backend.jobs import Job, Prologue
from fp4kit.formats import BLOCK_FORMATS, DTYPES
from fp4kit.reference import codecs
from fp4kit.reference.activations import ACTIVATIONS, DERIVATIVES
from fp4kit.scheme import as_scheme

F32 = np.float32
SEED = (3, 11)
REFERENCE = get_backend("reference")
#: Rows and columns of results: members end within thread blocks, some are empty.
DIMS = ((3, 64), (0, 32), (70, 96), (1, 32), (257, 32), (5, 0), (33, 160))


def raw(size, dtype, seed):
    """Moderate values, and some that are not."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size)
    x[200:400] *= 2.0 ** rng.integers(-20, 14, 200)
    x[1000], x[1500], x[1501:1540] = np.nan, -np.inf, -0.0
    return codecs.from_float32(x.astype(F32), dtype)


def starts_of(dims, factor, gap):
    """Where members of results begin, with gaps, and the end; times a factor for their inputs."""
    starts, end = [], gap
    for shape in dims:
        starts.append(factor * end)
        end += prod(shape) + gap
    return tuple(starts), factor * end


def activated(name, dtype, x, z, gap):
    """The buffer of results, and where members begin in it and in the inputs."""
    factor = 2 if name == "swiglu" else 1
    sources, _ = starts_of(DIMS, factor, gap)
    starts, size = starts_of(DIMS, 1, gap)
    y = np.zeros(size, x.dtype)
    for (rows, cols), source, start in zip(DIMS, sources, starts, strict=True):
        if rows and cols:
            end = source + factor * rows * cols
            own = None if z is None else z[source:end].reshape(rows, cols)
            out = np.empty((rows, cols), x.dtype)
            gate = x[source:end].reshape(rows, -1)
            REFERENCE.activate(Prologue(name, gate, dtype, own), out)
            y[start : start + rows * cols] = out.reshape(-1)
    return y, starts, sources


def check(
    on_host,
    kernels,
    assert_bits,
    name,
    dtype,
    format="nvfp4",
    axes=("rowwise",),
    gap=0,
    shift=0,
    **options,
):
    """The file of the kernel that did it, after a look at its bytes; None if none does."""
    _, size = starts_of(DIMS, 2 if name == "swiglu" else 1, gap)
    x = raw(size, dtype, 1)
    z = raw(size, dtype, 2) if name in DERIVATIVES else None
    y, starts, sources = activated(name, dtype, x, z, gap)
    schemes = (as_scheme(format, {**options, "direction": direction}) for direction in axes)
    plans = tuple(grouped_plan(DIMS, starts, scheme.parts[0], pad=True) for scheme in schemes)
    seconds = tuple(
        np.linspace(2, 9, plan.second_offsets[-1]).astype(F32) if format == "nvfp4" else None
        for plan in plans
    )
    packeds, scales, wanted_packeds, wanted_scales = (
        tuple(make(getattr(plan, name)[-1], np.uint8) for plan in plans)
        for make in (on_host.empty, np.empty)
        for name in ("packed_offsets", "scale_offsets")
    )
    kernels.launched.clear()
    other = None if z is None else on_host.put(z)
    prologue = Prologue(name, on_host.put(x, shift * x.itemsize), dtype, other)
    jobs = tuple(
        Job(plan, None, dtype, None if second is None else on_host.put(second), *arrays, SEED)
        for plan, second, *arrays in zip(plans, seconds, packeds, scales, strict=True)
    )
    done = on_host.engine.quantize_grouped_activated(prologue, sources, jobs)
    launched = [instance.kernel for instance in kernels.launched]
    assert len(launched) == done
    if not done:
        return None
    wanted = zip(plans, seconds, wanted_packeds, wanted_scales, strict=True)
    get_backend("cpu").quantize_grouped(
        tuple(Job(plan, y, dtype, *rest, SEED) for plan, *rest in wanted)
    )
    for got, want in zip(packeds + scales, wanted_packeds + wanted_scales, strict=True):
        assert_bits(np.asarray(got), want)
    return launched[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_one_kernel(on_host, kernels, tables, assert_bits, name, dtype):
    for gap in (0, 8):
        done = check(on_host, kernels, assert_bits, name, dtype, gap=gap)
        assert done == "grouped_quantize_rowwise"


@pytest.mark.parametrize("axes", [("columnwise",), ("rowwise", "columnwise")])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("name", ["silu", "swiglu", "dgelu"])
def test_tiles(on_host, kernels, assert_bits, name, format, axes):
    options = {"scale_layout": "swizzled_128x4", "gap": 8}
    done = check(on_host, kernels, assert_bits, name, "bfloat16", format, axes, **options)
    assert done == "grouped_quantize_tiles"


def test_rows_with_swizzled_scales_take_tiles(on_host, kernels, assert_bits):
    options = {"scale_layout": "swizzled_128x4"}
    done = check(on_host, kernels, assert_bits, "silu", "bfloat16", **options)
    assert done == "grouped_quantize_tiles"


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("name", ["swiglu", "dgelu"])
def test_formats(on_host, kernels, assert_bits, name, format):
    options = {"format": format, "nibble_order": "high_first"}
    assert check(on_host, kernels, assert_bits, name, "bfloat16", **options)


def test_what_is_not_fused(on_host, kernels, assert_bits):
    arguments = on_host, kernels, assert_bits
    assert not check(*arguments, "silu", "float32", scale_layout="swizzled_128x4")
    assert not check(*arguments, "silu", "bfloat16", shift=1)
    assert not check(*arguments, "silu", "bfloat16", gap=3)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("name", ["gelu", "swiglu", "dsilu"])
def test_public_function(cupy, name, format, layout, given):
    """Fused or not, the bytes of the CPU; the tail of the buffer holds NaN."""
    rows, width = [0, 33, 128, 1, 300], 256 if name == "swiglu" else 128
    hosts = [
        np.random.default_rng(seed).standard_normal((500, width)).astype(ml_dtypes.bfloat16)
        for seed in range(2)
    ]
    for host in hosts:
        host[sum(rows) :] = np.nan
    options = {"format": format, "first_dims": rows, "scale_layout": layout, "activation": name}
    options["nonfinite"] = "propagate"
    if given and format == "nvfp4":
        options["amax"] = np.linspace(2, 5, len(rows)).astype(F32)

    def call(place, **more):
        x, z = (place(host) for host in hosts)
        more |= {"activation_input": z} if name in DERIVATIVES else {}
        if "amax" in more:
            more["amax"] = place(more["amax"])
        return fp4kit.quantize_grouped(x, **more)

    def device(host):
        if host.dtype == F32:
            return cupy.asarray(host)
        return cupy.asarray(host.view(np.uint16)).view(ml_dtypes.bfloat16)

    got, want = call(device, **options), call(np.asarray, backend="cpu", **options)
    np.testing.assert_array_equal(got.packed.get(), want.packed)
    np.testing.assert_array_equal(got.block_scale.get(), want.block_scale)
    if format == "nvfp4":
        np.testing.assert_array_equal(got.amax.get(), want.amax)
