# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""fp4kit.matmul: every kind of operand on every backend, and what it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from fp4kit import DtypeError, OptionError, ShapeError
from matmul_cases import KINDS, expected, numbers, tensor

BF16 = ml_dtypes.bfloat16


def unit(backend):
    """What a float32 sum on a backend may be off by: tensor cores cut instead of rounding."""
    return 2.0**-23 if backend.on_gpu else 2.0**-24


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_of_every_kind(backend, kind, dtype):
    w = tensor(kind, 48, 96)
    x = numbers((2, 3, 96), dtype, seed=1)
    y = backend.call(fp4kit.matmul, x, w)
    assert y.dtype == x.dtype
    expected(x, w, unit=unit(backend)).check(y, kind)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_both_operands_of_every_kind(backend, first, second):
    a, b = tensor(first, 16, 64, seed=2), tensor(second, 32, 64, seed=3)
    y = backend.call(fp4kit.matmul, a, b)
    expected(a, b, unit=unit(backend)).check(y, f"{first} x {second}")


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "fp8-block"])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 17, 33, 70])
def test_any_number_of_rows(backend, kind, rows):
    w = tensor(kind, 40, 160)
    x = numbers((rows, 160), "bfloat16", seed=rows)
    y = backend.call(fp4kit.matmul, x, w, out_dtype="float32")
    expected(x, w, unit=unit(backend)).check(y, f"{rows} rows")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape(backend, data):
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    rows, cols = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 150))
    depth = data.draw(st.integers(1, 300))
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    w = tensor(kind, cols, depth, seed=4)
    x = numbers((rows, depth), dtype, seed=5)
    expected(x, w, unit=unit(backend)).check(backend.call(fp4kit.matmul, x, w), kind)


def test_gradients_of_a_layer(backend):
    """dx = dy w and dw = dy^T x, from the columns of tensors of both directions."""
    x, dy, w = numbers((32, 48)), numbers((32, 64), seed=1), numbers((64, 48), seed=2)
    pairs = [
        backend.quantize(one, direction="both", second_level="row_scaled") for one in (x, dy, w)
    ]
    of_x, of_dy, of_w = pairs
    for a, b in (
        (of_x.rowwise, of_w.rowwise),
        (of_dy.rowwise, of_w.columnwise),
        (of_dy.columnwise, of_x.columnwise),
    ):
        expected(a, b, unit=unit(backend)).check(backend.call(fp4kit.matmul, a, b))
    shapes = [
        backend.call(fp4kit.matmul, of_dy.rowwise, of_w.columnwise).shape,
        backend.call(fp4kit.matmul, of_dy.columnwise, of_x.columnwise).shape,
    ]
    assert shapes == [(32, 48), (64, 48)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [2, 80])
def test_bias_sum_and_factor(backend, dtype, rows):
    w, x = tensor("nvfp4", 48, 64), numbers((rows, 64))
    bias, c = numbers((48,), dtype, seed=1), numbers((rows, 48), dtype, seed=2)
    for options in ({"bias": bias}, {"c": c}, {"bias": bias, "c": c, "alpha": -0.7}, {"alpha": 3}):
        y = backend.call(fp4kit.matmul, x, w, out_dtype=dtype, **options)
        assert y.dtype == numbers((1,), dtype).dtype
        expected(x, w, unit=unit(backend), **options).check(y, str(options.keys()))


def test_a_result_accumulates_in_place(backend):
    w, x, c = tensor("nvfp4", 48, 64), numbers((5, 64)), numbers((5, 48), seed=1)
    into = backend.put(c.copy())
    result = fp4kit.matmul(backend.put(x), backend.put(w), c=into, out=into, backend=backend.name)
    assert result is into
    expected(x, w, c=c, unit=unit(backend)).check(backend.get(into))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_nothing_to_sum_or_to_fill(backend, kind):
    w = tensor(kind, 32, 0)
    bias = numbers((32,))
    y = backend.call(fp4kit.matmul, np.zeros((3, 0), np.float32), w, bias=bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (3, 32)))
    assert not backend.call(fp4kit.matmul, np.zeros((3, 0), np.float32), w).any()
    empty = backend.call(fp4kit.matmul, np.zeros((0, 32), np.float32), tensor(kind, 16, 32))
    assert empty.shape == (0, 16)
    none = backend.call(fp4kit.matmul, np.zeros((3, 32), np.float32), tensor(kind, 0, 32))
    assert none.shape == (3, 0)


