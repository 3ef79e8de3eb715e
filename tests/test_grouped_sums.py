# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups activated, summed and measured in one pass: on the host, and public calls on a GPU."""

import weakref
from math import prod

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Prologue
from fp4kit.cuda import grouped as cuda_grouped
from fp4kit.cuda import member_tables as cuda_member_tables
from fp4kit.cuda.member_tables import MEMBER_WORDS
from fp4kit.formats import DTYPES
from fp4kit.group_shapes import GroupShapes
from fp4kit.reference import codecs
from fp4kit.reference.activations import ACTIVATIONS, DERIVATIVES, SUM_ROWS

F32 = np.float32
REFERENCE = get_backend("reference")
#: Members whose tiles have all shapes; some are empty, one needs sums of sums.
EVEN = ((3, 64), (0, 32), (33, 1088), (64, 520), (70, 96), (130, 32), (257, 264), (5, 0), (600, 8),
        (1030, 72), (1, 8))  # fmt: skip
#: Members whose rows are not whole pieces.
ODD = ((2100, 7), (0, 5), (5, 0), (300, 70), (1, 3), (1025, 1), (20, 33))


def placed(dims, gap, factor=1):
    """Members with gaps ahead of each, and the size of a buffer with a tail; times a factor."""
    starts, end = [], gap
    for shape in dims:
        starts.append(factor * end)
        end += prod(shape) + gap
    whole = tuple((rows, factor * cols) for rows, cols in dims)
    return GroupShapes(whole, tuple(starts)), factor * (end + 24)


def values(group, size, dtype, seed, holes):
    """Numbers of many magnitudes in the members, NaN everywhere else, and with holes in them."""
    rng = np.random.default_rng(seed)
    x = np.full(size, np.nan)
    for number, (shape, start) in enumerate(zip(group.dims, group.starts, strict=True)):
        part = rng.standard_normal(prod(shape)) * 2.0 ** rng.integers(-9, 6, prod(shape))
        if holes and number in (2, 3, 6) and part.size > 30:
            part[rng.integers(0, part.size, 3)] = [np.nan, np.inf, -0.0]
        x[start : start + part.size] = part
    return codecs.from_float32(x.astype(F32), dtype)


def member(group, number, flat):
    """A member's array."""
    shape, start = group.dims[number], group.starts[number]
    return flat[start : start + prod(shape)].reshape(shape)


def check(on_host, kernels, assert_bits, name, dtype, dims=EVEN, gap=0, shift=0, holes=True,
          with_sums=True, wants=True):  # fmt: skip
    """The files of the kernels that did it, after a look at all bytes; and whether it measured."""
    source, size = placed(dims, gap, 2 if name == "swiglu" else 1)
    group, result_size = placed(dims, gap)
    x = values(source, size, dtype, 1, holes)
    z = values(source, size, dtype, 2, holes) if name in DERIVATIVES else None
    moved = on_host.put(x, shift * x.itemsize)
    out = moved if name is None else on_host.empty(result_size, x.dtype)
    widths = [cols for _, cols in dims]
    sums = on_host.empty(sum(widths), F32) if with_sums else None
    kernels.launched.clear()
    prologue = Prologue(name, moved, dtype, None if z is None else on_host.put(z), sums)
    scan = on_host.engine.activate_grouped(prologue, source, group, out, wants)
    launched = [instance.kernel for instance in kernels.launched]
    finite, place = True, 0
    for number, shape in enumerate(dims):
        y = member(source, number, x)
        want = np.zeros(shape[1], F32)
        amax = np.zeros(1, F32)
        if prod(shape):
            if name is not None:
                own = None if z is None else member(source, number, z)
                y, gate = np.empty(shape, x.dtype), y
                REFERENCE.activate(Prologue(name, gate, dtype, own), y)
            REFERENCE.column_sums(y, dtype, want)
            amax, all_finite = REFERENCE.scan(y, dtype)
            finite = finite and all_finite
            assert_bits(np.asarray(member(group, number, out)), y, f"member {number}")
        if sums is not None:
            assert_bits(np.asarray(sums[place : place + shape[1]]), want, f"sums of {number}")
        if scan is not None:
            assert np.asarray(scan)[number] == amax.view(np.uint32)[0], f"amax of {number}"
        place += shape[1]
    if scan is not None:
        assert scan.shape == (len(dims) + 1,)
        assert bool(np.asarray(scan)[-1]) == (not finite) == holes
    return launched, scan is not None


SUMS = "grouped_column_sums"


@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
def test_one_pass(on_host, kernels, assert_bits, name):
    """Sums of sums take one more; holes in a result that has none do not count."""
    arguments = on_host, kernels, assert_bits, name, "bfloat16"
    assert check(*arguments, gap=8) == ([SUMS, SUMS], True)
    if name is None:
        assert check(*arguments, gap=8, holes=False) == ([SUMS, SUMS], True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [None, "swiglu", "dsilu"])
