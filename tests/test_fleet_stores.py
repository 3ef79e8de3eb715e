# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Sources and targets that are URLs: a web server with ranges, an S3 server, and their faults."""

from __future__ import annotations

import hashlib
import json
import logging
import os

import numpy as np
import pytest

import fp4kit
from command_line import invoke
from fleet_cluster import Cluster
from fleet_servers import CLOSED, CUT, OK, WHOLE, Log, every, s3_server, web_server
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.fleet import patience, places, remote_files, stores, tasks
from fp4kit.fleet.finish import finish
from fp4kit.fleet.job import PLAN, Job
from fp4kit.fleet.mirror import opened
from fp4kit.fleet.run import convert
from fp4kit.io.write.files import OutputError

pytest.importorskip("s3fs", reason="needs s3fs and moto (make fleet)")
pytest.importorskip("moto", reason="needs s3fs and moto (make fleet)")

logging.getLogger("werkzeug").setLevel(logging.ERROR)
SMALL = CheckpointOptions(max_shard_size=12_000)
BUCKET = "bucket"


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    """Short pauses, small pieces, and no source that stays open."""
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(remote_files, "PIECE", 3000)
    monkeypatch.setattr(remote_files, "HEAD", 1 << 10)
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(folder))
    yield
    tasks.close_idle()
    assert list(folder.iterdir()) == []


@pytest.fixture
def model(checkpoints, tmp_path):
    tensors, config = checkpoints.moe(3)
    others = list(checkpoints.OTHER_FILES)
    return checkpoints.save(tmp_path / "model", tensors, config, shards=3, others=others)


@pytest.fixture
def wanted(checkpoints, model, tmp_path):
    fp4kit.checkpoint.operations.quantize_checkpoint(model, tmp_path / "alone", SMALL)
    return checkpoints.digest(tmp_path / "alone")


@pytest.fixture
def web(model):
    log = Log()
    with web_server(model, log) as address:
        yield address, log


@pytest.fixture(scope="module")
def s3_address():
    log = Log()
    names = {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "keep-me-quiet",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # or botocore waits by itself
    }
    with s3_server(log) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "AWS_ENDPOINT_URL": address}.items():
            patch.setenv(name, value)
        yield log


@pytest.fixture
def s3(s3_address, request):
    """The log of a server with an empty bucket, and its file system."""
    import s3fs

    log = s3_address
    log.fault, log.faults = (lambda request: OK), 0
    fs = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    if fs.exists(BUCKET):
        fs.rm(BUCKET, recursive=True)
    fs.mkdir(BUCKET)
    log.requests.clear()
    return log, fs


def put(fs, folder, name):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fs.put_file(str(path), f"{BUCKET}/{name}/{path.relative_to(folder).as_posix()}")
    return f"s3://{BUCKET}/{name}"


