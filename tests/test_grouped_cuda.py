# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups where only a GPU can show it: graphs, streams, launches, sizes. Skipped without one.

Byte parity over options and shapes is tested for all backends in test_grouped.py.
"""

from math import prod

import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend

REASON = get_backend("cuda").unavailable_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
F32 = np.float32
FIRST = [130, 0, 1, 256, 33, 0]
OPTIONS = [
    {},
    {"scale_layout": "swizzled_128x4"},
    {"format": "mxfp8", "direction": "both"},
    {"direction": "both", "rht": True},
    {"direction": "columnwise", "second_level": "per_token"},
    {"direction": "both", "rounding": "stochastic", "seed": 7},
    {"direction": "both", "block_shape": "2d"},
    {"scale_search": "four_over_six"},
    {"recipe": "torchao"},
]


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def both_parts(result):
    if isinstance(result, fp4kit.GroupedPair):
        return result.rowwise, result.columnwise
    return (result,)


def assert_groups(got, want):
    """A device result equals the host's, byte for byte."""
    for one, other in zip(both_parts(got), both_parts(want), strict=True):
        assert (one.dims, one.starts) == (other.dims, other.starts)
        np.testing.assert_array_equal(one.packed.get(), other.packed)
        np.testing.assert_array_equal(one.block_scale.get(), other.block_scale)
        if other.second_level is not None:
            np.testing.assert_array_equal(one.second_level[1].get(), other.second_level[1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_graph_capture_and_replay(cupy, tables, options):
    """Nothing waits for the device; on replay the graph reads the table that was captured."""
    options = options | {"first_dims": FIRST, "pad": True, "nonfinite": "propagate"}
    if "rht" in options:
        options["first_dims"] = [128, 0, 16, 256, 32, 0]
    hosts = [normal((sum(options["first_dims"]) + 7, 64), seed) for seed in (0, 1)]
    for host in hosts:
        host[sum(options["first_dims"]) :] = np.nan
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray(hosts[0])
        for part in both_parts(fp4kit.quantize_grouped(x, **options)):  # loads the kernels
            fp4kit.dequantize_grouped(part)
        stream.synchronize()
        stream.begin_capture()
        group = fp4kit.quantize_grouped(x, **options)
        outs = [fp4kit.dequantize_grouped(part) for part in both_parts(group)]
        graph = stream.end_capture()
        # Other calls use the pools of memory in between.
        for seed in range(4):
            fp4kit.quantize_grouped(cupy.asarray(normal((64, 64), seed)), members=2**seed)
        for host in reversed(hosts):
            x.set(host)
            graph.launch(stream)
            stream.synchronize()
            want = fp4kit.quantize_grouped(host, **options)
            assert_groups(group, want)
            for out, part in zip(outs, both_parts(want), strict=True):
                np.testing.assert_array_equal(out.get(), fp4kit.dequantize_grouped(part))


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("cols", [64, 576, 4096])
def test_stretches_of_rows(cupy, tables, cols, layout):
    """Thread blocks of the flat kernels begin within members, and tiles have all kinds of rows."""
    rng = np.random.default_rng(cols)
    first = [1, 0, 7, 16, 33, 127, 128, 129, 500, *(int(rows) for rows in rng.integers(0, 300, 40))]
    host = normal((sum(first), cols))
    options = {"first_dims": first, "scale_layout": layout, "nonfinite": "propagate"}
    want = fp4kit.quantize_grouped(host, pad=True, **options)
    assert_groups(fp4kit.quantize_grouped(cupy.asarray(host), pad=True, **options), want)


@pytest.mark.parametrize("options", [
    {}, {"scale_layout": "swizzled_128x4"}, {"rht": True},
    {"rounding": "stochastic", "seed": 7}, {"format": "mxfp4"}, {"recipe": "torchao"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("cols", [128, 1000, 4096])
def test_folded_tiles_of_columns(cupy, tables, cols, options):
    """Last rows of tiles of every height, some of them not whole blocks where these are padded."""
    rng = np.random.default_rng(cols)
    heights = [*range(1, 25), *(int(rows) for rows in rng.integers(0, 40, 20))]
    first = [16 * height for height in heights]
    if "rht" not in options:
        first += [1, 0, 33, 127, 129, 250]
    host = normal((sum(first), cols))
    options = {"first_dims": first, "direction": "columnwise", "pad": True, **options}
    x = cupy.asarray(host).astype(np.float16)
    want = fp4kit.quantize_grouped(x.get(), nonfinite="propagate", **options)
    assert_groups(fp4kit.quantize_grouped(x, nonfinite="propagate", **options), want)


@pytest.mark.parametrize("members", [150, 600, 3000])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_members(cupy, options, members):
    """Tables that are larger parameters, where these are possible, and one that is none."""
    rng = np.random.default_rng(1)
    first = [int(rows) for rows in rng.integers(0, 4, members) * 16]
    host = normal((sum(first) + 1, 48))
    host[-1] = np.inf
    want = fp4kit.quantize_grouped(host, first_dims=first, pad=True, **options)
    got = fp4kit.quantize_grouped(cupy.asarray(host), first_dims=first, pad=True, **options)
    assert_groups(got, want)
    for one, other in zip(both_parts(got), both_parts(want), strict=True):
        np.testing.assert_array_equal(
            fp4kit.dequantize_grouped(one).get(), fp4kit.dequantize_grouped(other)
        )


def test_the_number_of_launches_does_not_depend_on_members(cupy, monkeypatch):
    from fp4kit.cuda import run as cuda_run

    launches = []
    launch = cuda_run.launch
    monkeypatch.setattr(cuda_run, "launch", lambda *a: (launches.append(a[0]), launch(*a)))
    counts = []
    for members in (1, 64, 1000):
        launches.clear()
        x = cupy.ones((16 * members, 64), F32)
        group = fp4kit.quantize_grouped(
            x, members=members, direction="both", rht=True, nonfinite="propagate"
        )
        for part in both_parts(group):
            fp4kit.dequantize_grouped(part)
        counts.append(len(launches))
    assert counts == [5, 5, 5]  # two amaxes, one quantization, two decodings


def test_tables_outlive_their_calls(cupy, tables):
    """Many groups queued up behind a slow kernel: each reads its own table when its turn comes."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        slow = cupy.ones(1 << 26, F32)
        for _ in range(20):
            slow = cupy.sin(slow)
        queued = []
        for seed in range(300):
            host = normal((40 + seed, 16), seed)
            first = [seed // 2, 40 + seed - seed // 2]
            x = cupy.asarray(host)
            queued.append((host, first, fp4kit.quantize_grouped(
                x, first_dims=first, nonfinite="propagate"
            )))  # fmt: skip
        stream.synchronize()
    for host, first, group in queued:
        assert_groups(group, fp4kit.quantize_grouped(host, first_dims=first))


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("direction", ["rowwise", "both"])
def test_members_anywhere_in_the_buffer(cupy, offset, direction):
    host = normal(20000)
    sizes = {"first_dims": [20, 0, 130], "last_dims": [64, 64, 64]}
    offsets = [offset, offset + 1280, offset + 1280 + 3, offset + 1280 + 3 + 130 * 64]
    want = fp4kit.quantize_grouped(host, **sizes, offsets=offsets, direction=direction, pad=True)
    got = fp4kit.quantize_grouped(
        cupy.asarray(host), **sizes, offsets=offsets, direction=direction, pad=True
    )
    assert_groups(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("direction", ["rowwise", "both"])
def test_more_than_two_to_the_31_elements(cupy, direction, layout):
    """The last member lies beyond 2^31 elements and has the bytes that it has alone."""
    rows, cols, last = (1 << 20) + 77, 2048, 300
    if cupy.cuda.runtime.memGetInfo()[0] < 24 << 30:
        pytest.skip("less than 24 GB free on the device")
    x = cupy.zeros((rows + last, cols), np.float16)
    host = normal((last, cols)).astype(np.float16)
    x[rows:] = cupy.asarray(host)
    x[rows - 1, -1] = 7
    options = {
        "direction": direction,
        "scale_layout": layout,
        "pad": True,
        "nonfinite": "propagate",
    }
    group = fp4kit.quantize_grouped(x, first_dims=[rows, last], **options)
    want = fp4kit.quantize(host, **options)
    for got, one in zip(
        both_parts(group), want if isinstance(want, tuple) else (want,), strict=True
    ):
        member = got.member(1)
        assert float(got.amax[0]) == 7
        np.testing.assert_array_equal(member.packed.get(), one.packed)
        np.testing.assert_array_equal(member.block_scale.get(), one.block_scale)
        # Of the first member only the last block is not zero.
        assert prod(got.member(0).shape) > 1 << 31
        assert int(cupy.count_nonzero(got.member(0).packed)) == 1
        out = fp4kit.dequantize_grouped(got, "float16")
        np.testing.assert_array_equal(out[rows:].get(), fp4kit.dequantize(one, "float16"))
        assert float(out[rows - 1, -1]) == 7
        del out
