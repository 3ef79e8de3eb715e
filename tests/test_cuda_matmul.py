# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products that only a GPU can show: tensor cores, cuBLAS, graphs, streams, equal bytes."""

import numpy as np
import pytest

import fp4kit
from cuda_arrays import floats, to_device
from fp4kit.formats import DTYPES
from matmul_cases import KINDS, expected, numbers, tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cupy")]

#: Tensor cores cut instead of rounding.
UNIT = 2.0**-23
#: (rows, cols, depth): few rows; `matmul_any`; cuBLAS; ragged tiles of either.
SHAPES = [(1, 512, 1024), (16, 384, 4096), (50, 200, 1000), (130, 520, 2056), (300, 1024, 512)]


def on_device(q):
    """A host tensor on the device."""
    return q.to("cuda")


def bits_of(array):
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32).get()


def product(cupy, x, w, **options):
    """The result of device operands, on the host, as an array of its element type."""
    given = {
        name: to_device(cupy, value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    a = to_device(cupy, x) if isinstance(x, np.ndarray) else on_device(x)
    return fp4kit.matmul(a, on_device(w), **given)


def host(result, dtype):
    """Values of a device result in an array of its type's name."""
    raw = result.get()
    if raw.dtype.name == dtype:
        return raw
    import ml_dtypes

    return raw.view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_at_every_size(cupy, kind, dtype):
    for rows, cols, depth in SHAPES:
        w, x = tensor(kind, cols, depth), numbers((rows, depth), dtype, seed=rows)
        y = host(product(cupy, x, w), dtype)
        expected(x, w, unit=UNIT).check(y, f"{kind}, {rows} x {cols} x {depth}")


@pytest.mark.parametrize("kind", KINDS)
def test_both_operands_quantized_with_many_rows(cupy, kind):
    for rows, cols, depth in SHAPES[3:]:
        a, b = tensor(kind, rows, depth, seed=1), tensor("nvfp4-per-token", cols, depth, seed=2)
        y = host(product(cupy, a, b), "float32")
        expected(a, b, unit=UNIT).check(y, kind)


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_sums(cupy, dtype, rows):
    w, x = tensor("nvfp4", 512, 1024), numbers((rows, 1024), dtype, seed=1)
    bias, c = numbers((512,), dtype, seed=2), numbers((rows, 512), dtype, seed=3)
    y = host(product(cupy, x, w, bias=bias, c=c, alpha=-0.5), dtype)
    expected(x, w, bias=bias, c=c, alpha=-0.5, unit=UNIT).check(y)
    # In place.
    out = to_device(cupy, c)
    fp4kit.matmul(to_device(cupy, x), on_device(w), c=out, out=out)
    expected(x, w, c=c, unit=UNIT).check(host(out, dtype))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "fp8-block"])
@pytest.mark.parametrize(("rows", "cols", "depth"), SHAPES)
def test_equal_bytes_in_every_run(cupy, kind, rows, cols, depth):
    w = on_device(tensor(kind, cols, depth))
    x = to_device(cupy, numbers((rows, depth), "bfloat16", seed=1))
    first = bits_of(fp4kit.matmul(x, w))
    for _ in range(10):
        np.testing.assert_array_equal(bits_of(fp4kit.matmul(x, w)), first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["mxfp8", "mxfp8-e5m2", "mxfp4"])
def test_values_that_16_bits_do_not_hold(cupy, kind, dtype):
    """Decoded for cuBLAS they are found on the device, and the product is made anew."""
    depth, rows = 512, 128
    w = numbers((256, depth), "float32", seed=1)
    w[7] *= np.float32(2.0**-120)
    w = fp4kit.quantize(w, KINDS[kind]["scheme"], backend="reference")
    x = numbers((rows, depth), dtype, seed=2)
    y = host(product(cupy, x, w, out_dtype="float32", alpha=2.0**60), "float32")
    expected(x, w, alpha=2.0**60, unit=UNIT).check(y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "mxfp8-e5m2"])
def test_every_scale_byte(cupy, kind, dtype):
    """Subnormal and negative ones among them; a column of the result for each."""
    w = tensor(kind, 256, 512)
    scales = np.arange(256)
    if kind == "nvfp4":
        scales[scales % 128 == 127] = 0x38  # NaN
    else:
        scales[208:] = 0x7F  # infinities and NaN
    w.block_scale[...] = scales[:, None]
    for rows in (5, 130):
        x = numbers((rows, 512), dtype, seed=1)
        y = host(product(cupy, x, w, out_dtype="float32"), "float32")
        expected(x, w, unit=UNIT).check(y, f"{rows} rows")


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_what_the_result_held_does_not_count(cupy, kind, dtype, out_dtype):
    """NaN; with a bias the factor of cuBLAS lies on the host, else on the device."""
    w, bias = on_device(tensor(kind, 512, 1024)), to_device(cupy, numbers((512,), "float32"))
    for rows in (3, 20, 300, 2048):
        x = to_device(cupy, numbers((rows, 1024), dtype))
        for options in ({}, {"bias": bias}):
            right = fp4kit.matmul(x, w, out_dtype=out_dtype, **options)
            assert np.isfinite(floats(right, out_dtype)).all()
            out = right.copy()
            out.view(np.uint8).fill(0xFF)
            fp4kit.matmul(x, w, out=out, out_dtype=out_dtype, **options)
            np.testing.assert_array_equal(bits_of(out), bits_of(right))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "nvfp4-per-token"])
