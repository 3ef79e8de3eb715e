# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Outputs that share memory with inputs, or with each other, are refused before any work."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import fp4kit
from array_functions import GROUP, QUANTIZED, RESIDUAL, SAMPLE
from fp4kit import OptionError
from fp4kit.arrays.overlap import place_of, refuse_overlap
from sample_arrays import F32, gaussian


def shares(first, second):
    try:
        refuse_overlap([place_of("out", first)], [place_of("x", second)])
    except OptionError:
        return True
    return False


VIEWS = [
    np.s_[:8], np.s_[8:], np.s_[::2], np.s_[1::2], np.s_[::-1], np.s_[:, :4], np.s_[:, 4:],
    np.s_[:, ::2], np.s_[:, 1::2], np.s_[4:12, 2:6], np.s_[::3, ::-2], np.s_[5], np.s_[:, 3],
    np.s_[3:3], np.s_[2, 5, ...], np.s_[1::2, 1::2], np.s_[::2, ::2], np.s_[15, 7, ...], ...,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["host", "device"])
def test_overlap_is_exact_for_all_kinds_of_views(kind):
    base = np.arange(128, dtype=np.int32).reshape(16, 8)

    class OnDevice:
        """What a CuPy array tells of its memory."""

        def __init__(self, view):
            self.dtype, self.shape, self.strides = view.dtype, view.shape, view.strides
            self.size, self.nbytes, self.ndim = view.size, view.nbytes, view.ndim
            self.data = SimpleNamespace(ptr=view.ctypes.data)
            self.flags = view.flags

    with pytest.MonkeyPatch.context() as patch:
        wrap = np.asarray
        if kind == "device":
            wrap = OnDevice
            patch.setattr(
                fp4kit.arrays.overlap, "is_contiguous", lambda data: data.flags.c_contiguous
            )
        for first, second in itertools.product(VIEWS, VIEWS):
            one, two = base[first], base[second]
            expected = not set(np.ravel(one)).isdisjoint(np.ravel(two))
            assert shares(wrap(one), wrap(two)) == expected, (first, second)


def test_hard_comparisons_count_as_overlapping():
    base = np.zeros(10**6, np.uint8)
    shape, strides = (9, 9, 9, 9, 9), (1009, 1013, 1019, 1021, 1031)
    first = np.lib.stride_tricks.as_strided(base, shape, strides)
    second = np.lib.stride_tricks.as_strided(base[1:], shape, [n + 2 for n in strides])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp4kit.arrays.overlap, "_MAX_WORK", 1)
        assert shares(first, second)


@pytest.fixture
def store(backend):
    """Device memory, and a function that gives it out from some byte on."""
    memory = backend.put(np.zeros(1 << 14, np.uint8))

    def take(shape, dtype="float32", start=0):
        dtype = np.dtype(dtype)
        count = int(np.prod(shape)) * dtype.itemsize
        return memory[start : start + count].view(dtype).reshape(shape)

    return take


def filled(array, values):
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        array.set(np.broadcast_to(np.asarray(values, array.dtype), array.shape).copy())
    return array


def refuses(backend, memory, function, *args, **options):
    before = backend.get(memory(1 << 14, "uint8")).copy()
    with pytest.raises(OptionError, match="share memory") as caught:
        function(*args, backend=backend.name, **options)
    assert "\n" not in str(caught.value)
    assert (backend.get(memory(1 << 14, "uint8")) == before).all()


OFFSETS = (0, 4, 512, 1020)


@pytest.mark.parametrize("start", OFFSETS)
@pytest.mark.parametrize(
    "function", [fp4kit.quantize_dequantize, fp4kit.hadamard_transform], ids=lambda f: f.__name__
)
def test_results_over_their_input(function, start, backend, store):
    x = filled(store((4, 64), start=start), SAMPLE)
    if function is fp4kit.quantize_dequantize and not start:
        x = x[:2]
        out = store((2, 64), "float16")
        refuses(backend, store, function, x, dtype="float16", out=out)
        wide = store((2, 128), "float32")[:, ::2]
        out = store((2, 64), "float32")
        refuses(backend, store, function, wide, out=out)
    else:
        out = store((4, 64))
        refuses(backend, store, function, x, out=out)


@pytest.mark.parametrize("start", OFFSETS)
@pytest.mark.parametrize("member", ["packed", "block_scale", "amax"])
def test_decoded_values_over_codes(member, start, backend, store):
    for q, decode, name in (
        (QUANTIZED, fp4kit.dequantize, member),
        (RESIDUAL, fp4kit.dequantize, member.replace("amax", "encode_scale")),
        (GROUP, fp4kit.dequantize_grouped, member),
    ):
        values = getattr(q, name)
        mine = filled(store(values.shape, values.dtype, start), values)
        others = {
            other: backend.put(getattr(q, other))
            for other in ("packed", "block_scale", "amax", "encode_scale")
            if getattr(q, other, None) is not None
        }
        moved = dataclasses.replace(q, **{**others, name: mine})
        out = store((4, 64))
        refuses(backend, store, decode, moved, out=out)


@pytest.mark.parametrize("member", ["packed", "block_scale", "amax"])
def test_codes_over_the_input(member, backend, store):
    x = filled(store((4, 64)), SAMPLE)
    for start in (0, 1020):
        for direction in ("rowwise", "both"):
            out = fp4kit.quantize(
                backend.put(SAMPLE), direction=direction, pad=True, backend=backend.name
            )
            one = out if direction == "rowwise" else out.columnwise
            values = getattr(one, member)
            mine = store(values.shape, str(values.dtype), start)
            one = dataclasses.replace(one, **{member: mine})
            target = one if direction == "rowwise" else fp4kit.DirectionPair(out.rowwise, one)
            for source in (x, x[::-1]):
                refuses(
                    backend,
                    store,
                    fp4kit.quantize,
                    source,
                    direction=direction,
                    pad=True,
                    out=target,
                )