def test_levels_of_one_change_nothing(backend):
    """A second level of each row, all 1, gives the bytes of one for all."""
    w = tensor("nvfp4-modelopt", 48, 64)
    rows = fp4kit.quantize(numbers((6, 64)), recipe="modelopt", decode_scale=np.float32(1))
    each = fp4kit.QuantizedTensor(
        rows.packed, rows.block_scale, "nvfp4", (6, 64), recipe="modelopt",
        decode_scale=np.ones(6, np.float32),
    )  # fmt: skip
    first = backend.call(fp4kit.matmul, rows, w)
    second = backend.call(fp4kit.matmul, each, w)
    assert first.tobytes() == second.tobytes()


def test_zero_amax_gives_zeros(backend):
    w = backend.get(backend.quantize(np.zeros((16, 32), np.float32)))
    assert not backend.call(fp4kit.matmul, numbers((3, 32)), w).any()


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "fp8-block"])
def test_nan_and_infinity_propagate(backend, kind):
    w = tensor(kind, 24, 96)
    x = numbers((4, 96))
    x[1, 5], x[2, 7] = np.nan, np.inf
    y = backend.call(fp4kit.matmul, x, w)
    assert np.isfinite(y[[0, 3]]).all()
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any()
    scales = w.block_scale.copy()
    scales.reshape(-1)[0] = (
        np.nan if scales.dtype == np.float32 else 0x7F if kind == "nvfp4" else 255
    )
    import dataclasses

    spoiled = dataclasses.replace(w, block_scale=scales)
    z = backend.call(fp4kit.matmul, numbers((4, 96)), spoiled)
    assert np.isnan(z[:, 0]).all()
    assert np.isfinite(z[:, 1:]).all() or kind == "fp8-block"


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
def test_every_code_and_scale_byte(backend, kind):
    """Each code under each scale byte, one at a time."""
    spec = fp4kit.ALL_FORMATS[tensor(kind, 1, 32).format]
    count, size = 1 << spec.element.bits, spec.block_size
    width = max(count, size)
    codes = np.resize(np.arange(count, dtype=np.uint8), (256, width))
    packed = codes if spec.codes_per_byte == 1 else codes[:, ::2] | codes[:, 1::2] << 4
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], width // size, 1)
    options = {"recipe": "torchao", "second_level": "none"} if kind == "nvfp4" else {}
    w = fp4kit.QuantizedTensor(packed, scales, kind, (256, width), **options)
    x = np.eye(width, dtype=np.float32)
    with np.errstate(all="ignore"):
        values = fp4kit.dequantize(w, backend="reference").astype(np.float64)
        # Zeros times NaN and infinity are NaN.
        wanted = values[:, :, None] * np.eye(width)
        wanted = wanted.sum(1)
    y = backend.call(fp4kit.matmul, x, w).T
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(y[finite], wanted[finite].astype(np.float32))
    nans = np.isnan(values).any(1)
    assert np.isnan(y[nans]).any(1).all()


# ------------------------------------------------------------------------------------------------
# Rotated operands and residual channels
# ------------------------------------------------------------------------------------------------


def test_rotated_operands(backend):
    x, w = numbers((8, 64)), numbers((32, 64), seed=1)
    a, b = (backend.get(backend.quantize(one, rht=True)) for one in (x, w))
    y = backend.call(fp4kit.matmul, a, b)
    expected(a, b, unit=unit(backend)).check(y)
    original = x.astype(np.float64) @ w.T.astype(np.float64)
    assert np.linalg.norm(y - original) / np.linalg.norm(original) < 0.2
    plain = backend.get(backend.quantize(w))
    for one, other in ((x, b), (a, plain)):
        with pytest.raises(OptionError, match="rotated with rht="):
            backend.call(fp4kit.matmul, one, other)


@pytest.mark.parametrize("layout", ["interleaved", "appended"])
@pytest.mark.parametrize("reorders", [False, True])
def test_residual_channels(backend, layout, reorders):
    x, w = numbers((5, 64)), numbers((48, 64), seed=1)
    options = {"layout": layout}
    if reorders:
        options["reorder"] = np.random.default_rng(0).permutation(64)
    a = backend.get(backend.call(fp4kit.quantize_residual, x, 32, **options))
    b = backend.get(backend.call(fp4kit.quantize_residual, w, 32, mode="weight", **options))
    y = backend.call(fp4kit.matmul, a, b)
    decoded = [one.dequantize(backend="reference").astype(np.float64) for one in (a, b)]
    np.testing.assert_allclose(y, decoded[0] @ decoded[1].T, rtol=1e-4, atol=1e-3)
    plain = backend.call(fp4kit.matmul, fp4kit.quantize(x), fp4kit.quantize(w))
    original = x.astype(np.float64) @ w.T
    assert np.linalg.norm(y - original) < np.linalg.norm(plain - original)
    for one in (a, b):  # a plain array with the decoded values of either
        z = backend.call(fp4kit.matmul, x, one)
        values = one.dequantize(backend="reference").astype(np.float64)
        np.testing.assert_allclose(z, x.astype(np.float64) @ values.T, rtol=1e-4, atol=1e-3)


