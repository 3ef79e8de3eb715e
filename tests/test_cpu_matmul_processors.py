# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of the CPU backend have the same bytes whatever processor kernels are compiled for."""

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from fp4kit.formats import ALL_FORMATS

HERE = Path(__file__).parent
#: What numba is told of the processor. A generic one has no fused multiplication and no float16.
PROCESSORS = {
    "avx2": ("haswell", "+avx,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2"),
    "generic": ("generic", ""),
}


@cache
def hashes(names, *changes):
    """What tests/matmul_operands.py prints under changes of the environment."""
    result = subprocess.run(
        [sys.executable, str(HERE / "matmul_operands.py"), *names],
        env=os.environ | dict(changes),
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_bytes_are_the_same_on_other_processors(processor):
    names = ("nvfp4", "mxfp4", "mxfp8")
    name, features = PROCESSORS[processor]
    other = hashes(names, ("NUMBA_CPU_NAME", name), ("NUMBA_CPU_FEATURES", features))
    assert other == hashes(names)
    assert len(set(other)) > len(other) // 2


@pytest.mark.parametrize("threads", ["1", "2", "3"])
def test_bytes_are_the_same_in_every_process(threads):
    names = tuple(ALL_FORMATS)
    assert hashes(names, ("FP4KIT_NUM_THREADS", threads)) == hashes(names)
