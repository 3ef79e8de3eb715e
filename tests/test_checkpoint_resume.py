# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions that are cut off: killed, out of space, failing; and what --resume makes of them."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

from fp4kit.checkpoint import operations
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.read.directory import STATE_DIR, Checkpoint
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.write.state import State
from fp4kit.errors import FileFormatError, NonFiniteError, OptionError
from fp4kit.io.write.files import OutputError

SMALL = 12_000
#: Operation, its options; all of them read what `make_source` gives.
RUNS = {
    "quantize": ("quantize_checkpoint", CheckpointOptions(layout="modelopt", max_shard_size=SMALL)),
    "lossless": ("quantize_checkpoint", CheckpointOptions(max_shard_size=SMALL)),
    "searched": (
        "quantize_checkpoint",
        CheckpointOptions(
            layout="comfy", scale_search="four_over_six", e4m3_max=256, max_shard_size=SMALL
        ),
    ),
    "dequantize": ("dequantize_checkpoint", DequantizeOptions("float32", max_shard_size=30_000)),
    "convert": ("convert_checkpoint", ConvertOptions("comfy", max_shard_size=SMALL)),
}
#: Runs an operation in children that kill themselves at the n-th call that changes the disk, before
#: it, after it, or in the middle of a write. Without n: says how many there are.
KILLER = """
import dataclasses, json, os, signal, sys
from pathlib import Path
from fp4kit.checkpoint import operations as convert
from fp4kit.checkpoint import options
job = json.loads(sys.argv[1])
chosen = getattr(options, job["kind"])(
    **{k: tuple(v) if isinstance(v, list) else v for k, v in job["options"].items()}
)
calls = 0
def watch(name, stop, when):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == stop:
            if when == "middle" and name == "pwrite":
                real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
            elif when == "after":
                real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return None if name == "fsync" else real(*args, **kwargs)
    setattr(os, name, call)
def run(target, stop, when):
    resume = (target / ".fp4kit-incomplete").exists()
    if target.exists() and any(target.iterdir()) and not resume:
        return  # the run before was complete
    for name in ("pwrite", "fsync", "replace", "unlink", "rmdir", "mkdir"):
        watch(name, stop, when)
    getattr(convert, job["function"])(Path(job["source"]), target, chosen, resume=resume)
# Kernels are loaded once, by the parent.
getattr(convert, job["function"])(Path(job["source"]), Path(job["warm"]), chosen)
for target, stop, when in job["runs"]:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(Path(target), stop, when)
            print(calls, flush=True)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status not in (0, signal.SIGKILL):
        sys.exit(f"{target} {stop} {when}: status {status}")
"""


def make_source(checkpoints, folder, name):
    """What an operation reads: floats, MXFP4, NVFP4."""
    tensors, config = checkpoints.moe(3)
    others = list(checkpoints.OTHER_FILES)
    source = checkpoints.save(folder / "float", tensors, config, shards=3, others=others)
    if name in ("quantize", "searched"):
        return source
    format = "mxfp4" if name == "lossless" else "nvfp4"
    operations.quantize_checkpoint(source, folder / format, CheckpointOptions(format=format))
    return folder / format


def run(name, source, target, **more):
    function, options = RUNS[name]
    return getattr(operations, function)(source, target, options, **more)


