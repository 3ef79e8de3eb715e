# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which backend takes an array, and which never does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import fp4kit
from fp4kit import BackendUnavailableError
from fp4kit.api.backends import get_backend
from sample_arrays import F32


def test_backend_status():
    status = fp4kit.backend_status()
    assert [entry.name for entry in status] == ["cuda", "cpu", "reference"]
    for entry in status:
        assert entry.available == (entry.reason is None)
        assert bool(entry.details) == entry.available
        assert all(isinstance(value, str) for value in entry.details.values())
        with pytest.raises(dataclasses.FrozenInstanceError):
            entry.name = "other"
    available = {entry.name: entry.available for entry in status}
    assert available["reference"]
    assert available["cpu"]


def test_default_backend_of_host_arrays_is_cpu(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the cpu backend was asked")

    monkeypatch.setattr(type(get_backend("cpu")), "quantize", refuse)
    with pytest.raises(AssertionError, match="cpu backend was asked"):
        fp4kit.quantize(np.ones((1, 16), F32))


def test_cuda_never_takes_host_arrays():
    x = np.ones((1, 16), F32)
    q = fp4kit.quantize(x, backend="reference")
    for function in (
        lambda: fp4kit.quantize(x, backend="cuda"),
        lambda: fp4kit.quantize_dequantize(x, backend="cuda"),
        lambda: fp4kit.dequantize(q, backend="cuda"),
        lambda: fp4kit.amax(x, backend="cuda"),
        lambda: fp4kit.swizzle(q.block_scale, backend="cuda"),
        lambda: fp4kit.unswizzle(np.zeros((128, 4), np.uint8), (1, 1), backend="cuda"),
        lambda: fp4kit.error_stats(x, q, backend="cuda"),
    ):
        with pytest.raises(BackendUnavailableError) as caught:
            function()
        assert set(caught.value.reasons) == {"cuda"}
        assert caught.value.reasons["cuda"] in str(caught.value)
        assert len(caught.value.reasons["cuda"]) > 10


def test_unavailable_backend_error_names_the_request():
    with pytest.raises(BackendUnavailableError) as caught:
        fp4kit.quantize(np.ones((1, 16), F32), recipe="comfy", backend="cuda")
    message = str(caught.value)
    assert "no backend can quantize float32 arrays on cpu as nvfp4 (recipe='comfy')" in message
    assert "cuda: " in message


@pytest.mark.gpu
def test_host_backends_never_take_device_arrays():
    reason = get_backend("cuda").unavailable_reason()
    if reason is not None:
        pytest.skip(f"cuda backend: {reason}")
    import cupy

    x = cupy.ones((1, 16), F32)
    for name in ("cpu", "reference"):
        with pytest.raises(BackendUnavailableError, match="copy the array to the host first"):
            fp4kit.quantize(x, backend=name)
