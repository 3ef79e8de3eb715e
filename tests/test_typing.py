# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What type checkers say to users' scripts: right use passes, every typo is found.

The scripts in tests/typing end each line that has to be refused with `# wrong`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "tests" / "typing").glob("*.py"))
WRONG = {
    (script.name, number)
    for script in SCRIPTS
    for number, line in enumerate(script.read_text().splitlines(), 1)
    if line.endswith("# wrong")
}


def run(*command):
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600
    )
    return done.stdout + done.stderr


def test_there_are_scripts():
    assert len(SCRIPTS) == 10
    assert {name for name, _ in WRONG} == {script.name for script in SCRIPTS}


def test_mypy(tmp_path):
    pytest.importorskip("mypy")
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nignore_missing_imports = True\nfollow_imports = silent\n")
    output = run(
        *(sys.executable, "-m", "mypy", "--config-file", settings, "--no-error-summary"),
        *("--cache-dir", ROOT / ".mypy_cache" / "users", *SCRIPTS),
    )
    found = re.findall(r"^(?:.*[\\/])?(\w+\.py):(\d+): error", output, re.MULTILINE)
    assert {(name, int(line)) for name, line in found} == WRONG, output


@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright():
    output = run(
        *(sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable),
        *SCRIPTS,
    )
    found = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in json.loads(output[output.index("{") : output.rindex("}") + 1])[
            "generalDiagnostics"
        ]
        if one["severity"] == "error"
    }
    assert found == WRONG, output
