# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Plugin of conftest.py: the golden vectors, and the check of a case against its arrays."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compare_bits import check_bits

GOLDEN = Path(__file__).parent / "golden"


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
    "te_ref_gemm",
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

    def run(case: GoldenCase, function: Any, backend: Any) -> None:
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
