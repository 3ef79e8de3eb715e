# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a launch hands to the driver, which is the test's own."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fp4kit.cuda import run
from fp4kit.cuda.compile import Instance


@pytest.fixture
def launched(monkeypatch):
    """(function, grid, block, shared memory, stream, parameters) of each launch."""
    calls = []

    def launch(function, *given):
        *shape, shared, stream, where, extra = given
        addresses = (ctypes.c_void_p * 4).from_address(where)
        words = [ctypes.c_int64.from_address(address).value for address in addresses[:3]]
        by_value = ctypes.string_at(addresses[3], 24)
        calls.append((function, *shape, shared, stream, words, by_value, extra))

    cuda = SimpleNamespace(
        driver=SimpleNamespace(launchKernel=launch),
        runtime=SimpleNamespace(getDevice=lambda: 1, setDevice=lambda number: calls.append(number)),
        get_current_stream=lambda: SimpleNamespace(ptr=7),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(run.cuda_module, "function", lambda *_: SimpleNamespace(ptr=5))
    return calls


def test_arguments(launched):
    array = SimpleNamespace(data=SimpleNamespace(ptr=1 << 47))
    words = np.arange(3, dtype=np.int64)
    parameter = words.view(np.dtype((np.void, words.nbytes)))
    run.launch(Instance("file", "kernel"), (9,), (array, -3, np.int32(4), parameter), 64)
    device, call = launched
    assert device == 1
    shape = (9, 1, 1, run.BLOCK[0], 1, 1)
    assert call == (5, *shape, 64, 7, [1 << 47, -3, 4], words.tobytes(), 0)
