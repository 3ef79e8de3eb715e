# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What `import fp4kit` imports, proved in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

#: Everything optional, heavy, or belonging to the command line.
HEAVY = ("numba", "llvmlite", "cupy", "torch", "jax", "click", "rich", "safetensors", "scipy")


def modules_after(code: str) -> set[str]:
    """Top-level modules in `sys.modules` of a fresh interpreter that ran `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.returncode == 0
    return {name.split(".")[0] for name in json.loads(result.stdout.splitlines()[-1])}


def test_import_is_light():
    assert modules_after("import fp4kit") & set(HEAVY) == set()


def test_every_public_name_is_there_without_heavy_modules():
    code = "import fp4kit\nfor name in fp4kit.__all__: getattr(fp4kit, name)"
    assert modules_after(code) & set(HEAVY) == set()


def test_reference_backend_needs_only_numpy():
    code = (
        "import fp4kit, numpy as np\n"
        "q = fp4kit.quantize(np.ones((2, 32), np.float32), backend='reference')\n"
        "y = fp4kit.dequantize(q, backend='reference')\n"
        "assert y.sum() == 64\n"
        "fp4kit.error_stats(y, q, backend='reference')"
    )
    loaded = modules_after(code)
    assert loaded & set(HEAVY) == set()
    assert "ml_dtypes" not in loaded


@pytest.mark.parametrize("absent", ["numba", "cupy"])
def test_a_missing_optional_package_is_a_reason_not_a_crash(absent):
    name = {"numba": "cpu", "cupy": "cuda"}[absent]
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda n, *a: None if n.split(".")[0] == {absent!r} else find_spec(n, *a)
import fp4kit
status = {{entry.name: entry for entry in fp4kit.backend_status()}}
assert not status[{name!r}].available
assert {absent!r} in status[{name!r}].reason.lower(), status[{name!r}].reason
assert status["reference"].available
"""
    assert absent not in modules_after(code)


def test_quantizing_a_numpy_array_does_not_import_other_frameworks():
    code = "import fp4kit, numpy as np\nfp4kit.quantize(np.ones((1, 16), np.float32))"
    loaded = modules_after(code)
    assert "numba" in loaded
    assert loaded & {"cupy", "torch", "jax", "click", "rich"} == set()
