# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Plugin of conftest.py: the command line as tests call it, and files to call it with."""

import json
import os
import re
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from fp4kit.cli.main import cli

WEIGHTS = ("layers.0.q_proj.weight", "layers.0.up_proj.weight")


def invoke(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def succeed(*args):
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result


def fail(*args, code=1):
    """A failed run: nothing on stdout, one line on stderr (usage errors add how to get help)."""
    result = invoke(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert "Wrote" not in result.output
    assert result.stdout == ""
    if code == 1:
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
    return result.stderr


def run(*args, cwd=None, **env):
    """`fp4kit` in a process of its own, with no terminal anywhere."""
    return subprocess.run(
        [sys.executable, "-m", "fp4kit", *map(str, args)],
        cwd=cwd,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
        check=False,
    )


def run_script(script, *args):
    """The entry point, after `script` has replaced something."""
    code = f"import sys, fp4kit.io.inspect, fp4kit.io.quantize\n{script}\n"
    code += f"sys.argv = {['fp4kit', *map(str, args)]!r}\nfrom fp4kit.cli.entry import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


def read_terminal(parent):
    """All that is written to the other side of a pseudo-terminal, which is closed then."""
    text = b""
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(parent)
    return text


def load(path):
    """Every tensor of a safetensors file as (dtype name, shape, bytes), and the metadata."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = raw[8 + length :]
    tensors = {
        name: (entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    return tensors, metadata


def table_row(text, name):
    """Cells of the row of a table that starts with `name`."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return re.split(r"\s{2,}", line.strip())


@pytest.fixture
def model_tensors():
    rng = np.random.default_rng(7)
    return {
        WEIGHTS[0]: rng.standard_t(5, (48, 64)).astype(ml_dtypes.bfloat16),
        WEIGHTS[1]: rng.standard_t(5, (32, 128)).astype(ml_dtypes.bfloat16),
        "layers.0.norm.weight": np.ones(64, np.float32),
        "layers.0.odd.weight": rng.normal(size=(4, 20)).astype(np.float32),
        "steps": np.arange(8, dtype=np.int64).reshape(2, 4),
    }


@pytest.fixture
def model_file(tmp_path, model_tensors):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(model_tensors, path, {"format": "pt"})
    return path


@pytest.fixture
def quantized_file(model_file, tmp_path):
    path = tmp_path / "q.safetensors"
    succeed("quantize", model_file, "-o", path, "--device", "cpu")
    return path
