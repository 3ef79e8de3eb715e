# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: patterns, pointers, sizes. Skipped without one.

Streams, graphs and devices are test_cuda_streams.py's; byte parity over formats, recipes and shapes
is tested for all backends in test_parity.py.
"""

import numpy as np
import pytest

import fp4kit
from cuda_arrays import as_dtype, assert_same, floats, normal, to_device
from fp4kit import arrays
from fp4kit.api.backends import get_backend
from fp4kit.backend.interface import Request
from fp4kit.cuda import compile as cuda_module
from fp4kit.cuda import launch as cuda_launch
from fp4kit.errors import BackendUnavailableError, KernelCompileError, NonFiniteError
from fp4kit.formats import BLOCK_FORMATS, DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cupy")]


# ------------------------------------------------------------------------------------------------
# Every pattern, also through the hardware's conversions
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern(cupy, name, dtype):
    """NaN, infinity and subnormals included, sorted into blocks of like size and shuffled."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    shuffled = np.random.default_rng(0).permutation(patterns)
    bits = np.concatenate([patterns, shuffled]).reshape(-1, 32)
    host = bits.view(np.float16)
    if dtype == "bfloat16":
        host = bits.view(pytest.importorskip("ml_dtypes").bfloat16)
    options = {"nonfinite": "propagate"} | ({"amax": 448.0} if name == "nvfp4" else {})
    wanted = fp4kit.quantize(host, name, backend="reference", **options)
    got = fp4kit.quantize(to_device(cupy, host), name, **options)
    assert_same(got, wanted)
    for out in DTYPES:
        values = floats(fp4kit.dequantize(wanted, out, backend="reference"), out)
        np.testing.assert_array_equal(floats(fp4kit.dequantize(got, out), out), values)


# ------------------------------------------------------------------------------------------------
# Pointers and views
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_pointers(cupy, name, dtype):
    base = as_dtype(normal(300), dtype)
    wanted = fp4kit.quantize(base[1:257].reshape(1, 256), name, backend="reference")
    device = to_device(cupy, base)
    x = device[1:257].reshape(1, 256)
    assert x.data.ptr % 16
    got = fp4kit.quantize(x, name)
    assert_same(got, wanted)
    values = fp4kit.dequantize(wanted, dtype, backend="reference")
    out = device[3:259].reshape(1, 256)
    assert fp4kit.dequantize(got, dtype, out=out) is out
    np.testing.assert_array_equal(floats(out, dtype), floats(values, dtype))
    device = to_device(cupy, base)
    again = fp4kit.quantize_dequantize(device[1:257].reshape(1, 256), name)
    np.testing.assert_array_equal(floats(again, dtype), floats(values, dtype))
    assert float(fp4kit.amax(device[1:257])[0]) == np.abs(floats(base[1:257], dtype)).max()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::-1],
        lambda x: x[:, ::-1],
        lambda x: x.T,
        lambda x: x[3:, 16:48],
        lambda x: x[::2],
        lambda x: x.reshape(2, 32, 64)[:, 3:, :],
    ],
    ids=["rows reversed", "columns reversed", "transposed", "sliced", "strided", "3-D"],
)
def test_views(cupy, view):
    host = normal((64, 64))
    wanted = fp4kit.quantize(np.ascontiguousarray(view(host)), backend="reference")
    assert_same(fp4kit.quantize(view(cupy.asarray(host))), wanted)


def test_broadcast_view(cupy):
    host = np.ones((2, 16), np.float32)
    x = cupy.broadcast_to(cupy.ones(1, np.float32), (2, 16))
    assert_same(fp4kit.quantize(x), fp4kit.quantize(host, backend="reference"))


# ------------------------------------------------------------------------------------------------
# Frameworks and second-level scales
# ------------------------------------------------------------------------------------------------


def test_torch_tensors_are_not_copied(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    host = as_dtype(normal((64, 128)), "bfloat16")
    bits = torch.from_numpy(host.view(np.int16))
    x = bits.cuda().view(torch.bfloat16)
    assert arrays.ingest(x).data.data.ptr == x.data_ptr()
    got = fp4kit.quantize(x)
    assert isinstance(got.packed, torch.Tensor)
    assert got.packed.is_cuda
    wanted = fp4kit.quantize(host, backend="reference")
    np.testing.assert_array_equal(got.packed.cpu().numpy(), wanted.packed)
    np.testing.assert_array_equal(got.block_scale.cpu().numpy(), wanted.block_scale)
    out = torch.empty_like(x)
    assert fp4kit.dequantize(got, "bfloat16", out=out) is out
    values = fp4kit.dequantize(wanted, "bfloat16", backend="reference")
    np.testing.assert_array_equal(out.float().cpu().numpy(), values.astype(np.float32))


def test_second_level_stays_on_the_device(cupy):
    host = normal((8, 32))
    amax = cupy.full(1, 6, np.float32)
    got = fp4kit.quantize(cupy.asarray(host), amax=amax)
    assert got.amax.data.ptr == amax.data.ptr
    assert_same(got, fp4kit.quantize(host, amax=6.0, backend="reference"))


@pytest.mark.parametrize("recipe", ["te", "torchao", "comfy"])
def test_one_scale_per_expert(cupy, recipe):
    host = normal((4, 24, 48))
    amax = np.abs(host).max(axis=(1, 2))
    got = fp4kit.quantize(cupy.asarray(host), recipe=recipe, amax=cupy.asarray(amax))
    wanted = fp4kit.quantize(host, recipe=recipe, amax=amax, backend="reference")
    assert_same(got, wanted)
    values = fp4kit.dequantize(wanted, backend="reference")
    np.testing.assert_array_equal(fp4kit.dequantize(got).get(), values)


def test_group_amax(cupy):
    host = normal((12, 1000))
    host[5, 7] = np.nan
    host[7] = np.nan
    engine = get_backend("cuda")
    got = engine.amax(cupy.asarray(host), "float32", 12).get()
    np.testing.assert_array_equal(got, get_backend("reference").amax(host, "float32", 12))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_amax_at_the_ends_of_chunks(cupy, dtype, start, over):
    """The largest value in the first and last place that blocks of threads read, aligned or not."""
    chunk = cuda_launch.AMAX_CHUNK // cuda_launch.ITEM_SIZES[dtype]
    size = 2 * chunk + over
    for place in (0, chunk - 1, chunk, size - 1):
        host = as_dtype(np.full(start + size, 0.5), dtype)
        host[start + place] = -3
        assert float(fp4kit.amax(to_device(cupy, host)[start:])[0]) == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(130, 1088), (257, 64), (3, 4160), (128, 192)])