def test_residual_channels_that_do_not_belong_together():
    x = numbers((16, 64))
    a = fp4kit.quantize_residual(x, 32)
    other = fp4kit.quantize_residual(x, 16, mode="weight")
    b = fp4kit.quantize_residual(x, 32, mode="weight", reorder=np.arange(64))
    for one, two, message in (
        (a, a, "mode='activation'"),
        (a, other, "residual_channels"),
        (a, b, "reordered"),
        (a, fp4kit.quantize(x), "quantize_residual"),
        (fp4kit.quantize(x), b, "quantize both"),
    ):
        with pytest.raises(OptionError, match=message):
            fp4kit.matmul(one, two)
    c = fp4kit.quantize_residual(x, 32, reorder=np.arange(64)[::-1].copy())
    with pytest.raises(OptionError, match="reordered differently"):
        fp4kit.matmul(c, b)


# ------------------------------------------------------------------------------------------------
# What is refused
# ------------------------------------------------------------------------------------------------


def test_wrong_arguments():
    w, x = tensor("nvfp4", 32, 64), numbers((4, 64))
    pair = fp4kit.quantize(numbers((32, 64)), direction="both")
    for arguments, options, kind, message in (
        ((x, x), {}, OptionError, "must be a QuantizedTensor"),
        ((fp4kit.prepare(w), w), {}, OptionError, "pass it as b"),
        ((x, pair), {}, OptionError, "one direction of a pair"),
        ((x[:, :32], w), {}, ShapeError, "32 elements along the axis that is summed, b has 64"),
        ((np.float32(3), w), {}, ShapeError, r"shape \(\)"),
        ((x.astype(np.float64), w), {}, DtypeError, "float64"),
        ((x, fp4kit.quantize(numbers((2, 32, 64)))), {}, ShapeError, "matmul_grouped"),
        ((x, w), {"out_dtype": "int8"}, OptionError, "out_dtype"),
        ((x, w), {"alpha": "2"}, OptionError, "alpha"),
        ((x, w), {"bias": np.zeros(31, np.float32)}, ShapeError, "bias has shape"),
        ((x, w), {"bias": np.zeros(32)}, DtypeError, "bias is float64"),
        ((x, w), {"c": np.zeros((4, 31), np.float32)}, ShapeError, "c has shape"),
        ((x, w), {"out": np.zeros((4, 32), np.float16)}, ShapeError, "out is float16"),
        ((x, w), {"backend": "tpu"}, OptionError, "backend"),
    ):
        with pytest.raises(kind, match=message):
            fp4kit.matmul(*arguments, **options)


def test_memory_that_is_read_and_written():
    buffer = np.zeros(64 * 64, np.float32)
    x, w = buffer[: 4 * 64].reshape(4, 64), tensor("nvfp4", 64, 64)
    with pytest.raises(OptionError, match="share memory"):
        fp4kit.matmul(x, w, out=buffer[64 : 5 * 64].reshape(4, 64))
    c = buffer[:256].reshape(4, 64)
    with pytest.raises(OptionError, match="share memory"):
        fp4kit.matmul(numbers((4, 64)), w, c=c, out=buffer[1:257].reshape(4, 64))


def test_strides_and_leading_axes(backend):
    w = tensor("nvfp4", 32, 64)
    x = numbers((64, 6))
    expected(x.T.copy(), w, unit=unit(backend)).check(backend.call(fp4kit.matmul, x.T, w))
    one = backend.call(fp4kit.matmul, x[:, 0], w)
    assert one.shape == (32,)
    vector = fp4kit.quantize(numbers((64,)))
    assert backend.call(fp4kit.matmul, x.T, vector).shape == (6,)


def test_equal_calls_give_equal_bytes(backend):
    w, x = tensor("nvfp4", 300, 512), numbers((17, 512), "bfloat16")
    first = backend.call(fp4kit.matmul, x, w).tobytes()
    assert all(backend.call(fp4kit.matmul, x, w).tobytes() == first for _ in range(5))
