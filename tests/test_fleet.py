# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions that several workers share, without a scheduler: parts, receipts, `finish`."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace as with_changes

import numpy as np
import pytest

import fp4kit
from command_line import invoke
from fp4kit.checkpoint import operations
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.directory import STATE_DIR
from fp4kit.checkpoint.write.shards import fresh
from fp4kit.errors import FileFormatError, NonFiniteError, OptionError
from fp4kit.fleet import patience, places, shards, shares, tasks
from fp4kit.fleet.finish import finish
from fp4kit.fleet.job import PLAN, Job, begin, opened_job
from fp4kit.fleet.mirror import check_names
from fp4kit.fleet.run import convert
from fp4kit.fleet.stores import place_of
from fp4kit.fleet.tasks import run_task
from fp4kit.fleet.workers import Part
from fp4kit.io.moments import InputMoments, read_moments, write_moments
from fp4kit.io.write.files import Output, OutputError
from test_checkpoint_resume import RUNS, make_source

SMALL = CheckpointOptions(max_shard_size=12_000)


@pytest.fixture(autouse=True)
def _no_open_source():
    """No source stays open, so that every test begins as a new process does."""
    yield
    tasks.close_idle()


@pytest.fixture
def model(checkpoints, tmp_path):
    """A model of three files, some fused weights of which lie in different ones."""
    tensors, config = checkpoints.moe(3)
    place = {name: number % 3 for number, name in enumerate(tensors)}
    others = list(checkpoints.OTHER_FILES)
    return checkpoints.save(
        tmp_path / "model", tensors, config, shards=3, others=others, assign=place
    )


@pytest.fixture
def wanted(checkpoints, model, tmp_path):
    """What one process makes of it: every file with its SHA-256."""
    operations.quantize_checkpoint(model, tmp_path / "alone", SMALL)
    found = checkpoints.digest(tmp_path / "alone")
    assert sum(name.endswith(".safetensors") for name in found) == 5
    return found


def job_for(model, target, **changes):
    return with_changes(Job("quantize", str(model), str(target), SMALL), **changes)


def notes(target):
    return sorted(path.name for path in (target / STATE_DIR).iterdir())


# ------------------------------------------------------------------------------------------------
# The same bytes, whoever does the work
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_parts_give_the_bytes_of_one_process(checkpoints, tmp_path, name, parts):
    function, options = RUNS[name]
    source = make_source(checkpoints, tmp_path, name)
    alone = getattr(operations, function)(source, tmp_path / "alone", options)
    job = Job(function.removesuffix("_checkpoint"), str(source), str(tmp_path / "out"), options)
    tensors = []
    for number in range(parts, 0, -1):  # in any order
        report = convert(job, f"{number}/{parts}")
        tensors += report.tensors
    whole = finish(job.target)
    assert checkpoints.digest(tmp_path / "out") == checkpoints.digest(tmp_path / "alone")
    assert whole.tensors == alone.tensors
    assert whole.shards == alone.shards
    assert whole.warnings == alone.warnings
    assert sorted(tensor.name for tensor in tensors) == sorted(t.name for t in alone.tensors)


def test_fused_weights_that_lie_in_several_files_share_their_scale(checkpoints, model, wanted):
    """A group is one unit of the plan, so that no amax has to cross from one task to another."""
    with opened_job(job_for(model, "out")) as planned:
        owners = planned.plan.source.checkpoint.shards
        held = {name: file for file, names in owners.items() for name in names}
        spread = [
            key
            for key, members in planned.plan.groups.items()
            if len({held[name] for name in members}) > 1
        ]
        assert spread
        for members in planned.plan.groups.values():
            shards = {
                shard.name
                for shard in planned.shards
                for work in shard.works
                if work.tensor.name in members
            }
            assert len(shards) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_any_executor_gives_the_bytes_of_one_process(checkpoints, model, wanted, tmp_path, count):
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as executor:
        seen = []
        report = fp4kit.quantize_checkpoint(
            model,
            tmp_path / "out",
            max_shard_size="1MB",
            workers=executor,
            progress=lambda done, total: seen.append((done, total)),
        )
        convert(job_for(model, tmp_path / "small"), executor)
    assert checkpoints.digest(tmp_path / "small") == wanted
    assert report.target == str(tmp_path / "out")
    assert seen[-1][0] == seen[-1][1] > 0
    alone = fp4kit.quantize_checkpoint(model, tmp_path / "one", max_shard_size="1MB")
    assert report.tensors == alone.tensors
    assert checkpoints.digest(tmp_path / "out") == checkpoints.digest(tmp_path / "one")


