# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`FP4KIT_TRACE=1` says what was chosen for each call, and why; without it nothing is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from fp4kit.cuda.choices import REASONS

CALLS = """
import numpy as np, fp4kit
x = np.ones((2, 32), np.float32)
for _ in range(2):
    q = fp4kit.quantize(x, "mxfp4", backend="reference")
fp4kit.dequantize(q)
"""


def lines(variable):
    env = {**os.environ, "FP4KIT_TRACE": variable}
    command = [sys.executable, "-c", CALLS]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return done.stderr.splitlines()


def test_every_call_is_told():
    told = [line for line in lines("1") if "backend" in line]
    quantized = [line for line in told if line.startswith("fp4kit: quantize float32 arrays on cpu")]
    assert len(quantized) >= 2
    assert all("backend reference (named by the caller)" in line for line in quantized)
    assert "dequantize" in told[-1]
    assert told[-1].endswith("backend cpu (the default of the device)")


def test_nothing_is_told_without_the_variable():
    assert lines("0") == lines("") == []


def test_reasons_are_of_kernels_that_exist():
    """And every kernel of an operation that has several has one."""
    folder = Path(str(files("fp4kit.kernels_cu")))
    text = "".join(path.read_text("utf-8") for path in folder.rglob("*.cu"))
    kernels = set(re.findall(r"\b(\w+)_kernel\(", text))
    assert set(REASONS) <= kernels
    operations = ("quantize_", "dequantize_", "grouped_quantize_")
    left = {name for name in kernels - set(REASONS) if name.startswith(operations)}
    assert left == set()
