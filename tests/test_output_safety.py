# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What must not be lost or opened by writing an output: others' files, permissions, changes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fp4kit.errors import FileFormatError
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.quantize import quantize_file
from fp4kit.io.report import QuantizeOptions
from fp4kit.io.write.files import TEMPORARY_SUFFIX, AtomicFile, Output, OutputError


@pytest.fixture
def source(tmp_path):
    """An .npy file of a few rows."""
    path = tmp_path / "in.npy"
    np.save(path, np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    return path


def temporaries(folder):
    return sorted(folder.rglob(f"*{TEMPORARY_SUFFIX}"))


# ------------------------------------------------------------------------------------------------
# Others' files
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_is_left_alone(tmp_path, monkeypatch, links):
    """Also where the file system has no hard links."""

    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr("os.link", link)
    target = tmp_path / "out"
    with AtomicFile(Output(target)) as file:
        file.write_at(0, b"whole")
        file.commit()
    assert target.read_bytes() == b"whole"
    target.unlink()
    with AtomicFile(Output(target)) as file:
        file.write_at(0, b"ours")
        target.write_bytes(b"theirs")
        with pytest.raises(OutputError, match="has appeared while this was at work"):
            file.commit()
    assert target.read_bytes() == b"theirs"
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("operation", ["quantize", "dequantize"])
def test_commands_do_not_replace_what_appears(tmp_path, source, force, operation):
    """Two processes with one output: the second says so, unless it was told to replace."""
    given, target = source, tmp_path / "out.safetensors"
    if operation == "dequantize":
        given = tmp_path / "q.safetensors"
        quantize_file(source, given, QuantizeOptions())

    def appear(done, total):
        target.write_bytes(b"theirs")

    def run():
        if operation == "quantize":
            quantize_file(given, target, QuantizeOptions(force=force), appear)
        else:
            dequantize_file(given, target, "float32", force=force, progress=appear)

    if force:
        run()
        assert target.read_bytes() != b"theirs"
    else:
        with pytest.raises(OutputError, match=r"has appeared .*choose another name"):
            run()
        assert target.read_bytes() == b"theirs"
    assert temporaries(tmp_path) == []


# ------------------------------------------------------------------------------------------------
# Permissions
# ------------------------------------------------------------------------------------------------


def mode(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("given", [0o600, 0o640, 0o644, 0o400])
@pytest.mark.parametrize("older", [None, 0o600, 0o666])
def test_a_result_is_never_more_readable_than_its_source(tmp_path, source, given, older):
    target = tmp_path / "out.safetensors"
    if older is not None:
        target.write_bytes(b"")
        target.chmod(older)
    source.chmod(given)
    quantize_file(source, target, QuantizeOptions(force=True))
    readable = given & (0o644 if older is None else older)
    assert mode(target) & 0o044 == readable & 0o044
    target.chmod(0o600)
    back = tmp_path / "back.npy"
    dequantize_file(target, back, "bfloat16")
    record = tmp_path / "back.npy.json"
    assert (mode(back), mode(record)) == (0o600, 0o600)


# ------------------------------------------------------------------------------------------------
# Temporary files
# ------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from fp4kit.io.write.files import AtomicFile
with AtomicFile(Path(sys.argv[1])) as file:
    file.write_at(0, b"half")
    print("open", flush=True)
    time.sleep(60)
"""


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    """By the next one that writes there; those of a living process stay."""
    target = tmp_path / "out [1]*.bin"  # a name that a glob would read otherwise
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD, str(target)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout.readline() == b"open\n"
        assert len(temporaries(tmp_path)) == 2
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        with AtomicFile(target) as file:
            file.commit()
        assert len(temporaries(tmp_path)) == 1
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            holder.stdout.close()


@pytest.mark.parametrize(("age", "stays"), [(0.0, True), (60.0, False)])
def test_an_empty_temporary_file_may_be_about_to_be_locked(tmp_path, age, stays):
    newborn = tmp_path / f".out.abcd{TEMPORARY_SUFFIX}"
    newborn.touch()
    then = time.time() - age
    os.utime(newborn, (then, then))
    with AtomicFile(tmp_path / "out") as file:
        file.commit()
    assert newborn.exists() == stays


def test_a_process_killed_before_it_wrote_leaves_nothing_behind(tmp_path):
    target = tmp_path / "out"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from fp4kit.io.write.files import AtomicFile\n"
        "file = AtomicFile(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert [path.stat().st_size for path in temporaries(tmp_path)] == [0]
    with AtomicFile(target) as file:
        file.commit()
    assert not temporaries(tmp_path)
    assert time.time() - target.stat().st_mtime < 60


# ------------------------------------------------------------------------------------------------
# Sources that change
# ------------------------------------------------------------------------------------------------


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x00\x80?")


def replace(path):
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("change", [overwrite, replace, os.unlink])
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_a_source_that_changes_gives_no_result(tmp_path, source, change, suffix):
    given = tmp_path / f"given{suffix}"
    quantized = tmp_path / "q.safetensors"
    quantize_file(source, quantized, QuantizeOptions())
    if suffix == ".npz":
        np.savez(given, x=np.load(source))
    else:
        dequantize_file(quantized, given, "float32")
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"older")

    def meddle(done, total):
        if given.exists() and done == total:
            change(given)

    with pytest.raises(FileFormatError, match="has changed while it was read"):
        quantize_file(given, target, QuantizeOptions(force=True), meddle)
    assert target.read_bytes() == b"older"
    assert temporaries(tmp_path) == []
