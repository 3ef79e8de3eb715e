# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Output directories: what --force replaces, what it never touches, and what --resume trusts."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from fp4kit.checkpoint import operations
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.read.directory import STATE_DIR
from fp4kit.checkpoint.write import output
from fp4kit.checkpoint.write.state import State, checksum
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.write.files import OutputError

SMALL = CheckpointOptions(max_shard_size=9000)


@pytest.fixture
def source(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(2)
    return checkpoints.save(tmp_path / "in", tensors, config, shards=2, others=["LICENSE"])


@pytest.fixture
def whole(checkpoints, source, tmp_path):
    """Digest of an undisturbed result."""
    operations.quantize_checkpoint(source, tmp_path / "whole", SMALL)
    return checkpoints.digest(tmp_path / "whole")


@pytest.fixture
def stopped(source, tmp_path, monkeypatch):
    """A result that lacks nothing but the word that it is finished."""

    def stop(self):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(State, "finish", stop)
        with pytest.raises(InterruptedError):
            operations.quantize_checkpoint(source, tmp_path / "out", SMALL)
    return tmp_path / "out"


# ------------------------------------------------------------------------------------------------
# --force
# ------------------------------------------------------------------------------------------------


def test_force_replaces_a_finished_result(checkpoints, source, whole, tmp_path):
    """Of other options, with more files: nothing of it is left, and nothing else is touched."""
    target = tmp_path / "out"
    operations.quantize_checkpoint(
        source, target, CheckpointOptions(layout="modelopt", max_shard_size=4000)
    )
    (target / "notes.txt").write_text("mine")
    (target / "more").mkdir()
    (target / "more" / "model.safetensors").write_text("mine")
    operations.quantize_checkpoint(source, target, SMALL, force=True)
    found = checkpoints.digest(target)
    assert {name: found[name] for name in whole} == whole
    assert found.keys() - whole.keys() == {"notes.txt", "more/model.safetensors"}
    operations.dequantize_checkpoint(tmp_path / "whole", target, DequantizeOptions(), force=True)
    with pytest.raises(OptionError, match="not empty"):
        operations.quantize_checkpoint(source, target, SMALL)


@pytest.mark.parametrize("theirs", ["weights", "link", "text"])
def test_force_does_not_replace_what_others_wrote(checkpoints, source, tmp_path, theirs):
    target = tmp_path / "out"
    if theirs == "weights":
        tensors, config = checkpoints.llama(1)
        checkpoints.save(target, tensors, config)
    else:
        operations.quantize_checkpoint(source, tmp_path / "other", SMALL)
        target.mkdir()
        if theirs == "link":
            for path in (tmp_path / "other").iterdir():
                (target / path.name).symlink_to(path)
        else:
            (target / "config.json").write_text("{}")
    before = checkpoints.digest(tmp_path)
    with pytest.raises(OptionError, match=r"fp4kit did not write|no result of fp4kit"):
        operations.quantize_checkpoint(source, target, SMALL, force=True)
    assert checkpoints.digest(tmp_path) == before


def test_starting_over_removes_only_what_the_plan_names(
    checkpoints, source, whole, stopped, tmp_path
):
    index = stopped / "mine.safetensors.index.json"
    for path in (stopped / "mine.safetensors", stopped / "mine.json", index):
        path.write_text("mine")
    (stopped / STATE_DIR / "evil").mkdir()
    with pytest.raises(OutputError, match="which this conversion did not write"):
        operations.quantize_checkpoint(source, stopped, SMALL, force=True)
    index.unlink()  # beside it no engine would open the result
    operations.quantize_checkpoint(source, stopped, SMALL, force=True)
    found = checkpoints.digest(stopped)
    assert {name: found[name] for name in whole} == whole
    assert found.keys() - whole.keys() == {"mine.safetensors", "mine.json"}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_links_in_a_marked_directory_are_refused(checkpoints, source, stopped, tmp_path, kind):
    """What they point to is not the conversion's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("mine")
    if kind == "file":
        (stopped / "config.json").unlink()
        (stopped / "config.json").symlink_to(elsewhere / "config.json")
    else:
        shutil.rmtree(stopped / STATE_DIR)
        (stopped / STATE_DIR).symlink_to(elsewhere)
    for more in ({"force": True}, {"resume": True}) if kind == "folder" else ({"force": True},):
        with pytest.raises((OptionError, OutputError), match=r"link|no directory of fp4kit"):
            operations.quantize_checkpoint(source, stopped, SMALL, **more)
    assert (elsewhere / "config.json").read_text() == "mine"


def test_a_plan_that_names_files_outside(source, stopped, tmp_path):
    """Notes lie where anyone may have changed them."""
    (tmp_path / "mine.json").write_text("mine")
    plan = json.loads((stopped / STATE_DIR / "plan.json").read_text())
    plan["planned"] += ["../mine.json", str(tmp_path / "mine.json"), 5, None]
    (stopped / STATE_DIR / "plan.json").write_text(json.dumps(plan))
    operations.quantize_checkpoint(source, stopped, SMALL, force=True)
    assert (tmp_path / "mine.json").read_text() == "mine"


def test_a_directory_that_fills_up_meanwhile(checkpoints, source, tmp_path, monkeypatch):
    """Another process finished there between the check and the first write."""
    target = tmp_path / "out"
    real = output.check_space

    def finish_first(*args):
        monkeypatch.setattr(output, "check_space", real)
        operations.quantize_checkpoint(source, target, CheckpointOptions())

    monkeypatch.setattr(output, "check_space", finish_first)
    with pytest.raises(OutputError, match="which this conversion did not write"):
        operations.quantize_checkpoint(source, target, CheckpointOptions())


# ------------------------------------------------------------------------------------------------
# --resume
# ------------------------------------------------------------------------------------------------


def alter(path):
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def truncate(path):
    os.truncate(path, path.stat().st_size - 8)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [alter, truncate, empty, os.unlink])
def test_damaged_shards_are_converted_again(checkpoints, source, whole, stopped, damage):
    damage(sorted(stopped.glob("*.safetensors"))[1])
    operations.quantize_checkpoint(source, stopped, SMALL, resume=True)
    assert checkpoints.digest(stopped) == whole


@pytest.mark.parametrize(
    "note",
    [
        "{}",
        "[]",
        "5",
        "",
        '{"results": 5}',
        '{"results": {}, "checksum": 5}',
        lambda noted: {},
        lambda noted: {name: {} for name in noted},
        lambda noted: {name: {**facts, "sums": 5} for name, facts in noted.items()},
        lambda noted: {name: {**facts, "recipe": [1]} for name, facts in noted.items()},
        lambda noted: {name: {**facts, "second": -1} for name, facts in noted.items()},
    ],
)
def test_notes_of_another_kind(checkpoints, source, whole, stopped, note):
    """The shard is converted again, and nothing is reported as a fault of fp4kit."""
    path = sorted((stopped / STATE_DIR).glob("model-*.json"))[0]
    noted = json.loads(path.read_text())
    damaged = note if isinstance(note, str) else {**noted, "results": note(noted["results"])}
    path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    operations.quantize_checkpoint(source, stopped, SMALL, resume=True)
    assert checkpoints.digest(stopped) == whole


@pytest.mark.parametrize("options", [None, 5, [], {"layout": 5}])
def test_plans_of_another_kind(source, stopped, options):
    path = stopped / STATE_DIR / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "options": options}))
    with pytest.raises(OptionError, match=r"cannot be resumed: option \w+ was"):
        operations.quantize_checkpoint(source, stopped, SMALL, resume=True)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4096, (1 << 22) - 1, 1 << 22, (1 << 22) + 9])
def test_checksums_see_every_byte(tmp_path, size):
    path = tmp_path / "x"
    data = bytearray(os.urandom(size))
    path.write_bytes(data)
    before = checksum(path)
    assert checksum(path) == before
    for at in {0, size // 2, size - 1} if size else ():
        data[at] ^= 0x80
        path.write_bytes(data)
        assert checksum(path) != before
        data[at] ^= 0x80
    path.write_bytes(bytes(data) + b"\0")
    assert checksum(path) != before


# ------------------------------------------------------------------------------------------------
# Sources that change, and permissions
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "LICENSE", "model-00001-of-00002.safetensors", "new.json"]
)
def test_a_source_that_changes_gives_no_result(source, tmp_path, name):
    target = tmp_path / "out"

    def meddle(done, total):
        path = source / name
        path.write_bytes(path.read_bytes() if path.exists() else b"{}")

    with pytest.raises(FileFormatError, match=r"has changed"):
        operations.quantize_checkpoint(source, target, SMALL, progress=meddle)
    assert (target / STATE_DIR).is_dir()  # it does not look finished
    assert not (target / "config.json").exists()


def test_a_result_is_never_more_readable_than_its_source(source, tmp_path):
    target = tmp_path / "out"
    for path in source.iterdir():
        path.chmod(0o600)
    (source / "LICENSE").chmod(0o644)
    source.chmod(0o700)
    operations.quantize_checkpoint(source, target, CheckpointOptions(layout="modelopt"))
    modes = {path.name: path.stat().st_mode & 0o777 for path in target.iterdir()}
    assert target.stat().st_mode & 0o777 == 0o700
    assert modes.pop("LICENSE") == 0o644
    assert set(modes.values()) == {0o600}
    assert {"config.json", "hf_quant_config.json"} <= modes.keys()
