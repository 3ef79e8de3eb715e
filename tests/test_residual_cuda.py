# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Residual channels on a GPU: every kernel against the reference, pointers, graphs.

Small shapes with drawn options are in test_residual.py, whole kernels on the host in
test_residual_kernels.py.
"""

import itertools

import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend
from fp4kit.api.residual import LAYOUTS, MODES
from fp4kit.backend.jobs import Job
from fp4kit.backend.operations import ResidualPlan
from fp4kit.cuda import residual_launch as launches
from fp4kit.errors import ShapeError
from fp4kit.formats import DTYPES, NIBBLE_ORDERS, SCALE_LAYOUTS
from fp4kit.reference import codecs

CUDA = get_backend("cuda")
REASON = CUDA.unavailable_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
REFERENCE = get_backend("reference")
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
ROWS = launches.STAGED_ROWS


def values(rows, cols, dtype, seed=0):
    """Raw rows of many magnitudes, with zeros, ties and what is not finite."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols), np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-20, 6, (rows, 1)))
    x[rng.random(x.shape) < 0.05] = 0
    x[rng.random(x.shape) < 0.05] *= -0.0
    x[rows // 2] = np.round(x[rows // 2] * 4) / 4
    if seed % 2:
        x[0, :3] = [np.nan, np.inf, -np.inf]
    return codecs.from_float32(x, dtype)


def shifted(cupy, host, elements):
    """A device copy that starts so many elements past an aligned address."""
    memory = cupy.empty(host.size + elements, host.dtype)
    array = memory[elements:].reshape(host.shape)
    array.set(host)
    return array


def check_plan(cupy, plan, dtype, out_dtype, has_order, seed=0, shift=0):
    """Both directions give the reference's bytes, with padding written over garbage."""
    x = values(plan.rows, plan.cols, dtype, seed)
    scale = np.array([[448.0, 37.3, 1e-3][seed % 3]], np.float32)
    order = np.random.default_rng(seed).permutation(plan.cols) if has_order else None
    packed = np.empty(plan.packed_shape, np.uint8)
    byte = np.empty(plan.scale_shape, np.uint8)
    REFERENCE.quantize_residual(Job(plan, x, dtype, scale, packed, byte), order)
    expected = np.empty(x.shape, STORED[out_dtype])
    REFERENCE.dequantize_residual(
        Job(plan, None, out_dtype, scale, packed, byte), order, expected, out_dtype
    )

    device_scale = cupy.asarray(scale)
    device_order = None if order is None else cupy.asarray(order)
    found = [shifted(cupy, np.full(a.shape, 0xA5, np.uint8), shift) for a in (packed, byte)]
    source = shifted(cupy, x, shift)
    CUDA.quantize_residual(Job(plan, source, dtype, device_scale, *found), device_order)
    np.testing.assert_array_equal(found[0].get(), packed)
    np.testing.assert_array_equal(found[1].get(), byte)
    out = shifted(cupy, np.empty_like(expected), shift)
    CUDA.dequantize_residual(
        Job(plan, None, out_dtype, device_scale, *found), device_order, out, out_dtype
    )
    unsigned = f"u{expected.itemsize}"
    np.testing.assert_array_equal(out.get().view(unsigned), expected.view(unsigned))


def plans(rows, cols, channels):
    """Every choice of options, numbered."""
    choices = itertools.product(MODES, LAYOUTS, SCALE_LAYOUTS, NIBBLE_ORDERS, (False, True))
    for number, chosen in enumerate(choices):
        yield number, ResidualPlan(rows, cols, channels, *chosen)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_choice(cupy, dtype, has_order, shift):
    for number, plan in plans(ROWS, 192, 64):
        check_plan(cupy, plan, dtype, DTYPES[number % 3], has_order, number, shift)


@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize(("rows", "cols", "channels"), [
    (1, 16, 16),
    (7, 80, 48),
    (ROWS + 3, 112, 112),
    (ROWS + 3, 48, 0),
    (1030, 1040, 528),
])  # fmt: skip
def test_odd_shapes(cupy, rows, cols, channels, has_order):
    for number, plan in plans(rows, cols, channels):
        if (number + number // 4) % 3 == 0:
            dtype, out = DTYPES[number % 3], DTYPES[number // 2 % 3]
            check_plan(cupy, plan, dtype, out, has_order, number)


@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize(("cols", "dtype", "scale_layout"), [
    (8192, "bfloat16", "swizzled_128x4"),
    (8192, "float16", "linear"),
    (8192, "float32", "swizzled_8x4"),
    (20480, "bfloat16", "linear"),
    (20480, "float32", "swizzled_128x4"),
    (65536 + 16, "bfloat16", "swizzled_8x4"),
])  # fmt: skip
def test_long_rows(cupy, cols, dtype, scale_layout, has_order):
    """Rows of several steps, places in words, and rows that no shared memory holds."""
    plan = ResidualPlan(
        ROWS + 9, cols, 2048, "activation", "interleaved", scale_layout, "low_first", has_order
    )
    check_plan(cupy, plan, dtype, dtype, has_order)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rounds", [False, True])
def test_every_16_bit_pattern(cupy, dtype, rounds):
    """NaN, infinity and subnormals included, sorted into blocks of like size and shuffled."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    shuffled = np.random.default_rng(0).permutation(patterns)
    x = np.concatenate([patterns, shuffled]).reshape(-1, 64).view(STORED[dtype])
    plan = ResidualPlan(len(x), 64, 64, "activation", "interleaved", "linear", "low_first", rounds)
    packed = np.empty(plan.packed_shape, np.uint8)
    byte = np.empty(plan.scale_shape, np.uint8)
    found = cupy.empty(packed.shape, np.uint8), cupy.empty(byte.shape, np.uint8)
    for scale in (1.0, 448.0, 1e-30, 1e30):
        encode = np.array([scale], np.float32)
        REFERENCE.quantize_residual(Job(plan, x, dtype, encode, packed, byte), None)
        CUDA.quantize_residual(
            Job(plan, cupy.asarray(x), dtype, cupy.asarray(encode), *found), None
        )
        np.testing.assert_array_equal(found[0].get(), packed)
        np.testing.assert_array_equal(found[1].get(), byte)


@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bytes_decode(cupy, dtype, has_order):
    """Also scales that are negative or NaN, and encode scales without a finite inverse."""
    rng = np.random.default_rng(0)
    plan = ResidualPlan(ROWS, 64, 32, "activation", "appended", "linear", "low_first", False)
    order = rng.permutation(64) if has_order else None
    packed, byte = (
        rng.integers(0, 256, shape, np.uint8) for shape in (plan.packed_shape, plan.scale_shape)
    )
    expected = np.empty((plan.rows, plan.cols), STORED[dtype])
    out = cupy.empty(expected.shape, expected.dtype)
    unsigned = f"u{expected.itemsize}"
    for scale in (448.0, 1e-40, 1e30, np.nan):
        encode = np.array([scale], np.float32)
        REFERENCE.dequantize_residual(
            Job(plan, None, dtype, encode, packed, byte), order, expected, dtype
        )
        codes, scales, level = (cupy.asarray(array) for array in (packed, byte, encode))
        job = Job(plan, None, dtype, level, codes, scales)
        CUDA.dequantize_residual(job, None if order is None else cupy.asarray(order), out, dtype)
        np.testing.assert_array_equal(out.get().view(unsigned), expected.view(unsigned))


@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "reordered"])
def test_graph_capture_and_replay(cupy, has_order):
    """The backend's own calls, on data that changes between replays."""
    plan = ResidualPlan(
        ROWS, 1024, 128, "activation", "interleaved", "swizzled_128x4", "low_first", has_order
    )
    first, second = (values(plan.rows, plan.cols, "bfloat16", seed) for seed in (0, 2))
    scale = np.array([448.0], np.float32)
    order = np.random.default_rng(0).permutation(plan.cols) if has_order else None
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, device_scale = cupy.asarray(first), cupy.asarray(scale)
        device_order = None if order is None else cupy.asarray(order)
        found = cupy.empty(plan.packed_shape, np.uint8), cupy.empty(plan.scale_shape, np.uint8)
        out = cupy.empty(first.shape, np.float32)

        def both():
            CUDA.quantize_residual(Job(plan, x, "bfloat16", device_scale, *found), device_order)
            CUDA.dequantize_residual(
                Job(plan, None, "float32", device_scale, *found), device_order, out, "float32"
            )

        both()  # whatever this path compiles is compiled before capture
        stream.begin_capture()
        both()
        graph = stream.end_capture()
        for data in (second, first, second):
            x.set(data, stream=stream)
            graph.launch(stream)
        stream.synchronize()
    packed = np.empty(plan.packed_shape, np.uint8)
    byte = np.empty(plan.scale_shape, np.uint8)
    expected = np.empty(second.shape, np.float32)
    REFERENCE.quantize_residual(Job(plan, second, "bfloat16", scale, packed, byte), order)
    REFERENCE.dequantize_residual(
        Job(plan, None, "float32", scale, packed, byte), order, expected, "float32"
    )
    np.testing.assert_array_equal(found[0].get(), packed)
    np.testing.assert_array_equal(found[1].get(), byte)
    np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.parametrize("has_order", [False, True], ids=["in order", "reordered"])
def test_public_calls_under_capture(cupy, has_order):
    """Nothing waits for the device, nor for a check of an order that lies there."""
    host = np.random.default_rng(0).standard_normal((ROWS, 256), np.float32)
    order = np.random.default_rng(1).permutation(256) if has_order else None
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray(host)
        options = {"nonfinite": "propagate"}
        if has_order:
            options["reorder"] = cupy.asarray(order)
        fp4kit.dequantize(fp4kit.quantize_residual(x, 64, **options))
        stream.begin_capture()
        q = fp4kit.quantize_residual(x, 64, **options)
        out = fp4kit.dequantize(q)
        graph = stream.end_capture()
        x.set(2 * host, stream=stream)
        graph.launch(stream)
        stream.synchronize()
    wanted = fp4kit.quantize_residual(2 * host, 64, reorder=order, backend="reference")
    np.testing.assert_array_equal(q.packed.get(), wanted.packed)
    np.testing.assert_array_equal(out.get(), fp4kit.dequantize(wanted, backend="reference"))


def test_orders_on_the_gpu_that_are_no_permutations(cupy):
    """Refused where the call waits anyway; else what there is not is the last channel."""
    host = np.random.default_rng(0).standard_normal((ROWS, 64), np.float32)
    x, order = cupy.asarray(host), np.arange(64)
    order[[1, 7, 40]] = -1, 1 << 40, 64
    given = cupy.asarray(order)
    with pytest.raises(ShapeError, match="each channel"):
        fp4kit.quantize_residual(x, 16, reorder=given)
    for propagates in ("raise", "propagate"):
        with pytest.raises(ShapeError, match="each channel"):
            fp4kit.quantize_residual(x, 16, reorder=order.tolist(), nonfinite=propagates)
    q = fp4kit.quantize_residual(x, 16, reorder=given, amax=4.0, nonfinite="propagate")
    plan, scale = q.plan, q.encode_scale.get()
    packed, byte = np.empty(plan.packed_shape, np.uint8), np.empty(plan.scale_shape, np.uint8)
    inside = np.where((order < 0) | (order > 63), 63, order)
    REFERENCE.quantize_residual(Job(plan, host, "float32", scale, packed, byte), inside)
    np.testing.assert_array_equal(q.packed.get(), packed)
    assert fp4kit.dequantize(q).shape == host.shape
