# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups: each member's bytes are those of quantizing it alone, whatever lies around it."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import fp4kit
from fp4kit.errors import NonFiniteError, OptionError, ShapeError
from fp4kit.formats import BLOCK_FORMATS, DTYPES, SCALE_LAYOUTS

F32 = np.float32
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
#: Options of quantize that a member is quantized with alone as well.
OPTIONS = [
    {},
    {"format": "mxfp8"},
    {"format": "mxfp4"},
    {"recipe": "torchao"},
    {"recipe": "compressed-tensors"},
    {"block_shape": "2d"},
    {"second_level": "row_scaled"},
    {"second_level": "per_token"},
    {"scale_search": "four_over_six", "e4m3_max": 256},
    {"scale_search": "sweep"},
    {"rounding": "stochastic", "seed": 77, "subsequence": 5},
]


def normal(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(F32)


def both_parts(result):
    if isinstance(result, fp4kit.GroupedPair):
        return result.rowwise, result.columnwise
    return (result,)


def alone(backend, x, number, direction, options):
    options = dict(options)
    if "subsequence" in options:
        options["subsequence"] += number
    result = backend.quantize(x, direction=direction, pad=True, nonfinite="propagate", **options)
    return tuple(result) if direction == "both" else (result,)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_members_are_as_if_alone(backend, assert_bits, data):
    count = data.draw(st.integers(0, 6))
    size = st.one_of(st.just(0), st.integers(1, 70))
    kind = data.draw(st.sampled_from(["same", "first", "last", "both"]))
    rows, cols = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    first = data.draw(st.lists(size, min_size=count, max_size=count))
    last = data.draw(st.lists(size, min_size=count, max_size=count))
    tail = data.draw(st.integers(0, 3))
    sizes = {}
    if kind == "same":
        count = max(count, 1)
        dims, shape, sizes = [(rows, cols)] * count, (count * rows, cols), {"members": count}
    elif kind == "first":
        dims, sizes = [(m, cols) for m in first], {"first_dims": first}
        shape = (sum(first) + tail, cols)
    elif kind == "last":
        dims, sizes = [(rows, k) for k in last], {"last_dims": last}
        shape = (rows, sum(last) + tail)
    else:
        dims = list(zip(first, last, strict=True))
        sizes = {"first_dims": first, "last_dims": last}
        shape = (sum(map(prod, dims)) + tail,)
    dtype = NUMPY[data.draw(st.sampled_from(DTYPES))]
    buffer = normal(prod(shape), data.draw(st.integers(0, 99)))
    buffer[sum(map(prod, dims)) :] = np.nan  # what lies behind must not leak
    buffer = buffer.astype(dtype)
    options = data.draw(st.sampled_from(OPTIONS))
    direction = data.draw(st.sampled_from(["rowwise", "columnwise", "both"]))
    layout = {"scale_layout": data.draw(st.sampled_from(SCALE_LAYOUTS))}
    group = backend.call(
        fp4kit.quantize_grouped, buffer.reshape(shape), direction=direction, pad=True,
        **sizes, **options,
        **layout,
    )  # fmt: skip
    places = np.cumsum([0, *map(prod, dims)])
    for number, pair in enumerate(dims):
        x = buffer[places[number] : places[number + 1]].reshape(pair)
        for part, want in zip(
            both_parts(group), alone(backend, x, number, direction, options | layout), strict=True
        ):
            got = backend.get(part.member(number))
            assert got.shape == want.shape == pair
            assert got.scheme.replace(second_level=want.scheme.second_level) == want.scheme
            for name in ("packed", "block_scale", "amax", "decode_scale", "encode_scale"):
                expected = getattr(want, name)
                if expected is not None and not (name != "packed" and not prod(pair)):
                    assert_bits(getattr(got, name), expected, f"member {number} {name}")


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_dequantize_fills_the_members_and_nothing_else(format, direction, backend, assert_bits):
    buffer, first = normal(200 * 64).reshape(200, 64), [64, 0, 33, 1, 0]
    group = backend.call(
        fp4kit.quantize_grouped, buffer, format, first_dims=first, direction=direction, pad=True
    )
    out = backend.put(np.full((200, 64), 7, F32))
    fp4kit.dequantize_grouped(group, backend=backend.name, out=out)
    fresh = backend.get(fp4kit.dequantize_grouped(group, backend=backend.name))
    host, row = backend.get(out), 0
    for number, count in enumerate(first):
        want = backend.dequantize(group.member(number))
        assert_bits(host[row : row + count], want)
        row += count
    assert (host[row:] == 7).all()
    assert_bits(fresh[:row], host[:row])
    assert not fresh[row:].any()


def test_gaps_between_members_are_not_looked_at(backend, assert_bits):
    buffer = normal(4096)
    buffer[512:640] = np.nan
    buffer[3000:] = np.inf
    group = backend.call(
        fp4kit.quantize_grouped, buffer, first_dims=[16, 0, 32], last_dims=[32, 16, 64],
        offsets=[0, 640, 640, 3000],
    )  # fmt: skip
    want = backend.quantize(buffer[640 : 640 + 2048].reshape(32, 64))
    got = backend.get(group.member(2))
    assert_bits(got.packed, want.packed)
    assert_bits(got.block_scale, want.block_scale)
    out = backend.get(fp4kit.dequantize_grouped(group, backend=backend.name))
    assert not out[512:640].any()


def test_one_amax_for_all_or_one_each(backend, assert_bits):
    buffer = normal((96, 32)).reshape(96, 32)
    for value, each in ((3.0, [3, 3, 3]), (np.array([1, 2, 3], F32), [1, 2, 3])):
        group = backend.call(fp4kit.quantize_grouped, buffer, members=3, amax=value)
        assert backend.get(group.amax).tolist() == each
        for number, amax in enumerate(each):
            want = backend.quantize(buffer[32 * number : 32 * number + 32], amax=float(amax))
            assert_bits(backend.get(group.member(number)).packed, want.packed)


def test_more_members_than_any_limit(fast_backend):
    first = [number % 3 for number in range(1000)]
    buffer = normal(sum(first) * 16).reshape(-1, 16)
    group = fast_backend.call(fp4kit.quantize_grouped, buffer, first_dims=first)
    assert len(group) == 1000
    assert fast_backend.get(group.member(999)).shape == (0, 16)
    back = fast_backend.get(fp4kit.dequantize_grouped(group, backend=fast_backend.name))
    assert np.linalg.norm(back - buffer) < 0.15 * np.linalg.norm(buffer)


def test_sizes_on_a_gpu_are_refused():
    """They would have to be waited for: never silently."""

    on_device = SimpleNamespace(__cuda_array_interface__={"shape": (3,), "typestr": "<i8"})
    for name in ("first_dims", "last_dims", "offsets", "row_offsets"):
        sizes = {"first_dims": [48, 48]} if name == "offsets" else {}
        with pytest.raises(OptionError, match=rf"{name} lies on a GPU.*{name}.tolist\(\)"):
            fp4kit.quantize_grouped(normal((96, 32)).reshape(96, 32), **sizes, **{name: on_device})


def test_experts_of_a_three_dimensional_buffer(backend):
    group = backend.call(fp4kit.quantize_grouped, normal((4, 16, 32)))
    assert group.dims == ((16, 32),) * 4
    with pytest.raises(IndexError, match="member 4 of a group of 4"):
        group.member(4)
    assert group.member(-1).shape == (16, 32)


def test_nonfinite_members_are_named():
    buffer = normal(96 * 32).reshape(96, 32)
    buffer[40, 3] = np.nan
    with pytest.raises(NonFiniteError, match=r"member 1 of the group holds 1 NaN.*\(8, 3\)"):
        fp4kit.quantize_grouped(buffer, members=3)
    fp4kit.quantize_grouped(buffer, first_dims=[32])


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({}, OptionError, "needs members, first_dims or last_dims"),
    ({"members": 5}, ShapeError, "not 5 equal members"),
    ({"members": 0}, ShapeError, "not 0 equal members"),
    ({"members": 2, "first_dims": [32]}, OptionError, "members of equal size"),
    ({"first_dims": [32.5]}, OptionError, "whole numbers"),
    ({"first_dims": [-16]}, OptionError, "whole numbers"),
    ({"first_dims": [64, 33]}, ShapeError, "the members end at element"),
    ({"first_dims": [16], "last_dims": [16, 16]}, OptionError, "names 1 members, last_dims 2"),
    ({"last_dims": [16, 8]}, ShapeError, "member 1 of the group: .*multiple of 16"),
    ({"first_dims": [33, 31], "direction": "columnwise"}, ShapeError, "member 0 of the group"),
    ({"first_dims": [32], "offsets": [0]}, ShapeError, r"n \+ 1"),
    ({"first_dims": [32, 32], "offsets": [0, 100, 4000]}, ShapeError, "offsets leave it"),
    ({"members": 3, "amax": np.ones(2, F32)}, ShapeError, "for 3 members"),
    ({"members": 3, "amax": "tensor"}, OptionError, "values of second_level"),
    ({"members": 3, "format": "mxfp8", "second_level": "row_scaled"}, OptionError, "has none"),
])  # fmt: skip
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        fp4kit.quantize_grouped(normal((96, 32)).reshape(96, 32), **arguments)