def got(fs, url, folder, checkpoints):
    root = url.removeprefix("s3://")
    for name in fs.find(root):
        path = folder / name.removeprefix(f"{root}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(name, str(path))
    return checkpoints.digest(folder)


def quantize(source, target, workers=None, **run):
    return convert(Job("quantize", str(source), str(target), SMALL), workers, **run)


# ------------------------------------------------------------------------------------------------
# Web server
# ------------------------------------------------------------------------------------------------


def test_a_model_on_a_web_server(checkpoints, web, wanted, tmp_path):
    address, _ = web
    report = quantize(address, tmp_path / "out")
    found = checkpoints.digest(tmp_path / "out")
    # A server lists only what lies in the directory itself.
    assert found == {name: value for name, value in wanted.items() if "/" not in name}
    assert report.source == address


def test_a_server_that_lists_nothing_is_asked_for_what_models_have(
    checkpoints, model, wanted, tmp_path
):
    with web_server(model, Log(), lists=False) as address:
        quantize(address, tmp_path / "out")
    assert checkpoints.digest(tmp_path / "out") == {
        name: value for name, value in wanted.items() if "/" not in name
    }


def test_exactly_what_a_task_needs_is_fetched(checkpoints, web, model, tmp_path):
    """Each byte of a tensor once; of a part, only those of its tensors."""
    address, log = web
    report = quantize(address, tmp_path / "out", "2/5")
    fetched = {}
    for request in log.requests:
        if request.method == "GET" and request.path.endswith(".safetensors"):
            assert request.first is not None
            span = range(request.first, request.last + 1)
            if request.first == 0 and len(span) == remote_files.HEAD:
                continue
            found = fetched.setdefault(request.path, set())
            assert not found & set(span)
            found.update(span)
    read = sum(tensor.bytes_before for tensor in report.tensors)
    headers = sum(
        max(len(checkpoints_header(path)) - remote_files.HEAD, 0)
        for path in model.glob("*.safetensors")
    )
    assert 0 < sum(map(len, fetched.values())) <= read + headers
    assert read < sum(path.stat().st_size for path in model.glob("*.safetensors")) / 2


def checkpoints_header(path):
    data = path.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.parametrize("fate", [CUT, CLOSED, 500, 503, 429])
@pytest.mark.parametrize("count", [1, 3])
def test_faults_that_pass_change_nothing(checkpoints, web, wanted, tmp_path, fate, count):
    address, log = web
    log.fault = every(count, fate)
    report = quantize(address, tmp_path / "out")
    assert log.faults > 10
    assert checkpoints.digest(tmp_path / "out").items() <= wanted.items()
    assert report.tensors


@pytest.mark.parametrize("fate", [CUT, 503])
def test_faults_in_the_middle_of_a_range(checkpoints, web, wanted, tmp_path, fate):
    """Every second request for a range that is no header."""
    address, log = web
    log.fault = lambda each: fate if each.first and each.number % 2 else OK
    quantize(address, tmp_path / "out")
    assert log.faults > 5
    assert checkpoints.digest(tmp_path / "out").items() <= wanted.items()


def test_a_fault_that_lasts_says_what_is_missing_and_resume_makes_it(
    checkpoints, web, wanted, tmp_path, monkeypatch
):
    address, log = web
    bad = "model-00003-of-00003.safetensors"
    log.fault = lambda each: 503 if each.path == bad and each.first else OK
    with pytest.raises(OutputError, match=r"of 5 shards are missing .*tried 7 times") as error:
        quantize(address, tmp_path / "out")
    assert bad in str(error.value)
    tasks.close_idle()
    log.fault = lambda each: OK
    quantize(address, tmp_path / "out", resume=True)
    assert checkpoints.digest(tmp_path / "out").items() <= wanted.items()


def test_retries_are_told(web, tmp_path):
    address, log = web
    told = []
    patience.on_retry(lambda message, retries: told.append((message, retries)))
    log.fault = lambda each: CUT if each.first and each.number % 2 else OK
    try:
        quantize(address, tmp_path / "out")
    finally:
        patience.on_retry(None)
    assert sum(retries for _, retries in told) > 0
    assert "requests were tried again" in told[0][0]


def test_a_server_without_ranges_is_refused(web, tmp_path):
    address, log = web
    log.fault = lambda each: WHOLE if each.first is not None else OK
    with pytest.raises(FileFormatError, match="does not answer requests for a range of bytes"):
        quantize(address, tmp_path / "out")


def test_nothing_there_is_said_at_once(web, tmp_path):
    address, log = web
    with pytest.raises(FileFormatError, match="there is nothing; give the URL of a model"):
        quantize(f"{address}/nowhere", tmp_path / "out")
    assert max(each.number for each in log.requests) < 2


def test_errors_name_the_url(checkpoints, model, tmp_path):
    (model / "config.json").write_text("{")
    with web_server(model, Log()) as address, pytest.raises(FileFormatError) as error:
        quantize(address, tmp_path / "out")
    assert str(error.value).startswith(f"{address}/config.json: damaged JSON")
    assert "fp4kit-scratch" not in str(error.value)


def test_a_web_server_is_no_target(web, model):
    address, _ = web
    with pytest.raises(OptionError, match="cannot be written to; give a path, or a URL of an"):
        quantize(model, f"{address}/out")


def test_a_source_that_changes_gives_no_receipt(s3, model, tmp_path, monkeypatch):
    _log, fs = s3
    url = put(fs, model, "model")
    real = tasks.write_shard

    def change(*arguments):
        real(*arguments)
        for name in fs.glob(f"{BUCKET}/model/*.safetensors"):
            data = bytearray(fs.cat_file(name))
            data[-1] ^= 1
            fs.pipe_file(name, bytes(data))

    monkeypatch.setattr(tasks, "write_shard", change)
    monkeypatch.setattr("fp4kit.fleet.executors.ATTEMPTS", 1)
    with pytest.raises(OutputError, match="has changed while it was read"):
        quantize(url, tmp_path / "out")
    assert not list((tmp_path / "out").glob(".fp4kit-incomplete/model*"))


# ------------------------------------------------------------------------------------------------
# S3
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [lambda each: OK, every(1, 503), every(2, 500, "PUT")])
def test_from_and_to_s3(checkpoints, s3, model, wanted, tmp_path, fault):
    log, fs = s3
    source, target = put(fs, model, "model"), f"s3://{BUCKET}/out"
    log.fault = fault
    report = quantize(source, target)
    log.fault = lambda each: OK
    assert got(fs, target, tmp_path / "out", checkpoints) == wanted
    assert report.target == target
    assert finish(target) is None


