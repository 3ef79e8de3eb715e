# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and column sums on a GPU: every pattern, odd places, many rows, streams and graphs.

Parity over functions, types and shapes is tested for all backends in test_activations.py.
"""

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Prologue
from fp4kit.cuda import compile as cuda_module
from fp4kit.cuda import device as cuda_device
from fp4kit.cuda import ready as cuda_ready
from fp4kit.formats import DTYPES
from fp4kit.reference import codecs
from fp4kit.reference.activations import ACTIVATIONS, DERIVATIVES

CUDA, REFERENCE = get_backend("cuda"), get_backend("reference")
REASON = CUDA.unavailable_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
RAW = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def raw_normal(shape, dtype, seed=0, scale=3):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return codecs.from_float32(np.float32(scale) * values, dtype)


def raw_bits(shape, dtype, seed=0):
    unsigned = np.dtype(f"u{np.dtype(RAW[dtype]).itemsize}")
    top = np.iinfo(unsigned).max
    bits = np.random.default_rng(seed).integers(0, top, shape, unsigned, endpoint=True)
    return bits.view(RAW[dtype])


def assert_bits(got, wanted):
    """NaN as well: it is canonical."""
    unsigned = f"u{wanted.dtype.itemsize}"
    np.testing.assert_array_equal(got.get().view(unsigned), wanted.view(unsigned))


def expected(name, dtype, x, z):
    rows, cols = x.shape
    width = cols // 2 if name == "swiglu" else cols
    out, sums = np.empty((rows, width), x.dtype), np.empty(width, np.float32)
    REFERENCE.activate_with_sums(Prologue(name, x, dtype, z, sums), out)
    return out, sums


def check(cupy, name, dtype, x, z=None, shift=0):
    """Both ways to activate, all arrays `shift` elements past an aligned address."""

    def place(host):
        device = cupy.empty(host.size + shift, host.dtype)[shift:].reshape(host.shape)
        device.set(host)
        return device

    out, sums = expected(name, dtype, x, z)
    moved = place(x), None if z is None else place(z)
    got = place(np.zeros_like(out))
    CUDA.activate(Prologue(name, moved[0], dtype, moved[1]), got)
    assert_bits(got, out)
    got, got_sums = place(np.zeros_like(out)), place(np.zeros_like(sums))
    CUDA.activate_with_sums(Prologue(name, moved[0], dtype, moved[1], got_sums), got)
    assert_bits(got, out)
    assert_bits(got_sums, sums)


# ------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------


def test_reciprocal_of_every_significand(cupy):
    """Shows for this device what the header relies on."""
    code = """
    #include "activation/activations.cuh"
    extern "C" __global__ void reciprocals(float* out, unsigned exponent) {
      const unsigned i = blockIdx.x * 256 + threadIdx.x;
      const float x = fp4kit::as_float(exponent << 23 | i);
      out[i] = fp4kit::refine_reciprocal(x, fp4kit::guess_reciprocal(x));
    }
    """
    major, minor = cuda_device.capability(cupy.cuda.Device().id)
    module = cupy.RawModule(code=code, options=cuda_module.options(major, minor))
    found = cupy.empty(1 << 23, np.float32)
    for exponent in (127, 128, 187, 251):
        arguments = found, np.uint32(exponent)
        module.get_function("reciprocals")((1 << 15,), (256,), arguments)
        x = (np.uint32(exponent << 23) | np.arange(1 << 23, dtype=np.uint32)).view(np.float32)
        assert_bits(found, np.float32(1) / x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_16_bit_pattern(cupy, name, dtype):
    """In order, so that whole pieces are of moderate size, and shuffled; NaN included."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    shuffled = np.random.default_rng(0).permutation(patterns)
    for gate, factor in ((patterns, shuffled), (shuffled, patterns), (patterns, patterns)):
        first, second = (bits.view(RAW[dtype]).reshape(-1, 64) for bits in (gate, factor))
        if name == "swiglu":
            check(cupy, name, dtype, np.concatenate([first, second], axis=1))
        elif name in DERIVATIVES:
            check(cupy, name, dtype, second, first)
        else:
            check(cupy, name, dtype, first)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float32(cupy, name):
    shape = 1024, 1024
    check(cupy, name, "float32", raw_bits(shape, "float32"), second(name, shape, "float32", True))
    for scale in (1e-40, 1, 30):
        x = raw_normal(shape, "float32", 2, scale)
        check(cupy, name, "float32", x, second(name, shape, "float32"))