def test_swizzled_scales_of_whole_tiles_across(cupy, dtype, shape):
    """Rows that end within a tile or a warp's strips, and tensors narrower than a thread block."""
    host = as_dtype(normal(shape), dtype)
    wanted = fp4kit.quantize(host, scale_layout="swizzled_128x4", backend="reference")
    got = fp4kit.quantize(to_device(cupy, host), scale_layout="swizzled_128x4")
    assert_same(got, wanted)


# ------------------------------------------------------------------------------------------------
# Host-side answers
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_input_is_named(cupy, dtype):
    host = normal((40, 64))
    host[3, 5] = np.inf
    host[7, 1] = np.nan
    host[39, 63] = -np.inf
    with pytest.raises(NonFiniteError, match=r"1 NaN and 2 infinite values.*\(3, 5\)"):
        fp4kit.quantize(to_device(cupy, as_dtype(host, dtype)))


def test_error_stats_agree(cupy):
    host = normal((33, 80))
    wanted = fp4kit.error_stats(host, fp4kit.quantize(host, backend="reference"))
    x = cupy.asarray(host)
    got = fp4kit.error_stats(x, fp4kit.quantize(x))
    for key, value in wanted.to_dict().items():
        assert got.to_dict()[key] == pytest.approx(value, rel=1e-12), key
    decoded = fp4kit.dequantize(fp4kit.quantize(x))
    assert fp4kit.error_stats(x, decoded).mse == pytest.approx(wanted.mse, rel=1e-12)


def test_host_arrays_are_refused():
    with pytest.raises(BackendUnavailableError, match=r"cupy\.asarray"):
        fp4kit.quantize(np.ones((1, 16), np.float32), backend="cuda")
    assert get_backend("cuda").refusal(Request("quantize", "cuda:0", "float32")) is None


def test_details_name_the_device(cupy):
    details = get_backend("cuda").details()
    assert "-arch=sm_" in details["device 0"]
    assert details["cupy"] == cupy.__version__


def test_compile_errors_are_ours(cupy):
    broken = cuda_module.Instance("reduce/amax.cu", "fp4kit::amax_kernel<fp4kit::NoSuchType>")
    with pytest.raises(KernelCompileError, match="NoSuchType"):
        cuda_module.function(cupy.cuda.runtime.getDevice(), broken)


# ------------------------------------------------------------------------------------------------
# Size
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
def test_more_than_two_to_the_31_elements(cupy, scale_layout):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rows, cols = 65537, 32768
    last = as_dtype(normal((1, cols)), "bfloat16")
    bits = cupy.zeros((rows, cols), np.uint16)
    bits[-1] = cupy.asarray(last.view(np.uint16)[0])
    x = bits.view(ml_dtypes.bfloat16)
    peak = fp4kit.amax(x)
    assert float(peak[0]) == np.abs(floats(last, "bfloat16")).max()
    got = fp4kit.quantize(x, amax=peak, nonfinite="propagate", scale_layout=scale_layout)
    wanted = fp4kit.quantize(last, amax=float(peak[0]), backend="reference")
    np.testing.assert_array_equal(got.packed[-1].get(), wanted.packed[0])
    assert not got.packed[:-1].any()
    linear = got.block_scale
    if scale_layout != "linear":
        linear = fp4kit.unswizzle(linear, (rows, cols // 16), scale_layout)
    np.testing.assert_array_equal(linear[-1].get(), wanted.block_scale[0])
    decoded = fp4kit.dequantize(got, "bfloat16")
    values = fp4kit.dequantize(wanted, "bfloat16", backend="reference")
    np.testing.assert_array_equal(floats(decoded[-1], "bfloat16"), floats(values[0], "bfloat16"))
    assert not decoded[:-1].view(np.uint16).any()
    del got, decoded
    fused = fp4kit.quantize_dequantize(x, amax=peak, nonfinite="propagate")
    np.testing.assert_array_equal(floats(fused[-1], "bfloat16"), floats(values[0], "bfloat16"))
