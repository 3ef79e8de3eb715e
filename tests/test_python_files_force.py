# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""fp4kit.save(force=True): the old result stays until the new one is whole."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import checkpoints as c
import fp4kit
from fp4kit.checkpoint.write.state import State
from fp4kit.io.write.files import AtomicFile, OutputError
from python_files import CONFIG, NAME, Failing, Q, X

# What stands in the place of a new result, and what is saved over it.
OLD = {"a": X, NAME: Q}
LARGE = np.tile(X, (100, 1))
NEW = {"a": LARGE + 1, "b": LARGE + 2, "c": LARGE + 3}
NEW_SHARDS = {"max_shard_size": "1MB"}


def older(path):
    """A good result, in a directory with files of somebody else's; its bytes."""
    fp4kit.save(path, OLD, **({} if path.suffix else {"config": CONFIG}))
    if not path.is_dir():
        return {"": path.read_bytes()}
    (path / "sub").mkdir()
    (path / "sub" / "model.safetensors").write_text("mine")
    (path / "notes.txt").write_text("mine")
    return c.digest(path)


def content(path):
    return c.digest(path) if path.is_dir() else {"": path.read_bytes()}


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["x.safetensors", "x"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, FileNotFoundError, "write_at", "commit"])
def test_a_failed_save_with_force_leaves_the_old_result(tmp_path, monkeypatch, name, fault):
    path = tmp_path / name
    before = older(path)
    more = {} if path.suffix else NEW_SHARDS
    given, error = NEW, OutputError
    if isinstance(fault, str):
        real, calls = getattr(AtomicFile, fault), []
        after = 0 if path.suffix and fault == "commit" else 2

        def fail(*args):
            calls.append(args)
            (full if len(calls) > after else real)(*args)

        monkeypatch.setattr(AtomicFile, fault, fail)
    else:
        given, error = Failing(NEW, "c", fault), (fault, OutputError)
    with pytest.raises(error):
        fp4kit.save(path, given, force=True, **more)
    assert content(path) == before
    assert len(list(tmp_path.rglob("*"))) == len(before) + (0 if path.suffix else 2)
    with fp4kit.open(path) as file:
        assert (file["a"] == X).all()
        assert (file[NAME].packed == Q.packed).all()
    monkeypatch.undo()
    fp4kit.save(path, NEW, force=True, **more)
    assert (fp4kit.open(path)["c"] == LARGE + 3).all()
    if path.is_dir():
        assert dict(before.items() & content(path).items()).keys() == {
            "notes.txt",
            "sub/model.safetensors",
        }
        assert not list(path.glob(".fp4kit*"))


def test_what_appears_while_a_result_is_saved_over_an_old_one(tmp_path):
    path = tmp_path / "x"
    before = older(path)

    class Meddling(Failing):
        def __getitem__(self, name):
            if self._asked:
                (path / "model-00002-of-00003.safetensors").write_text("theirs")
            self._asked += name == self._name
            return self._values[name]

    with pytest.raises(OutputError, match="did not write"):
        fp4kit.save(path, Meddling(NEW, "c"), force=True, **NEW_SHARDS)
    assert (path / "model-00002-of-00003.safetensors").read_text() == "theirs"
    assert {name: content(path).get(name) for name in before} == before


@pytest.mark.parametrize("step", ["replace", "rmdir", "finish"])
def test_interrupted_as_the_new_result_takes_its_place(tmp_path, monkeypatch, step):
    """Nothing can fail any more, so that it is completed."""
    path = tmp_path / "x"
    others = {name: bits for name, bits in older(path).items() if not name.startswith(("m", "c"))}
    owner = State if step == "finish" else Path
    real, calls = getattr(owner, step), []

    def interrupt(*args):
        done = real(*args)
        if (path / ".fp4kit-incomplete").exists() or step == "finish":
            calls.append(args)
            if len(calls) == 1:
                raise KeyboardInterrupt
        return done

    monkeypatch.setattr(owner, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fp4kit.save(path, NEW, force=True, **NEW_SHARDS)
    assert calls
    monkeypatch.undo()
    fp4kit.save(tmp_path / "whole", NEW, **NEW_SHARDS)
    assert c.digest(path) == c.digest(tmp_path / "whole") | others


# Every step that changes a directory, one after the other, is the last one of a process.
KILLED_AT = """
import os, shutil, signal, sys
import numpy as np
import fp4kit
x = np.tile(np.random.default_rng(0).standard_normal((32, 64), np.float32), (100, 1))
new = {"a": x + 1, "b": x + 2, "c": x + 3}
fp4kit.save(sys.argv[3], new, max_shard_size="1MB")
os.fsync = lambda fd: None
for number in range(1000):
    shutil.copytree(sys.argv[1], f"{sys.argv[2]}/{number}")
    child = os.fork()
    if not child:
        steps = []
        def dying(real):
            def step(*args, **options):
                steps.append(args)
                if len(steps) > number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)
            return step
        for name in ("replace", "rename", "link", "unlink", "mkdir", "rmdir", "pwrite"):
            setattr(os, name, dying(getattr(os, name)))
        fp4kit.save(f"{sys.argv[2]}/{number}", new, force=True, max_shard_size="1MB")
        os._exit(0)
    if not os.waitpid(child, 0)[1]:
        break
"""


def test_killed_at_any_step_of_a_save_with_force(tmp_path):
    """The old result or the new one is whole, or the next save completes the new one."""
    before, whole = older(tmp_path / "old"), tmp_path / "whole"
    work = tmp_path / "work"
    work.mkdir()
    script = [sys.executable, "-c", KILLED_AT, tmp_path / "old", work, whole]
    subprocess.run(script, check=True, timeout=60)
    others = {name: before[name] for name in ("notes.txt", "sub/model.safetensors")}
    after = c.digest(whole) | others
    seen = {"old": 0, "new": 0, "marked": 0}
    for path in sorted(work.iterdir(), key=lambda path: int(path.name)):
        for newborn in path.rglob("*.fp4kit-tmp"):  # would stay for some seconds
            os.utime(newborn, (0, 0))
        marked = (path / ".fp4kit-incomplete").is_dir()
        found = {name: digest for name, digest in c.digest(path).items() if name[0] != "."}
        state = "marked" if marked else "old" if found == before else "new"
        seen[state] += 1
        if marked:
            with pytest.raises(fp4kit.FileFormatError, match="unfinished"):
                fp4kit.open(path)
        else:
            assert found == (before if state == "old" else after)
            assert (fp4kit.open(path)["a"] == (X if state == "old" else LARGE + 1)).all()
        with pytest.raises(KeyboardInterrupt):
            fp4kit.save(path, Failing({"z": X}, "z"), force=True)
        assert c.digest(path) == (before if state == "old" else after)
        fp4kit.save(path, {"z": X}, force=True)
        assert c.digest(path).keys() == {"model.safetensors", *others}
    assert seen["old"] > 20
    assert seen["marked"] > 5
    assert seen["new"] == 1
