# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Shared conversions that fail or are refused: killed workers, faults, bad requests."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

import fp4kit
from command_line import invoke
from fleet_models import SMALL, job_for, notes
from fp4kit.checkpoint import operations
from fp4kit.checkpoint.read.directory import STATE_DIR
from fp4kit.errors import FileFormatError, NonFiniteError, OptionError
from fp4kit.fleet import patience, places, shards, tasks
from fp4kit.fleet.finish import finish
from fp4kit.fleet.job import begin, opened_job
from fp4kit.fleet.mirror import check_names
from fp4kit.fleet.run import convert
from fp4kit.fleet.stores import place_of
from fp4kit.fleet.tasks import run_task
from fp4kit.io.write.files import OutputError

pytestmark = pytest.mark.usefixtures("no_open_source")


@pytest.fixture
def model(fleet_model):
    return fleet_model


@pytest.fixture
def wanted(fleet_wanted):
    return fleet_wanted


# ------------------------------------------------------------------------------------------------
# Failures
# ------------------------------------------------------------------------------------------------


def test_workers_that_are_gone_leave_what_resume_needs(checkpoints, model, wanted, tmp_path):
    job = job_for(model, tmp_path / "out")
    convert(job, "1/2")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        os.kill(executor.submit(os.getpid).result(), signal.SIGKILL)
        with pytest.raises(OutputError, match="2 of 5 shards are missing") as error:
            convert(job, executor, resume=True)
    missing = "('model-00002-of-00005.safetensors', 'model-00004-of-00005.safetensors')"
    assert missing in str(error.value)
    assert "the workers are gone" in str(error.value)
    assert "the same command with --resume makes them" in str(error.value)
    with pytest.raises(OptionError, match="holds an unfinished conversion; pass --resume"):
        convert(job)
    convert(job, resume=True)
    assert checkpoints.digest(tmp_path / "out") == wanted