def test_threads_of_one_process_share_a_plan(checkpoints, model, wanted, tmp_path):
    with ThreadPoolExecutor(3) as executor:
        convert(job_for(model, tmp_path / "out"), executor)
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_a_task_may_be_run_again(checkpoints, model, wanted, tmp_path):
    """Twice in one process and beside another worker's: the same receipt, the same bytes."""
    job = job_for(model, tmp_path / "out")
    with opened_job(job) as planned:
        begin(place_of(job.target), planned)
        plan, count = planned.hash, len(planned.shards)
    first = [run_task(job, plan, number) for number in range(count)]
    assert [run_task(job, plan, number) for number in range(count)] == first
    shutil.rmtree(tmp_path / "out" / STATE_DIR)
    (tmp_path / "out" / STATE_DIR).mkdir()
    with opened_job(job) as planned:
        place_of(job.target).write(PLAN, job.notes(planned.hash, planned.files))
    again = [run_task(job, plan, number) for number in range(count)]
    assert again == first  # the sums of errors, too, are those of one run
    finish(job.target)
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_a_fresh_shard_shares_second_levels_as_the_planned_one_does(model):
    with opened_job(job_for(model, "out")) as planned:
        for shard in planned.shards:
            made = fresh(shard)
            for old, new in zip(shard.units, made.units, strict=True):
                assert len({id(w.second) for w in new.works}) == len(
                    {id(w.second) for w in old.works}
                )
                assert not {id(w.second) for w in new.works} & {id(w.second) for w in old.works}


def test_every_task_is_in_one_part():
    for total in (0, 1, 5, 16):
        for count in (1, 2, 3, 20):
            parts = [Part(number, count).tasks(total) for number in range(1, count + 1)]
            assert sorted(task for part in parts for task in part) == list(range(total))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


# ------------------------------------------------------------------------------------------------
# Another plan
# ------------------------------------------------------------------------------------------------


def test_a_worker_with_another_plan_refuses(checkpoints, model, tmp_path):
    job = job_for(model, tmp_path / "out")
    convert(job, "1/2")
    before = checkpoints.digest(tmp_path / "out")
    for other, said in [
        (with_changes(SMALL, max_shard_size=13_000), "option max_shard_size was 12000, is 13000"),
        (with_changes(SMALL, exclude=("*down_proj*",)), "option exclude was"),
        (with_changes(SMALL, layout="modelopt"), "option layout was 'compressed-tensors'"),
    ]:
        with pytest.raises(OptionError, match="begun with another plan") as error:
            convert(with_changes(job, options=other), "2/2")
        assert said in str(error.value)
    config = checkpoints.config_of(model)
    checkpoints.write_json(model / "config.json", {**config, "vocab_size": 81})
    with pytest.raises(OptionError, match="has other headers, sizes or JSON files"):
        convert(job, "2/2")
    assert checkpoints.digest(tmp_path / "out") == before


def test_a_task_refuses_a_source_that_is_not_the_planned_one(model, tmp_path):
    job = job_for(model, tmp_path / "out")
    with pytest.raises(OptionError, match="this worker makes another plan"):
        run_task(job, "0" * 64, 0)
    assert not (tmp_path / "out").exists()