def test_dask_workers_from_and_to_s3(checkpoints, s3, model, wanted, tmp_path):
    log, fs = s3
    source, target = put(fs, model, "model"), f"s3://{BUCKET}/out"
    folder = tmp_path / "cluster"
    folder.mkdir()
    with Cluster(folder) as cluster:
        cluster.add(2)
        log.fault = every(1, 503)
        quantize(source, target, cluster.address)
    log.fault = lambda each: OK
    assert log.faults > 10
    assert got(fs, target, tmp_path / "out", checkpoints) == wanted


def test_parts_on_s3_and_finish_twice(checkpoints, s3, model, wanted, tmp_path):
    _, fs = s3
    source, target = put(fs, model, "model"), f"s3://{BUCKET}/out"
    quantize(source, target, "2/2")
    with pytest.raises(OutputError, match="3 of 5 shards are missing"):
        finish(target)
    result = invoke("verify", target)
    assert result.exit_code == 1
    assert "is the unfinished output of a conversion" in result.stdout
    quantize(source, target, "1/2")
    assert finish(target) is not None
    assert got(fs, target, tmp_path / "out", checkpoints) == wanted
    # A late worker's receipt means nothing without the plan.
    fs.pipe_file(f"{BUCKET}/out/.fp4kit-incomplete/model-00001-of-00005.safetensors.json", b"{}")
    assert invoke("verify", target).exit_code == 0
    assert finish(target) is None
    assert not fs.find(f"{BUCKET}/out/.fp4kit-incomplete")


def test_a_file_is_no_model_directory(s3, model, tmp_path):
    _, fs = s3
    source = put(fs, model, "model")
    with pytest.raises(FileFormatError, match="is a file; give the URL of a model directory"):
        quantize(f"{source}/model-00001-of-00003.safetensors", tmp_path / "out")
    with pytest.raises(FileFormatError, match="there is nothing"):
        quantize(f"{source}2", tmp_path / "out")


def test_what_was_uploaded_is_not_read_again(s3, model):
    log, _fs = s3
    target = f"s3://{BUCKET}/out"
    quantize(model, target, "1/1")
    log.requests.clear()
    finish(target)
    read = [each for each in log.requests if each.method == "GET" and ".safetensors" in each.path]
    shards = {each.path for each in read if each.path.endswith(".safetensors")}
    # Headers and scales, for the last check; no shard as a whole.
    assert len(shards) == 5
    assert all(each.first is not None for each in read if each.path in shards)


