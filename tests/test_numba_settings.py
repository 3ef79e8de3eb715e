# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""numba's environment variables: they work, or are refused in one line."""

import os
import subprocess
import sys

import pytest

from command_line import run
from fp4kit.cpu.kernel_cache import CACHE_VARIABLE

#: float16 there and back: its conversions are instructions of some processors only.
SCRIPT = """
import numpy as np
import fp4kit
x = np.linspace(-70, 70, 64 * 48).reshape(64, 48).astype(np.float16)
x.reshape(-1)[:8] = [0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504, -65504, 1e-5]
for backend in ("cpu", "reference"):
    q = fp4kit.quantize(x, backend=backend)
    y = fp4kit.dequantize(q, "float16", backend=backend)
    print(q.packed.tobytes().hex(), q.block_scale.tobytes().hex(), y.tobytes().hex())
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"NUMBA_CPU_NAME": "generic"},
        {"NUMBA_CPU_FEATURES": "", "NUMBA_CPU_NAME": "nehalem"},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()),
)
def test_another_processor_gives_the_same_bytes(tmp_path, settings):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | settings | {CACHE_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    cpu, reference = done.stdout.splitlines()
    assert cpu == reference


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("NUMBA_DISABLE_JIT", "1", "NUMBA_DISABLE_JIT=1 turns numba off"),
        ("NUMBA_CPU_FEATURES", "avx2", "'avx2': every feature starts with + or -"),
        ("NUMBA_CPU_FEATURES", "+avx2,garbage", "'garbage': every feature starts with + or -"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, model_file, name, value, reason):
    result = run("quantize", model_file, "-o", tmp_path / "out.safetensors", **{name: value})
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1
    assert reason in result.stderr.decode()