def test_another_version_refuses(model, tmp_path, monkeypatch):
    job = job_for(model, tmp_path / "out")
    convert(job, "1/2")
    path = tmp_path / "out" / PLAN
    path.write_text(path.read_text().replace(fp4kit.__version__, "0.0.1"))
    with pytest.raises(OptionError, match=r"was begun by fp4kit 0\.0\.1"):
        finish(job.target)


def test_the_hash_is_that_of_content_not_of_a_place_or_a_time(checkpoints, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    with opened_job(job_for(model, "a")) as one, opened_job(job_for(copy, "b")) as other:
        assert one.hash == other.hash
    # Half the parts from each.
    convert(job_for(model, tmp_path / "out"), "1/2")
    convert(job_for(copy, tmp_path / "out"), "2/2")
    shutil.rmtree(model)
    with pytest.raises(FileFormatError, match="no such file"):
        finish(str(tmp_path / "out"))
    assert finish(str(tmp_path / "out"), str(copy)).source == str(copy)


# ------------------------------------------------------------------------------------------------
# finish
# ------------------------------------------------------------------------------------------------


def test_finish_names_what_is_missing(model, tmp_path):
    job = job_for(model, tmp_path / "out")
    convert(job, "2/2")
    before = notes(tmp_path / "out")
    with pytest.raises(OutputError, match="3 of 5 shards are missing or damaged") as error:
        finish(job.target)
    assert "'model-00001-of-00005.safetensors', 'model-00003-of-00005.safetensors'" in str(
        error.value
    )
    assert notes(tmp_path / "out") == before
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "receipt", "no receipt"])
def test_damage_is_found_and_made_good(checkpoints, model, wanted, tmp_path, damage):
    job = job_for(model, tmp_path / "out")
    for part in ("1/2", "2/2"):
        convert(job, part)
    shard = tmp_path / "out" / "model-00003-of-00005.safetensors"
    receipt = tmp_path / "out" / STATE_DIR / f"{shard.name}.json"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    match damage:
        case "changed":
            shard.write_bytes(data)
        case "cut":
            shard.write_bytes(data[:-1])
        case "gone":
            shard.unlink()
        case "receipt":
            content = json.loads(receipt.read_text())
            content["results"].popitem()
            receipt.write_text(json.dumps(content))
        case "no receipt":
            receipt.write_bytes(receipt.read_bytes()[:100])
    with pytest.raises(OutputError, match="1 of 5 shards are missing or damaged"):
        finish(job.target)
    convert(job, "1/2")
    finish(job.target)
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_finishing_twice_changes_nothing(checkpoints, model, wanted, tmp_path):
    job = job_for(model, tmp_path / "out")
    convert(job, "1/1")
    with ThreadPoolExecutor(4) as pool:  # and all at once
        reports = list(pool.map(lambda _: finish(job.target), range(4)))
    assert any(report is not None for report in reports)
    assert checkpoints.digest(tmp_path / "out") == wanted
    assert finish(job.target) is None
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_finish_without_parts_says_so(tmp_path, checkpoints):
    with pytest.raises(FileFormatError, match="holds no conversion; run its parts first"):
        finish(str(tmp_path / "nothing"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FileFormatError, match="holds no unfinished conversion"):
        finish(str(tmp_path / "other"))


def test_a_late_worker_leaves_a_finished_result_finished(
    checkpoints, model, wanted, tmp_path, monkeypatch
):
    """Its task was given to another one meanwhile, and the result is whole when it ends."""
    job = job_for(model, tmp_path / "out")
    convert(job, "1/1")
    with opened_job(job) as planned:
        plan = planned.hash
    real = tasks.write_shard

    def write_late(*arguments):
        real(*arguments)
        finish(job.target)

    monkeypatch.setattr(tasks, "write_shard", write_late)
    monkeypatch.setattr(tasks, "read_receipt", lambda *_: None)
    assert run_task(job, plan, 2).shard == "model-00003-of-00005.safetensors"
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_notes_go_also_while_a_late_worker_writes_one(tmp_path, monkeypatch):
    place = places.LocalPlace(tmp_path / "out")
    place.create(0)
    place.write(PLAN, b"{}")
    real, left = places.Path.rmdir, [b"x", b"y"]

    def rmdir(path):
        if left:
            (path / "late.json").write_bytes(left.pop())
        real(path)

    monkeypatch.setattr(places.Path, "rmdir", rmdir)
    place.remove_notes()
    assert list((tmp_path / "out").iterdir()) == []


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


# ------------------------------------------------------------------------------------------------
# Surveys and comparisons in shares
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_bytes", [1 << 40, 20_000, 1000])
def test_a_survey_in_shares(model, monkeypatch, share_bytes):
    monkeypatch.setattr(shares, "SHARE_BYTES", share_bytes)
    names = ["nvfp4", "mxfp4", "nvfp4+sweep", "fp8", "bf16"]
    alone = fp4kit.survey(model, names, budget=7.0, device="cpu")
    with ThreadPoolExecutor(2) as executor:
        shared = fp4kit.survey(model, names, budget=7.0, device="cpu", workers=executor)
    assert shared.tensors == alone.tensors
    assert shared.plan == alone.plan
    assert shared.groups == alone.groups
    one, other = alone.to_json(), shared.to_json()
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("share_bytes", [1 << 40, 20_000, 1000])
def test_a_comparison_in_shares(checkpoints, model, tmp_path, monkeypatch, share_bytes):
    monkeypatch.setattr(shares, "SHARE_BYTES", share_bytes)
    fp4kit.quantize_checkpoint(model, tmp_path / "q")
    tensors, config = checkpoints.moe(3)
    for name, other in checkpoints.moe(3, seed=1)[0].items():
        if "experts.1" in name or "gate" in name:  # some tensors are far off
            tensors[name] = other
    model = checkpoints.save(tmp_path / "other", tensors, config)
    alone = fp4kit.verify(tmp_path / "q", model)
    with ThreadPoolExecutor(2) as executor:
        shared = fp4kit.verify(tmp_path / "q", model, workers=executor)
    assert len(alone.faults) > 3
    assert len(alone.tensors) > 10
    assert shared.faults == alone.faults
    assert shared.tensors == alone.tensors


@pytest.fixture
def moments(model, tmp_path):
    """Moments of all modules, which weigh the errors of a sweep."""
    random = np.random.default_rng(5)
    tensors = fp4kit.survey(model, ["nvfp4"], device="cpu").tensors
    second = {t.name.removesuffix(".weight"): random.random(t.shape[1]) ** 4 for t in tensors}
    file = tmp_path / "moments.safetensors"
    write_moments(Output(file), InputMoments(file, second), {})
    return file


def test_moments_go_to_workers_too(checkpoints, model, moments, tmp_path, monkeypatch):
    monkeypatch.setattr(shares, "SHARE_BYTES", 20_000)
    monkeypatch.chdir(tmp_path)
    sweep = fp4kit.Scheme("nvfp4", scale_search="sweep")
    options = {"moments": moments.name, "max_shard_size": "1MB"}
    alone = fp4kit.survey(model, ["nvfp4", "nvfp4+sweep"], moments=moments.name)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.chdir, ("/",)) as executor:
        fp4kit.quantize_checkpoint(model, "out", sweep, workers=executor, **options)
        shared = fp4kit.survey(
            model, ["nvfp4", "nvfp4+sweep"], moments=moments.name, workers=executor
        )
    fp4kit.quantize_checkpoint(model, "alone", sweep, **options)
    assert checkpoints.digest(tmp_path / "out") == checkpoints.digest(tmp_path / "alone")
    assert shared.tensors == alone.tensors
    assert all(t.errors["nvfp4"].output_noise is not None for t in shared.tensors)
    # Other moments are another plan.
    fp4kit.quantize_checkpoint(model, "parts", sweep, workers="1/2", **options)
    write_moments(Output(moments, replace=True), _doubled(moments), {})
    tasks.close_idle()
    with pytest.raises(OptionError, match="was begun with another plan"):
        fp4kit.quantize_checkpoint(model, "parts", sweep, workers="2/2", **options)


