# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""fp4kit.matmul_grouped: experts with rows of their own."""

from __future__ import annotations

import numpy as np
import pytest

import fp4kit
from fp4kit import OptionError, ShapeError
from matmul_cases import KINDS, expected, numbers, tensor

SIZES = (3, 0, 1, 8)
#: Of rowwise linear scales, which one tensor of all members may have.
STACKED = (
    "nvfp4",
    "nvfp4-row-scaled",
    "nvfp4-nvfuser",
    "mxfp4",
    "mxfp8",
    "fp8-tensor",
    "fp8-channel",
)


def unit(backend):
    return 2.0**-23 if backend.on_gpu else 2.0**-24


def check_members(backend, y, x, members, sizes, **options):
    at = 0
    for size, w in zip(sizes, members, strict=True):
        rows = slice(at, at + size)
        expected(x[rows], w, unit=unit(backend), **options).check(y[rows])
        at += size


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_weights(backend, kind):
    members = [tensor(kind, 32, 64, seed=number) for number in range(4)]
    x = numbers((12, 64), "bfloat16", seed=9)
    held = [backend.put(one) for one in members]
    y = backend.get(
        fp4kit.matmul_grouped(
            backend.put(x), held, first_dims=SIZES, out_dtype="float32", backend=backend.name
        )
    )
    check_members(backend, y, x, members, SIZES)


@pytest.mark.parametrize("kind", STACKED)
def test_one_tensor_of_all_weights(backend, kind):
    options = KINDS[kind]
    w = fp4kit.quantize(numbers((4, 32, 64)), backend="reference", **options)
    x = numbers((4, 5, 64), seed=1)
    y = backend.call(fp4kit.matmul_grouped, x, w, alpha=2)
    assert y.shape == (4, 5, 32)
    for number in range(4):
        expected(x[number], w[number], alpha=2, unit=unit(backend)).check(y[number])


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_quantized_rows(backend, kind):
    x, w = numbers((12, 64)), numbers((4 * 32, 64), seed=1)
    a = fp4kit.quantize_grouped(x, kind, first_dims=SIZES, backend="reference")
    b = fp4kit.quantize_grouped(w, kind, members=4, backend="reference")
    if backend.on_gpu:
        a, b = a.to("cuda:0"), b.to("cuda:0")
    y = backend.get(fp4kit.matmul_grouped(a, b, backend=backend.name))
    at = 0
    for size, one, other in zip(SIZES, a.to("cpu"), b.to("cpu"), strict=True):
        expected(one, other, unit=unit(backend)).check(y[at : at + size])
        at += size


def test_bias_of_each_member(backend):
    members = tuple(tensor("nvfp4", 32, 64, seed=number) for number in range(2))
    x, bias = numbers((5, 64)), numbers((2, 32), seed=1)
    y = backend.get(
        fp4kit.matmul_grouped(
            backend.put(x), backend.put(members), first_dims=[4, 1], bias=backend.put(bias),
            backend=backend.name,
        )
    )  # fmt: skip
    for number, rows in enumerate((slice(0, 4), slice(4, 5))):
        want = expected(x[rows], members[number], bias=np.tile(bias[number], (len(x[rows]), 1)),
                        unit=unit(backend))  # fmt: skip
        want.check(y[rows])


def test_rows_of_no_member(backend):
    members = tuple(tensor("nvfp4", 32, 64, seed=number) for number in range(2))
    x = numbers((9, 64))
    arguments = backend.put(x), backend.put(members)
    y = backend.get(fp4kit.matmul_grouped(*arguments, row_offsets=[2, 4, 7], backend=backend.name))
    assert not y[:2].any()
    assert not y[7:].any()
    expected(x[2:4], members[0], unit=unit(backend)).check(y[2:4])
    out = backend.put(np.full((9, 32), 5, np.float32))
    fp4kit.matmul_grouped(*arguments, row_offsets=[2, 4, 7], out=out, backend=backend.name)
    kept = backend.get(out)
    assert (kept[:2] == 5).all()
    assert (kept[7:] == 5).all()
    np.testing.assert_array_equal(kept[2:7], y[2:7])


def test_offsets_that_are_arrays(backend):
    """Of the host they are read there; on a GPU by the kernel, bounds and all."""
    members = tuple(tensor("nvfp4", 32, 64, seed=number) for number in range(4))
    x = numbers((12, 64), "bfloat16")
    offsets = np.array([0, 3, 3, 4, 12], np.int32)
    arguments = backend.put(x), backend.put(members)
    sizes = backend.get(fp4kit.matmul_grouped(*arguments, first_dims=SIZES, backend=backend.name))
    y = backend.get(
        fp4kit.matmul_grouped(*arguments, row_offsets=backend.put(offsets), backend=backend.name)
    )
    check_members(backend, y, x, members, SIZES)
    check_members(backend, sizes, x, members, SIZES)


def test_wrong_arguments():
    w = fp4kit.quantize(numbers((2, 32, 64)))
    x = numbers((5, 64))
    swizzled = fp4kit.quantize(numbers((2, 32, 64)), scale_layout="swizzled_128x4")
    group = fp4kit.quantize_grouped(x, first_dims=[1, 4])
    for a, b, options, kind, message in (
        (group, w, {"first_dims": [4, 1]}, OptionError, "leave the sizes out"),
        (group, w, {"row_offsets": [0, 4, 5]}, OptionError, "leave the sizes out"),
        (x, w, {}, OptionError, "pass .n, M, K."),
        (x, w, {"first_dims": [1, 4], "row_offsets": [0, 1, 5]}, OptionError, "not both"),
        (x, w, {"first_dims": [1, 2, 2]}, ShapeError, "3 sizes are given for 2 members"),
        (x, w, {"first_dims": [1, 5]}, ShapeError, "must rise within them"),
        (x, w, {"row_offsets": [0, 3, 2]}, ShapeError, "must rise within them"),
        (x, swizzled, {"first_dims": [1, 4]}, OptionError, "tiled across members"),
        (x, w[0], {"first_dims": [5]}, ShapeError, r"\(n, N, K\)"),
        (x, [], {"first_dims": []}, OptionError, "no members"),
        (x, [w[0], "w"], {"first_dims": [1, 4]}, OptionError, r"b\[1\] is a str"),
        (x, [w[0], w[1][:16]], {"first_dims": [1, 4]}, OptionError, r"b\[1\] is 16 x 64"),
        (x[:, :32], w, {"first_dims": [1, 4]}, ShapeError, "axis that is summed"),
        (x, w, {"first_dims": [1, 4], "bias": numbers((32,))}, ShapeError, "bias"),
    ):
        with pytest.raises(kind, match=message):
            fp4kit.matmul_grouped(a, b, backend="reference", **options)
