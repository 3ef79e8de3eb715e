# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: streams, graphs, devices. Skipped without one."""

import numpy as np
import pytest

import fp4kit
from cuda_arrays import as_dtype, assert_same, floats, normal, to_device
from fp4kit.errors import DtypeError
from fp4kit.formats import DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cupy")]


@pytest.mark.parametrize("recipe", ["te", "torchao", "compressed-tensors"])
def test_graph_capture_and_replay(cupy, recipe):
    first, second = normal((48, 128)), 3 * normal((48, 128), seed=1)
    options = {"recipe": recipe, "nonfinite": "propagate", "scale_layout": "swizzled_128x4"}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray(first)
        out = fp4kit.quantize(x, **options)
        decoded = fp4kit.dequantize(out)
        # Once more into the same arrays: whatever this path compiles is compiled before capture.
        fp4kit.quantize(x, out=out, **options)
        fp4kit.dequantize(out, out=decoded)
        stream.begin_capture()
        fp4kit.quantize(x, out=out, **options)
        fp4kit.dequantize(out, out=decoded)
        graph = stream.end_capture()
        # Memory that the capture used must not be handed to anybody else.
        noise = [cupy.full(1, 1e30, np.float32) for _ in range(64)]
        for data in (second, first, second):
            x.set(data, stream=stream)
            graph.launch(stream)
        stream.synchronize()
        assert all(float(value[0]) == np.float32(1e30) for value in noise)
    wanted = fp4kit.quantize(second, backend="reference", **options)
    assert_same(out, wanted)
    values = fp4kit.dequantize(wanted, backend="reference")
    np.testing.assert_array_equal(decoded.get(), values)


def test_graph_reads_the_given_amax_on_replay(cupy):
    host = normal((16, 64))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, amax = cupy.asarray(host), cupy.full(1, 6, np.float32)
        out = fp4kit.quantize(x, amax=amax, nonfinite="propagate")
        fp4kit.quantize(x, amax=amax, nonfinite="propagate", out=out)
        stream.begin_capture()
        fp4kit.quantize(x, amax=amax, nonfinite="propagate", out=out)
        graph = stream.end_capture()
        amax.fill(11)
        graph.launch(stream)
        stream.synchronize()
    wanted = fp4kit.quantize(host, amax=11.0, backend="reference")
    np.testing.assert_array_equal(out.packed.get(), wanted.packed)
    np.testing.assert_array_equal(out.block_scale.get(), wanted.block_scale)


def test_graph_capture_with_amax_as_a_float(cupy):
    """The float becomes device memory that the graph reads on every replay: it must live on."""
    first, second = normal((32, 64)), 2 * normal((32, 64), seed=1)
    options = {"amax": 7.5, "nonfinite": "propagate"}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray(first)
        out = fp4kit.quantize(x, **options)
        fused = fp4kit.quantize_dequantize(x, **options)
        stream.begin_capture()
        fp4kit.quantize(x, out=out, **options)
        fp4kit.quantize_dequantize(x, out=fused, **options)
        graph = stream.end_capture()
        # Memory that the capture let go would be handed out, and filled, here.
        noise = [cupy.full(1, 1e30, np.float32) for _ in range(64)]
        for data in (second, first, second):
            x.set(data, stream=stream)
            graph.launch(stream)
        stream.synchronize()
        assert all(float(value[0]) == np.float32(1e30) for value in noise)
    wanted = fp4kit.quantize(second, backend="reference", **options)
    assert_same(out, wanted)
    np.testing.assert_array_equal(fused.get(), fp4kit.dequantize(wanted, backend="reference"))