def _doubled(file):
    second = {name: 2 * values for name, values in read_moments(file).second.items()}
    return InputMoments(file, second)


def test_shares_are_refused_where_there_are_none(checkpoints, model, tmp_path):
    tensors, _ = checkpoints.llama(1)
    file = checkpoints.write_file(tmp_path / "one.safetensors", tensors)
    quantized = tmp_path / "one-nvfp4.safetensors"
    fp4kit.quantize_file(file, quantized)
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(OptionError, match="is no model directory, which workers are for"):
            fp4kit.survey(file, workers=executor)
        with pytest.raises(OptionError, match="is no model directory; workers compare two"):
            fp4kit.verify(quantized, file, workers=executor)
        with pytest.raises(OptionError, match="workers compare values; say against what"):
            fp4kit.verify(quantized, workers=executor)
    with pytest.raises(OptionError, match="a survey has no parts; give a scheduler"):
        fp4kit.survey(model, workers="1/2")
    with pytest.raises(OptionError, match="verify has no parts; give a scheduler"):
        fp4kit.verify(model, model, workers="1/2")


def test_a_share_of_another_source_is_refused(checkpoints, model):
    wanted = shares.hash_of(model)
    config = checkpoints.config_of(model)
    checkpoints.write_json(model / "config.json", {**config, "vocab_size": 81})
    with pytest.raises(OptionError, match="this worker sees other headers"):
        shares.check_hash(wanted, model)


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def test_an_array_of_jobs(checkpoints, model, tmp_path):
    alone = invoke("quantize", model, "-o", tmp_path / "alone", "--json", "--max-shard-size", "1MB")
    for number in (1, 2):
        result = invoke(
            "quantize", model, "-o", tmp_path / "out", "--max-shard-size", "1MB",
            "--part", f"{number}/2",
        )  # fmt: skip
        assert result.exit_code == 0, result.stderr
        assert f"Wrote part {number}/2 of" in result.stderr
        assert f"fp4kit finish {tmp_path / 'out'}" in result.stderr
    result = invoke("finish", tmp_path / "out", "--json", "--report", tmp_path / "report.json")
    assert result.exit_code == 0, result.stderr
    report, whole = json.loads(result.stdout), json.loads(alone.stdout)
    assert report["tensors"] == whole["tensors"]
    assert report["shards"] == whole["shards"]
    assert json.loads((tmp_path / "report.json").read_text())["tensors"] == whole["tensors"]
    assert checkpoints.digest(tmp_path / "out") == checkpoints.digest(tmp_path / "alone")
    again = invoke("finish", tmp_path / "out")
    assert again.exit_code == 0
    assert "is finished already, and no fault was found" in again.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--part", "1/2", "--scheduler", "local:2"), "exclude each other"),
        (("--part", "1/2", "--force"), "--force is not for --scheduler, --part and URLs"),
        (("--part", "1/2", "--resume"), "--resume is not for --part"),
        (("--part", "1/2", "--budget", "5"), "--budget is not for --part"),
        (("--part", "1/2", "--report", "r.json"), "not for --part; fp4kit finish has them"),
    ],
)
def test_options_that_exclude_parts(model, tmp_path, options, said):
    result = invoke("quantize", model, "-o", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_parts_need_an_output(model):
    result = invoke("quantize", model, "--part", "1/2")
    assert result.exit_code == 2
    assert "need -o OUT" in result.stderr


def test_a_dry_run_of_a_scheduler_plans_alone(model, tmp_path):
    job = fp4kit.quantize_checkpoint(model, tmp_path / "out", workers="1/2", dry_run=True)
    assert job.target is None
    assert not (tmp_path / "out").exists()