def test_prepared_weights_of_many_rows(cupy, kind, dtype):
    """As many as cuBLAS multiplies: decoded as they lie, so the same bytes as those of the rows."""
    for rows, cols, depth in ((1100, 520, 2056), (1100, 1024, 512), (1300, 4096, 256)):
        w, x = tensor(kind, cols, depth), numbers((rows, depth), dtype, seed=rows)
        given = on_device(w)
        plain = fp4kit.matmul(to_device(cupy, x), given)
        prepared = fp4kit.matmul(to_device(cupy, x), fp4kit.prepare(given))
        np.testing.assert_array_equal(bits_of(prepared), bits_of(plain))
        expected(x, w, unit=UNIT).check(host(prepared, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_byte_of_prepared_weights(cupy, dtype):
    w = tensor("nvfp4", 256, 512)
    scales = np.arange(256)
    scales[scales % 128 == 127] = 0x38  # NaN
    w.block_scale[...] = scales[:, None]
    prepared = fp4kit.prepare(on_device(w))
    assert not prepared.is_plain
    x = numbers((130, 512), dtype, seed=1)
    y = host(fp4kit.matmul(to_device(cupy, x), prepared, out_dtype="float32"), "float32")
    expected(x, w, unit=UNIT).check(y)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_large_results(cupy, dtype, prepared):
    """Wherever what makes them is."""
    rows, cols, depth = 2048, 4096, 256
    w = on_device(tensor("nvfp4", cols, depth))
    b = fp4kit.prepare(w) if prepared else w
    right = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}[dtype]
    for value in (np.nan, np.inf):
        for place in ((0, 0), (255, 77), (rows - 1, depth - 1)):
            x = numbers((rows, depth), dtype, seed=1)
            x[place] = value
            y = fp4kit.matmul(to_device(cupy, x), b)
            bits, values = bits_of(y), floats(y, dtype)
            nan = np.isnan(values)
            assert np.isnan(value) == nan[place[0]].all()
            assert set(bits[nan].tolist()) <= {right}
            assert np.isfinite(np.delete(values, place[0], axis=0)).all()
    for scale in ((0, 0), (cols - 1, depth // 16 - 1)):
        q = tensor("nvfp4", cols, depth)
        q.block_scale[scale] = 0x7F
        given = on_device(q)
        x = to_device(cupy, numbers((rows, depth), dtype, seed=1))
        y = fp4kit.matmul(x, fp4kit.prepare(given) if prepared else given)
        assert set(bits_of(y)[:, scale[0]].tolist()) == {right}


@pytest.mark.parametrize("rows", [3, 300])
def test_nan_and_infinity(cupy, rows):
    w = tensor("nvfp4", 512, 1024)
    w.block_scale[5, 3] = 0x7F
    x = numbers((rows, 1024), "bfloat16", seed=1)
    x[1, 7] = np.inf
    y = product(cupy, x, w)
    bits, values = bits_of(y), floats(y, "bfloat16")
    nan = np.isnan(values)
    assert nan[:, 5].all()
    assert set(bits[nan].tolist()) == {0x7FC0}
    assert not np.isfinite(values[1]).any()
    assert np.isfinite(np.delete(values, 5, axis=1)[2:]).all()


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_graph_capture_and_replay(cupy, rows):
    """Also cuBLAS, whose scratch is the graph's own."""
    w = tensor("mxfp8", 512, 1024)
    first, second = (numbers((rows, 1024), "bfloat16", seed=seed) for seed in (1, 2))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        weights, x = on_device(w), to_device(cupy, first)
        bias = to_device(cupy, numbers((512,), "float32"))
        out, sums = fp4kit.matmul(x, weights), fp4kit.matmul(x, weights, bias=bias)
        stream.synchronize()
        stream.begin_capture()
        fp4kit.matmul(x, weights, out=out)
        fp4kit.matmul(x, weights, bias=bias, out=sums)
        graph = stream.end_capture()
        noise = [cupy.full(1 << 20, 1e30, np.float32) for _ in range(16)]
        for data in (second, first, second):
            x.view(np.uint16).set(data.view(np.uint16), stream=stream)
            graph.launch(stream)
        stream.synchronize()
        assert all(float(value.min()) == np.float32(1e30) for value in noise)
        again = fp4kit.matmul(x, weights)
        stream.synchronize()
    np.testing.assert_array_equal(bits_of(out), bits_of(again))
    expected(second, w, unit=UNIT).check(host(out, "bfloat16"))
    expected(second, w, bias=bias.get(), unit=UNIT).check(host(sums, "bfloat16"))


@pytest.mark.parametrize("rows", [2, 300])
def test_streams_side_by_side(cupy, rows):
    """Two streams with a product each have the bytes that one has."""
    w = on_device(tensor("nvfp4", 1024, 2048))
    x = [to_device(cupy, numbers((rows, 2048), "bfloat16", seed=seed)) for seed in (1, 2)]
    wanted = [bits_of(fp4kit.matmul(one, w)) for one in x]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in x]
    cupy.cuda.runtime.deviceSynchronize()
    results = [[], []]
    for _ in range(20):
        for number, stream in enumerate(streams):
            with stream:
                results[number].append(fp4kit.matmul(x[number], w))
    for stream in streams:
        stream.synchronize()
    for number, right in enumerate(wanted):
        for result in results[number]:
            np.testing.assert_array_equal(bits_of(result), right)


def experts_of(kind, count, cols, depth):
    return [tensor(kind, cols, depth, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "fp8-block"])
def test_members_of_a_group(cupy, kind, dtype):
    sizes = [3, 0, 70, 1, 129, 0, 16, 33]
    weights = experts_of(kind, len(sizes), 256, 512)
    x = numbers((sum(sizes), 512), dtype, seed=9)
    device = [on_device(w) for w in weights]
    given = to_device(cupy, x)
    by_host = host(fp4kit.matmul_grouped(given, device, first_dims=sizes), dtype)
    ends = np.cumsum([0, *sizes])
    offsets = cupy.asarray(ends.astype(np.int64))
    by_device = host(fp4kit.matmul_grouped(given, device, row_offsets=offsets), dtype)
    for number, weight in enumerate(weights):
        rows = slice(ends[number], ends[number + 1])
        if sizes[number]:
            right = expected(x[rows], weight, unit=UNIT)
            right.check(by_host[rows], f"member {number}, offsets of the host")
            right.check(by_device[rows], f"member {number}, offsets of the device")


def test_a_graph_follows_the_offsets(cupy):
    """A router's result divides the rows anew in each replay."""
    count, rows, depth = 6, 90, 512
    weights = experts_of("nvfp4", count, 256, depth)
    x = numbers((rows, depth), "bfloat16", seed=1)
    device = [on_device(w) for w in weights]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = to_device(cupy, x)
        offsets = cupy.asarray(np.array([0, 1, 2, 3, 4, 5, rows], np.int64))
        out = fp4kit.matmul_grouped(given, device, row_offsets=offsets)
        stream.synchronize()
        stream.begin_capture()
        fp4kit.matmul_grouped(given, device, row_offsets=offsets, out=out)
        graph = stream.end_capture()
        for ends in ([0, 10, 10, 40, 60, 61, rows], [0, 80, 81, 82, 83, 84, rows]):
            offsets.set(np.array(ends, np.int64), stream=stream)
            graph.launch(stream)
            stream.synchronize()
            y = host(out, "bfloat16")
            for number, weight in enumerate(weights):
                part = slice(ends[number], ends[number + 1])
                if ends[number + 1] > ends[number]:
                    expected(x[part], weight, unit=UNIT).check(y[part], f"member {number}")


def test_more_members_than_a_parameter_holds(cupy):
    """Two launches, also of ranges whose offsets are on the device."""
    count, depth = 200, 64
    weights = experts_of("nvfp4", count, 32, depth)
    x = numbers((count, depth), "float16", seed=1)
    device, given = [on_device(w) for w in weights], to_device(cupy, x)
    y = host(fp4kit.matmul_grouped(given, device, first_dims=[1] * count), "float16")
    offsets = cupy.arange(count + 1, dtype=np.int64)
    z = host(fp4kit.matmul_grouped(given, device, row_offsets=offsets), "float16")
    for number, weight in enumerate(weights):
        right = expected(x[number : number + 1], weight, unit=UNIT)
        right.check(y[number : number + 1])
        right.check(z[number : number + 1])


def test_without_the_library(cupy, monkeypatch):
    """What cuBLAS would multiply, `matmul_any` does."""
    from fp4kit.cuda import blas

    monkeypatch.setattr(blas, "is_available", lambda: False)
    for dtype in DTYPES:
        w, x = tensor("nvfp4", 512, 1024), numbers((1100, 1024), dtype, seed=1)
        expected(x, w, unit=UNIT).check(host(product(cupy, x, w), dtype))


def test_few_bytes_of_scratch(cupy, monkeypatch):
    """Slabs of both operands."""
    from fp4kit.cuda import blas, matmul_library

    if not blas.is_available():
        pytest.skip(f"cuBLAS {blas.description()}")
    monkeypatch.setattr(matmul_library, "SCRATCH_BYTES", blas.WORKSPACE_BYTES + (1 << 20))
    a, b = tensor("mxfp8", 700, 512, seed=1), tensor("nvfp4", 1200, 512, seed=2)
    bias = numbers((1200,), "float32")
    expected(a, b, unit=UNIT).check(host(product(cupy, a, b), "float32"))
    y = host(product(cupy, a, b, bias=bias, out_dtype="bfloat16"), "bfloat16")
    expected(a, b, bias=bias, unit=UNIT).check(y)


def test_environment_says_whether_the_library_is_used():
    details = fp4kit.backend_status()[0].details
    assert "cublas" in details
