# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products with gradients, and the linear layer that holds a quantized weight."""

from __future__ import annotations

import copy
import doctest
import pickle
import subprocess
import sys

import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, OptionError, ShapeError
from sample_arrays import gaussian

torch = pytest.importorskip("torch")

import fp4kit.torch  # noqa: E402 - it needs torch
from fp4kit.torch import product  # noqa: E402
from torch_models import backend  # noqa: E402

SCHEMES = {
    "nvfp4": {},
    "nvfp4 swizzled": {"scale_layout": "swizzled_128x4"},
    "nvfp4 torchao": {"recipe": "torchao"},
    "nvfp4 without second level": {"recipe": "torchao", "second_level": "none"},
    "nvfp4 per token": {"second_level": "per_token"},
    "nvfp4 2d": {"block_shape": "2d"},
    "nvfp4 high first": {"nibble_order": "high_first"},
    "mxfp4": {},
    "mxfp8": {},
    "mxfp8 swizzled": {"scale_layout": "swizzled_128x4"},
    "fp8": {},
    "fp8 block": {"granularity": "block"},
    "fp8 channel": {"granularity": "channel"},
    "fp8_e5m2": {},
}
N, K = 48, 256


def quantized(name, shape=(N, K), **options):
    return fp4kit.quantize(
        torch.from_numpy(gaussian(shape)), name.split()[0], **SCHEMES[name], **options
    )


def layer(name="nvfp4", bias=True):
    held = torch.randn(N) if bias else None
    return fp4kit.torch.Linear(quantized(name), held, backend=backend())


def close(actual, expected, factor=2e-5):
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).abs().max()) <= factor * float(expected.abs().max())


# ------------------------------------------------------------------------------------------------
# Products
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("slab", [product.SLAB_BYTES, 1])
def test_gradients_are_those_of_the_decoded_weight(name, slab, monkeypatch):
    monkeypatch.setattr(product, "SLAB_BYTES", slab)
    q = quantized(name)
    a = torch.randn(2, 3, K, requires_grad=True)
    bias = torch.randn(N, requires_grad=True)
    c = torch.randn(2, 3, N, requires_grad=True)
    dy = torch.randn(2, 3, N)
    y = fp4kit.torch.matmul(a, q, bias=bias, c=c, alpha=0.5, backend=backend())
    got = torch.autograd.grad(y, (a, bias, c), dy)
    z = 0.5 * (a @ fp4kit.dequantize(q).T) + bias + c
    expected = torch.autograd.grad(z, (a, bias, c), dy)
    assert close(y, z)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_have_the_type_of_their_tensor(dtype):
    q = quantized("nvfp4")
    a = torch.randn(5, K, dtype=dtype, requires_grad=True)
    bias = torch.randn(N, requires_grad=True)
    y = fp4kit.torch.matmul(a, q, bias=bias, backend=backend())
    assert y.dtype == dtype
    y.sum().backward()
    assert a.grad.dtype == dtype
    assert bias.grad.dtype == torch.float32
    weight = fp4kit.dequantize(q, dtype)
    assert torch.equal(a.grad, torch.ones(5, N, dtype=dtype) @ weight)


@pytest.mark.parametrize("slab", [product.SLAB_BYTES, 1])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 swizzled", "mxfp8 swizzled", "fp8 channel"])
def test_columnwise_weights(name, slab, monkeypatch):
    monkeypatch.setattr(product, "SLAB_BYTES", slab)
    q = quantized(name, (K, N), direction="columnwise")
    a = torch.randn(3, K, requires_grad=True)
    y = fp4kit.torch.matmul(a, q, backend=backend())
    dy = torch.randn(3, N)
    (got,) = torch.autograd.grad(y, a, dy)
    weight = fp4kit.dequantize(q)
    assert close(y, a @ weight)
    assert close(got, dy @ weight.T)


def test_second_derivatives():
    q = quantized("nvfp4", (16, 32))
    a = torch.randn(2, 32, requires_grad=True)
    y = fp4kit.torch.matmul(a, q, backend=backend())
    dy = torch.randn(2, 16, requires_grad=True)
    (da,) = torch.autograd.grad(y, a, dy, create_graph=True)
    (second,) = torch.autograd.grad(da, dy, torch.ones_like(da))
    assert close(second, torch.ones(2, 32) @ fp4kit.dequantize(q).T)


