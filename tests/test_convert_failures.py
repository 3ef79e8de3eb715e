# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Failures of file conversion leave the old output or none, and nothing beside it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fp4kit.errors import FileFormatError, NonFiniteError, OptionError
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.quantize import quantize_file
from fp4kit.io.read.open import open_source
from fp4kit.io.report import QuantizeOptions
from fp4kit.io.write.files import OutputError
from fp4kit.scheme import Scheme
from tensor_files import random_array, save


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.usefixtures("small_slabs")
def test_nonfinite_values_are_named_and_nothing_is_written(bad, form, tmp_path):
    array = random_array((2, 200, 64), "float32")
    array[1, 150, 3] = bad
    array[1, 199, 63] = bad
    source = save(tmp_path / "in.safetensors", {"ok": random_array((4, 32)), "w": array})
    counts = "2 NaN and 0 infinite" if np.isnan(bad) else "0 NaN and 2 infinite"
    with pytest.raises(NonFiniteError) as caught:
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(Scheme(form)))
    message = str(caught.value)
    assert message.startswith(f"{source}: tensor 'w' holds {counts} values")
    assert "at index (1, 150, 3)" in message
    assert list(tmp_path.iterdir()) == [source]
    quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(exclude=("w",)))


def test_truncated_inputs_leave_nothing(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})
    os.truncate(source, source.stat().st_size - 4)
    with pytest.raises(FileFormatError, match="truncated"):
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions())
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_old_output(moment, tmp_path, monkeypatch):
    # D4
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64)), "n": np.ones(3)})
    target = tmp_path / "q.safetensors"
    target.write_bytes(b"old")
    real, calls = os.pwrite, []

    def failing(fd, data, offset):
        calls.append(offset)
        if len(calls) == moment:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OutputError, match=r"q\.safetensors: cannot be written: No space left"):
        quantize_file(source, target, QuantizeOptions(force=True))
    assert target.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [source, target]


def test_an_interrupt_removes_the_temporary(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})

    def interrupt(_done, _total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(), interrupt)
    assert list(tmp_path.iterdir()) == [source]


def test_outputs_are_checked_before_work(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})
    content = source.read_bytes()
    for force in (False, True):
        with pytest.raises(OptionError, match="is the input itself"):
            quantize_file(source, source, QuantizeOptions(force=force))
    assert source.read_bytes() == content
    with pytest.raises(OptionError, match=r"must end in \.safetensors"):
        quantize_file(source, tmp_path / "q.npz", QuantizeOptions())
    # A directory in which not even root can create files.
    with pytest.raises(OutputError, match=r"^/proc/q\.safetensors: cannot be written"):
        quantize_file(source, Path("/proc/q.safetensors"), QuantizeOptions())
    quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions())
    with pytest.raises(OptionError, match="--force"):
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions())
    with pytest.raises(OptionError, match="is the input itself"):
        dequantize_file(
            tmp_path / "q.safetensors", tmp_path / "q.safetensors", "float32", force=True
        )
    with pytest.raises(OptionError, match="dtype='int8'"):
        dequantize_file(tmp_path / "q.safetensors", tmp_path / "b.npz", "int8")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_refused(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        quantize_file(source, folder / "q.safetensors", QuantizeOptions())


KILLED = """
import sys
from pathlib import Path
from fp4kit.io.quantize import QuantizeOptions, quantize_file

def stall(done, total):
    print("working", flush=True)
    sys.stdin.read()

quantize_file(Path("in.safetensors"), Path("q.safetensors"), QuantizeOptions(force=True), stall)
"""


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path):
    source = save(tmp_path / "in.safetensors", {f"t{n}": random_array((64, 64)) for n in range(9)})
    target = tmp_path / "q.safetensors"
    target.write_bytes(b"old")
    content = source.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"working\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    assert source.read_bytes() == content
    (left,) = set(tmp_path.iterdir()) - {source, target}
    assert left.suffix == ".fp4kit-tmp"
    copy = left.rename(tmp_path / "left.safetensors")
    with pytest.raises(FileFormatError):
        open_source(copy)