#: Runs a part in children that kill themselves at the n-th call that changes the disk.
KILLER = """
import json, os, signal, sys
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.fleet.job import Job
from fp4kit.fleet.run import convert
source, folder, stops = json.loads(sys.argv[1])
options = CheckpointOptions(max_shard_size=12_000)
calls = 0
def watch(name, stop):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == stop:
            if name == "pwrite":
                real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
            os.kill(os.getpid(), signal.SIGKILL)
        return None if name == "fsync" else real(*args, **kwargs)
    setattr(os, name, call)
convert(Job("quantize", source, folder + "/warm", options))
for stop in stops:
    child = os.fork()
    if child == 0:
        for name in ("pwrite", "fsync", "replace", "unlink", "mkdir"):
            watch(name, stop)
        convert(Job("quantize", source, f"{folder}/{stop}", options), "1/1")
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_part_that_is_killed_anywhere_is_run_again(checkpoints, model, wanted, tmp_path):
    stops = [1, 2, 3, 5, 8, 11, 16, 23, 31, 40, 52]
    job = json.dumps([str(model), str(tmp_path), stops])
    done = subprocess.run(
        [sys.executable, "-c", KILLER, job], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(stops), done.stderr
    for stop in stops:
        target = tmp_path / str(stop)
        with pytest.raises((OutputError, FileFormatError)):
            finish(str(target))
        convert(job_for(model, target), "1/1")
        finish(str(target))
        assert checkpoints.digest(target) == wanted, stop


def test_a_fault_that_passes_is_tried_again(checkpoints, model, wanted, tmp_path, monkeypatch):
    real, told, left = shards.run_task, [], [OSError(28, "No space left on device"), None]

    def failing(job, plan, number):
        if number == 1 and left:
            error = left.pop(0)
            raise error or OutputError("the disk is away")
        return real(job, plan, number)

    monkeypatch.setattr(shards, "run_task", failing)
    patience.on_retry(lambda message, retries: told.append((message, retries)))
    try:
        convert(job_for(model, tmp_path / "out"))
    finally:
        patience.on_retry(None)
    assert checkpoints.digest(tmp_path / "out") == wanted
    assert [retries for _, retries in told] == [1, 1]
    assert "model-00002-of-00005.safetensors is tried again" in told[0][0]


def test_a_fault_that_lasts_says_what_is_missing(model, tmp_path, monkeypatch):
    def failing(job, plan, number):
        raise OutputError("the disk is full")

    monkeypatch.setattr(shards, "run_task", failing)
    with pytest.raises(OutputError, match=r"5 of 5 shards are missing.*failed 4 times: the disk"):
        convert(job_for(model, tmp_path / "out"))


def test_numbers_that_are_not_finite_are_not_tried_again(checkpoints, tmp_path, monkeypatch):
    tensors, config = checkpoints.llama(1)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][1][3, 4] = float("nan")
    source = checkpoints.save(tmp_path / "model", tensors, config)
    told = []
    patience.on_retry(lambda *said: told.append(said))
    try:
        with pytest.raises(NonFiniteError, match="holds 1 NaN"):
            convert(job_for(source, tmp_path / "out"))
    finally:
        patience.on_retry(None)
    assert told == []


def test_a_source_that_changes_gives_no_receipt(checkpoints, model, tmp_path, monkeypatch):
    job = job_for(model, tmp_path / "out")
    with opened_job(job) as planned:
        begin(place_of(job.target), planned)
        plan = planned.hash
    real = tasks.write_shard

    def change(*arguments):
        real(*arguments)
        for path in model.glob("*.safetensors"):
            os.utime(path, (1, 1))

    monkeypatch.setattr(tasks, "write_shard", change)
    with pytest.raises(FileFormatError, match="has changed while it was read"):
        run_task(job, plan, 0)
    assert notes(tmp_path / "out") == ["plan.json"]


def test_scratch_of_killed_processes_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(places, "NEWBORN_SECONDS", -1.0)
    abandoned = tmp_path / f"{places.SCRATCH}old"
    abandoned.mkdir()
    (abandoned / places.LOCK_FILE).touch()
    (abandoned / "shard").write_bytes(b"half")
    with places.scratch() as mine, places.scratch() as other:
        assert not abandoned.exists()
        assert mine.is_dir()
        assert other.is_dir()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------
# What is refused
# ------------------------------------------------------------------------------------------------


def test_a_place_that_holds_something_else_is_left_alone(checkpoints, model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(OptionError, match="is not empty, and holds no conversion"):
        convert(job_for(model, tmp_path / "out"), "1/2")
    assert list(checkpoints.digest(tmp_path / "out")) == ["mine.txt"]
    with pytest.raises(OptionError, match="must lie outside the input"):
        convert(job_for(model, model / "out"), "1/2")


def test_one_process_and_several_do_not_mix(model, tmp_path, monkeypatch):
    convert(job_for(model, tmp_path / "out"), "1/2")
    with pytest.raises(OptionError, match="was begun with --part or --scheduler"):
        operations.quantize_checkpoint(model, tmp_path / "out", SMALL, resume=True)
    operations.quantize_checkpoint(model, tmp_path / "out", SMALL, force=True)
    assert not (tmp_path / "out" / STATE_DIR).exists()

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp4kit.checkpoint.write.output.write_documents", stop)
    with pytest.raises(KeyboardInterrupt):
        operations.quantize_checkpoint(model, tmp_path / "other", SMALL)
    with pytest.raises(OptionError, match="an unfinished conversion of a single process"):
        convert(job_for(model, tmp_path / "other"), "1/2")


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ("0/3", "does not exist; parts go from 1/N to N/N"),
        ("4/3", "does not exist; parts go from 1/N to N/N"),
        ("somewhere", "is no address; give tcp://HOST:PORT, or local:N"),
        ("tcp://me:secret@host:1", "is no address"),
        (3, "is no executor of concurrent.futures"),
    ],
)
def test_workers_that_are_none(model, tmp_path, workers, said):
    with pytest.raises(OptionError, match=said):
        fp4kit.quantize_checkpoint(model, tmp_path / "out", workers=workers)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "url",
    ["s3://me:secret@host/model", "https://host/model?X-Amz-Signature=secret", "s3://a/b#secret"],
)
def test_secrets_in_urls_are_refused_and_not_repeated(tmp_path, url):
    result = invoke("quantize", url, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "holds no user name, password or signature" in result.stderr
    assert "secret" not in result.output
    assert "secret" not in result.stderr


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        ("distributed", ("model", "-o", "out", "--scheduler", "local:2"), "dask.distributed"),
        ("fsspec", ("s3://bucket/model", "-o", "out"), "the package fsspec"),
        ("s3fs", ("model", "-o", "s3://bucket/out"), "the package"),
    ],
)
def test_packages_that_are_missing_are_named(model, monkeypatch, missing, arguments, said):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else real(name)
    )
    monkeypatch.chdir(model.parent)
    result = invoke("quantize", *arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert "pip install 'fp4kit[fleet]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_relative_paths_are_those_of_whoever_asks(checkpoints, model, tmp_path, monkeypatch):
    """Workers were started elsewhere."""
    monkeypatch.chdir(model.parent)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.chdir, ("/",)) as executor:
        fp4kit.quantize_checkpoint("model", "out", workers=executor)
    fp4kit.quantize_checkpoint("model", "alone")
    assert checkpoints.digest(tmp_path / "out") == checkpoints.digest(tmp_path / "alone")


@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/etc/evil", "a//b", "./a", "a\\b", "a\0b", ""]
)
def test_names_in_a_store_that_leave_the_directory(name):
    check_names("s3://b/m", ["config.json", "onnx/model.txt"])
    with pytest.raises(FileFormatError, match="which leaves the directory"):
        check_names("s3://b/m", ["config.json", name])


def test_too_many_files_in_a_store():
    with pytest.raises(FileFormatError, match="holds 100001 files, of which a model has at most"):
        check_names("s3://b/m", range(100_001))


def test_pipelines_and_files_are_refused(checkpoints, tmp_path):
    tensors, _ = checkpoints.llama(1)
    file = checkpoints.write_file(tmp_path / "one.safetensors", tensors)
    with pytest.raises(OptionError, match="are for model directories"):
        convert(job_for(file, tmp_path / "out"), "1/2")
    checkpoints.save(tmp_path / "pipe" / "transformer", tensors, {})
    checkpoints.write_json(tmp_path / "pipe" / "model_index.json", {})
    with pytest.raises(OptionError, match="is a diffusers pipeline; give the folder"):
        convert(job_for(tmp_path / "pipe", tmp_path / "out"), "1/2")
