# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions on a real dask scheduler over loopback: the same bytes, whatever is killed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from command_line import run as run_command
from fleet_cluster import Cluster
from fp4kit.checkpoint import operations
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.errors import NonFiniteError, OptionError
from fp4kit.fleet import dask_scheduler, patience, tasks
from fp4kit.fleet.job import Job
from fp4kit.fleet.run import convert
from fp4kit.io.write.files import OutputError
from test_checkpoint_resume import RUNS, make_source

distributed = pytest.importorskip("distributed", reason="needs dask.distributed (make fleet)")

SMALL = CheckpointOptions(max_shard_size=12_000)


@pytest.fixture(autouse=True)
def _no_open_source():
    yield
    tasks.close_idle()


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(folder) as cluster:
        yield cluster


@pytest.fixture
def told():
    said = []
    patience.on_retry(lambda message, retries: said.append((message, retries)))
    yield said
    patience.on_retry(None)


@pytest.fixture
def model(checkpoints, tmp_path):
    tensors, config = checkpoints.moe(3)
    others = list(checkpoints.OTHER_FILES)
    return checkpoints.save(tmp_path / "model", tensors, config, shards=3, others=others)


@pytest.fixture
def wanted(checkpoints, model, tmp_path):
    operations.quantize_checkpoint(model, tmp_path / "alone", SMALL)
    return checkpoints.digest(tmp_path / "alone")


def quantize(model, target, cluster, **run):
    return convert(Job("quantize", str(model), str(target), SMALL), cluster.address, **run)


def in_background(function, *arguments, **named):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *arguments, **named)
    pool.shutdown(wait=False)
    return future


# ------------------------------------------------------------------------------------------------
# The same bytes
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_number_of_workers(checkpoints, model, wanted, tmp_path, cluster, count):
    cluster.add(count)
    seen = []
    report = quantize(model, tmp_path / "out", cluster, progress=lambda *done: seen.append(done))
    alone = operations.quantize_checkpoint(model, tmp_path / "again", SMALL)
    assert checkpoints.digest(tmp_path / "out") == wanted
    assert report.tensors == alone.tensors
    assert seen[-1][0] == seen[-1][1] > 0


def test_every_operation(checkpoints, tmp_path, cluster):
    cluster.add(2)
    for name, (function, options) in RUNS.items():
        source = make_source(checkpoints, tmp_path / name, name)
        getattr(operations, function)(source, tmp_path / name / "alone", options)
        target = tmp_path / name / "out"
        job = Job(function.removesuffix("_checkpoint"), str(source), str(target), options)
        convert(job, cluster.address)
        assert checkpoints.digest(target) == checkpoints.digest(tmp_path / name / "alone"), name


def test_two_clients_share_a_cluster(checkpoints, model, wanted, tmp_path, cluster):
    """Also the same job twice at once: tasks may be run by both."""
    cluster.add(2)
    jobs = [in_background(quantize, model, tmp_path / name, cluster) for name in "ab"]
    for job, name in zip(jobs, "ab", strict=True):
        job.result(120)
        assert checkpoints.digest(tmp_path / name) == wanted


def test_the_command_starts_a_cluster_of_its_own(checkpoints, model, tmp_path):
    options = ("--max-shard-size", "1MB", "--json")
    result = run_command(
        "quantize", model, "-o", tmp_path / "out", "--scheduler", "local:2", *options
    )
    assert result.returncode == 0, result.stderr
    alone = run_command("quantize", model, "-o", tmp_path / "alone", *options)
    one, other = json.loads(result.stdout), json.loads(alone.stdout)
    assert one["tensors"] == other["tensors"]
    assert checkpoints.digest(tmp_path / "out") == checkpoints.digest(tmp_path / "alone")
    assert b"Warning" not in result.stderr


def test_surveys_and_comparisons(checkpoints, model, tmp_path, cluster):
    cluster.add(2)
    options = ("--json", "--scheduler", cluster.address)
    shared, alone = (
        json.loads(run_command("survey", model, "--device", "cpu", *more).stdout)
        for more in (options, ("--json",))
    )
    assert shared["tensors"] == alone["tensors"]
    assert len(shared["tensors"]) > 10
    operations.quantize_checkpoint(model, tmp_path / "q", SMALL)
    result = run_command("verify", tmp_path / "q", "--against", model, *options)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["faults"] == []
    assert run_command("verify", tmp_path / "q", *options).returncode == 2


def test_tasks_have_names(model, tmp_path, cluster):
    """What the dashboard shows: the operation and the file."""
    cluster.add(1, "held")
    job = in_background(quantize, model, tmp_path / "out", cluster)
    cluster.wait_begun()
    with distributed.Client(cluster.address, set_as_default=False) as client:
        keys = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
    cluster.go()
    job.result(60)
    assert sum(key.startswith("quantize-model-0000") for key in keys) == 5
    assert {distributed.utils.key_split(key) for key in keys} == {"quantize-model"}


# ------------------------------------------------------------------------------------------------
# Failures
# ------------------------------------------------------------------------------------------------