def test_both_kinds_of_tables(on_host, kernels, tables, assert_bits, name, dtype):
    dims = EVEN[:9]
    assert check(on_host, kernels, assert_bits, name, dtype, dims) == ([SUMS], True)
    assert kernels.launched[0].expression.endswith(f"true, fp4kit::{tables}>")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_members_of_any_width(on_host, kernels, tables, assert_bits, dtype):
    for gap, wants in ((0, True), (3, False)):
        done = check(on_host, kernels, assert_bits, None, dtype, ODD, gap=gap, wants=wants)
        assert done == ([SUMS, SUMS], wants)
        assert kernels.launched[0].expression.endswith(f"false, fp4kit::{tables}>")


def test_sums_between_live_until_they_are_read(on_host, kernels, assert_bits, monkeypatch):
    """Memory that is given back could be taken for the table of the launch that reads it."""
    made, argument = [], cuda_grouped._argument

    def scratch(shape, dtype):
        array = on_host.empty(shape, dtype)
        made.append(weakref.ref(array))
        return array

    def looked_at(table):
        assert all(each() is not None for each in made)
        return argument(table)

    monkeypatch.setattr(cuda_grouped, "scratch", scratch)
    monkeypatch.setattr(cuda_grouped, "_argument", looked_at)
    done = check(on_host, kernels, assert_bits, None, "float32", wants=False)
    assert done == ([SUMS, SUMS], False)
    assert len(made) == 1


def test_what_is_asked_for(on_host, kernels, assert_bits):
    arguments = on_host, kernels, assert_bits
    only = {"with_sums": False}
    assert check(*arguments, "dsilu", "bfloat16", **only) == ([SUMS], True)
    done, measured = check(*arguments, "dsilu", "bfloat16", wants=False, **only)
    assert (set(done), measured) == ({"activate"}, False)
    assert check(*arguments, "dsilu", "bfloat16", wants=False) == ([SUMS, SUMS], False)
    assert check(*arguments, None, "bfloat16", wants=False, **only) == ([], False)


@pytest.mark.parametrize("name", ["silu", "swiglu"])
@pytest.mark.parametrize("why", ["misaligned", "gap", "width"])
def test_odd_places_are_activated_first(on_host, kernels, assert_bits, why, name):
    options = {"misaligned": {"shift": 1}, "gap": {"gap": 3}, "width": {"dims": ODD}}[why]
    arguments = on_host, kernels, assert_bits, name, "bfloat16"
    done, measured = check(*arguments, **options)
    assert set(done[:-2]) == {"activate"}
    assert (done[-2:], measured) == ([SUMS, SUMS], True)
    done, measured = check(*arguments, with_sums=False, **options)
    assert (set(done), measured) == ({"activate"}, False)


def test_nothing_to_do(on_host, kernels):
    for dims in ((), ((0, 16), (5, 0))):
        group = GroupShapes(dims, (0,) * len(dims))
        x = on_host.empty(0, F32)
        sums = on_host.empty(sum(cols for _, cols in dims), F32)
        prologue = Prologue("silu", x, "float32", None, sums)
        scan = on_host.engine.activate_grouped(prologue, group, group, x, True)
        assert not np.asarray(sums).any()
        assert np.asarray(scan).tolist() == [0] * (len(dims) + 1)
    assert not kernels.launched


def test_tiles_of_few_rows_are_wide():
    """Every row has threads, and no tile is narrower than it has to be."""
    dims = tuple((rows, 4096) for rows in (1, 32, 33, 64, 65, 330, 512, 513, 1024, 5000))
    group, _ = placed(dims, 0)
    first, second = cuda_member_tables.sum_levels(group, group, "bfloat16")
    table = first.table
    lanes = table.words[table.records :].reshape(-1, MEMBER_WORDS)[:, 5]
    assert lanes.tolist() == [256, 256, 128, 128, 84, 20, 16, 12, 8, 8]
    for (rows, _), own in zip(dims, lanes, strict=True):
        assert 256 // own * SUM_ROWS >= min(rows, SUM_ROWS**2)
    # Columns of a tile, and tiles.
    assert np.diff(table.words[: len(dims) + 1]).tolist() == [
        *(2, 2, 4, 4, 7, 26, 32, 43, 64, 5 * 64),
    ]
    assert second.table.pieces == 10 * 4  # of float32, 1024 columns each


# ------------------------------------------------------------------------------------------------
# Public calls
# ------------------------------------------------------------------------------------------------

FIRST = [0, 33, 130, 1, 1100, 0, 64]


def hosts(shape):
    """An input and an input of an activation; their tails hold NaN."""
    result = []
    for seed in range(2):
        x = np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)
        x[sum(FIRST) :] = np.nan
        result.append(x)
    return result


def on_device(cupy, host):
    if host.dtype == F32:
        return cupy.asarray(host)
    return cupy.asarray(host.view(np.uint16)).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", [None, "relu", "dsilu"])
