# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations and column sums before quantization: accuracy, parity, order, refusals."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Prologue
from fp4kit.errors import NonFiniteError, OptionError, ShapeError
from fp4kit.formats import DTYPES
from fp4kit.reference import activations
from fp4kit.reference.activations import ACTIVATIONS, DERIVATIVES

F32 = np.float32
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORMATS = ("nvfp4", "mxfp8")


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def exact(name, x, z):
    """The same functions in float64."""
    x = x.astype(np.float64)
    logistic = lambda t: 0.5 * (1 + np.tanh(t / 2))  # noqa: E731
    a, b = 2 * math.sqrt(2 / math.pi), 0.044715
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x * logistic(x)
    if name == "gelu":
        return x * logistic(a * (x + b * x**3))
    if name == "swiglu":
        half = x.shape[-1] // 2
        return x[..., :half] * logistic(x[..., :half]) * x[..., half:]
    z = z.astype(np.float64)
    if name == "drelu":
        return x * (z > 0)
    if name == "dsilu":
        s = logistic(z)
        return x * s * (1 + z * (1 - s))
    s = logistic(a * (z + b * z**3))
    return x * (s + z * s * (1 - s) * a * (1 + 3 * b * z**2))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_accuracy(name):
    x = np.concatenate([normal(1 << 14, 1) * 3, np.linspace(-30, 30, 1 << 12, dtype=F32)])
    z = np.concatenate([normal(1 << 14, 2) * 3, np.linspace(-30, 30, 1 << 12, dtype=F32)])
    x, z = x.reshape(-1, 64), z.reshape(-1, 64)
    with np.errstate(over="ignore"):
        got = activations.activation(name, x, z if name in DERIVATIVES else None)
    # The largest error against a scale of one, or of the value where that is larger.
    wanted = exact(name, x, z)
    assert np.max(np.abs(got - wanted) / np.maximum(np.abs(wanted), 1)) < 2e-6