def test_a_worker_is_killed(checkpoints, model, wanted, tmp_path, cluster):
    """In the middle of its task; another one does it again."""
    first = cluster.add(1, "held")[0]
    job = in_background(quantize, model, tmp_path / "out", cluster)
    assert cluster.wait_begun() == [first.pid]
    cluster.add(1, "plain")
    cluster.kill(first)
    job.result(120)
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_worker_after_worker_is_killed(checkpoints, model, wanted, tmp_path, cluster):
    """A task whose workers were killed too often is given out anew."""
    job = in_background(quantize, model, tmp_path / "out", cluster)
    for count in range(1, 7):
        worker = cluster.add(1, "held")[0]
        cluster.wait_begun(count)
        cluster.kill(worker)
    cluster.add(2, "plain")
    job.result(120)
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_the_scheduler_is_killed(checkpoints, model, wanted, tmp_path, cluster):
    cluster.add(2, "slow")
    job = in_background(quantize, model, tmp_path / "out", cluster)
    notes = tmp_path / "out" / ".fp4kit-incomplete"
    cluster._wait(lambda: notes.is_dir() and len(list(notes.glob("model*"))) >= 1)
    cluster.kill(cluster.scheduler)
    with pytest.raises(OutputError, match="of 5 shards are missing") as error:
        job.result(120)
    assert "the scheduler is gone" in str(error.value)
    assert "the same command with --resume makes them" in str(error.value)
    folder = tmp_path / "second"
    folder.mkdir()
    with Cluster(folder) as second:
        second.add(2)
        with pytest.raises(OptionError, match="pass --resume to go on"):
            quantize(model, tmp_path / "out", second)
        quantize(model, tmp_path / "out", second, resume=True)
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_workers_that_come_late(checkpoints, model, wanted, tmp_path, cluster, told, monkeypatch):
    monkeypatch.setattr(dask_scheduler, "QUIET_SECONDS", 1.0)
    job = in_background(quantize, model, tmp_path / "out", cluster)
    said = "The scheduler has no worker at the moment; the work goes on when one joins"
    cluster._wait(lambda: (said, 0) in told)
    cluster.add(1, "slow")
    cluster._wait(lambda: (tmp_path / "out" / "model-00001-of-00005.safetensors").exists())
    cluster.add(2)
    job.result(120)
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_a_disk_that_is_full_on_one_worker(checkpoints, model, wanted, tmp_path, cluster, told):
    cluster.add(1, "full")
    cluster.add(1, "slow")
    with distributed.Client(cluster.address, set_as_default=False) as client:
        client.wait_for_workers(2)
    quantize(model, tmp_path / "out", cluster)
    assert checkpoints.digest(tmp_path / "out") == wanted
    assert any("No space left on device" in message for message, _ in told)


def test_a_disk_that_is_full_everywhere(model, tmp_path, cluster):
    cluster.add(2, "full")
    with pytest.raises(OutputError, match=r"of 5 shards are missing.*No space left on device"):
        quantize(model, tmp_path / "out", cluster)


def test_a_worker_whose_clock_is_wrong(checkpoints, model, wanted, tmp_path, cluster):
    cluster.add(1, "other clock")
    cluster.add(1)
    quantize(model, tmp_path / "out", cluster)
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_a_worker_of_another_version_refuses(model, tmp_path, cluster):
    cluster.add(1, "other version")
    with pytest.raises(OptionError, match="this worker makes another plan of it"):
        quantize(model, tmp_path / "out", cluster)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".fp4kit-incomplete"]


def test_numbers_that_are_not_finite_end_the_run(checkpoints, tmp_path, cluster):
    tensors, config = checkpoints.llama(1)
    tensors["model.layers.0.mlp.down_proj.weight"][1][3, 4] = float("nan")
    source = checkpoints.save(tmp_path / "bad", tensors, config)
    cluster.add(1)
    with pytest.raises(NonFiniteError, match="holds 1 NaN"):
        quantize(source, tmp_path / "out", cluster)


def test_a_scheduler_that_is_not_there(model, tmp_path, monkeypatch):
    monkeypatch.setattr(dask_scheduler, "ANSWER_SECONDS", 0.5)
    with pytest.raises(OptionError, match=r"scheduler tcp://127\.0\.0\.1:9: does not answer"):
        convert(Job("quantize", str(model), str(tmp_path / "out"), SMALL), "tcp://127.0.0.1:9")


# ------------------------------------------------------------------------------------------------
# GPUs
# ------------------------------------------------------------------------------------------------


def test_tasks_go_to_workers_that_offer_a_gpu(checkpoints, model, wanted, tmp_path, cluster):
    cluster.add(2, "held")
    (gpu,) = cluster.add(1, "held", "--resources", "GPU=1")
    cluster.go()
    with distributed.Client(cluster.address, set_as_default=False) as client:
        client.wait_for_workers(3)
    convert(Job("quantize", str(model), str(tmp_path / "out"), SMALL, "auto"), cluster.address)
    assert cluster.wait_begun() == [gpu.pid]
    assert checkpoints.digest(tmp_path / "out") == wanted


def test_cuda_needs_workers_that_offer_a_gpu(model, tmp_path, cluster):
    cluster.add(1)
    with distributed.Client(cluster.address, set_as_default=False) as client:
        client.wait_for_workers(1)
    job = Job("quantize", str(model), str(tmp_path / "out"), SMALL, "cuda")
    with pytest.raises(OptionError, match="no worker offers the resource GPU"):
        convert(job, cluster.address)
