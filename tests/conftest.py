# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: the golden vectors, the backends under test, and bit-exact comparison."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.backends import BACKEND_NAMES, get_backend

# The same examples in every run, so that a change is judged by what it changed; others are looked
# for with --hypothesis-profile=search.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("search", derandomize=False, print_blob=True)
hypothesis.settings.load_profile("same")

GOLDEN = Path(__file__).parent / "golden"
NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


# ------------------------------------------------------------------------------------------------
# Golden vectors
# ------------------------------------------------------------------------------------------------


@functools.cache
def golden_manifest() -> dict[str, Any]:
    return json.loads((GOLDEN / "manifest.json").read_text("utf-8"))


@functools.cache
def golden_file(name: str) -> Any:
    return np.load(GOLDEN / name, allow_pickle=False)


#: The files that test_golden_variants.py checks, the others being test_golden.py's.
GOLDEN_VARIANT_FILES = (
    "te_ref_2d",
    "te_ref_rht",
    "te_ref_rowscaled",
    "te_ref_4over6",
    "te_model_variants",
    "fouroversix",
    "flashinfer_4over6",
    "arcquant_model",
    "arcquant_fake",
)


@dataclasses.dataclass(frozen=True)
class GoldenCase:
    """One case of the manifest."""

    entry: dict[str, Any]

    @property
    def file(self) -> str:
        return self.entry["file"].removesuffix(".npz")

    @property
    def name(self) -> str:
        return f"{self.file}-{self.entry['case']}"

    @property
    def params(self) -> dict[str, Any]:
        return self.entry["params"]

    @property
    def function(self) -> str:
        return self.entry["function"]

    @property
    def exact(self) -> tuple[str, ...]:
        return tuple(self.entry["exact"])

    @property
    def kind(self) -> str:
        """What the input is made of ('' for decoding cases)."""
        return self.entry.get("input", {}).get("kind", "")

    def __contains__(self, array: str) -> bool:
        return array in self.entry["arrays"]

    def array(self, name: str) -> np.ndarray:
        """A stored array as it is: bfloat16 as uint16, FP8 and E8M0 as uint8."""
        return golden_file(self.entry["file"])[self.entry["arrays"][name]]

    def input(self) -> np.ndarray:
        """The case's input in its logical dtype."""
        described = self.entry["input"]
        stored = golden_file(self.entry["file"])[described["key"]]
        return stored.view(ml_dtypes.bfloat16) if described["dtype"] == "bf16" else stored