def killed(name, source, runs):
    """Runs [target, n-th call, when] one after the other in processes that end themselves."""
    function, options = RUNS[name]
    job = {
        "function": function,
        "kind": type(options).__name__,
        "options": dict(vars(options)),
        "source": str(source),
        "warm": str(runs[0][0]) + "-warm",
        "runs": [[str(target), *rest] for target, *rest in runs],
    }
    done = subprocess.run(
        [sys.executable, "-c", KILLER, json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def assert_unfinished(checkpoints, target, complete):
    """Nothing looks finished: it is all there, or every command says that it is not."""
    found = checkpoints.digest(target) if target.exists() else {}
    if found == complete:
        return
    if not found:
        return
    assert (target / STATE_DIR).is_dir()
    (fault,) = structure_faults(target)
    assert "unfinished output" in fault
    assert "--resume" in fault
    for path in found:
        if path in complete:  # what has its name is whole
            assert found[path] == complete[path]
        else:
            assert path.startswith(STATE_DIR) or path.endswith(".fp4kit-tmp")


def finish(name, source, target):
    """What a user would do next; returns the report, None if nothing was left to do."""
    if target.exists() and any(target.iterdir()):
        if not (target / STATE_DIR).exists():
            return None
        return run(name, source, target, resume=True)
    return run(name, source, target)


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_any_moment(checkpoints, tmp_path, name):
    """E19, D4: the source is untouched, and what --resume completes is as if nothing had been."""
    source = make_source(checkpoints, tmp_path, name)
    before = checkpoints.digest(source)
    complete_report = run(name, source, tmp_path / "whole")
    complete = checkpoints.digest(tmp_path / "whole")
    assert len([n for n in complete if n.endswith(".safetensors")]) > 2
    (count,) = killed(name, source, [[tmp_path / "counted", None, ""]])
    assert checkpoints.digest(tmp_path / "counted") == complete
    assert count > 50
    rng = random.Random(len(name))
    stops = sorted({1, 2, 4, count - 2, count})
    stops += rng.sample(range(6, count - 3), 4)
    runs = []
    for number, stop in enumerate(stops):
        target = tmp_path / f"out{number}"
        runs.append([target, stop, rng.choice(["before", "middle", "after"])])
        if number % 2:  # and once more while resuming
            runs.append([target, rng.randrange(1, count // 2), rng.choice(["before", "after"])])
    killed(name, source, runs)
    assert checkpoints.digest(source) == before
    for number in range(len(stops)):
        target = tmp_path / f"out{number}"
        assert_unfinished(checkpoints, target, complete)
        report = finish(name, source, target)
        assert checkpoints.digest(target) == complete
        if report is not None:
            assert_same_report(report, complete_report)


def assert_same_report(report, other):
    """Shards that an earlier run wrote are reported as if this one had."""
    assert report.tensors == other.tensors
    for name in ("shards", "groups", "ignore", "dropped", "warnings", "options"):
        assert getattr(report, name) == getattr(other, name)


# ------------------------------------------------------------------------------------------------
# Failures
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_full_disk(checkpoints, tmp_path, monkeypatch, name, share, number):
    """D4: one line with the reason, no temporary file, the rest as after a kill."""
    source = make_source(checkpoints, tmp_path, name)
    run(name, source, tmp_path / "whole")
    complete = checkpoints.digest(tmp_path / "whole")
    total = sum(p.stat().st_size for p in (tmp_path / "whole").rglob("*") if p.is_file())
    room, real = int(total * share * 0.99), os.pwrite

    def pwrite(fd, data, offset):
        nonlocal room
        if len(data) > room:
            raise OSError(number, os.strerror(number))
        room -= len(data)
        return real(fd, data, offset)

    target = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", pwrite)
        with pytest.raises(OutputError, match=rf"cannot be written: {os.strerror(number)}"):
            run(name, source, target)
    assert not list(target.rglob("*.fp4kit-tmp"))
    assert_unfinished(checkpoints, target, complete)
    run(name, source, target, resume=True)
    assert checkpoints.digest(target) == complete


def test_full_disk_with_a_single_file(checkpoints, tmp_path, monkeypatch):
    source = checkpoints.write_file(tmp_path / "in.safetensors", checkpoints.diffusion())
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"older")

    def pwrite(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", pwrite)
    with pytest.raises(OutputError, match="No space left"):
        operations.quantize_checkpoint(
            source, target, CheckpointOptions(layout="comfy"), force=True
        )
    assert target.read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name, target.name]


def test_a_repaired_source_cannot_be_resumed(checkpoints, tmp_path):
    """A failed run was of another source; --force starts over."""
    tensors, config = checkpoints.llama(2)
    good = tensors["model.layers.1.mlp.up_proj.weight"][1].copy()
    tensors["model.layers.1.mlp.up_proj.weight"][1][0, 0] = np.nan
    source = checkpoints.save(tmp_path / "in", tensors, config)
    options = CheckpointOptions(max_shard_size=9000)
    target = tmp_path / "out"
    with pytest.raises(NonFiniteError):
        operations.quantize_checkpoint(source, target, options)
    written = [path.name for path in target.glob("*.safetensors")]
    assert written
    tensors["model.layers.1.mlp.up_proj.weight"] = "BF16", good
    checkpoints.save(source, tensors, config)
    with pytest.raises(OptionError, match="the source has changed"):
        operations.quantize_checkpoint(source, target, options, resume=True)
    operations.quantize_checkpoint(source, target, options, force=True)
    operations.quantize_checkpoint(source, tmp_path / "whole", options)
    assert checkpoints.digest(target) == checkpoints.digest(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------
# What may be resumed
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(checkpoints, tmp_path, monkeypatch):
    """(source, target, options) of a run that ended just before it was complete."""
    tensors, config = checkpoints.llama(2)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2, others=["LICENSE"])
    (tmp_path / "amax.json").write_text(json.dumps({n[: -len(".weight")]: 2.0 for n in tensors}))
    options = CheckpointOptions(
        layout="modelopt", activations=str(tmp_path / "amax.json"), max_shard_size=9000
    )

    def stop(self):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(State, "finish", stop)
        with pytest.raises(InterruptedError):
            operations.quantize_checkpoint(source, tmp_path / "out", options)
    return source, tmp_path / "out", options


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "comfy"},
        {"format": "mxfp4", "layout": "compressed-tensors"},
        {"recipe": "torchao"},
        {"scale_search": "sweep"},
        {"exclude": ("*o_proj*",)},
        {"include": ("lm_head",)},
        {"activations": None},
        {"activations": "uncalibrated"},
        {"max_shard_size": 9001},
    ],
)
def test_changed_options(checkpoints, stopped, changes):
    """E19: refused with the first difference; --force gives what the options say, nothing stale."""
    source, target, options = stopped
    changed = CheckpointOptions(**{**vars(options), **changes})
    before = checkpoints.digest(target)
    with pytest.raises(OptionError, match=r"option (\w+) was .*, is .*--force"):
        operations.quantize_checkpoint(source, target, changed, resume=True)
    with pytest.raises(OptionError, match=r"unfinished conversion.*--resume.*--force"):
        operations.quantize_checkpoint(source, target, changed)
    assert checkpoints.digest(target) == before
    operations.quantize_checkpoint(source, target, changed, force=True)
    operations.quantize_checkpoint(source, source.with_name("whole"), changed)
    assert checkpoints.digest(target) == checkpoints.digest(source.with_name("whole"))


def other_bytes(source):
    path = source / "model-00001-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-2] + bytes([data[-2] ^ 1, data[-1]]))


def other_config(source):
    path = source / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"mistral"'))


def other_calibration(source):
    path = source.with_name("amax.json")
    path.write_text(path.read_text().replace("2.0", "3.0"))


@pytest.mark.parametrize("change", [other_bytes, other_config, other_calibration])
def test_changed_sources(stopped, change):
    source, target, options = stopped
    change(source)
    with pytest.raises(OptionError, match="the source has changed"):
        operations.quantize_checkpoint(source, target, options, resume=True)


def test_another_version(stopped, monkeypatch):
    source, target, options = stopped
    monkeypatch.setattr("fp4kit.checkpoint.write.state.__version__", "99.0")
    with pytest.raises(OptionError, match=r"begun by fp4kit .*, this is 99\.0"):
        operations.quantize_checkpoint(source, target, options, resume=True)


def test_two_processes(checkpoints, stopped):
    """The second is refused, whatever it was told to do, and the first is not disturbed."""
    source, target, options = stopped
    before = checkpoints.digest(target)
    with State(target):
        for more in ({"resume": True}, {"force": True}):
            with pytest.raises(OutputError, match="another fp4kit process is writing there"):
                operations.quantize_checkpoint(source, target, options, **more)
        assert checkpoints.digest(target) == before
    operations.quantize_checkpoint(source, target, options, resume=True)
    assert structure_faults(target) == []


def test_a_process_that_finishes_while_another_waits(stopped, monkeypatch):
    """The lock that was got is that of notes that are gone."""
    _, target, _ = stopped
    real = os.open

    def late(path, *args, **kwargs):
        fd = real(path, *args, **kwargs)
        if str(path).endswith("lock"):
            shutil.rmtree(target / STATE_DIR)
        return fd

    with monkeypatch.context() as patched:
        patched.setattr("os.open", late)
        with pytest.raises(OutputError, match="has finished there just now"), State(target):
            pass


def test_unfinished_outputs_are_no_sources(stopped):
    """Every command says so, and how to go on."""
    source, target, options = stopped
    for run_ in (
        lambda: Checkpoint(target),
        lambda: operations.dequantize_checkpoint(
            target, source.with_name("d"), DequantizeOptions()
        ),
        lambda: operations.convert_checkpoint(
            target, source.with_name("d"), ConvertOptions("comfy")
        ),
    ):
        with pytest.raises(FileFormatError, match=r"unfinished output.*--resume"):
            run_()
    assert "unfinished" in structure_faults(target)[0]
    operations.quantize_checkpoint(source, target, options, resume=True)
    assert not (target / STATE_DIR).exists()
    with pytest.raises(FileFormatError, match="no unfinished conversion"):
        operations.quantize_checkpoint(source, target, options, resume=True)
