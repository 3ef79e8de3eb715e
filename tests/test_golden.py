# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every golden case on every backend, through the public functions, byte for byte.

A check compares each array that the manifest calls exact. An array may be compared on a part of
its entries only if `PARTIAL` says which and why, and left out only if `EXCLUDED` does; the test
fails if an array is neither compared nor excluded, and if a table entry matches nothing. Checks and
tables are in golden_quantizers.py, golden_engines.py and golden_elements.py.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import golden_elements
import golden_engines
import golden_quantizers

MODULES = (golden_quantizers, golden_engines, golden_elements)
EXCLUDED = {key: reason for module in MODULES for key, reason in module.EXCLUDED.items()}
PARTIAL = {key: reason for module in MODULES for key, reason in module.PARTIAL.items()}
#: {golden file: its check}.
CHECKS = {
    name.removeprefix("check_"): function
    for module in MODULES
    for name, function in vars(module).items()
    if name.startswith("check_")
    and Path(__file__).parent.joinpath("golden", name.removeprefix("check_") + ".npz").exists()
}


@pytest.mark.golden(*CHECKS)
def test_case(golden_case, backend, golden_check):
    golden_check(golden_case, CHECKS[golden_case.file], backend)


def test_no_table_entry_is_stale_and_few_arrays_are_left_out(golden_tables_are_fresh):
    total, left_out = golden_tables_are_fresh(set(CHECKS))
    assert total > 1800
    assert left_out / total < 0.05


def test_no_golden_file_is_forgotten(golden_manifest, golden_cases, golden_variant_files):
    stored = {path.stem for path in (Path(__file__).parent / "golden").glob("*.npz")}
    assert stored == {case.file for case in golden_cases}
    assert stored == set(CHECKS) | set(golden_variant_files)
    assert stored == {name.removesuffix(".npz") for name in golden_manifest["files"]}
    for name, described in golden_manifest["files"].items():
        cases = [case for case in golden_cases if case.entry["file"] == name]
        assert len(cases) == described["n_cases"], name


def test_golden_files_are_unchanged(golden_manifest):
    folder = Path(__file__).parent / "golden"
    for name, described in golden_manifest["files"].items():
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert digest == described["sha256"], name


@pytest.mark.golden("te_model_dequant")
def test_corrections_are_where_the_tables_say(golden_case):
    corrected = golden_case.entry["case"] in ("case010", "case011", "case012", "case013")
    assert any(text == golden_case.entry["case"] for _, text, _ in PARTIAL) == corrected
