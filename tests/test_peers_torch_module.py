# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""torch's own ways: gradients, torch.compile, dtypes and devices, pickles, tensors as objects."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, OptionError
from sample_arrays import gaussian

torch = pytest.importorskip("torch")

import fp4kit.torch  # noqa: E402 - it needs torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def tensor(shape=(32, 64), dtype=torch.float32):
    return torch.from_numpy(gaussian(shape)).to(dtype)


# ------------------------------------------------------------------------------------------------
# Gradients
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheme": "mxfp8"},
        {"scheme": fp4kit.Scheme("nvfp4", recipe="torchao")},
        {"direction": "columnwise", "block_shape": "2d"},
        {"rounding": "stochastic", "seed": 3},
        {"rht": True, "undo_rht": True},
        {"amax": 1.0, "dtype": torch.float32},
    ],
)
def test_gradients_pass_straight_through(dtype, options):
    x = tensor(dtype=dtype).requires_grad_()
    y = fp4kit.torch.quantize_dequantize(x, **options)
    assert torch.equal(y, fp4kit.quantize_dequantize(x.detach(), **options))
    assert y.dtype == options.get("dtype", dtype)
    upstream = tensor(dtype=y.dtype) * 3
    (gradient,) = torch.autograd.grad(y, x, upstream)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, upstream.to(dtype))


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_values_that_stay_rotated_have_rotated_gradients(direction):
    x = tensor().requires_grad_()
    y = fp4kit.torch.quantize_dequantize(x, rht=0xBEEF, direction=direction)
    upstream = tensor() * 3
    (gradient,) = torch.autograd.grad(y, x, upstream)
    expected = fp4kit.hadamard_transform(upstream, 0xBEEF, direction=direction, inverse=True)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_the_gradient_of_a_rotation_is_its_transpose(direction, inverse):
    x = tensor((16, 16)).requires_grad_()
    options = {"direction": direction, "inverse": inverse}
    y = fp4kit.torch.hadamard_transform(x, **options)
    assert torch.equal(y, fp4kit.hadamard_transform(x.detach(), **options))
    upstream = tensor((16, 16)) * 2
    (gradient,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    # <upstream, H x> = <H' upstream, x>
    assert torch.allclose((upstream * y).sum(), (gradient * x).sum(), rtol=1e-5)


def test_second_derivatives_and_transforms():
    x = tensor().requires_grad_()
    y = (fp4kit.torch.quantize_dequantize(x) ** 2).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.full_like(x, 2))

    def loss(x):
        return (fp4kit.torch.quantize_dequantize(x) ** 2).sum()

    assert torch.equal(torch.func.grad(loss)(x.detach()), first.detach())