@functools.cache
def golden_cases() -> tuple[GoldenCase, ...]:
    return tuple(GoldenCase(entry) for entry in golden_manifest()["cases"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that ask for `golden_case` get every case, or those that their mark chooses."""
    if "golden_case" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("golden")
        wanted = None if mark is None else set(mark.args)
        without = mark.kwargs.items() if mark is not None else ()
        cases = [
            case
            for case in golden_cases()
            if (wanted is None or case.file in wanted)
            and not any(case.params.get(name) == value for name, value in without)
        ]
        assert cases, f"no golden case in {wanted}"
        metafunc.parametrize("golden_case", cases, ids=lambda case: case.name)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "golden(*files, **without): golden files `golden_case` runs over, less the cases whose "
        "params have one of the values in `without`",
    )


@pytest.fixture(scope="session", name="golden_manifest")
def golden_manifest_fixture() -> dict[str, Any]:
    return golden_manifest()


@pytest.fixture(scope="session", name="golden_cases")
def golden_cases_fixture() -> tuple[GoldenCase, ...]:
    return golden_cases()


@pytest.fixture(scope="session")
def golden_variant_files() -> tuple[str, ...]:
    return GOLDEN_VARIANT_FILES


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
        if isinstance(value, fp4kit.Directions):
            return fp4kit.Directions(*map(self.get, value))
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


# ------------------------------------------------------------------------------------------------
# Comparison
# ------------------------------------------------------------------------------------------------


def _bits(array: np.ndarray) -> np.ndarray:
    """Bit patterns with all NaN made alike."""
    array = np.ascontiguousarray(array)
    bits = array.view(UNSIGNED[array.dtype.itemsize])
    if array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16:
        bits = np.where(np.isnan(array), np.array(-1).astype(bits.dtype), bits)
    return bits


def describe_difference(actual: np.ndarray, expected: np.ndarray, block: int = 16) -> str:
    """The number of differing entries and the first differing block of both."""
    got, want = _bits(actual).ravel(), _bits(expected).ravel()
    where = np.flatnonzero(got != want)
    first = int(where[0])
    start = first // block * block
    index = np.unravel_index(first, np.shape(expected))
    rows = [
        f"{where.size} of {got.size} differ, the first at {tuple(int(i) for i in index)}",
        f"  got  {np.ravel(actual)[start : start + block]}",
        f"  want {np.ravel(expected)[start : start + block]}",
        f"  got  {' '.join(f'{v:x}' for v in got[start : start + block])}",
        f"  want {' '.join(f'{v:x}' for v in want[start : start + block])}",
    ]
    return "\n".join(rows)


def check_bits(actual: Any, expected: Any, what: str = "array", where: Any = None) -> None:
    """Fails unless both arrays hold the same bits; NaN payloads count as equal.

    Args:
        actual: NumPy array.
        expected: NumPy array of the same shape; bfloat16 may be given as uint16 bits on one side.
        what: name for the message.
        where: optional mask of the entries to compare.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    for one, other in ((actual, expected), (expected, actual)):
        if one.dtype == ml_dtypes.bfloat16 and other.dtype == np.uint16:
            expected = expected.view(ml_dtypes.bfloat16)
            actual = actual.view(ml_dtypes.bfloat16)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    if where is not None:
        actual = np.where(where, actual, expected)
    if not np.array_equal(_bits(actual), _bits(expected)):
        pytest.fail(f"{what}: {describe_difference(actual, expected)}", pytrace=True)


def check_tensors(actual: fp4kit.QuantizedTensor, expected: fp4kit.QuantizedTensor) -> None:
    """Fails unless two quantized tensors are equal in every byte and every field."""
    for field in dataclasses.fields(expected):
        got, want = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(want, np.ndarray):
            check_bits(got, want, field.name)
        else:
            assert got == want, field.name


def golden_entries(table: dict[tuple[str, str, str], str], case: Any) -> dict[str, str]:
    """{array or *: reason} of the entries of a table that match a case."""
    text = f"{case.entry['case']} {case.function} {json.dumps(case.params)} kind={case.kind}"
    return {
        array: reason
        for (file, part, array), reason in table.items()
        if file == case.file and part in text
    }


class GoldenCheck:
    """Compares results with the arrays of a case and remembers which."""

    def __init__(self, case: GoldenCase, excluded: dict[str, str], partial: dict[str, str]) -> None:
        self.case = case
        self.assert_bits = check_bits
        self.compared: set[str] = set()
        self.excluded = excluded
        self.partial = partial

    def __call__(self, name: str, actual: Any, where: Any = None) -> None:
        """Compares `actual` with array `name`, on the entries of mask `where` if PARTIAL allows."""
        expected = self.case.array(name)
        actual = np.asarray(actual).reshape(expected.shape)
        if where is not None:
            where = np.asarray(where).reshape(expected.shape)
            assert name in self.partial or where.all(), f"PARTIAL has no entry for {name}"
        self.assert_bits(actual, expected, f"{self.case.name} {name}", where)
        self.compared.add(name)

    def dequantized(self, q: Any, backend: Any, prefix: str = "dequant_") -> None:
        """Compares what `q` decodes to with every dequantized array of the case."""
        for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
            if prefix + short in self.case.exact:
                self(prefix + short, backend.dequantize(q, dtype))


@pytest.fixture(name="golden_check")
def golden_check_fixture(request: pytest.FixtureRequest) -> Any:
    """Runs a check of a case; the test's module has the tables EXCLUDED and PARTIAL."""

    def run(case: GoldenCase, function: Any, backend: BackendUnderTest) -> None:
        excluded, partial = (
            golden_entries(table, case)
            for table in (request.module.EXCLUDED, request.module.PARTIAL)
        )
        check = GoldenCheck(case, excluded, partial)
        function(case, backend, check)
        wanted = set(case.exact)
        left_out = wanted if "*" in excluded else set(excluded)
        assert check.compared <= wanted | set(case.entry["arrays"])
        assert not check.compared & left_out
        assert wanted - check.compared == left_out & wanted, "arrays neither compared nor excluded"

    return run


@pytest.fixture
def golden_tables_are_fresh(request: pytest.FixtureRequest) -> Any:
    """Fails if an entry of the module's tables matches nothing; gives (arrays, left out)."""

    def check(files: Any) -> tuple[int, int]:
        cases = [case for case in golden_cases() if case.file in files]
        for table in (request.module.EXCLUDED, request.module.PARTIAL):
            for file, part, array in table:
                one = {(file, part, array): ""}
                matching = [case for case in cases if golden_entries(one, case)]
                assert matching, (file, part)
                assert array == "*" or any(array in case.exact for case in matching), (file, array)
        left_out = 0
        for case in cases:
            excluded = golden_entries(request.module.EXCLUDED, case)
            left_out += len(case.exact) if "*" in excluded else len(excluded)
        return sum(len(case.exact) for case in cases), left_out

    return check


@pytest.fixture(scope="session")
def assert_bits() -> Any:
    return check_bits


@pytest.fixture(scope="session")
def assert_tensors() -> Any:
    return check_tensors


@pytest.fixture(scope="session")
def dtypes() -> dict[str, np.dtype]:
    """NumPy dtype of each element type the library takes."""
    return NUMPY_DTYPES


# ------------------------------------------------------------------------------------------------
# Helpers of several test modules, which cannot import each other
# ------------------------------------------------------------------------------------------------


def _load(name: str) -> Any:
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def stored() -> Any:
    """Stored tensors in memory."""
    return _load("stored_tensors")


@pytest.fixture(scope="session")
def checkpoints() -> Any:
    """Small model directories."""
    return _load("checkpoints")


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of small model directories need not survive a power cut."""
    if "checkpoints" in request.fixturenames:
        monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of host memory behind `cuda` and `cuda:N`, as many as one likes."""
    _load("fake_gpu").install(monkeypatch)


@pytest.fixture(scope="session")
def host_gpu() -> Any:
    """Kernels on the host."""
    return _load("host_gpu")


@pytest.fixture(scope="module")
def kernels(host_gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels built for the host so far."""
    if host_gpu.COMPILER is None:
        pytest.skip("no g++ to build the kernels with")
    return host_gpu.Kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def on_host(host_gpu: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The CUDA backend with its kernels run on the host, and what makes arrays for it."""
    from fp4kit.backends import cuda, cuda_measured, cuda_ready, cuda_run

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
    for name in ("quantize", "quantize_residual", "dequantize_residual"):
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
    from fp4kit.backends import cuda_ready

    if request.param == "narrow":
        monkeypatch.setattr(cuda_ready, "has_shared_memory", lambda *_: False)
    return str(request.param)


@pytest.fixture(params=["FewMembers<951>", "ManyMembers"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How kernels get the tables of few members: as a parameter, or as those of many."""
    from fp4kit.backends import cuda_member_tables, cuda_members

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


@pytest.fixture
def real_gpu() -> None:
    """A GPU, or a skip with the reason."""
    require_backend("cuda")
