# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products in CUDA graphs that torch captures, which forbids allocations to everybody else."""

from __future__ import annotations

import ctypes
import gc

import pytest

import fp4kit
from fp4kit.arrays import capture

torch = pytest.importorskip("torch")

import fp4kit.torch  # noqa: E402 - it needs torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("real_gpu")]
N, K = 1024, 2048


@pytest.fixture(autouse=True)
def _torch_has_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")


def values(*shape, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def layer(scheme="nvfp4", prepare=False, bias=False, **options):
    q = fp4kit.quantize(values(N, K, seed=1), scheme, **options)
    given = values(N, seed=2) if bias else None
    return fp4kit.torch.Linear(fp4kit.prepare(q) if prepare else q, given)


def captured(call):
    """A graph of a call, after two calls on another stream, and what it writes to."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        result = call()
    return graph, result


def check(call, x, seeds=(11, 12)):
    """Replays with other numbers in x give what plain calls do."""
    graph, result = captured(call)
    for seed in seeds:
        x.copy_(values(*x.shape, seed=seed, dtype=x.dtype))
        graph.replay()
        with torch.no_grad():
            right = call()
        torch.cuda.synchronize()
        assert torch.equal(result, right)
        assert torch.isfinite(result).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 512, 2048])
def test_layers(rows, prepare, bias):
    ours, x = layer(prepare=prepare, bias=bias), values(rows, K, seed=3)
    check(lambda: ours(x), x)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("mxfp4", {}),
        ("mxfp8", {}),
        ("fp8", {"granularity": "block"}),
        ("nvfp4", {"second_level": "per_token"}),
        ("nvfp4", {"scale_layout": "swizzled_128x4"}),
    ],
)
@pytest.mark.parametrize("rows", [3, 300])
def test_layers_of_other_formats(rows, scheme, options):
    ours, x = layer(scheme, **options), values(rows, K, seed=3)
    check(lambda: ours(x), x)


@pytest.mark.parametrize("rows", [2, 300])
def test_inputs_that_are_not_contiguous(rows):
    ours, x = layer(), values(rows, 2 * K, seed=3)
    check(lambda: ours(x[:, ::2]), x)


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("rows", [1, 512])
def test_products_without_a_given_result(rows, prepare):
    """Of fp4kit itself: the result is torch's own."""
    q = fp4kit.quantize(values(N, K, seed=1))
    w, x = fp4kit.prepare(q) if prepare else q, values(rows, K, seed=3)
    check(lambda: fp4kit.matmul(x, w), x)


def test_the_first_call_may_be_captured():
    """Kernels are loaded and handles made meanwhile."""
    ours, x = layer("mxfp4"), values(40, K, seed=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        result = ours(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, ours(x).detach())


#: CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT and CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT.
OF_GRAPHS = {"used by graphs": 0, "reserved by graphs": 2}


def own_memory(pool):
    """Bytes of the device that this process holds: others may share the GPU."""
    held = {
        "allocated by torch": torch.cuda.memory_allocated(),
        "reserved by torch": torch.cuda.memory_reserved(),
        "of CuPy": pool.total_bytes(),
    }
    driver, device = capture.driver(), torch.cuda.current_device()
    assert driver.cuDeviceGraphMemTrim(device) == 0
    for name, attribute in OF_GRAPHS.items():
        value = ctypes.c_uint64()
        status = driver.cuDeviceGetGraphMemAttribute(device, attribute, ctypes.byref(value))
        assert status == 0, f"cuDeviceGetGraphMemAttribute returned CUDA status {status}"
        held[name] = value.value
    return held


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 512, 2048])
def test_captures_keep_no_memory(rows, prepare):
    import cupy

    ours, x = layer(prepare=prepare), values(rows, K, seed=3)
    pool = cupy.get_default_memory_pool()

    def once():
        graph, result = captured(lambda: ours(x))
        graph.replay()
        torch.cuda.synchronize()
        del graph, result
        gc.collect()
        torch.cuda.empty_cache()
        pool.free_all_blocks()  # those of the plain calls, each time of another stream

    once()
    kept, before = len(capture._captured), own_memory(pool)
    for _ in range(5):
        once()
    assert len(capture._captured) == kept
    assert own_memory(pool) == before


def test_the_mode_of_captures_is_restored():
    """Others stay forbidden to allocate."""
    ours, x = layer(), values(2, K, seed=3)
    with torch.no_grad():
        ours(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        ours(x)
        mode = ctypes.c_int(capture.RELAXED)
        capture._exchange(mode)
        former = mode.value
        capture._exchange(mode)
    assert former == 0  # CU_STREAM_CAPTURE_MODE_GLOBAL