@pytest.mark.parametrize(
    "options",
    [
        {"direction": "columnwise", "rht": True, "undo_rht": True},
        {"scale_search": "four_over_six", "e4m3_max": 256},
        {"second_level": "per_token", "dtype": "bfloat16"},
    ],
)
def test_graph_capture_of_fake_quantization(cupy, options):
    """Codes and rotated values in between are memory that the graph uses on every replay."""
    first, second = normal((64, 64)), 2 * normal((64, 64), seed=1)
    options = {"nonfinite": "propagate", **options}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray(first)
        out = fp4kit.quantize_dequantize(x, **options)
        stream.begin_capture()
        fp4kit.quantize_dequantize(x, out=out, **options)
        graph = stream.end_capture()
        noise = [cupy.full(size, 255, np.uint8) for size in (256, 2048, 16384) for _ in range(16)]
        for data in (second, first, second):
            x.set(data, stream=stream)
            graph.launch(stream)
        stream.synchronize()
        assert all(bool((array == 255).all()) for array in noise)
    wanted = fp4kit.quantize_dequantize(second, backend="reference", **options)
    dtype = options.get("dtype", "float32")
    np.testing.assert_array_equal(floats(out, dtype), floats(wanted, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_capture_of_amax_into_an_array(cupy, dtype):
    """Each replay starts anew: a smaller amax must not be hidden by the last one."""
    hosts = [as_dtype(scale * normal((48, 1000)), dtype) for scale in (4, 1, 2)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, peak = to_device(cupy, hosts[0]), cupy.zeros(1, np.float32)
        assert fp4kit.amax(x, out=peak) is peak
        out = fp4kit.quantize(x[:, :992], amax=peak, nonfinite="propagate")
        fp4kit.quantize(x[:, :992], amax=peak, nonfinite="propagate", out=out)
        stream.begin_capture()
        fp4kit.amax(x, out=peak)
        fp4kit.quantize(x[:, :992], amax=peak, nonfinite="propagate", out=out)
        graph = stream.end_capture()
        for host in hosts:
            x.view(np.uint8).set(host.view(np.uint8), stream=stream)
            graph.launch(stream)
            stream.synchronize()
            largest = float(np.abs(floats(host, dtype)).max())
            assert float(peak[0]) == largest
            wanted = fp4kit.quantize(
                np.ascontiguousarray(host[:, :992]), amax=largest, backend="reference"
            )
            np.testing.assert_array_equal(out.packed.get(), wanted.packed)
            np.testing.assert_array_equal(out.block_scale.get(), wanted.block_scale)


def test_the_current_stream_is_used(cupy):
    """On any other stream the call would read `x` before the slow work in front has filled it."""
    host = normal((256, 256))
    big = cupy.zeros(1 << 27, np.float32)
    x = cupy.zeros((256, 256), np.float32)
    data = cupy.asarray(host)
    fp4kit.dequantize(fp4kit.quantize(x, nonfinite="propagate"))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            big += 1
        x[...] = data
        got = fp4kit.quantize(x, nonfinite="propagate")
        decoded = fp4kit.dequantize(got)
        stream.synchronize()
    wanted = fp4kit.quantize(host, backend="reference")
    assert_same(got, wanted)
    values = fp4kit.dequantize(wanted, backend="reference")
    np.testing.assert_array_equal(decoded.get(), values)


@pytest.fixture
def second_device(cupy):
    """The number of a device that is not the current one."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(0):
        yield 1


def test_array_on_another_device(cupy, second_device):
    host = normal((32, 64))
    with cupy.cuda.Device(second_device):
        x = cupy.asarray(host)
    options = {"scale_layout": "swizzled_128x4"}
    got = fp4kit.quantize(x, **options)
    values = fp4kit.dequantize(got)
    linear = fp4kit.unswizzle(got.block_scale, (32, 4), "swizzled_128x4")
    results = [got.packed, got.block_scale, got.amax, values, linear, fp4kit.amax(x)]
    results += [fp4kit.quantize_dequantize(x), fp4kit.swizzle(linear)]
    assert {array.device.id for array in results} == {second_device}
    assert cupy.cuda.runtime.getDevice() == 0
    wanted = fp4kit.quantize(host, backend="reference", **options)
    assert_same(got, wanted)
    decoded = fp4kit.dequantize(wanted, backend="reference")
    for result in (values, results[-2]):
        np.testing.assert_array_equal(result.get(), decoded)
    np.testing.assert_array_equal(results[-1].get(), wanted.block_scale)
    assert fp4kit.error_stats(x, got).mse == pytest.approx(fp4kit.error_stats(host, wanted).mse)


def test_torch_tensor_on_another_device(cupy, second_device):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    host = normal((32, 64))
    x = torch.from_numpy(host).to(f"cuda:{second_device}")
    got = fp4kit.quantize(x)
    values = fp4kit.dequantize(got)
    assert {got.packed.device.index, got.block_scale.device.index, values.device.index} == {1}
    wanted = fp4kit.quantize(host, backend="reference")
    np.testing.assert_array_equal(got.packed.cpu().numpy(), wanted.packed)
    np.testing.assert_array_equal(
        values.cpu().numpy(), fp4kit.dequantize(wanted, backend="reference")
    )


def test_a_scale_on_another_device_is_refused(cupy, second_device):
    amax = cupy.full(1, 6, np.float32)
    with cupy.cuda.Device(second_device):
        x = cupy.asarray(normal((32, 64)))
    with pytest.raises(DtypeError, match="amax lies on cuda:0, the input on cuda:1"):
        fp4kit.quantize(x, amax=amax)