def test_arrays_of_numpy():
    q = fp4kit.quantize(gaussian((N, K)), "nvfp4")
    a = torch.randn(2, K, requires_grad=True)
    fp4kit.torch.matmul(a, q, backend=backend()).sum().backward()
    assert close(a.grad, torch.ones(2, N) @ torch.from_numpy(fp4kit.dequantize(q)))


def test_empty_operands():
    q = quantized("nvfp4", (16, 0))
    a = torch.zeros(3, 0, requires_grad=True)
    y = fp4kit.torch.matmul(a, q, backend=backend())
    y.sum().backward()
    assert torch.equal(y, torch.zeros(3, 16))
    assert a.grad.shape == (3, 0)


def test_products_refuse_what_is_no_tensor():
    with pytest.raises(DtypeError, match=r"a is a ndarray; .*fp4kit\.matmul"):
        fp4kit.torch.matmul(np.ones((2, K), np.float32), quantized("nvfp4"))
    with pytest.raises(OptionError, match="b is a Tensor"):
        fp4kit.torch.matmul(torch.ones(2, K), torch.ones(N, K))


# ------------------------------------------------------------------------------------------------
# The layer
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(K,), (3, K), (2, 3, K), (0, K)])
def test_results_are_those_of_a_layer_with_decoded_weights(name, shape):
    ours = layer(name)
    theirs = torch.nn.Linear(K, N)
    theirs.weight.data = fp4kit.dequantize(ours.weight)
    theirs.bias.data = ours.bias.detach()
    x = torch.randn(shape)
    actual, expected = ours(x), theirs(x)
    assert actual.shape == expected.shape
    assert not actual.numel() or close(actual, expected)


def test_it_looks_like_a_layer():
    linear = torch.nn.Linear(64, 32).eval()
    ours = fp4kit.torch.Linear.from_linear(linear, "mxfp8")
    assert (ours.in_features, ours.out_features, ours.training) == (64, 32, False)
    assert ours.bias is linear.bias
    assert ours.weight == fp4kit.quantize(linear.weight.detach(), "mxfp8")
    assert ours.weight is ours.weight
    assert ours.scheme == ours.weight.scheme
    assert list(dict(ours.named_parameters())) == ["bias"]
    assert repr(ours) == (
        "Linear(in_features=64, out_features=32, bias=True, mxfp8, 8.25 bits per element)"
    )
    assert fp4kit.torch.Linear.from_linear(torch.nn.Linear(64, 32, bias=False)).bias is None


def test_types_change_the_bias_alone():
    ours = layer()
    before = {name: buffer.clone() for name, buffer in ours.named_buffers()}
    for change in (
        lambda one: one.half(),
        lambda one: one.to(torch.bfloat16),
        lambda one: one.double(),
        lambda one: one.type(torch.float16),
        lambda one: one.to("cpu", torch.float32),
    ):
        change(ours)
        for name, buffer in ours.named_buffers():
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer, before[name])
    assert ours.half().bias.dtype == torch.float16
    assert ours(torch.randn(2, K).half()).dtype == torch.float16


def test_devices():
    ours = layer().to("meta")
    assert all(buffer.is_meta for buffer in ours.buffers())
    assert ours.weight.packed.is_meta
    with pytest.raises(DtypeError, match="meta"):
        ours(torch.ones(2, K))