def test_a_shard_that_somebody_replaced_is_made_again(checkpoints, s3, model, wanted, tmp_path):
    _, fs = s3
    target = f"s3://{BUCKET}/out"
    quantize(model, target, "1/1")
    name = f"{BUCKET}/out/model-00002-of-00005.safetensors"
    data = bytearray(fs.cat_file(name))
    data[-1] ^= 1
    fs.pipe_file(name, bytes(data))
    with pytest.raises(OutputError, match="1 of 5 shards are missing or damaged"):
        finish(target)
    quantize(model, target, "1/1")
    finish(target)
    assert got(fs, target, tmp_path / "out", checkpoints) == wanted


def test_a_multipart_upload_never_appears_half_done(checkpoints, s3, tmp_path, monkeypatch):
    log, fs = s3
    tensors, config = checkpoints.llama(1)
    large = np.random.default_rng(0).integers(0, 1 << 16, (110, 1 << 19), np.uint16)
    tensors["model.embed_tokens.weight"] = "BF16", large.view(checkpoints.DTYPES["BF16"])
    model = checkpoints.save(tmp_path / "model", tensors, config)
    target = f"s3://{BUCKET}/out"
    # A store that fails for good in the middle: no object, no receipt.
    log.fault = lambda each: 403 if "partNumber=2" in each.path else OK
    monkeypatch.setattr("fp4kit.fleet.executors.ATTEMPTS", 1)
    with pytest.raises(OutputError, match="1 of 1 shards are missing"):
        fp4kit.quantize_checkpoint(model, target)
    assert any("partNumber=1" in each.path for each in log.requests)
    assert fs.find(f"{BUCKET}/out") == [f"{BUCKET}/out/{PLAN}"]
    # One that fails for a while.
    log.faults = 0
    log.fault = lambda each: 503 if "partNumber=2" in each.path and log.faults < 2 else OK
    fp4kit.quantize_checkpoint(model, target, resume=True)
    log.fault = lambda each: OK
    fp4kit.quantize_checkpoint(model, tmp_path / "alone")
    assert got(fs, target, tmp_path / "out", checkpoints) == checkpoints.digest(tmp_path / "alone")


def test_credentials_stand_nowhere(s3, model, tmp_path):
    log, fs = s3
    source, target = put(fs, model, "model"), f"s3://{BUCKET}/out"
    result = invoke("quantize", source, "-o", target, "--json", "--max-shard-size", "1MB")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["source"] == source
    log.fault = every(99, 403)
    failed = invoke("quantize", source, "-o", f"{target}2")
    assert failed.exit_code == 1
    assert failed.stderr.count("\n") == 1
    for text in (result.stdout, result.stderr, failed.output, failed.stderr):
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in text
        assert os.environ["AWS_ACCESS_KEY_ID"] not in text


def test_refused_credentials_are_said_at_once(s3, model, tmp_path):
    log, fs = s3
    put(fs, model, "model")
    log.requests.clear()
    log.fault = lambda each: 403
    with pytest.raises(FileFormatError, match=f"s3://{BUCKET}/model: cannot be read"):
        quantize(f"s3://{BUCKET}/model", tmp_path / "out")
    assert len(log.requests) < 5


@pytest.mark.parametrize("command", ["verify", "survey"])
def test_commands_that_only_read(s3, model, tmp_path, command):
    _, fs = s3
    quantized = fp4kit.quantize_checkpoint(model, tmp_path / "q")
    assert quantized.target
    here = model if command == "survey" else tmp_path / "q"
    local = invoke(command, here, "--json")
    there = put(fs, here, "it")
    remote = invoke(command, there, "--json")
    assert remote.exit_code == local.exit_code == 0, remote.stderr
    one, other = json.loads(local.stdout), json.loads(remote.stdout)
    assert other.pop("source") == there
    one.pop("source")
    for each in (one, other):
        each.pop("seconds", None)
    assert one == other


def test_verify_against_a_source_elsewhere(s3, model, tmp_path):
    _, fs = s3
    fp4kit.quantize_checkpoint(model, tmp_path / "q")
    report = fp4kit.verify(put(fs, tmp_path / "q", "q"), put(fs, model, "model"))
    assert report.ok
    assert len(report.tensors) == len(fp4kit.verify(tmp_path / "q", model).tensors)


