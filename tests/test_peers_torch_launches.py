# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What products of torch tensors launch on a GPU that is none: the second time as the first.

What was found out about a weight is used again; nothing of it may be of another call.
"""

from __future__ import annotations

import copy

import pytest

import fp4kit
from fp4kit import DtypeError, ShapeError

torch = pytest.importorskip("torch")

import fp4kit.torch  # noqa: E402 - it needs torch
from torch_on_fake_gpu import OF_GRAPH, SCRATCH, Machine  # noqa: E402

N, K = 512, 512
#: Products of a few rows, of warpgroups, and of cuBLAS.
ROWS = (1, 16, 4096)


def weights(seed=1, **options):
    generator = torch.Generator().manual_seed(seed)
    return fp4kit.quantize(torch.randn(N, K, generator=generator), "nvfp4", **options)


@pytest.fixture(params=["rows", "prepared"])
def layer(request):
    q = weights()
    held = fp4kit.prepare(q) if request.param == "prepared" else q
    return fp4kit.torch.Linear(held, torch.zeros(N)).requires_grad_(False)


@pytest.fixture
def machine(layer, monkeypatch):
    return Machine(monkeypatch)


def x_of(rows, dtype=torch.bfloat16):
    return torch.zeros(rows, K, dtype=dtype)


def launches(machine, call):
    """What a call launches; the address of its result, which differs, is one word."""
    machine.log.clear()
    address = call().data_ptr()

    def word(value):
        if isinstance(value, tuple):
            fields = (word(each) for each in value)
            return tuple(fields)
        if isinstance(value, bytes):
            return value.replace(address.to_bytes(8, "little"), b"(result)")
        return "(result)" if value == address else value

    return [word(each) for each in machine.log]


def check(machine, layer, x):
    """The launches of a call, which are those of a layer that knows nothing."""
    found = launches(machine, lambda: layer(x))
    layer._held = None
    assert found == launches(machine, lambda: layer(x))
    return found


def words(found):
    return [word for launch in found for word in launch]


def addresses(layer):
    """Of the codes and the bias."""
    return {layer.codes.data_ptr(), layer.bias.data_ptr()}


def shows(found, address):
    """Whether launches were given an address, as such or in a parameter."""
    flat = repr(found)
    return str(address) in flat or any(
        address.to_bytes(8, "little") in word for word in words(found) if isinstance(word, bytes)
    )


@pytest.mark.parametrize("rows", ROWS)
def test_addresses_are_those_of_the_call(rows, layer, machine):
    kept = [x_of(rows) for _ in range(3)]
    for x in kept:
        found = launches(machine, lambda x=x: layer(x))
        assert [shows(found, one.data_ptr()) for one in kept] == [x is one for one in kept]
        assert all(shows(found, address) for address in addresses(layer))
        assert shows(found, "(result)") or b"(result)" in b"".join(
            word for word in words(found) if isinstance(word, bytes)
        )


def test_kernels_are_those_of_the_rows(layer, machine):
    names = [launches(machine, lambda rows=rows: layer(x_of(rows)))[-1][2] for rows in ROWS]
    for name, wanted in zip(names, ("small", "warpgroup", "finish"), strict=True):
        assert wanted in name


def test_other_rows_and_types(layer, machine):
    """In an order in which each comes after all others."""
    cases = [(rows, dtype) for rows in (*ROWS, 3) for dtype in (torch.bfloat16, torch.float32)]
    given = [x_of(*case) for case in cases]
    first = [launches(machine, lambda x=x: layer(x)) for x in given]
    assert first == [launches(machine, lambda x=x: layer(x)) for x in given]
    assert first == [check(machine, layer, x) for x in given]
    assert len({repr(each) for each in first}) == len(cases)


@pytest.mark.parametrize("rows", ROWS)
def test_inputs_that_are_not_aligned(rows, layer, machine):
    whole = torch.zeros(rows * K + 8, dtype=torch.bfloat16)
    layer(whole[8:].view(rows, K))
    for shift in (0, 1, 8):
        check(machine, layer, whole[shift : shift + rows * K].view(rows, K))


@pytest.mark.parametrize("rows", ROWS)
def test_weights_that_change(rows, layer, machine):
    x = x_of(rows)
    known = check(machine, layer, x)
    state = copy.deepcopy(layer.state_dict())
    layer.load_state_dict(state)  # copied into the buffers that are there
    assert check(machine, layer, x) == known
    before, alive = addresses(layer), [layer.codes.detach(), layer.bias]
    layer.load_state_dict(state, assign=True)
    layer.bias.requires_grad_(False)
    found = check(machine, layer, x)
    assert all(shows(found, address) for address in addresses(layer))
    assert not any(shows(found, address) for address in before)
    layer.codes.data = layer.codes.clone()
    found = check(machine, layer, x)
    assert shows(found, layer.codes.data_ptr())
    layer._apply(lambda tensor: tensor.clone())
    found = check(machine, layer, x)
    assert all(shows(found, address) for address in addresses(layer))
    alive.append(layer.bias)
    layer.bias = None
    found = check(machine, layer, x)
    assert not any(shows(found, each.data_ptr()) for each in alive)


@pytest.mark.parametrize("rows", ROWS)
def test_another_device(rows, layer, machine):
    layer(x_of(rows))
    machine.device = 1
    layer._apply(lambda tensor: tensor.clone())
    assert {launch[0] for launch in check(machine, layer, x_of(rows))} == {1}


@pytest.mark.parametrize("rows", ROWS)
def test_another_stream(rows, layer, machine):
    x = x_of(rows)
    for stream in (0, 7, 8, 0):
        machine.torch_stream = stream
        assert {launch[1] for launch in check(machine, layer, x)} == {stream}
    with fp4kit.arrays.known_stream(9, 0):  # CuPy's, which is not that of torch's tensors
        assert {launch[1] for launch in check(machine, layer, x)} == {0}


@pytest.mark.parametrize("rows", ROWS[1:])
def test_captures_have_memory_of_their_own(rows, layer, machine):
    x = x_of(rows)
    machine.torch_stream = 7
    plain = launches(machine, lambda: layer(x))
    machine.captures = 7
    captured = launches(machine, lambda: layer(x))
    assert "mode of captures" in captured
    assert (0, 7, "free", OF_GRAPH) in captured
    assert (str(SCRATCH)[:6] in repr(plain), str(SCRATCH)[:6] in repr(captured)) == (True, False)
    machine.captures = None
    assert launches(machine, lambda: layer(x)) == plain


def test_factors(layer, machine):
    x = x_of(1)
    numbers = [
        launches(machine, lambda alpha=alpha: fp4kit.matmul(x, layer.weight, alpha=alpha))
        for alpha in (1.0, 0.0, -0.0, 2.0, 1, 1.0)
    ]
    assert numbers[0] == numbers[4] == numbers[5]
    assert len({repr(each) for each in numbers}) == 4


@pytest.mark.parametrize("rows", ROWS)
def test_other_types_of_what_is_added_and_of_the_result(rows, layer, machine):
    x = x_of(rows)
    cases = [
        {"out_dtype": out, "bias": torch.zeros(N, dtype=bias), "c": torch.zeros(rows, N, dtype=c)}
        for out, bias, c in (
            (torch.bfloat16, torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16, torch.float16),
        )
    ]
    for options in cases:
        found = launches(machine, lambda given=options: fp4kit.matmul(x, layer.weight, **given))
        layer._held = None
        alone = launches(machine, lambda given=options: fp4kit.matmul(x, layer.weight, **given))
        assert found == alone
        for each in cases:
            fp4kit.matmul(x, layer.weight, **each)


def test_results_that_are_given(layer, machine):
    for rows in ROWS:
        x, out = x_of(rows), torch.zeros(rows, N, dtype=torch.bfloat16)
        found = launches(machine, lambda x=x, out=out: fp4kit.matmul(x, layer.weight, out=out))
        assert found == launches(machine, lambda x=x: fp4kit.matmul(x, layer.weight))
        c = torch.zeros_like(out)
        sums = [
            launches(
                machine,
                lambda x=x, c=c, out=out: fp4kit.matmul(x, layer.weight, c=c, out=out),
            )
            for c in (c, out, c)
        ]
        assert sums[0] == sums[2] != sums[1]
        assert shows(sums[0], c.data_ptr())


def test_what_is_refused_stays_refused(layer, machine):
    """After an equal call that was not."""
    for rows in ROWS:
        layer(x_of(rows))
        with pytest.raises(ShapeError, match="a has 496 elements"):
            layer(torch.zeros(rows, K - 16, dtype=torch.bfloat16))
        with pytest.raises(DtypeError, match="a is float64; fp4kit takes"):
            layer(x_of(rows, torch.float64))
        with pytest.raises(DtypeError, match="a requires a gradient"):
            fp4kit.matmul(x_of(rows).requires_grad_(), layer.weight)
        shrunk = x_of(rows)
        shrunk.untyped_storage().resize_(0)
        with pytest.raises(DtypeError, match="a is a torch tensor whose storage was freed"):
            layer(shrunk)
        out = torch.zeros(rows, N + 1, dtype=torch.bfloat16)
        strided = [out[:, :N]] if rows > 1 else []
        for wrong in (out, out[:, :N].float(), *strided):
            with pytest.raises(ShapeError, match="out"):
                fp4kit.matmul(x_of(rows), layer.weight, out=wrong)
        both = torch.zeros(rows * K, dtype=torch.bfloat16).view(rows, K)
        with pytest.raises(fp4kit.OptionError, match="share memory"):
            fp4kit.matmul(both, layer.weight, out=both)
    layer.codes.data = layer.codes.clone()  # whose memory is torch's own
    layer(x_of(1))
    layer.codes.untyped_storage().resize_(0)
    with pytest.raises(DtypeError, match=r"(packed|tiles) is a torch tensor whose storage was"):
        layer(x_of(1))
