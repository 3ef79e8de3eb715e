# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of the rotation and of amaxes of vectors, run on the host, equal the reference."""

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Rotation
from fp4kit.cuda import rotations as cuda_rotations
from fp4kit.plan import plan_of
from fp4kit.reference import codecs
from fp4kit.scheme import Scheme

DTYPES = ["float32", "float16", "bfloat16"]
TE_MASK = 0xD7E8


def values(shape, dtype, seed):
    """Raw elements of many magnitudes; some of them special."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 8, shape)
    raw = np.array(codecs.from_float32(x.astype(np.float32), dtype))
    bits = raw.view(f"u{raw.itemsize}")
    flat = bits.reshape(-1)
    sign = 1 << (8 * raw.itemsize - 1)
    inf, nan, tiny = (
        int(np.asarray(codecs.from_float32(np.array([v], np.float32), dtype)).view(flat.dtype)[0])
        for v in (np.inf, np.nan, 0.0)
    )
    # Subnormals, zeros of both signs, the largest numbers, infinities and NaN of both signs.
    special = [1, sign | 3, tiny, sign, inf - 1, sign | (inf - 1), inf, sign | inf, nan, sign | nan]
    places = rng.choice(flat.size, min(flat.size // 40, 40), replace=False)
    flat[places] = rng.choice(special, places.size)
    # A group of subnormals alone, and one of large numbers, whose sums overflow.
    flat[:16] = rng.integers(1, 60, flat[:16].size)
    bits[-1, -16:] = inf - 1 - rng.integers(0, 3, bits[-1, -16:].size)
    return raw


def typed(raw, dtype):
    raw = np.asarray(raw)
    return raw.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else raw


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_rotate(on_host, kernels, assert_bits, direction, dtype, out_dtype):
    shapes = [(16, 16), (48, 272), (96, 64), (33, 32), (3, 560)]
    if direction == "columnwise":
        shapes = [(16, 16), (272, 48), (64, 96), (32, 33), (80, 3), (16, 560)]
    masks = [TE_MASK, 0, 0xFFFF, 0x8001, 0x0180, 0x5A3C]
    number = 0
    reference = get_backend("reference")
    for shape, shift in product(shapes, (0, 1)):
        x = values(shape, dtype, number)
        item = np.dtype({"float32": np.float32, "float16": np.float16}.get(out_dtype, np.uint16))
        for rounding, inverse in product(("none", "bf16"), (False, True)):
            mask = masks[number % len(masks)]
            number += 1
            want = np.empty(shape, item)
            rotation = Rotation(direction, mask, rounding, inverse)
            reference.rotate(x, dtype, rotation, want, out_dtype)
            out = on_host.put(np.full(shape, 7, item), shift * item.itemsize)
            given = on_host.put(x, shift * x.itemsize)
            on_host.engine.rotate(given, dtype, rotation, out, out_dtype)
            what = f"{shape} {shift} {rounding} {inverse} {mask:#x}"
            assert_bits(typed(out, out_dtype), typed(want, out_dtype), what)
    used = {instance.expression.endswith("true>") for instance in kernels.launched}
    both_wide = direction == "columnwise" and dtype == out_dtype == "float32"
    assert used == ({False} if both_wide else {False, True})


# What is not rotated is the business of `amax_kernel`, but for columns of several scales.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("direction", "mask"),
    [("rowwise", TE_MASK), ("rowwise", 0x180), ("columnwise", None), ("columnwise", TE_MASK)],
)
def test_amax_of_vectors(on_host, monkeypatch, assert_bits, direction, dtype, mask):
    # Few blocks fill this device: threads take several groups, and several take a vector.
    monkeypatch.setattr(cuda_rotations, "AMAX_BLOCKS", 1)
    cuda_rotations.amax_launch.cache_clear()
    reference = get_backend("reference")
    shapes = [(16, 16), (48, 272), (160, 256), (64, 96), (37, 75), (1, 1), (16, 20480), (2064, 64)]
    number = 0
    for shape in shapes:
        length = shape[1] if direction == "rowwise" else shape[0]
        if mask is not None and length % 16:
            continue
        x = values(shape, dtype, number)
        vectors = shape[0] if direction == "rowwise" else shape[1]
        for scales in {1, 2, 4, vectors}:
            if vectors % scales or (mask is None and scales == 1):
                continue
            for rounding, shift in product(("none", "bf16") if mask else (None,), (0, 1)):
                scheme = Scheme("nvfp4", direction=direction, rht=mask, rht_rounding=rounding)
                plan = plan_of(shape, scheme.parts[0], scales, pad=True)
                want = reference.plan_amax(plan, x, dtype)
                got = on_host.engine.plan_amax(plan, on_host.put(x, shift * x.itemsize), dtype)
                assert_bits(np.asarray(got), want, f"{shape} {scales} {rounding} {shift}")
                number += 1
    assert number > 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_scale", [1, None])
def test_one_read_for_both_amaxes(on_host, kernels, assert_bits, dtype, per_scale):
    """Rows as they are beside rotated columns; directions alike are measured once."""
    reference = get_backend("reference")
    for number, (shape, shift) in enumerate(product([(16, 16), (96, 75), (160, 256)], (0, 1))):
        x = values(shape, dtype, number)
        row = plan_of(shape, Scheme("nvfp4").parts[0], pad=True)
        rotated = Scheme("nvfp4", direction="columnwise", rht=TE_MASK)
        column = plan_of(shape, rotated.parts[0], pad=True)
        column = replace(column, rows_per_scale=per_scale or shape[1])
        kernels.launched.clear()
        got = on_host.engine.plan_amax_both(row, column, on_host.put(x, shift * x.itemsize), dtype)
        assert len(kernels.launched) == 1
        for plan, own in zip((row, column), got, strict=True):
            assert_bits(np.asarray(own), reference.plan_amax(plan, x, dtype), f"{shape} {shift}")
    plain = plan_of(shape, Scheme("nvfp4", direction="columnwise").parts[0], pad=True)
    first, second = reference.plan_amax_both(row, plain, x, dtype)
    assert first is second


def test_amax_of_nothing_but_nan_is_zero(on_host, assert_bits):
    x = np.full((32, 64), np.nan, np.float32)
    for direction, mask in (("rowwise", 1), ("columnwise", 1)):
        scheme = Scheme("nvfp4", direction=direction, rht=mask, rht_rounding="bf16")
        plan = plan_of((32, 64), scheme.parts[0])
        for per_scale in (1, plan.vectors):
            plan = replace(plan, rows_per_scale=per_scale)
            got = on_host.engine.plan_amax(plan, on_host.put(x), "float32")
            assert_bits(np.asarray(got), np.zeros(plan.scales, np.float32), f"{direction} {mask}")