def test_training_moves_weights():
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, wanted = torch.randn(64, 32), torch.randn(64, 16)
    losses = []
    for _ in range(20):
        weight = fp4kit.torch.quantize_dequantize(layer.weight, block_shape="2d")
        loss = ((x @ weight.T + layer.bias - wanted) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.95


def test_gradients_are_never_lost_in_silence():
    x = torch.nn.Parameter(tensor())
    for name in ("quantize_dequantize", "hadamard_transform"):
        function = getattr(fp4kit, name)
        with pytest.raises(DtypeError, match=rf"fp4kit\.torch\.{name}, .* x\.detach\(\)"):
            function(x)
        with pytest.raises(DtypeError, match="requires a gradient"):
            function(x * 1)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert not function(x).requires_grad
        assert torch.equal(function(x.detach()), getattr(fp4kit.torch, name)(x).detach())


def test_codes_have_no_gradient():
    x = torch.nn.Parameter(tensor())
    assert fp4kit.quantize(x) == fp4kit.quantize(x.detach())
    assert not fp4kit.quantize(x).amax.requires_grad
    assert not fp4kit.dequantize(fp4kit.quantize(x)).requires_grad


def test_examples_of_the_module():
    result = doctest.testmod(sys.modules["fp4kit.torch.straight_through"])
    assert (result.failed, result.attempted) == (0, 4)


def test_wrong_arguments_of_the_module():
    with pytest.raises(DtypeError, match=r"x is a ndarray; fp4kit\.torch takes torch tensors"):
        fp4kit.torch.quantize_dequantize(gaussian((4, 64)))
    with pytest.raises(OptionError, match="out= would overwrite"):
        fp4kit.torch.quantize_dequantize(tensor(), out=tensor())
    with pytest.raises(OptionError, match="'nvpf4' is not known"):
        fp4kit.torch.quantize_dequantize(tensor(), "nvpf4")
    with pytest.raises(OptionError, match="'colour' is not an option here"):
        fp4kit.torch.quantize_dequantize(tensor(), colour="red")


# ------------------------------------------------------------------------------------------------
# torch.compile
# ------------------------------------------------------------------------------------------------


def codes_and_values(x):
    q = fp4kit.quantize(x * 2, scale_layout="swizzled_128x4")
    return q.packed, q.block_scale, fp4kit.dequantize(q) + 1, fp4kit.quantize_dequantize(x) + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_give_the_same_bytes(backend):
    torch.compiler.reset()
    x = tensor()
    compiled = torch.compile(codes_and_values, backend=backend)
    for _ in range(2):
        for one, other in zip(compiled(x), codes_and_values(x), strict=True):
            assert torch.equal(one, other)


# What torch says of any graph that breaks at a tensor with a gradient; it hides it by itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_pass_through_compiled_functions():
    torch.compiler.reset()

    @torch.compile(backend="aot_eager")
    def loss(x):
        return (fp4kit.torch.quantize_dequantize(x * 2) ** 2).sum()

    x = tensor().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    assert torch.equal(gradient, 4 * fp4kit.quantize_dequantize(2 * x.detach()))


@pytest.mark.parametrize(
    "order",
    [
        "import torch, fp4kit",
        "import fp4kit, torch",
        "import torch, torch._dynamo, fp4kit",
    ],
)
def test_any_order_of_imports_compiles_without_a_warning(order):
    code = f"""
{order}
def f(x):
    return fp4kit.dequantize(fp4kit.quantize(x * 2)) + 1
x = torch.arange(64.).reshape(2, 32)
assert torch.equal(torch.compile(f, backend="eager")(x), f(x))
counters = torch._dynamo.utils.counters
assert len(counters["graph_break"]) <= 2, counters
from torch._dynamo import trace_rules
assert trace_rules.__loader__ is trace_rules.__spec__.loader
assert trace_rules.__spec__.loader.get_source(trace_rules.__name__)
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr


# ------------------------------------------------------------------------------------------------
# Tensors as objects
# ------------------------------------------------------------------------------------------------


def test_dtypes_of_torch():
    q = fp4kit.quantize(tensor())
    for dtype in FLOATS:
        name = str(dtype).removeprefix("torch.")
        assert torch.equal(q.dequantize(dtype), q.dequantize(name))
        assert q.dequantize(dtype).dtype == dtype
        assert fp4kit.hadamard_transform(tensor(), dtype=dtype).dtype == dtype
    for dtype in (torch.float64, torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(OptionError, match=r"dtype=torch\.\w+ \(\w+\) is not known"):
            q.dequantize(dtype)


def test_facts_and_parts_of_torch():
    x = gaussian((4, 64))
    q, host = fp4kit.quantize(torch.from_numpy(x)), fp4kit.quantize(x)
    assert q == host
    assert (q.device, q.nbytes, len(q)) == ("cpu", host.nbytes, 4)
    assert isinstance(q.codes(), torch.Tensor)
    np.testing.assert_array_equal(q.codes().numpy(), host.codes())
    np.testing.assert_array_equal(q.block_scale_values().numpy(), host.block_scale_values())
    np.testing.assert_array_equal(np.asarray(q), host.dequantize())
    part = q[1:3]
    assert part == host[1:3]
    assert part.packed.data_ptr() == q.packed[1].data_ptr()
    assert "torch" in repr(q)


def test_copies_of_torch():
    q = fp4kit.quantize(tensor())
    for other in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert other == q
        assert isinstance(other.packed, torch.Tensor)
        other.packed[0, 0] ^= 1
        assert other != q
    stored = io.BytesIO()
    torch.save(q, stored)
    stored.seek(0)
    assert torch.load(stored, weights_only=False) == q


def test_devices_of_torch():
    q = fp4kit.quantize(tensor())
    for device in ("cpu", torch.device("cpu")):
        assert q.to(device) is q
    host = q.to("numpy")
    assert isinstance(host.packed, np.ndarray)
    assert host == q
    typed = fp4kit.QuantizedTensor(
        **{**vars(q), "block_scale": q.block_scale.view(torch.float8_e4m3fn)}
    )
    assert typed.to("numpy") == q
    with pytest.raises(OptionError, match="choose cpu, cuda or cuda:N"):
        q.to(torch.device("meta"))
    if not torch.cuda.is_available():
        with pytest.raises(fp4kit.BackendUnavailableError, match="copy to cuda:1: torch: "):
            q.to(torch.device("cuda:1"))


@pytest.mark.gpu
def test_torch_there_and_back():
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU")
    q = fp4kit.quantize(tensor())
    far = q.to("cuda")
    assert far.packed.device.type == "cuda"
    assert far == fp4kit.quantize(tensor().cuda())
    assert far.to("cpu") == q == far.to("numpy")
    x = tensor().cuda().requires_grad_()
    (gradient,) = torch.autograd.grad(fp4kit.torch.quantize_dequantize(x).sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