def second(name, shape, dtype, any_bits=False):
    if name not in DERIVATIVES:
        return None
    return raw_bits(shape, dtype, 9) if any_bits else raw_normal(shape, dtype, 9)


# ------------------------------------------------------------------------------------------------
# Shapes and places
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (5, 48), (33, 66), (31, 4100), (1025, 136)])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_shapes_and_places(cupy, name, dtype, shift, shape):
    x = raw_normal(shape, dtype, 1)
    check(cupy, name, dtype, x, second(name, shape, dtype), shift)


@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        *((rows, cols) for rows in (1, 31, 32, 33, 1023, 1024, 1025) for cols in (1, 67, 200)),
        *((rows, cols) for rows in (40_000, (1 << 20) + 33) for cols in (1, 8)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_column_sums(cupy, dtype, rows, cols):
    host = raw_normal((rows, cols), dtype)
    host[:, 0] = codecs.from_float32(np.float32([-0.0]), dtype)
    wanted = np.empty(cols, np.float32)
    REFERENCE.column_sums(host, dtype, wanted)
    got = cupy.empty(cols, np.float32)
    CUDA.column_sums(cupy.asarray(host), dtype, got)
    assert_bits(got, wanted)


def test_column_sums_of_no_rows(cupy):
    sums = cupy.full(16, 7, np.float32)
    CUDA.column_sums(cupy.empty((0, 16), np.float16), "float16", sums)
    assert not sums.get().any()


def test_activations_of_large_arrays(cupy):
    """More than 2^31 elements of an input: offsets have 64 bits."""
    rows, width = (1 << 16) + 1, 1 << 14
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 16 << 30:
        pytest.skip("needs 16 GiB of device memory")
    x = cupy.zeros((rows, 2 * width), np.uint16)
    last = raw_normal((1, 2 * width), "bfloat16")
    x[-1] = cupy.asarray(last[0])
    out, sums = cupy.empty((rows, width), np.uint16), cupy.empty(width, np.float32)
    wanted, _ = expected("swiglu", "bfloat16", last, None)
    for with_sums in (False, True):
        out.fill(0xFFFF)
        if with_sums:
            CUDA.activate_with_sums(Prologue("swiglu", x, "bfloat16", None, sums), out)
            # All other rows are +0.0, which leaves nothing but the signs of zeros in doubt.
            values = codecs.to_float32(wanted[0], "bfloat16")
            np.testing.assert_array_equal(sums.get(), values)
        else:
            CUDA.activate(Prologue("swiglu", x, "bfloat16"), out)
        assert_bits(out[-1:], wanted)
        assert not bool(out[:-1].any())


def test_views(cupy):
    """Through the public function, which copies what is not contiguous."""
    host = np.random.default_rng(3).standard_normal((96, 128)).astype(np.float32)
    for view in (lambda a: a.T, lambda a: a[::2, 32:96], lambda a: a[:, ::-1]):
        sums, device_sums = np.empty(64, np.float32), cupy.empty(64, np.float32)
        x = view(host)
        sums, device_sums = sums[: x.shape[1] // 2], device_sums[: x.shape[1] // 2]
        options = {"activation": "swiglu", "pad": True}
        wanted = fp4kit.quantize(
            np.ascontiguousarray(x), dbias=sums, backend="reference", **options
        )
        got = fp4kit.quantize(view(cupy.asarray(host)), dbias=device_sums, **options)
        np.testing.assert_array_equal(got.packed.get(), wanted.packed)
        np.testing.assert_array_equal(got.block_scale.get(), wanted.block_scale)
        assert_bits(device_sums, sums)


# ------------------------------------------------------------------------------------------------
# Graphs
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [96, 3000])
@pytest.mark.parametrize("name", ["swiglu", "dgelu"])
def test_graph_capture_and_replay(cupy, name, rows):
    """The activated array and partial sums live as long as the graph."""
    hosts = [
        np.random.default_rng(seed).standard_normal((rows, 128)).astype(ml_dtypes.bfloat16)
        for seed in range(3)
    ]
    width = 64 if name == "swiglu" else 128
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, z = (cupy.asarray(h.view(np.uint16)).view(ml_dtypes.bfloat16) for h in hosts[:2])
        sums = cupy.empty(width, np.float32)
        options = {"activation": name, "nonfinite": "propagate"}
        inputs = {"activation_input": z} if name in DERIVATIVES else {}
        out = fp4kit.quantize(x, dbias=sums, **inputs, **options)
        fp4kit.quantize(x, dbias=sums, out=out, **inputs, **options)
        stream.begin_capture()
        fp4kit.quantize(x, dbias=sums, out=out, **inputs, **options)
        graph = stream.end_capture()
        # Memory that the capture let go would be handed out, and filled, here.
        noise = [cupy.full(size, 1e30, np.float32) for size in (64, 384, 12_000, 96_000) * 4]
        for host in (hosts[2], hosts[0], hosts[2]):
            x.view(np.uint16).set(host.view(np.uint16), stream=stream)
            graph.launch(stream)
        stream.synchronize()
        assert all(bool((value == np.float32(1e30)).all()) for value in noise)
    inputs = {"activation_input": hosts[1]} if name in DERIVATIVES else {}
    wanted_sums = np.empty(width, np.float32)
    wanted = fp4kit.quantize(hosts[2], dbias=wanted_sums, backend="reference", **inputs, **options)
    np.testing.assert_array_equal(out.packed.get(), wanted.packed)
    np.testing.assert_array_equal(out.block_scale.get(), wanted.block_scale)
    assert_bits(sums, wanted_sums)


def test_one_pass_where_pieces_allow_it(cupy, monkeypatch):
    """Sums come with the activation: nothing is read a second time but partial sums."""
    launched = []
    original = cuda_ready.column_sums

    def record(device, name, dtype, rows, cols, vector):
        launched.append((name, dtype, rows, cols))
        return original(device, name, dtype, rows, cols, vector)

    monkeypatch.setattr(cuda_ready, "column_sums", record)
    x = cupy.asarray(raw_normal((1111, 56), "bfloat16"))
    out, sums = cupy.empty_like(x), cupy.empty(56, np.float32)
    CUDA.activate_with_sums(Prologue("gelu", x, "bfloat16", None, sums), out)
    assert launched == [("gelu", "bfloat16", 1111, 56), (None, "float32", 2, 56)]


# ------------------------------------------------------------------------------------------------
# Together with quantization
# ------------------------------------------------------------------------------------------------


def quantized(x, z, place, name, **options):
    """Of arrays moved by `place`; the tensor, and its codes and scales on the host."""
    if name in DERIVATIVES:
        options["activation_input"] = place(z)
    q = fp4kit.quantize(place(x), activation=name, nonfinite="propagate", **options)
    return q, [np.asarray(a.get() if hasattr(a, "get") else a) for a in (q.packed, q.block_scale)]


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("given", ["amax", "decode_scale", None])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("name", [None, *ACTIVATIONS])
def test_fused_or_measured(cupy, monkeypatch, name, format, given, layout, sums):
    """One kernel where no amax is wanted; else the activation measures it."""
    if name is None and not sums:
        pytest.skip("nothing to do before")
    if format != "nvfp4" and given is not None:
        pytest.skip("MX formats have no second level")
    launched = []
    for what in (
        *("amax", "activate", "quantize", "column_sums"),
        *("quantize_activated", "quantize_sums"),
    ):
        original = getattr(cuda_ready, what)
        monkeypatch.setattr(
            cuda_ready, what, lambda *args, f=original, w=what: (launched.append(w), f(*args))[1]
        )
    # As many tiles of sums as fill any device.
    columns = 34816
    x, z = (raw_normal((70, columns), "bfloat16", seed) for seed in (1, 2))
    x, z = (array.view(ml_dtypes.bfloat16) for array in (x, z))
    options = {"format": format, "scale_layout": layout}
    if given == "amax":
        options["amax"] = np.float32(3.5)
    elif given is not None:
        options |= {"recipe": "modelopt", given: np.float32(0.002)}

    def device(host):
        return cupy.asarray(host.view(np.uint16)).view(ml_dtypes.bfloat16)

    fused = format != "nvfp4" or given is not None
    width = columns // 2 if name == "swiglu" else columns
    dbias = cupy.empty(width, np.float32) if sums else None
    got, arrays = quantized(x, z, device, name, dbias=dbias, **options)
    before = ["column_sums"] if sums else ["activate"]
    together = ["quantize_sums"] if sums else ["quantize_activated"]
    assert launched == (together if fused else [*before, "quantize"])
    expected_sums = np.empty(width, np.float32) if sums else None
    options |= {"backend": "cpu", "dbias": expected_sums}
    want, expected_arrays = quantized(x, z, np.asarray, name, **options)
    if sums:
        assert_bits(dbias, expected_sums)
    for one, two in zip(arrays, expected_arrays, strict=True):
        np.testing.assert_array_equal(one, two)
    if format == "nvfp4":
        assert_bits(got.second_level[1], np.asarray(want.second_level[1]))


def test_fused_under_capture(cupy):
    """The graph reads its inputs anew."""
    hosts = [raw_normal((96, 256), "bfloat16", seed) for seed in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)
    options = {"format": "mxfp8", "activation": "swiglu", "nonfinite": "propagate"}
    with stream:
        x = cupy.asarray(hosts[0])
        view = x.view(ml_dtypes.bfloat16)
        out = fp4kit.quantize(view, **options)
        stream.begin_capture()
        fp4kit.quantize(view, out=out, **options)
        graph = stream.end_capture()
        x.set(hosts[1], stream=stream)
        graph.launch(stream)
        stream.synchronize()
    wanted = fp4kit.quantize(hosts[1].view(ml_dtypes.bfloat16), backend="reference", **options)
    np.testing.assert_array_equal(out.packed.get(), wanted.packed)
    np.testing.assert_array_equal(out.block_scale.get(), wanted.block_scale)


@pytest.mark.parametrize("how", ["activation", "both", "sums"])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_measured_results(cupy, how, bad):
    """The amax that ignores NaN, and the refusal that it makes cheap."""
    host = raw_normal((1100, 128), "float32")
    host[700, 5] = 3e38 if bad is None else bad
    sums = {} if how == "activation" else {"dbias": cupy.empty(128, np.float32)}
    name = None if how == "sums" else "gelu"
    x = cupy.asarray(host)
    got = fp4kit.quantize(x, activation=name, nonfinite="propagate", **sums)
    wanted = fp4kit.quantize(host, activation=name, nonfinite="propagate", backend="reference")
    np.testing.assert_array_equal(got.packed.get(), wanted.packed)
    assert_bits(got.amax, wanted.amax)
    if bad is not None:
        with pytest.raises(fp4kit.NonFiniteError, match=r"\(700, 5\)"):
            fp4kit.quantize(x, activation=name, **sums)
    else:
        assert_bits(fp4kit.quantize(x, activation=name, **sums).amax, wanted.amax)
