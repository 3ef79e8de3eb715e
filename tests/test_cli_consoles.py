# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: where it runs, consoles of every kind and none."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from command_line import WEIGHTS, load, read_terminal, run, succeed


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"TERM": "dumb", "COLUMNS": "20"},
    ],
    ids=["ascii", "C locale", "dumb"],
)
def test_odd_consoles(tmp_path, model_tensors, env):
    source = tmp_path / "mod\u00e8le.npz"
    np.savez(source, **{"gewicht\u00df\u6a21": model_tensors[WEIGHTS[0]].astype(np.float32)})
    target = tmp_path / "q.safetensors"
    for args in (
        ("--help",),
        ("env",),
        ("quantize", source, "-o", target),
        ("inspect", target),
        ("compare", source, target),
    ):
        result = run(*args, **env)
        assert result.returncode == 0, result.stderr
        assert b"\x1b" not in result.stdout + result.stderr
        if "TERM" not in env:
            assert (result.stdout + result.stderr).isascii()
    assert load(target)[0]


def test_home_that_cannot_be_written(quantized_file, tmp_path):
    # Below a device nobody, not even root, can make a directory.
    nowhere = "/dev/null/home"
    env = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "CUPY_CACHE_DIR": nowhere}
    result = run("dequantize", quantized_file, "-o", tmp_path / "back.safetensors", **env)
    assert result.returncode == 0, result.stderr
    assert set(WEIGHTS) <= set(load(tmp_path / "back.safetensors")[0])


def test_hostile_names_reach_the_terminal_escaped(tmp_path):
    source = tmp_path / "x.safetensors"
    name = "\x1b]0;owned\x07[red]{task}\nrow"
    safetensors.numpy.save_file({name: np.ones((2, 16), np.float32)}, source)
    result = succeed("quantize", source)
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    assert "[red]{task}\\nrow" in result.stdout
    assert json.loads(succeed("inspect", source, "--json").stdout)["tensors"][0]["name"] == name


def test_no_terminal_no_folding_and_no_progress(tmp_path):
    source = tmp_path / "x.safetensors"
    name = "layer." * 60 + "weight"
    safetensors.numpy.save_file({name: np.ones((2, 16), np.float32)}, source)
    result = run("quantize", source)
    assert name.encode() in result.stdout
    assert result.stderr.startswith(b"Wrote ")
    assert result.stderr.count(b"\n") == 1


def test_kernels_are_compiled_in_a_line_above_the_bar(tmp_path):
    """Not in the middle of what the bar draws."""
    script = """
import sys
from fp4kit.cpu import kernel_cache
from fp4kit.cli.progress import progress_bar
with progress_bar("Quantizing x") as progress:
    kernel_cache.compiling()
    progress(1, 2)
"""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {"TERM": "xterm", "NO_COLOR": "1", "FP4KIT_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen([sys.executable, "-c", script], stderr=child, env=os.environ | env)
    os.close(child)
    text = read_terminal(parent).decode()
    assert process.wait(timeout=300) == 0
    cleared = r"(^|[\n\r])(\x1b\[[0-9;?]*[a-zA-Z])*"
    assert re.search(cleared + "Compiling kernels for this processor", text)


@pytest.mark.parametrize("width", [60, 100])
def test_narrow_terminal(model_file, width):
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fp4kit", "quantize", str(model_file)],
        stdin=child,
        stdout=child,
        stderr=subprocess.PIPE,
        env=env | {"TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(child)
    text = read_terminal(parent)
    talk = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=300) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()
    assert all(len(line) <= width for line in lines), lines
    assert "SQNR" in lines[0]
    assert "too narrow for" in talk
    assert Path(model_file.with_name("model-nvfp4.safetensors")).exists()