def test_exponential():
    t = np.linspace(-87, 88, 1 << 16, dtype=F32)
    wanted = np.exp(t.astype(np.float64))
    assert np.max(np.abs(activations.exponential(t) / wanted - 1)) < 3e-7
    with np.errstate(over="ignore", invalid="ignore"):
        ends = activations.exponential(np.array([-np.inf, -200, 0, 200, np.inf, np.nan], F32))
    assert ends[:5].tolist() == [0, 0, 1, np.inf, np.inf]
    assert np.isnan(ends[5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_parity_for_any_bits(name, dtype, fast_backend, reference, assert_bits):
    rng = np.random.default_rng(7)
    unsigned = np.uint32 if dtype == "float32" else np.uint16
    x, z = (
        rng.integers(0, np.iinfo(unsigned).max, (257, 66), unsigned, endpoint=True).view(
            NUMPY[dtype]
        )
        for _ in range(2)
    )
    x[:40], z[:40] = normal((40, 66)), normal((40, 66), 1)
    results = []
    for backend in (fast_backend, reference):
        engine = get_backend(backend.name)
        raw = [v.view(np.uint16) if dtype == "bfloat16" else v for v in (x, z)]
        moved = [backend.put(np.ascontiguousarray(v)) for v in raw]
        out = backend.put(np.empty((257, 33 if name == "swiglu" else 66), raw[0].dtype))
        other = moved[1] if name in DERIVATIVES else None
        engine.activate(Prologue(name, moved[0], dtype, other), out)
        result = backend.get(out)
        results.append(result.view(NUMPY[dtype]) if dtype == "bfloat16" else result)
    assert_bits(*results, name)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("direction", ["rowwise", "both"])
def test_quantizes_what_the_activation_gives(name, format, direction, backend, assert_tensors):
    """Rounded to the input type, then amax, then everything."""
    x = normal((64, 128)).astype(ml_dtypes.bfloat16)
    z = normal((64, 128), 1).astype(ml_dtypes.bfloat16)
    options = {"activation_input": z} if name in DERIVATIVES else {}
    got = backend.quantize(x, format, direction=direction, activation=name, **options)
    other = z.astype(F32) if name in DERIVATIVES else None
    y = activations.activation(name, x.astype(F32), other).astype(ml_dtypes.bfloat16)
    want = backend.quantize(y, format, direction=direction)
    for one, two in zip(*(q if direction == "both" else (q,) for q in (got, want)), strict=True):
        assert_tensors(one, two)
        assert one.shape[-1] == (64 if name == "swiglu" else 128)


@pytest.mark.parametrize("rows", [0, 1, 5, 32, 33, 1024, 1025, 33000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_column_sums(rows, dtype, fast_backend, reference, assert_bits):
    x = (normal((rows, 16), rows) + F32(0.1)).astype(NUMPY[dtype])
    sums = []
    for backend in (fast_backend, reference):
        out = backend.put(np.full(16, np.nan, F32))
        backend.call(fp4kit.quantize, x, "mxfp8", pad=True, dbias=out)
        sums.append(backend.get(out))
    assert_bits(*sums)
    wanted = x.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(sums[1], wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 8), (5, 24), (33, 33), (257, 66), (1030, 72), (2049, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu", "swiglu", "dsilu"])
def test_activations_with_sums(name, dtype, shape, fast_backend, reference, assert_bits):
    """Results and their sums from one call are those of two, NaN included."""
    rows, width = shape
    x = normal((rows, 2 * width if name == "swiglu" else width), 3).astype(NUMPY[dtype])
    x[rows // 2, 1] = np.nan
    z = normal(x.shape, 4).astype(NUMPY[dtype])
    raw = [v.view(np.uint16) if dtype == "bfloat16" else v for v in (x, z)]
    results = []
    for backend in (fast_backend, reference):
        engine = get_backend(backend.name)
        moved = [backend.put(v) for v in raw]
        out, sums = (
            backend.put(np.empty(size, kind))
            for size, kind in ((shape, raw[0].dtype), (width, F32))
        )
        other = moved[1] if name in DERIVATIVES else None
        engine.activate_with_sums(Prologue(name, moved[0], dtype, other, sums), out)
        results.append((backend.get(out), backend.get(sums).view(np.uint32)))
    assert_bits(results[0][0], results[1][0], "activation")
    assert_bits(results[0][1], results[1][1], "sums")


def test_sums_of_nothing(backend):
    for shape in ((0, 32), (4, 0)):
        out = backend.put(np.full(shape[1] // 2, np.nan, F32))
        backend.call(fp4kit.quantize, np.empty(shape, F32), activation="swiglu", dbias=out)
        assert not backend.get(out).any()


def test_column_sums_are_of_what_is_quantized(backend):
    x = normal((40, 32))
    out = backend.put(np.empty(16, F32))
    backend.call(fp4kit.quantize, x, activation="swiglu", dbias=out)
    y = activations.activation("swiglu", x, None)
    np.testing.assert_allclose(backend.get(out), y.sum(axis=0, dtype=np.float64), atol=1e-4)


def test_order_of_column_sums():
    """Groups of 32 rows in order: 2^24 swallows what is added to it one by one, not in groups."""
    x = np.ones((64, 1), F32)
    x[0] = 2.0**25
    assert activations.column_sums(x)[0] == 2.0**25 + 32


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"activation": "tanh"}, OptionError, "choose one of gelu"),
    ({"activation": "dgelu"}, OptionError, "needs activation_input"),
    ({"activation": "gelu", "activation_input": np.ones((16, 32), F32)}, OptionError, "takes no"),
    ({"activation_input": np.ones((16, 32), F32)}, OptionError, "belongs to dgelu"),
    ({"activation": "dsilu", "activation_input": np.ones((16, 16), F32)}, ShapeError, "16, 16"),
    ({"activation": "dsilu", "activation_input": np.ones((16, 32), "f2")}, ShapeError, "float16"),
    ({"dbias": np.ones(16, F32)}, ShapeError, "out is"),
    ({"dbias": np.ones(32, np.float16)}, ShapeError, "float16"),
])  # fmt: skip
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        fp4kit.quantize(normal((16, 32)), **options)


def test_nonfinite_inputs_are_named():
    bad = normal((16, 32))
    bad[2, 3] = np.nan
    with pytest.raises(NonFiniteError, match=r"^x holds 1 NaN.*\(2, 3\)"):
        fp4kit.quantize(bad, activation="relu")
    with pytest.raises(NonFiniteError, match=r"^activation_input holds"):
        fp4kit.quantize(normal((16, 32)), activation="drelu", activation_input=bad)
    with pytest.raises(ShapeError, match="even last axis"):
        fp4kit.quantize(normal((16, 33)), activation="swiglu")
