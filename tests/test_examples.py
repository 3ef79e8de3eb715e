# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/ run, in processes of their own, and print what they are to show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the source checkout")


def run(name, *args, folder):
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *map(str, args)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" or result.stderr.startswith("Compiling kernels")
    return result.stdout.splitlines()


def test_check_file(tmp_path):
    source = tmp_path / "x.npz"
    weight = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    np.savez(source, weight=weight, bias=weight[0])
    title, row, sizes = run("check_file.py", source, folder=tmp_path)
    assert title.startswith("SQNR dB: Scheme('nvfp4'), Scheme('nvfp4', scale_search='sweep')")
    name, *errors = row.split()
    assert name == "weight"
    nvfp4, sweep, mxfp4, mxfp8 = map(float, errors)
    assert mxfp4 < nvfp4 < sweep < mxfp8
    assert sizes == "smaller by 7.10 7.10 7.53 3.88"


def test_convert_state_dict(tmp_path):
    lines = run("convert_state_dict.py", tmp_path / "out", folder=tmp_path)
    assert lines[0] == "faults: []"
    assert "model.layers.0.self_attn.q_proj.weight QuantizedTensor (64, 64)" in lines
    assert "model.norm.weight ndarray (64,)" in lines
    assert (tmp_path / "out" / "config.json").is_file()


def test_matrix_product(tmp_path):
    equal, error = run("matrix_product.py", folder=tmp_path)
    assert equal == "equals the product of decoded operands: True"
    assert 16 < float(re.search(r"[\d.]+", error)[0]) < 19


def test_cuda_graph_without_a_gpu(tmp_path):
    first, *rest = run("cuda_graph.py", folder=tmp_path)
    if not first.startswith("skipped: no GPU here: "):
        assert first.endswith("microseconds a replay")
        assert rest == ["SQNR 20.4 dB"]


def test_the_list_of_examples_is_complete():
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text("utf-8")))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")}
