# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Failures of quantizing GGUF models leave the old output or none, and nothing beside it."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import fp4kit
from fp4kit.errors import FileFormatError, NonFiniteError, OptionError
from fp4kit.io.write.files import OutputError
from gguf_models import weights, write_model


@pytest.mark.usefixtures("small_slabs")
def test_a_nan_is_named_and_nothing_is_written(tmp_path):
    arrays = weights(layers=1)
    arrays["blk.0.ffn_up.weight"][150, 3] = np.nan
    path = write_model(tmp_path / "m.gguf", arrays)
    with pytest.raises(NonFiniteError, match=r"'blk.0.ffn_up.weight' holds 1 NaN .* \(150, 3\)"):
        fp4kit.quantize_file(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("moment", [1, 2, 5, 20])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_full_disk_leaves_the_old_output(moment, shards, tmp_path, monkeypatch):
    path = write_model(tmp_path / "m.gguf", weights(layers=1), shards=shards)
    suffix = "" if shards == 1 else "-00001-of-00002"
    target = tmp_path / f"q{suffix}.gguf"
    target.write_bytes(b"old")
    before = set(tmp_path.iterdir())
    real, calls = os.pwrite, []

    def failing(fd, data, offset):
        calls.append(offset)
        if len(calls) == moment:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OutputError, match=r"cannot be written: No space left"):
        fp4kit.quantize_file(path, target, force=True)
    assert target.read_bytes() == b"old"
    assert set(tmp_path.iterdir()) == before


KILLED = """
import sys
import fp4kit

def stall(done, total):
    if done > total // 2:
        print("working", flush=True)
        sys.stdin.read()

fp4kit.quantize_file(sys.argv[1], sys.argv[2], progress=stall, force=True)
"""


@pytest.mark.parametrize("shards", [1, 2])
def test_a_killed_run_leaves_nothing_that_looks_finished(shards, tmp_path):
    path = write_model(tmp_path / "m.gguf", weights(), shards=shards)
    suffix = "" if shards == 1 else "-00001-of-00002"
    target = tmp_path / f"q{suffix}.gguf"
    target.write_bytes(b"old")
    command = [sys.executable, "-c", KILLED, path, target]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"working\n"
        process.kill()
    assert target.read_bytes() == b"old"
    left = [one for one in tmp_path.iterdir() if one.suffix == ".fp4kit-tmp"]
    assert len(left) == shards
    for number, one in enumerate(left):
        copy = shutil.copy(one, tmp_path / f"left{number}.gguf")
        with pytest.raises(FileFormatError):
            fp4kit.open(copy)
    fp4kit.quantize_file(path, target, force=True)
    assert not [one for one in tmp_path.iterdir() if one.suffix == ".fp4kit-tmp"]
    assert fp4kit.verify(target, path).ok


def test_a_source_that_is_cut_leaves_nothing(tmp_path):
    path = write_model(tmp_path / "m.gguf", weights(layers=1))
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(FileFormatError, match="truncated"):
        fp4kit.quantize_file(path)
    assert list(tmp_path.iterdir()) == [path]


def test_the_source_is_never_the_target(tmp_path):
    path = write_model(tmp_path / "m.gguf", weights(layers=1), shards=2)
    second = tmp_path / "m-00002-of-00002.gguf"
    (tmp_path / "q-00001-of-00002.gguf").symlink_to(second)
    with pytest.raises(OptionError, match=r"is a shard of the input"):
        fp4kit.quantize_file(path, tmp_path / "q-00001-of-00002.gguf", force=True)