def test_members_that_are_not_finite_are_named(backend, name):
    """With sums as without; what lies behind the members does not matter."""
    x, z = (host.astype(F32) for host in hosts((sum(FIRST) + 3, 32)))
    dbias = backend.put(np.zeros((len(FIRST), 32), F32))
    options = {"first_dims": FIRST, "dbias": dbias, "activation": name}
    if name in DERIVATIVES:
        options["activation_input"] = z
    backend.call(fp4kit.quantize_grouped, x, **options)
    x[33 + 7, 4] = np.inf
    with pytest.raises(fp4kit.NonFiniteError, match=r"member 2 of the group holds .*\(7, 4\)"):
        backend.call(fp4kit.quantize_grouped, x, **options)


def test_results_that_overflow_are_named(backend):
    """Inputs are numbers, a result is not."""
    x = np.full((64, 64), 1e30, F32)
    x[:48] = 1
    with pytest.raises(fp4kit.NonFiniteError, match=r"member 2 of the group holds .*\(32, 0\)"):
        backend.call(fp4kit.quantize_grouped, x, first_dims=[16, 0, 48], activation="swiglu")


CALLS = [
    {},
    {"nonfinite": "raise"},
    {"direction": "both"},
    {"direction": "both", "rht": True, "nonfinite": "raise"},
    {"second_level": "row_scaled"},
    {"amax": F32(5)},
    {"format": "mxfp8"},
    {"recipe": "modelopt"},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("name", [None, "gelu", "swiglu", "dsilu"])
@pytest.mark.parametrize("width", [128, 96 + 16])
def test_public_function(cupy, tables, name, options, width):
    """The bytes of the CPU, sums included."""
    first = FIRST if "rht" not in options else [16 * rows for rows in (0, 3, 1, 70, 5)]
    x, z = hosts((sum(FIRST) + 5, width))
    cols = width // 2 if name == "swiglu" else width
    options = {"nonfinite": "propagate", "first_dims": first, "pad": True} | options

    def call(place, **more):
        more |= {"activation_input": place(z)} if name in DERIVATIVES else {}
        return fp4kit.quantize_grouped(place(x), activation=name, **more)

    got_sums, want_sums = (xp.full((len(first), cols), 7, F32) for xp in (cupy, np))
    got = call(lambda host: on_device(cupy, host), dbias=got_sums, **options)
    want = call(np.asarray, dbias=want_sums, backend="cpu", **options)
    np.testing.assert_array_equal(got_sums.get(), want_sums)
    pairs = [(got, want)]
    if options.get("direction") == "both":
        pairs = [(got.rowwise, want.rowwise), (got.columnwise, want.columnwise)]
    for one, other in pairs:
        np.testing.assert_array_equal(one.packed.get(), other.packed)
        np.testing.assert_array_equal(one.block_scale.get(), other.block_scale)
        if other.second_level is not None:
            np.testing.assert_array_equal(one.second_level[1].get(), other.second_level[1])


@pytest.mark.gpu
def test_public_function_takes_one_pass(cupy, monkeypatch):
    """Sums and amaxes of activated members: a kernel, one for sums of sums, and quantization."""
    from fp4kit.cuda import run as cuda_run

    launched, launch = [], cuda_run.launch
    monkeypatch.setattr(cuda_run, "launch", lambda *a: (launched.append(a[0].kernel), launch(*a)))
    x, z = (on_device(cupy, host) for host in hosts((sum(FIRST), 64)))
    dbias = cupy.empty((len(FIRST), 64), F32)
    options = {"first_dims": FIRST, "dbias": dbias}
    for more in ({}, {"activation": "dsilu", "activation_input": z, "nonfinite": "propagate"}):
        launched.clear()
        fp4kit.quantize_grouped(x, **options, **more)
        assert launched == [SUMS, SUMS, "grouped_quantize_rowwise"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "dgelu"])
def test_graphs(cupy, tables, name):
    """Nothing waits for the device; on replay all is made of what the buffers hold then."""
    cases = [hosts((sum(FIRST) + 5, 64)) for _ in range(2)]
    for host in cases[1]:
        host[: sum(FIRST)] *= 3
    options = {"first_dims": FIRST, "nonfinite": "propagate", "activation": name}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, z = (on_device(cupy, host) for host in cases[0])
        dbias = cupy.zeros((len(FIRST), 64), F32)
        more = {"activation_input": z} if name in DERIVATIVES else {}
        fp4kit.quantize_grouped(x, dbias=dbias, **options, **more)  # loads the kernels
        stream.synchronize()
        stream.begin_capture()
        group = fp4kit.quantize_grouped(x, dbias=dbias, **options, **more)
        graph = stream.end_capture()
        for host, other in reversed(cases):
            for array, data in ((x, host), (z, other)):
                array.view(np.uint16).set(data.view(np.uint16))
            graph.launch(stream)
            stream.synchronize()
            sums = np.empty((len(FIRST), 64), F32)
            mine = {"activation_input": other} if name in DERIVATIVES else {}
            want = fp4kit.quantize_grouped(host, dbias=sums, **options, **mine)
            np.testing.assert_array_equal(dbias.get(), sums)
            np.testing.assert_array_equal(group.packed.get(), want.packed)
            np.testing.assert_array_equal(group.amax.get(), want.amax)
