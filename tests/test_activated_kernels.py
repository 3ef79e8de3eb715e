# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of activations, run on the host: fused with quantization, or measuring results."""

import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job, Prologue
from fp4kit.cuda import ready as cuda_ready
from fp4kit.formats import ALL_RECIPES, DTYPES
from fp4kit.options import DIRECTIONS
from fp4kit.reference import codecs
from fp4kit.reference.activations import ACTIVATIONS, DERIVATIVES
from sample_plans import sample_plan

F32 = np.float32
SEED = (77, 5)
REFERENCE = get_backend("reference")


def raw(shape, dtype, seed):
    """Moderate rows, rows of any size, and some that are not finite."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-2, 2, shape)
    x[1::3] *= 2.0 ** rng.integers(-20, 14, (len(x[1::3]), 1))
    x[::5, ::3] = -0.0
    x[3::7, :40].flat[::11] = np.nan
    x[4::9, 8::16] = -np.inf
    return codecs.from_float32(x.astype(F32), dtype)


def inputs(name, rows, width, dtype):
    x = raw((rows, 2 * width if name == "swiglu" else width), dtype, 1)
    return x, raw((rows, width), dtype, 2) if name in DERIVATIVES else None


def activated(name, x, dtype, z, width):
    """The result and its column sums."""
    out, sums = np.empty((len(x), width), x.dtype), np.empty(width, F32)
    if name is None:
        REFERENCE.column_sums(x, dtype, sums)
        return x, sums
    REFERENCE.activate_with_sums(Prologue(name, x, dtype, z, sums), out)
    return out, sums


def make_plan(rows, cols, format="nvfp4", recipe="te", **options):
    # One second level for all rows or columns, unless said otherwise.
    along_columns = options.get("direction") == "columnwise"
    options = {"rows_per_scale": cols if along_columns else rows, **options}
    return sample_plan(rows, cols, format, recipe=recipe, **options)


def quantize(on_host, kernels, assert_bits, name, plans, dtype, put=None, sums=False):
    """The file of the kernel that did it, after a look at its bytes; None if none does."""
    put = put or on_host.put
    plans = plans if isinstance(plans, tuple) else (plans,)
    plan = plans[0]
    x, z = inputs(name, plan.rows, plan.cols, dtype)
    seconds = tuple(
        np.linspace(20, 30, one.scales).astype(F32) if one.has_second_level else None
        for one in plans
    )
    packeds = tuple(on_host.empty(one.packed_shape, np.uint8) for one in plans)
    scales = tuple(on_host.empty(one.scale_shape, np.uint8) for one in plans)
    got_sums = on_host.empty((plan.cols,), F32) if sums else None
    kernels.launched.clear()
    prologue = Prologue(name, put(x), dtype, None if z is None else put(z), got_sums)
    jobs = tuple(
        Job(one, None, dtype, None if second is None else on_host.put(second), *arrays, SEED)
        for one, second, *arrays in zip(plans, seconds, packeds, scales, strict=True)
    )
    done = on_host.engine.quantize_activated(prologue, jobs)
    launched = [instance.kernel for instance in kernels.launched]
    if not done:
        assert not launched
        return None
    assert set(launched[1:]) <= {"column_sums"}
    y, wanted_sums = activated(name, x, dtype, z, plan.cols)
    for one, second, packed, scale in zip(plans, seconds, packeds, scales, strict=True):
        wanted = np.empty(one.packed_shape, np.uint8), np.empty(one.scale_shape, np.uint8)
        REFERENCE.quantize(Job(one, y, dtype, second, *wanted, SEED))
        assert_bits(np.asarray(packed), wanted[0], "packed")
        assert_bits(np.asarray(scale), wanted[1], "block_scale")
    if sums:
        assert_bits(np.asarray(got_sums), wanted_sums, "sums")
    return launched[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions_and_types(on_host, kernels, assert_bits, name, dtype):
    done = quantize(on_host, kernels, assert_bits, name, make_plan(70, 96), dtype)
    assert done == "quantize_rowwise_activated"


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_formats_and_layouts(on_host, kernels, assert_bits, format, layout):
    """Many rows: the grid is filled, and a thread takes several lanes."""
    plan = make_plan(150, 224, format, scale_layout=layout, nibble_order="high_first")
    done = quantize(on_host, kernels, assert_bits, "swiglu", plan, "bfloat16")
    assert done == "quantize_rowwise_activated"


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_recipes(on_host, kernels, assert_bits, recipe):
    plan = make_plan(30, 64, recipe=recipe)
    assert quantize(on_host, kernels, assert_bits, "dgelu", plan, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [None, "silu", "swiglu", "dsilu"])
def test_sums(on_host, kernels, assert_bits, name, dtype):
    """Groups and tiles that are not whole, in either direction."""
    for rows, cols in ((70, 96), (1, 16), (33, 272)):
        plan = make_plan(rows, cols)
        done = quantize(on_host, kernels, assert_bits, name, plan, dtype, sums=True)
        assert done == "quantize_rowwise_column_sums"


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_sums_in_formats_and_layouts(on_host, kernels, assert_bits, format, layout):
    """More rows than one launch adds up."""
    plan = make_plan(1030, 160, format, scale_layout=layout, nibble_order="high_first")
    assert quantize(on_host, kernels, assert_bits, None, plan, "bfloat16", sums=True)


def test_sums_that_would_leave_much_idle(on_host, kernels, assert_bits, monkeypatch):
    monkeypatch.setattr(cuda_ready, "multiprocessors", lambda _: 3)
    for rows, cols, done in ((1024, 256, False), (1025, 256, True), (1, 272, True)):
        plan = make_plan(rows, cols)
        found = quantize(on_host, kernels, assert_bits, None, plan, "bfloat16", sums=True)
        assert found == ("quantize_rowwise_column_sums" if done else None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_tiles_of_both_directions(on_host, kernels, assert_bits, name, dtype):
    """Tiles that end within a matrix; blocks that do, one of them a row's."""
    for rows, cols in ((130, 136), (48, 264)):
        plans = tuple(make_plan(rows, cols, direction=direction) for direction in DIRECTIONS)
        done = quantize(on_host, kernels, assert_bits, name, plans, dtype)
        assert done == "quantize_tiles"


