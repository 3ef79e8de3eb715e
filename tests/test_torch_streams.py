# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Layers called on several streams and devices: what they found out elsewhere is not used."""

from __future__ import annotations

import copy

import pytest

import fp4kit

torch = pytest.importorskip("torch")

import fp4kit.torch  # noqa: E402 - it needs torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("real_gpu")]
N, K = 1024, 2048
ROWS = (1, 16, 512, 2048)


@pytest.fixture(autouse=True)
def _torch_has_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")


def values(*shape, seed, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)


@pytest.fixture(params=[False, True])
def layer(request):
    q = fp4kit.quantize(values(N, K, seed=1))
    held = fp4kit.prepare(q) if request.param else q
    return fp4kit.torch.Linear(held, values(N, seed=2)).requires_grad_(False)


def fresh(layer, x):
    """The result of a layer that has found out nothing."""
    return copy.deepcopy(layer)(x)


@pytest.mark.parametrize("rows", ROWS)
def test_two_streams(rows, layer):
    """Each waits for what was done on it alone: a late input is read when it is there."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [values(rows, K, seed=seed) for seed in (3, 4)]
    expected = [fresh(layer, x) for x in inputs]
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    results = []
    for _ in range(3):
        for stream, x, target in zip(streams, inputs, late, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                target.copy_(x)
                results.append(layer(target))
                target.zero_()
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        assert torch.equal(result, expected[number % 2])


@pytest.mark.parametrize("rows", ROWS)
def test_weights_that_are_loaded_in_place(rows, layer):
    x = values(rows, K, seed=3)
    layer(x)
    q = fp4kit.quantize(values(N, K, seed=5))
    held = fp4kit.prepare(q) if hasattr(layer, "tiles") else q
    other = fp4kit.torch.Linear(held, values(N, seed=6)).requires_grad_(False)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), fresh(other, x))
    assert torch.equal(fp4kit.matmul(x, held), fp4kit.matmul(x, layer.weight))


@pytest.mark.parametrize("rows", ROWS)
def test_layers_that_move(rows, layer):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    x = values(rows, K, seed=3)
    expected = layer(x)
    for device in ("cuda:1", "cpu", "cuda:0", "cuda:1"):
        layer.to(device)
        if device != "cpu":
            for current in range(2):  # is not asked: where the tensors lie, is
                with torch.cuda.device(current):
                    assert torch.equal(layer(x.to(device)).to("cuda:0"), expected)
    with pytest.raises(fp4kit.DtypeError, match="lies on cuda:1"):
        layer(x)