@pytest.mark.parametrize("name", ["nvfp4", "fp8 block", "mxfp4"])
def test_copies_pickles_and_state_dicts(name):
    ours = layer(name)
    x = torch.randn(2, K)
    expected = ours(x)
    assert torch.equal(copy.deepcopy(ours)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(x), expected)
    other = fp4kit.torch.Linear(
        fp4kit.quantize(torch.zeros(N, K), ours.scheme), torch.zeros(N), backend=backend()
    )
    other(x)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other(x), expected)
    other.load_state_dict(copy.deepcopy(ours.state_dict()), assign=True)
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nvfp4 swizzled"])
def test_prepared_weights(name):
    """The same results, gradients and copies; codes lie in tiles."""
    q = quantized(name)
    plain = fp4kit.torch.Linear(q, backend=backend())
    ours = fp4kit.torch.Linear(fp4kit.prepare(q), backend=backend())
    assert {buffer for buffer, _ in ours.named_buffers()} <= {"tiles", "amax"}
    assert (ours.out_features, ours.in_features) == (N, K)
    x = torch.randn(3, K, requires_grad=True)
    expected = plain(x)
    y = ours(x)
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(y, x, torch.ones(3, N))
    assert torch.equal(gradient, torch.autograd.grad(expected, x, torch.ones(3, N))[0])
    assert torch.equal(copy.deepcopy(ours)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(x), expected)
    other = fp4kit.torch.Linear(
        fp4kit.prepare(fp4kit.quantize(torch.zeros(N, K), q.scheme)), backend=backend()
    )
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other(x), expected)
    with pytest.raises(RuntimeError, match="PreparedTensor"):
        plain.load_state_dict(ours.state_dict())


def test_a_state_dict_of_another_kind_is_refused():
    ours, other = layer("nvfp4"), layer("nvfp4 high first")
    before = other.packed.clone()
    with pytest.raises(RuntimeError, match=r"'nibble_order': 'low_first'.*'high_first'"):
        other.load_state_dict(ours.state_dict())
    assert torch.equal(other.packed, before)


def test_residual_tensors():
    q = fp4kit.quantize_residual(torch.from_numpy(gaussian((N, K))), 32, mode="weight")
    ours = fp4kit.torch.Linear(q, backend=backend())
    x = torch.randn(3, K, requires_grad=True)
    y = ours(x)
    y.sum().backward()
    assert close(y, x @ q.dequantize().T)
    assert close(x.grad, torch.ones(3, N) @ q.dequantize())
    assert torch.equal(copy.deepcopy(ours)(x), y)


def test_autocast_computes_in_its_type():
    ours = layer()
    x = torch.randn(2, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, ours(x.bfloat16()))
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("grad", [False, True])
def test_no_grad_and_inference_mode(grad):
    ours = layer().requires_grad_(grad)
    x = torch.randn(2, K)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not ours(x).requires_grad
    assert ours(x).requires_grad == grad


def test_compiled_models_give_the_same_and_do_not_warn():
    """In a process of its own, as torch warns about itself when it is first called."""
    code = f"""
import warnings
import torch, fp4kit, fp4kit.torch
ours = fp4kit.torch.Linear(fp4kit.quantize(torch.randn(32, 64)), torch.randn(32),
                           backend={backend()!r})
model = torch.nn.Sequential(torch.nn.Linear(64, 64), ours, torch.nn.ReLU())
x = torch.randn(4, 64)
torch.compile(torch.nn.ReLU(), backend="aot_eager")(x)
warnings.simplefilter("error")
compiled = torch.compile(model, backend="aot_eager")
for _ in range(2):
    assert torch.equal(compiled(x), model(x))
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
x.requires_grad_()
(one,) = torch.autograd.grad(compiled(x).sum(), x)
(other,) = torch.autograd.grad(model(x).sum(), x)
assert torch.allclose(one, other)
assert len(torch._dynamo.utils.counters["graph_break"]) <= 2
"""
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "warn" not in run.stderr.lower(), run.stderr


def test_bad_arguments():
    q = quantized("nvfp4")
    with pytest.raises(OptionError, match=r"weight is a Tensor.*from_linear"):
        fp4kit.torch.Linear(torch.ones(N, K))
    with pytest.raises(ShapeError, match="two axes"):
        fp4kit.torch.Linear(quantized("nvfp4", (2, N, K)))
    with pytest.raises(ShapeError, match=r"bias has shape \(3,\)"):
        fp4kit.torch.Linear(q, torch.ones(3))
    with pytest.raises(DtypeError, match="bias is a ndarray"):
        fp4kit.torch.Linear(q, np.ones(N))


@pytest.mark.parametrize("module", ["linear", "product"])
def test_examples(module):
    if backend() == "reference":
        pytest.skip("no backend but the reference multiplies")
    result = doctest.testmod(sys.modules[f"fp4kit.torch.{module}"])
    assert (result.failed, result.attempted > 2) == (0, True)