# ------------------------------------------------------------------------------------------------
# Google Cloud Storage
# ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the emulator's sockets
def test_from_and_to_google_storage(checkpoints, model, wanted, tmp_path, monkeypatch):
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="make fleet")
    gcsfs = pytest.importorskip("gcsfs", reason="make fleet")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        port = server._api._httpd.server_address[1]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        fs = gcsfs.GCSFileSystem(use_listings_cache=False)
        for path in sorted(model.rglob("*")):
            if path.is_file():
                fs.put_file(str(path), f"{BUCKET}/m/{path.relative_to(model).as_posix()}")
        quantize(f"gs://{BUCKET}/m", f"gs://{BUCKET}/out", "2/2")
        with pytest.raises(OutputError, match="3 of 5 shards are missing"):
            finish(f"gs://{BUCKET}/out")
        quantize(f"gs://{BUCKET}/m", f"gs://{BUCKET}/out", "1/2")
        finish(f"gs://{BUCKET}/out")
        found = {
            name.removeprefix(f"{BUCKET}/out/"): hashlib.sha256(fs.cat_file(name)).hexdigest()
            for name in fs.find(f"{BUCKET}/out")
        }
        assert found == wanted
        assert finish(f"gs://{BUCKET}/out") is None
    finally:
        server.stop()


# ------------------------------------------------------------------------------------------------
# Parts
# ------------------------------------------------------------------------------------------------


def test_the_cache_is_bounded(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    cache = remote_files.RangeCache(folder, 1000)
    for number in range(50):
        cache.add("file", 100 * number, memoryview(bytes([number]) * 100))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 1000
    out = bytearray(100)
    assert cache.read_into("file", 4900, memoryview(out))
    assert out == bytes([49]) * 100
    assert not cache.read_into("file", 0, memoryview(out))
    assert not cache.read_into("file", 4900, memoryview(out)[:99])
    cache.add("file", 0, memoryview(bytes(900)))  # as large as all: not worth the others
    assert cache.read_into("file", 4900, memoryview(out))


def test_a_worker_needs_the_disk_for_three_shards(s3, model, tmp_path, monkeypatch):
    """The shard that is uploaded, and what is kept of the source."""
    _, fs = s3
    source, real, seen = put(fs, model, "model"), stores.StorePlace._upload, []

    def upload(place, path, name):
        files = [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]
        seen.append(sum(path.stat().st_size for path in files))
        real(place, path, name)

    monkeypatch.setattr(stores.StorePlace, "_upload", upload)
    report = quantize(source, f"s3://{BUCKET}/out")
    largest = max(report.shards.values()) + 4096  # its header
    assert SMALL.max_shard_size < max(seen) <= 2 * SMALL.max_shard_size + largest


def test_what_stands_in_for_a_file_holds_no_wrong_bytes(web):
    address, _ = web
    with opened(address) as folder:
        names = [path for path in folder.iterdir() if path.is_file()]
        assert len(names) > 5
        assert all(path.stat().st_size == 0 for path in names)
    assert not folder.exists()


def test_a_second_pass_over_a_large_group_reads_the_cache(
    checkpoints, web, wanted, tmp_path, monkeypatch
):
    """A fusion group that is not held in memory is read twice, and fetched once."""
    from fp4kit.io.stream import chunks

    monkeypatch.setattr(chunks, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2048)
    address, log = web
    quantize(address, tmp_path / "out")
    spans = [
        (each.path, each.first, each.last)
        for each in log.requests
        if each.method == "GET" and each.path.endswith(".safetensors") and each.first
    ]
    assert len(spans) == len(set(spans)) > 20
    assert checkpoints.digest(tmp_path / "out").items() <= wanted.items()


def test_a_place_names_itself_in_errors(s3):
    log, _ = s3
    log.fault = every(99, 403, "PUT")
    place = stores.place_of(f"s3://{BUCKET}/x")
    with pytest.raises(OutputError, match=f"s3://{BUCKET}/x: cannot be written"):
        place.write("name", b"data")
