# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Plugin of conftest.py: whole CUDA kernels run on the host, see host_gpu.py."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session")
def host_gpu() -> Any:
    """The module of that name."""
    return importlib.import_module("host_gpu")


@pytest.fixture(scope="module")
def kernels(host_gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels built for the host so far."""
    if host_gpu.COMPILER is None:
        pytest.skip("no g++ to build the kernels with")
    return host_gpu.Kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def on_host(host_gpu: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The CUDA backend with its kernels run on the host, and what makes arrays for it."""
    from fp4kit.cuda import (
        backend as cuda,
    )
    from fp4kit.cuda import (
        measured as cuda_measured,
    )
    from fp4kit.cuda import (
        ready as cuda_ready,
    )
    from fp4kit.cuda import (
        run as cuda_run,
    )

    monkeypatch.setitem(sys.modules, "cupy", host_gpu.fake_cupy())
    monkeypatch.setattr(cuda_run, "launch", kernels.launch)
    monkeypatch.setattr(cuda_ready, "_shared_memory", lambda _: host_gpu.SHARED_MEMORY)
    # Few: each takes several tiles, and meets several members.
    monkeypatch.setattr(cuda_ready, "resident_blocks", lambda *_: 3)
    monkeypatch.setattr(cuda_ready, "multiprocessors", lambda _: 1)
    # Neither from nor into the cache of what a device has loaded.
    for module in (cuda_ready, cuda_measured):
        monkeypatch.setattr(module, "Ready", kernels.ready)
    monkeypatch.setattr(cuda_measured, "_ready", cuda_measured._ready.__wrapped__)
    for name in (
        *("quantize", "quantize_tiles", "quantize_residual", "dequantize_residual"),
        *("activate", "column_sums", "quantize_activated", "quantize_sums"),
        "quantize_activated_tiles",
    ):
        monkeypatch.setattr(cuda_ready, name, getattr(cuda_ready, name).__wrapped__)
    kernels.launched.clear()
    return SimpleNamespace(
        engine=cuda.CudaBackend(),
        empty=host_gpu.empty,
        put=host_gpu.put,
        launched=kernels.launched,
    )


@pytest.fixture(params=["wide", "narrow"])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """After `on_host`: whether the device has the shared memory of wide tiles."""
    from fp4kit.cuda import ready as cuda_ready

    if request.param == "narrow":
        monkeypatch.setattr(cuda_ready, "has_shared_memory", lambda *_: False)
    return str(request.param)


@pytest.fixture(params=["FewMembers<951>", "ManyMembers"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How kernels get the tables of few members: as a parameter, or as those of many."""
    from fp4kit.cuda import member_tables as cuda_member_tables
    from fp4kit.cuda import members as cuda_members

    def forget() -> None:
        for module in (cuda_member_tables, cuda_members):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()

    words = re.findall(r"\d+", request.param)
    monkeypatch.setattr(cuda_member_tables, "FEW_WORDS", tuple(map(int, words)))
    forget()
    yield str(request.param)
    forget()
