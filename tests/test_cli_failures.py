# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: how it fails."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from command_line import fail, invoke, run_script, succeed
from fp4kit.api.backends import BackendStatus


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["quantize"],
        ["quantize", "x.safetensors", "--format", "int3"],
        ["quantize", "x.safetensors", "--scale-rule", "ceil"],
        ["quantize", "x.safetensors", "--format", "mxfp4", "--recipe", "comfy"],
        ["quantize", "x.safetensors", "--void-dtype", "float16"],
        ["dequantize", "x.safetensors"],
        ["dequantize", "x.safetensors", "-o", "y.npy", "--dtype", "float64"],
        ["compare", "x.safetensors"],
        ["bench", "--sizes", "24,x"],
        ["bench", "--sizes", "99"],
        ["compare", "x.safetensors", "y.safetensors", "--min-sqnr", "many"],
        ["compare", "x.safetensors", "y.safetensors", "--min-sqnr", "nan"],
        ["compare", "x.safetensors", "y.safetensors", "--min-sqnr", "inf"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(args):
    message = fail(*args, code=2)
    assert "Usage:" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}q\x00.",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 4) + b"{{{{",
    ],
    ids=["empty", "pickle", "huge header", "no JSON"],
)
def test_malformed_input_is_one_line_and_no_output(tmp_path, content):
    source = tmp_path / "bad.safetensors"
    source.write_bytes(content)
    for args in (
        ("quantize", source),
        ("quantize", source, "--dry-run"),
        ("dequantize", source, "-o", tmp_path / "out.npz"),
        ("inspect", source),
        ("compare", source, source),
    ):
        assert "bad.safetensors" in fail(*args)
    assert list(tmp_path.iterdir()) == [source]


def test_missing_files_and_directories(model_file, tmp_path):
    assert "none.safetensors" in fail("quantize", tmp_path / "none.safetensors")
    assert "none" in fail("quantize", model_file, "-o", tmp_path / "none" / "q.safetensors")
    fail("quantize", model_file, "-o", model_file / "q.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no .safetensors file" in fail("quantize", empty)
    assert "no .safetensors file" in fail("inspect", empty)
    assert {*tmp_path.iterdir()} == {model_file, empty}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only directories")
def test_read_only_directory_is_refused(model_file, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    assert "locked" in fail("quantize", model_file, "-o", locked / "q.safetensors")


def test_device_cuda_without_a_gpu(model_file, monkeypatch):
    status = [BackendStatus("cuda", False, "no CUDA driver", {})]
    monkeypatch.setattr("fp4kit.files.devices.backend_status", lambda: status)
    for args in (
        ("quantize", model_file),
        ("dequantize", model_file, "-o", model_file.with_name("x.npz")),
        ("compare", model_file, model_file),
    ):
        assert "no CUDA driver" in fail(*args, "--device", "cuda")
    succeed(
        "quantize", model_file, "--device", "auto", "-o", model_file.with_name("auto.safetensors")
    )


def test_unquantizable_files_are_no_success(tmp_path):
    path = tmp_path / "ints.safetensors"
    safetensors.numpy.save_file({"a": np.arange(4)}, path)
    assert "no tensor is quantized" in fail("quantize", path)
    assert list(tmp_path.iterdir()) == [path]
    assert "no tensor is quantized" in succeed("quantize", path, "--allow-nothing").stderr


def test_bugs_keep_their_traceback(model_file, monkeypatch):
    monkeypatch.setattr("fp4kit.cli.inspect.inspect_file", lambda path: 1 / 0)
    assert isinstance(invoke("inspect", model_file).exception, ZeroDivisionError)
    script = "fp4kit.io.inspect.inspect_file = lambda path: 1 / 0"
    result = run_script(script, "inspect", model_file)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr


def test_interrupt_exits_130_without_a_traceback(model_file, tmp_path):
    script = "def stop(*args): raise KeyboardInterrupt\nfp4kit.io.quantize.quantize_file = stop"
    result = run_script(script, "quantize", model_file, "--device", "cpu")
    assert (result.returncode, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr


def test_termination_runs_the_clean_up(model_file):
    script = """
import os, signal, time
def stop(*args):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("cleaned up")
fp4kit.io.quantize.quantize_file = stop
"""
    result = run_script(script, "quantize", model_file, "--device", "cpu")
    assert (result.returncode, result.stdout) == (143, "cleaned up\n")
    assert result.stderr == ""


def test_a_reader_that_leaves_is_no_fault(model_file):
    process = subprocess.Popen(
        [sys.executable, "-m", "fp4kit", "inspect", str(model_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(timeout=300)