@pytest.mark.parametrize("options", [
    {"direction": "columnwise"},
    {"direction": "columnwise", "rounding": "stochastic"},
    {"direction": "columnwise", "rht": 0x1234, "rht_rounding": "bf16"},
    {"block_shape": "2d"},
    {"rounding": "stochastic"},
    {"direction": "columnwise", "format": "mxfp8"},
    {"direction": "columnwise", "format": "mxfp4", "scale_layout": "swizzled_128x4"},
])  # fmt: skip
@pytest.mark.parametrize("name", ["silu", "swiglu", "dgelu"])
def test_tiles_of_variants(on_host, kernels, assert_bits, name, options):
    plan = make_plan(144, 160, **options)
    done = quantize(on_host, kernels, assert_bits, name, plan, "bfloat16")
    assert done == "quantize_tiles"


@pytest.mark.parametrize("why", ["ragged", "second levels"])
def test_rows_that_take_tiles(on_host, kernels, assert_bits, why):
    options = {"cols": 40} if why == "ragged" else {"rows_per_scale": 1}
    plan = make_plan(**{"rows": 20, "cols": 64, **options})
    done = quantize(on_host, kernels, assert_bits, "silu", plan, "bfloat16")
    assert done == "quantize_tiles"


@pytest.mark.parametrize("why", ["misaligned", "wide elements", "sums", "search", "narrow"])
def test_what_is_not_fused(on_host, kernels, assert_bits, monkeypatch, why):
    options = {"scale_search": "sweep"} if why == "search" else {"direction": "columnwise"}
    if why == "narrow":
        monkeypatch.setattr(cuda_ready, "has_shared_memory", lambda *_: False)

    def shifted(array):
        return on_host.put(array, array.itemsize)

    put = shifted if why == "misaligned" else None
    dtype = "float32" if why == "wide elements" else "bfloat16"
    plan = make_plan(32, 64, **options)
    arguments = on_host, kernels, assert_bits, "silu", plan, dtype, put
    assert quantize(*arguments, sums=why == "sums") is None


@pytest.mark.parametrize("how", ["activation", "both", "sums"])
@pytest.mark.parametrize("width", [64, 40, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("holes", [True, False])
def test_results_are_measured(on_host, assert_bits, dtype, width, how, holes):
    """The amax without NaN, and whether there is anything that is not finite."""
    rows, name = 70, "gelu"
    x, _ = inputs(name, rows, width, dtype)
    if not holes:
        wide = np.nan_to_num(codecs.to_float32(x, dtype), posinf=9, neginf=9)
        x = codecs.from_float32(wide, dtype)
    y, sums = activated(name, x, dtype, None, width)
    if how == "sums":
        y = x
        REFERENCE.column_sums(x, dtype, sums)
    wanted, finite = REFERENCE.scan(y, dtype)
    got_sums = None if how == "activation" else on_host.empty(sums.shape, F32)
    moved = on_host.put(x)
    out = moved if how == "sums" else on_host.empty(y.shape, y.dtype)
    chosen = None if how == "sums" else name
    scan = on_host.engine.activate_measured(
        Prologue(chosen, moved, dtype, None, got_sums), out, True
    )
    assert np.asarray(scan)[0] == wanted.view(np.uint32)[0]
    assert bool(np.asarray(scan)[1]) == (not finite) == holes
    assert_bits(np.asarray(out), y)
    if got_sums is not None:
        assert_bits(np.asarray(got_sums), sums)