@pytest.mark.parametrize(
    "pair", [("packed", "block_scale"), ("packed", "amax"), ("block_scale", "amax")]
)
def test_parts_of_a_result_over_each_other(pair, backend, store):
    out = fp4kit.quantize(backend.put(SAMPLE), backend=backend.name)
    shared = {}
    for member in pair:
        values = getattr(out, member)
        shared[member] = store(values.shape, str(values.dtype))
    target = dataclasses.replace(out, **shared)
    x = backend.put(SAMPLE)
    refuses(backend, store, fp4kit.quantize, x, out=target)


def test_both_directions_over_each_other(backend, store):
    x = backend.put(gaussian((64, 64)))
    out = fp4kit.quantize(x, direction="both", backend=backend.name)
    shared = [
        dataclasses.replace(one, packed=store(one.packed.shape, "uint8", 16 * number))
        for number, one in enumerate(out)
    ]
    target = fp4kit.DirectionPair(*shared)
    refuses(backend, store, fp4kit.quantize, x, direction="both", out=target)


@pytest.mark.parametrize("options", [{}, {"activation": "dsilu"}])
@pytest.mark.parametrize("grouped", [False, True])
def test_column_sums_over_the_input(options, grouped, backend, store):
    x = filled(store((4, 64)), SAMPLE)
    z = backend.put(SAMPLE)
    if options:
        x, z = z, x
        options = {**options, "activation_input": z}
    function = fp4kit.quantize
    dbias = store((64,), start=64)
    if grouped:
        function, options = fp4kit.quantize_grouped, {**options, "members": 1}
        dbias = store((1, 64), start=64)
    refuses(backend, store, function, x, dbias=dbias, **options)


def test_given_scales_over_codes(backend, store):
    out = fp4kit.quantize(backend.put(SAMPLE), backend=backend.name)
    out = dataclasses.replace(out, packed=store(out.packed.shape, "uint8"))
    x, amax = backend.put(SAMPLE), filled(store((1,), start=8), 3.0)
    refuses(backend, store, fp4kit.quantize, x, amax=amax, out=out)


def test_scale_bytes_over_scale_bytes(backend, store):
    scales = store((128, 4), "uint8")
    out = store((128, 4), "uint8", 256)
    refuses(backend, store, fp4kit.swizzle, scales, out=out)
    refuses(backend, store, fp4kit.unswizzle, scales, (128, 4), out=out)
    x = store((4, 64))
    refuses(backend, store, fp4kit.amax, x, out=store((1,)))


def test_neighbours_and_interleaved_views_are_no_overlap(backend, store, assert_bits):
    expected = backend.get(fp4kit.quantize_dequantize(backend.put(SAMPLE), backend=backend.name))
    x = filled(store((4, 64)), SAMPLE)
    out = store((4, 64), start=1024)
    fp4kit.quantize_dequantize(x, out=out, backend=backend.name)
    assert_bits(backend.get(out), expected)
    rows = store((7, 64), start=2048)
    rows[::2] = x
    sums = store((64,), start=2048 + 256)  # the second of the rows, between two that are read
    fp4kit.quantize(rows[::2], dbias=sums, backend=backend.name)
    assert_bits(backend.get(rows[::2]), SAMPLE)
    assert np.allclose(backend.get(sums), SAMPLE.sum(axis=0), atol=1e-5)


def test_the_second_level_may_be_the_amax_that_was_passed(backend, assert_bits):
    x = backend.put(SAMPLE)
    amax = backend.put(np.array([4.0], F32))
    for direction in ("rowwise", "both"):
        out = fp4kit.quantize(x, direction=direction, pad=True, amax=amax, backend=backend.name)
        again = fp4kit.quantize(
            backend.put(SAMPLE * F32(0.5)), direction=direction, pad=True, amax=amax, out=out,
            backend=backend.name,
        )  # fmt: skip
        assert again is out
        expected = backend.quantize(SAMPLE * F32(0.5), direction=direction, pad=True, amax=4.0)
        for got, want in zip(
            (out,) if direction == "rowwise" else out,
            (expected,) if direction == "rowwise" else expected,
            strict=True,
        ):
            assert_bits(backend.get(got.packed), backend.get(want.packed))
        # Measured into the second level that both directions share.
        fp4kit.quantize(x, direction=direction, pad=True, out=out, backend=backend.name)
        amax = backend.put(np.array([4.0], F32))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"direction": "columnwise"}, {"block_shape": "2d"}, {"format": "mxfp8"},
        {"rounding": "stochastic"},
        {"rht": True}, {"scale_search": "sweep"}, {"format": "mxfp4", "pad": True},
        {"recipe": "torchao"},
    ],
    ids=str,
)  # fmt: skip
def test_fake_quantization_in_place(options, backend, assert_bits):
    x = gaussian((64, 96), "bfloat16")
    if "rounding" in options:
        options = {**options, "seed": 5}
    expected = backend.call(fp4kit.quantize_dequantize, x, **options)
    array = backend.put(x.copy())
    assert fp4kit.quantize_dequantize(array, out=array, backend=backend.name, **options) is array
    assert_bits(backend.get(array), expected)
