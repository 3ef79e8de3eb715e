# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups: activations and column sums before quantization, row offsets, scales in one matrix."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend
from fp4kit.errors import NonFiniteError, OptionError, ShapeError
from fp4kit.layout import padded_scale_shape
from fp4kit.reference.activations import ACTIVATIONS, DERIVATIVES

F32 = np.float32
FIRST = [32, 0, 33, 1, 64]


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def require(backend, operation):
    reason = get_backend(backend.name).lacks(operation)
    if reason is not None:
        pytest.skip(f"{backend.name} {reason}")


def assert_member(backend, assert_bits, group, number, want):
    got = backend.get(group.member(number))
    assert got.shape == want.shape
    if prod(got.shape):
        assert_bits(got.packed, want.packed, f"member {number} packed")
        assert_bits(got.block_scale, want.block_scale, f"member {number} block_scale")
        if want.amax is not None:
            assert_bits(got.amax, want.amax, f"member {number} amax")


# ------------------------------------------------------------------------------------------------
# Activations
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("kind", ["first", "last", "gaps"])
def test_members_are_activated_as_if_alone(backend, assert_bits, kind, format, name):
    require(backend, "activate")
    rows, cols, tail = 130, 64, 5
    if kind == "first":
        sizes = {"first_dims": FIRST}
        dims, shape = [(m, cols) for m in FIRST], (rows + tail, cols)
        starts = np.cumsum([0, *(m * cols for m in FIRST)])
    elif kind == "last":
        last = [64, 0, 32, 128]
        sizes = {"last_dims": last}
        dims, shape = [(rows, k) for k in last], (rows, sum(last) + tail)
        starts = np.cumsum([0, *(rows * k for k in last)])
    else:
        dims, shape = [(3, 64), (2, 32), (70, 64)], (6001,)
        starts = [1, 195, 262, 5000]
        sizes = {"first_dims": [3, 2, 70], "last_dims": [64, 32, 64], "offsets": starts}
    buffer, other = (normal(prod(shape), seed) for seed in (1, 2))
    options = {"format": format, "pad": True, "direction": "both", "activation": name}
    given = {"activation_input": other.reshape(shape)} if name in DERIVATIVES else {}
    covered = np.zeros(prod(shape), bool)
    for pair, start in zip(dims, starts, strict=False):
        covered[start : start + prod(pair)] = True
    buffer[~covered] = np.nan
    group = backend.call(
        fp4kit.quantize_grouped, buffer.reshape(shape), **sizes, **options, **given
    )
    for number, (pair, start) in enumerate(zip(dims, starts, strict=False)):
        part = slice(start, start + prod(pair))
        mine = {key: other[part].reshape(pair) for key in given}
        want = backend.quantize(buffer[part].reshape(pair), **options, **mine)
        for got, expected in zip((group.rowwise, group.columnwise), want, strict=True):
            assert_member(backend, assert_bits, got, number, expected)
    back = backend.get(fp4kit.dequantize_grouped(group.rowwise, backend=backend.name))
    assert back.shape == group.rowwise.shape
    assert np.isfinite(back).all()


def test_swiglu_halves_the_buffer(backend):
    require(backend, "activate")
    x = normal((40, 64))
    group = backend.call(
        fp4kit.quantize_grouped, x, first_dims=[16, 8], activation="swiglu", nonfinite="propagate"
    )
    assert group.shape == (40, 32)
    assert group.dims == ((16, 32), (8, 32))
    assert group.starts == (0, 512)
    flat = backend.call(
        fp4kit.quantize_grouped, x[:3, :33], first_dims=[1], last_dims=[64], activation="swiglu"
    )
    assert flat.shape == (49,)


@pytest.mark.parametrize("name", ["gelu", "dsilu"])
def test_nonfinite_members_are_named_before_the_activation(name):
    x, z = normal((64, 32)), normal((64, 32), 1)
    options = {"first_dims": [16, 32], "activation": name}
    if name in DERIVATIVES:
        options["activation_input"] = z
    x[60, 0] = z[60, 0] = np.nan  # behind the members
    fp4kit.quantize_grouped(x, **options)
    x[20, 3] = -np.inf
    with pytest.raises(NonFiniteError, match=r"member 1 of the group holds .*\(4, 3\)"):
        fp4kit.quantize_grouped(x, **options)
    if name in DERIVATIVES:
        x[20, 3], z[2, 2] = 0, np.inf
        with pytest.raises(NonFiniteError, match=r"member 0 of activation_input .*\(2, 2\)"):
            fp4kit.quantize_grouped(x, **options)


# ------------------------------------------------------------------------------------------------
# Column sums
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
def test_column_sums_of_members(backend, assert_bits, activation):
    require(backend, "column_sums")
    if activation:
        require(backend, "activate")
    x = normal((sum(FIRST) + 3, 64))
    x[sum(FIRST) :] = np.nan
    options = {"activation": activation, "pad": True}
    cols = 32 if activation == "swiglu" else 64
    flat = backend.put(np.full(len(FIRST) * cols, 7, F32))
    backend.call(fp4kit.quantize_grouped, x, first_dims=FIRST, dbias=flat, **options)
    matrix = backend.put(np.full((len(FIRST), cols), 7, F32))
    backend.call(fp4kit.quantize_grouped, x, first_dims=FIRST, dbias=matrix, **options)
    assert_bits(backend.get(matrix).reshape(-1), backend.get(flat))
    row = 0
    for number, count in enumerate(FIRST):
        want = backend.put(np.full(cols, 9, F32))
        backend.quantize(x[row : row + count], dbias=want, **options)
        row += count
        assert_bits(backend.get(matrix)[number], backend.get(want), f"member {number}")
    assert not backend.get(matrix)[1].any()


