# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: the backends under test, modules of helpers; and the plugins that hold more."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import BACKEND_NAMES, get_backend
from fp4kit.io.stream import chunks
from sample_arrays import NUMPY

# Their assertions, too, say what they compared.
pytest.register_assert_rewrite(
    "golden_elements",
    "golden_engines",
    "golden_quantizers",
    "html_pages",
    "parity_cases",
)

pytest_plugins = (
    "awq_checkpoints",
    "command_line",
    "compare_bits",
    "fleet_models",
    "golden_vectors",
    "kernels_on_host",
    "survey_models",
)

# The same examples in every run, so that a change is judged by what it changed; others are looked
# for with --hypothesis-profile=search.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("search", derandomize=False, print_blob=True)
hypothesis.settings.load_profile("same")


# ------------------------------------------------------------------------------------------------
# Backends
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BackendUnderTest:
    """A backend and the way to its device: NumPy arrays in, NumPy arrays out."""

    name: str

    @property
    def on_gpu(self) -> bool:
        return self.name == "cuda"

    def put(self, value: Any) -> Any:
        """Arrays and quantized tensors go to the backend's device; anything else passes."""
        if isinstance(value, (fp4kit.QuantizedTensor, fp4kit.ResidualTensor)):
            return self._map_tensor(value, self.put)
        if isinstance(value, tuple):
            moved = map(self.put, value)
            return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
        if not isinstance(value, np.ndarray) or not self.on_gpu:
            return value
        import cupy

        if value.dtype == ml_dtypes.bfloat16:
            return cupy.asarray(value.view(np.uint16)).view(ml_dtypes.bfloat16)
        return cupy.asarray(value)

    def get(self, value: Any) -> Any:
        """The inverse of `put`."""
        if isinstance(value, (fp4kit.QuantizedTensor, fp4kit.ResidualTensor)):
            return self._map_tensor(value, self.get)
        if isinstance(value, fp4kit.DirectionPair):
            return fp4kit.DirectionPair(*map(self.get, value))
        if not self.on_gpu or type(value).__module__.split(".")[0] != "cupy":
            return value
        import cupy

        if value.dtype == ml_dtypes.bfloat16:
            return cupy.asnumpy(value.view(np.uint16)).view(ml_dtypes.bfloat16)
        return cupy.asnumpy(value)

    @staticmethod
    def _map_tensor(q: Any, move: Any) -> Any:
        names = ("packed", "block_scale", "amax", "decode_scale", "encode_scale", "order")
        moved = {name: move(getattr(q, name)) for name in names if hasattr(q, name)}
        return dataclasses.replace(q, **moved)

    def call(self, function: Any, *args: Any, **options: Any) -> Any:
        """Runs a public function of fp4kit on this backend."""
        args = tuple(self.put(value) for value in args)
        options = {name: self.put(value) for name, value in options.items()}
        return self.get(function(*args, backend=self.name, **options))

    def quantize(self, x: np.ndarray, *args: Any, **options: Any) -> fp4kit.QuantizedTensor:
        return self.call(fp4kit.quantize, x, *args, **options)

    def dequantize(self, q: fp4kit.QuantizedTensor, dtype: str = "float32", **options: Any) -> Any:
        return self.call(fp4kit.dequantize, q, dtype, **options)


def require_backend(name: str) -> BackendUnderTest:
    """The backend, or a skip with its reason. Only a missing GPU is a reason."""
    reason = get_backend(name).unavailable_reason()
    if reason is not None and name == "cuda":
        pytest.skip(f"cuda backend: {reason}")
    assert reason is None, f"{name} must run everywhere, but: {reason}"
    return BackendUnderTest(name)


def backend_params(*names: str) -> list[Any]:
    gpu = {"cuda": (pytest.mark.gpu,)}
    return [pytest.param(name, marks=gpu.get(name, ())) for name in names]


@pytest.fixture(scope="session", params=backend_params(*reversed(BACKEND_NAMES)))
def backend(request: pytest.FixtureRequest) -> BackendUnderTest:
    """Each backend in turn; the CUDA one skips without a GPU."""
    return require_backend(request.param)


@pytest.fixture(scope="session", params=backend_params("cpu", "cuda"))
def fast_backend(request: pytest.FixtureRequest) -> BackendUnderTest:
    """Each backend that has to equal the reference."""
    return require_backend(request.param)


@pytest.fixture(scope="session")
def reference() -> BackendUnderTest:
    return BackendUnderTest("reference")


@pytest.fixture(scope="session")
def dtypes() -> dict[str, np.dtype]:
    """NumPy dtype of each element type the library takes."""
    return NUMPY


# ------------------------------------------------------------------------------------------------
# Helpers of several test modules
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stored() -> Any:
    """Stored tensors in memory."""
    return importlib.import_module("stored_tensors")


@pytest.fixture(scope="session")
def checkpoints() -> Any:
    """Small model directories."""
    return importlib.import_module("checkpoints")


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of small model directories need not survive a power cut."""
    if "checkpoints" in request.fixturenames:
        monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts everything above a few kilobytes into chunks."""
    monkeypatch.setattr(chunks, "WHOLE_BYTES", 8 << 10)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 << 10)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of host memory behind `cuda` and `cuda:N`, as many as one likes."""
    importlib.import_module("fake_gpu").install(monkeypatch)


@pytest.fixture(scope="session")
def real_gpu() -> None:
    """A GPU, or a skip with the reason."""
    require_backend("cuda")


@pytest.fixture(scope="session")
def cupy(real_gpu: None) -> Any:
    """CuPy and a GPU for it."""
    return importlib.import_module("cupy")
