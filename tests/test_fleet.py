# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions that several workers share, without a scheduler: parts, plans, `finish`."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace as with_changes

import pytest

import fp4kit
from fleet_models import SMALL, job_for, notes
from fp4kit.checkpoint import operations
from fp4kit.checkpoint.read.directory import STATE_DIR
from fp4kit.checkpoint.write.shards import fresh
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.fleet import places, tasks
from fp4kit.fleet.finish import finish
from fp4kit.fleet.job import PLAN, Job, begin, opened_job
from fp4kit.fleet.run import convert
from fp4kit.fleet.stores import place_of
from fp4kit.fleet.tasks import run_task
from fp4kit.fleet.workers import Part
from fp4kit.io.write.files import OutputError
from test_checkpoint_resume import RUNS, make_source

pytestmark = pytest.mark.usefixtures("no_open_source")


@pytest.fixture
def model(fleet_model):
    return fleet_model


@pytest.fixture
def wanted(fleet_wanted):
    return fleet_wanted


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
