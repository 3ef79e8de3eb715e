# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files of a model directory that are no files, that cannot be read, or that have no end."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from fp4kit.checkpoint.operations import (
    dequantize_checkpoint,
    plan_quantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.read import json_files
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.read.files import FilePool

KINDS = ["dangling", "folder", "pipe", "device", "endless"]


def put(path, kind):
    """Something that is no regular file, in the place of one."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        targets = {"dangling": "nowhere", "device": "/dev/null", "endless": "/dev/zero"}
        path.symlink_to(targets[kind])


@pytest.fixture
def source(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1)
    return checkpoints.save(tmp_path / "in", tensors, config, shards=2, others=["LICENSE"])


def refused(source, match, error=FileFormatError, **options):
    """Before anything is written, with and without following links."""
    target = source.with_name("out")
    for follow in (False, True):
        chosen = CheckpointOptions(follow_links=follow, **options)
        for run in (
            lambda chosen=chosen: plan_quantize_checkpoint(source, chosen),
            lambda chosen=chosen: quantize_checkpoint(source, target, chosen),
        ):
            with pytest.raises(error, match=match) as caught:
                run()
            assert "\n" not in str(caught.value)
    assert not target.exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
    ],
)
def test_what_is_no_regular_file(source, name, kind):
    """Neither waited for, nor read without end, nor taken for missing."""
    put(source / name, kind)
    if kind == "folder" and name == "tokenizer.json":
        assert plan_quantize_checkpoint(source, CheckpointOptions()).copied == ["LICENSE"]
        return
    refused(source, name)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_that_are_no_regular_file(source, tmp_path, kind):
    put(tmp_path / "amax.json", kind)
    refused(source, r"amax\.json", activations=str(tmp_path / "amax.json"))


@pytest.mark.parametrize("kind", ["dangling", "pipe", "folder"])
def test_settings_of_a_result(source, tmp_path, kind):
    """What is missing is a fault of the result as well."""
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    put(tmp_path / "out" / "config.json", kind)
    (fault,) = structure_faults(tmp_path / "out")
    assert "config.json" in fault
    with pytest.raises(FileFormatError, match=r"config\.json"):
        dequantize_checkpoint(tmp_path / "out", tmp_path / "back", DequantizeOptions())


# ------------------------------------------------------------------------------------------------
# Size
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ('{"a": [' + "[]," * 600_000 + "[]]}", "values"),
        ('{"a": "' + "x" * (17 << 20) + '"}', "bytes long; at most 16777216"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_settings_that_are_too_large(source, name, text, match):
    (source / name).write_text(text)
    with pytest.raises(FileFormatError, match=rf"{name}.*{match}"):
        Checkpoint(source)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    """By its size, before it is opened."""
    path = tmp_path / "index.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(json_files.os, "open", None)
    with pytest.raises(FileFormatError, match=r"is 1099511627776 bytes long; at most 536870912"):
        json_files.read_json(path)


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN"])
def test_constants_of_python(checkpoints, source, tmp_path, value):
    """Mamba-2 models have `"time_step_limit": [0.0, Infinity]`; it is written the same way."""
    config = checkpoints.config_of(source)
    text = json.dumps(config | {"time_step_limit": [0.0, "X"]}).replace('"X"', value)
    (source / "config.json").write_text(text)
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    written = (tmp_path / "out" / "config.json").read_text()
    assert value in written
    assert structure_faults(tmp_path / "out") == []
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back", DequantizeOptions())
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert str(back["time_step_limit"]) == str(json.loads(text)["time_step_limit"])


# ------------------------------------------------------------------------------------------------
# What cannot be read
# ------------------------------------------------------------------------------------------------


def test_an_unreadable_folder(source, monkeypatch):
    """Not passed over: what is in it would be missing."""
    (source / "sub").mkdir()
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    refused(source, "sub: cannot be read: Permission denied")


@pytest.mark.parametrize(
    "name", ["LICENSE", "config.json", "model-00002-of-00002.safetensors", "sub/notes.txt"]
)
def test_an_unreadable_file(source, monkeypatch, name):
    """Found before any weight is written."""
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_text("notes")
    real = os.open

    def refuse(path, *args, **kwargs):
        if str(path) == str(source / name):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    refused(source, f"{name}: cannot be read: Permission denied")


# ------------------------------------------------------------------------------------------------
# Links
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["secret.txt", "folder", "config.json", "model-00001-of-00002.safetensors", "a/b.txt"]
)
def test_links_out_of_the_directory(checkpoints, source, tmp_path, name):
    """Nobody's file is copied because a downloaded directory holds a link to it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    path = source / name
    path.parent.mkdir(exist_ok=True)
    target = outside / path.name
    if path.exists():
        path.rename(target)
    elif name == "folder":
        target.mkdir()
        (target / "x.txt").write_text("private")
    else:
        target.write_text("private")
    path.symlink_to(target)
    for run in (
        lambda: plan_quantize_checkpoint(source, CheckpointOptions()),
        lambda: quantize_checkpoint(source, tmp_path / "out", CheckpointOptions()),
    ):
        with pytest.raises(OptionError, match=rf"{name}: is a link out of .*--follow-links"):
            run()
    assert not (tmp_path / "out").exists()
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(follow_links=True))
    assert "model.norm.weight" in checkpoints.read(tmp_path / "out")
    if name in ("secret.txt", "a/b.txt"):
        assert name in report.copied
        assert (tmp_path / "out" / name).read_text() == "private"


@pytest.mark.parametrize("component", ["", "transformer"])
def test_links_inside_and_into_the_cache(checkpoints, source, tmp_path, component):
    """As the Hugging Face hub lays models out."""
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123" / component
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    (snapshot / "same").symlink_to("LICENSE")
    report = quantize_checkpoint(snapshot, tmp_path / "out", CheckpointOptions())
    assert report.copied == ["LICENSE", "same"]
    assert (tmp_path / "out" / "same").read_bytes() == checkpoints.OTHER_FILES["LICENSE"]


def test_links_are_read_without_asking(source, tmp_path):
    """Looking at a directory copies nothing."""
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    (tmp_path / "out" / "config.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "elsewhere.json")
    assert structure_faults(tmp_path / "out") == []


# ------------------------------------------------------------------------------------------------
# Open files
# ------------------------------------------------------------------------------------------------


def test_more_shards_than_files_may_be_open(checkpoints, tmp_path):
    tensors = {f"layers.{n}.mlp.down_proj.weight": checkpoints.normal((16, 32)) for n in range(150)}
    source = checkpoints.save(tmp_path / "in", tensors, {"model_type": "x"}, shards=150)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(list(Path("/proc/self/fd").iterdir()))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 140, hard))
        report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(report.tensors) == 150
    assert structure_faults(tmp_path / "out") == []


def test_files_of_a_pool(tmp_path):
    """Every file reads as if it were open; one that was exchanged meanwhile is not read."""
    pool, files = FilePool(2), []
    for number in range(5):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 4)
        files.append(pool.open(tmp_path / str(number)))
    assert [file.is_open for file in files] == [False, False, False, True, True]
    for number, file in enumerate(files):
        assert file.read(1, 2) == bytes([number]) * 2
    assert sum(file.is_open for file in files) == 2
    (tmp_path / "new").write_bytes(b"other")
    (tmp_path / "new").rename(tmp_path / "0")
    with pytest.raises(FileFormatError, match="has changed while"):
        files[0].read(0, 2)
    for file in files:
        file.close()
    assert not any(file.is_open for file in files)
