# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of residual channels, run on the host, equal the reference."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fp4kit.api import residual
from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job
from fp4kit.backend.operations import ResidualPlan
from fp4kit.cuda import residual_launch as launches
from fp4kit.formats import DTYPES, NIBBLE_ORDERS, SCALE_LAYOUTS
from fp4kit.reference import codecs

#: As an H200 has them and `on_host` too, but few multiprocessors: thread blocks take several turns.
LIMITS = launches.Limits(1, 227 * 1024, 228 * 1024)
REFERENCE = get_backend("reference")
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
SCALES = (448.0, 37.3, 1e-3, np.inf)
PLAN = ResidualPlan(40, 192, 64, "activation", "interleaved", "linear", "low_first", False)
#: Kernels: channels in order, in another order, single accesses.
KINDS = ("", "_reordered", "_any")


@pytest.fixture(scope="module", autouse=True)
def _built(kernels):
    # -O1: built once, and run on long rows.
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    kernels.build(launches.all_instances(), flags)


def values(rows, cols, dtype, seed):
    """Rows of many magnitudes, with zeros, ties, signed zeros and what is not finite."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x *= (
        np.ldexp(np.float32(1), rng.integers(-20, 6, (rows, cols // 16, 1)))
        .repeat(16, 1)
        .reshape(rows, cols)
    )
    x[rng.random(x.shape) < 0.05] = 0
    x[rng.random(x.shape) < 0.05] *= -0.0
    x[rows // 2] = np.round(x[rows // 2] * 4) / 4
    x[-1, :16] = 0
    if seed % 2:
        x[0, :3] = [np.nan, np.inf, -np.inf]
        x[rows // 3, -2:] = [-np.nan, np.float32(3e38)]
    with np.errstate(over="ignore"):
        return codecs.from_float32(x, dtype)


def check_quantize(on, plan, x, dtype, scale, order, shift=0, given=None):
    """Quantizes, compares with the reference, and returns kernel and arrays.

    The kernel gets the order `given`, if there is one, which must count as `order`. Arrays begin
    `shift` elements past a 16-byte boundary.
    """
    wanted = np.empty(plan.packed_shape, np.uint8), np.empty(plan.scale_shape, np.uint8)
    REFERENCE.quantize_residual(Job(plan, x, dtype, scale, *wanted), order)
    found = [on.empty(array.shape, np.uint8, shift) for array in wanted]
    passed = order if given is None else given
    passed = None if passed is None else on.put(passed)
    source = on.put(x, shift * x.itemsize)
    on.engine.quantize_residual(Job(plan, source, dtype, on.put(scale), *found), passed)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    return on.launched[-1].expression, *wanted


def check_dequantize(on, plan, packed, byte, dtype, scale, order, shift=0):
    """The same of decoding; NaN must be the canonical one. Returns the kernel."""
    expected = np.empty((plan.rows, plan.cols), STORED[dtype])
    REFERENCE.dequantize_residual(
        Job(plan, None, dtype, scale, packed, byte), order, expected, dtype
    )
    inputs = [on.put(array, shift) for array in (packed, byte)]
    passed = None if order is None else on.put(order)
    out = on.empty(expected.shape, expected.dtype, shift * expected.itemsize)
    on.engine.dequantize_residual(
        Job(plan, None, dtype, on.put(scale), *inputs), passed, out, dtype
    )
    unsigned = f"u{expected.itemsize}"
    np.testing.assert_array_equal(out.view(unsigned), expected.view(unsigned))
    return on.launched[-1].expression


def check_plan(on, plan, dtype, out, order, shift=0, seed=0):
    """Both ways, with a scale that depends on the seed; returns the names of the kernels."""
    x = values(plan.rows, plan.cols, dtype, seed)
    scale = np.array([SCALES[seed % len(SCALES)]], np.float32)
    kernel, packed, byte = check_quantize(on, plan, x, dtype, scale, order, shift)
    return kernel, check_dequantize(on, plan, packed, byte, out, scale, order, shift)


def plans(rows, cols, channels):
    """Every choice of options, numbered."""
    choices = itertools.product(
        residual.MODES, residual.LAYOUTS, SCALE_LAYOUTS, NIBBLE_ORDERS, (False, True)
    )
    for number, chosen in enumerate(choices):
        yield number, ResidualPlan(rows, cols, channels, *chosen)


def permutation(cols, seed=1):
    return np.random.default_rng(seed).permutation(cols)


@pytest.fixture
def stages_few_rows(monkeypatch):
    monkeypatch.setattr(launches, "STAGED_ROWS", 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("stages_few_rows")
def test_every_choice(on_host, dtype, kind):
    for number, plan in plans(20, 192, 64):
        has_order = kind == "_reordered" or (kind == "_any" and number % 2)
        order = permutation(192) if has_order else None
        out = DTYPES[number % 3]
        for kernel in check_plan(on_host, plan, dtype, out, order, int(kind == "_any"), number):
            assert f"residual{kind}_kernel" in kernel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols", "channels"), [
    (1, 16, 0),
    (1, 16, 16),
    (7, 80, 48),  # an odd first block, blocks that are no multiple of four
    (9, 112, 112),
    (130, 64, 16),  # two rows of tiles, most of the second one padding
    (259, 48, 32),
])  # fmt: skip
@pytest.mark.usefixtures("stages_few_rows")
def test_odd_shapes(on_host, kind, rows, cols, channels):
    order = permutation(cols) if kind == "_reordered" else None
    for number, plan in plans(rows, cols, channels):
        if (number + number // 4) % 3 == 0:
            dtype, out = DTYPES[number % 2 + 1], DTYPES[number // 2 % 3]
            check_plan(on_host, plan, dtype, out, order, int(kind == "_any"), number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("cols", [4112, 12288, 28672])
@pytest.mark.usefixtures("stages_few_rows")
def test_long_rows(on_host, kind, dtype, scale_layout, cols):
    """More blocks in a row than threads, rows of a group in several steps, and a single buffer."""
    order = permutation(cols) if kind == "_reordered" else None
    plan = replace(PLAN, rows=9, cols=cols, residual=2048, scale_layout=scale_layout)
    check_plan(on_host, plan, dtype, dtype, order, int(kind == "_any"))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern(on_host, dtype, rounds):
    """Sorted into blocks of like size, and shuffled."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    bits = np.concatenate([patterns, permutation(1 << 16).astype(np.uint16)]).reshape(-1, 64)
    x = bits.view(STORED[dtype])
    plan = replace(PLAN, rows=len(x), cols=64, residual=64, rounds=rounds)
    for scale in (1.0, 448.0, 1e-30, 1e30):
        check_quantize(on_host, plan, x, dtype, np.array([scale], np.float32), None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("stages_few_rows")
def test_any_bytes_decode(on_host, dtype, kind):
    """Also scales that are negative or NaN, and encode scales without a finite inverse."""
    rng = np.random.default_rng(0)
    order = permutation(64) if kind == "_reordered" else None
    plan = replace(PLAN, rows=256, cols=64, residual=32)
    packed, byte = (
        rng.integers(0, 256, shape, np.uint8) for shape in (plan.packed_shape, plan.scale_shape)
    )
    for scale in (448.0, 1e-40, 1e30, np.nan):
        arrays = packed, byte, dtype, np.array([scale], np.float32), order, int(kind == "_any")
        check_dequantize(on_host, plan, *arrays)


@pytest.mark.parametrize("shift", [0, 1], ids=["staged", "single accesses"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("stages_few_rows")
def test_an_order_that_is_no_permutation_stays_inside(on_host, dtype, shift):
    """Nobody has checked it if nothing may wait: what there is not is the last channel."""
    plan = replace(PLAN, rows=20)
    given = permutation(plan.cols)
    given[[0, 5, 17, 100, 191]] = -1, plan.cols, 1 << 40, -(1 << 63), (1 << 32) + 3
    inside = np.where((given < 0) | (given >= plan.cols), plan.cols - 1, given)
    x = values(plan.rows, plan.cols, dtype, 0)
    scale = np.array([448.0], np.float32)
    _, packed, byte = check_quantize(on_host, plan, x, dtype, scale, inside, shift, given)
    out = on_host.empty(x.shape, x.dtype, shift * x.itemsize)
    codes, scales, level, order = (on_host.put(array) for array in (packed, byte, scale, given))
    job = Job(plan, None, dtype, level, codes, scales)
    on_host.engine.dequantize_residual(job, order, out, dtype)


@pytest.mark.parametrize(("cols", "dtype", "wanted"), [
    (192, "bfloat16", (2, 3, 20, 32)),
    (1024, "bfloat16", (2, 3, 5, 128)),
    (4096, "bfloat16", (2, 3, 2, 320)),
    (8192, "bfloat16", (2, 3, 1, 640)),
    (8192, "float32", (2, 3, 1, 640)),
    (12288, "bfloat16", (1, 3, 1, 640)),
    (20480, "bfloat16", (1, 2, 1, 640)),
    (28672, "float32", (1, 1, 1, 640)),
])  # fmt: skip
def test_buffers_that_fit(cols, dtype, wanted):
    """Rows of a step, its buffers, and how threads share a multiprocessor."""
    plan = replace(PLAN, rows=512, cols=cols)
    stage = launches.quantize_staging(plan, dtype, True, LIMITS)
    assert (stage.together, stage.buffers, stage.blocks, stage.threads) == wanted
    assert stage.shared <= LIMITS.shared_block
    assert stage.blocks * (stage.shared + 1024) <= LIMITS.shared_multiprocessor


def test_rows_that_cannot_be_staged():
    """Too long for shared memory, or too few."""
    plan = replace(PLAN, rows=512, cols=8192)
    few = replace(plan, rows=launches.STAGED_ROWS - 1)
    small = replace(LIMITS, shared_block=48 * 1024)
    for staging in (launches.quantize_staging, launches.dequantize_staging):
        assert staging(plan, "bfloat16", True, LIMITS) is not None
        for other, limits in ((few, LIMITS), (replace(plan, cols=65536), LIMITS), (plan, small)):
            assert staging(other, "bfloat16", True, limits) is None
        assert staging(plan, "bfloat16", False, LIMITS) is None


def test_many_elements_take_64_bits():
    """What the fast kernels count in 32 bits decides whether they are taken."""
    for launch in (launches.quantize_launch, launches.dequantize_launch):
        for rows, fast in ((1 << 30, True), (1 << 31, False)):
            plan = replace(PLAN, rows=rows)
            kernel = launch(plan, "bfloat16", False, True, LIMITS).instance.expression
            assert kernel.startswith("fp4kit::" + launch.__name__.removesuffix("_launch"))
            assert ("residual_kernel" in kernel) == fast
            assert ("any_kernel" in kernel) != fast