def test_column_sums_of_members_of_other_widths(backend, assert_bits):
    require(backend, "column_sums")
    x, last = normal((40, 100)), [32, 0, 64]
    got = backend.put(np.full(96, 7, F32))
    backend.call(fp4kit.quantize_grouped, x, last_dims=last, dbias=got)
    want = [backend.put(np.empty(k, F32)) for k in (32, 64)]
    flat = x.reshape(-1)
    backend.quantize(flat[: 40 * 32].reshape(40, 32), dbias=want[0])
    backend.quantize(flat[40 * 32 : 40 * 96].reshape(40, 64), dbias=want[1])
    assert_bits(backend.get(got), np.concatenate([backend.get(part) for part in want]))


# ------------------------------------------------------------------------------------------------
# Row offsets, scales in one matrix
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [64, 80, 33])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_scales_in_one_matrix(backend, assert_bits, format, cols):
    """Each member's 128x4 tiles begin at its row of a matrix of M + 127 n rows."""
    x = normal((300, cols))
    x[295:] = np.nan
    offsets = [3, 3, 130, 131, 295]
    options = {"format": format, "pad": True}
    group = backend.call(
        fp4kit.quantize_grouped, x, row_offsets=offsets, scale_layout="grouped_128x4", **options
    )
    assert group.scale_layout == "grouped_128x4"
    assert group.dims == tuple((m, cols) for m in (0, 127, 1, 164))
    assert group.scale_row_offsets == (0, 0, 128, 256, 512)
    assert group.starts == tuple(row * cols for row in offsets[:-1])
    scales = backend.get(group.block_scale)
    blocks = -(-cols // (16 if format == "nvfp4" else 32))
    assert scales.shape == group.scale_shape == (300 + 4 * 127, -(-blocks // 4) * 4)
    assert not scales[512:].any()
    for number, row in enumerate(offsets[:-1]):
        end = offsets[number + 1]
        if row == end:
            continue
        want = backend.quantize(x[row:end], scale_layout="swizzled_128x4", **options)
        assert_member(backend, assert_bits, group, number, want)
        assert group.member(number).scale_layout == "swizzled_128x4"
        rows = group.scale_row_offsets[number]
        stored = padded_scale_shape(end - row, blocks, "swizzled_128x4")
        assert_bits(scales[rows : rows + stored[0]].reshape(-1), want.block_scale.reshape(-1))
    back = backend.get(fp4kit.dequantize_grouped(group, backend=backend.name))
    linear = backend.call(fp4kit.quantize_grouped, x, row_offsets=offsets, **options)
    assert_bits(back, backend.get(fp4kit.dequantize_grouped(linear, backend=backend.name)))


def test_row_offsets_are_first_dims(assert_bits):
    x = normal((96, 32))
    got = fp4kit.quantize_grouped(x, row_offsets=np.array([0, 32, 32, 96]))
    want = fp4kit.quantize_grouped(x, first_dims=[32, 0, 64])
    assert (got.dims, got.starts) == (want.dims, want.starts)
    assert_bits(got.packed, want.packed)
    with pytest.raises(OptionError, match="no rows of one matrix"):
        _ = got.scale_row_offsets


def test_one_matrix_of_no_members():
    group = fp4kit.quantize_grouped(normal((4, 32)), row_offsets=[0], scale_layout="grouped_128x4")
    assert len(group) == 0
    assert group.scale_shape == (4, 0)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"row_offsets": [0, 32], "first_dims": [32]}, OptionError, "leave the others out"),
    ({"row_offsets": [0, 64, 32]}, ShapeError, "must not fall"),
    ({"row_offsets": []}, ShapeError, r"n \+ 1 rows"),
    ({"row_offsets": [0, 97]}, ShapeError, "the members end at element"),
    ({"members": 3, "direction": "both", "scale_layout": "grouped_128x4"}, OptionError, "='both'"),
    ({"last_dims": [16, 8], "scale_layout": "grouped_128x4"}, ShapeError, "members of one K"),
    ({"members": 3, "scale_layout": "128x4"}, OptionError, "swizzled_8x4, grouped_128x4"),
    ({"members": 3, "activation": "tanh"}, OptionError, "gelu, silu"),
    ({"members": 3, "activation": "dgelu"}, OptionError, "needs activation_input"),
    ({"members": 3, "activation_input": normal((96, 32))}, OptionError, "belongs to dgelu"),
    (
        {"members": 3, "activation": "dsilu", "activation_input": normal((95, 32))},
        ShapeError,
        "activation_input is float32",
    ),
    (
        {"last_dims": [16, 15], "activation": "swiglu", "pad": True},
        ShapeError,
        r"member 1 of the group is \(96, 15\)",
    ),
    ({"members": 3, "dbias": np.empty((2, 32), F32)}, ShapeError, "out is float32"),
])  # fmt: skip
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        fp4kit.quantize_grouped(normal((96, 32)), **arguments)
