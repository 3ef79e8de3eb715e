# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Model directories as they are found: what is read, what is refused up front, and where to."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    plan_quantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.errors import FileFormatError, Fp4kitError, OptionError
from fp4kit.io.write.files import OutputError

INDEX = "model.safetensors.index.json"
SHARD = "model-{:05d}-of-00003.safetensors"


@pytest.fixture
def source(checkpoints, tmp_path):
    """A sharded model that nothing is wrong with."""
    tensors, config = checkpoints.llama(1)
    return checkpoints.save(tmp_path / "in", tensors, config, shards=3, others=["LICENSE"])


def edit_index(folder, change):
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def refused(source, match, kind=FileFormatError):
    """Every operation refuses it the same way, and leaves nothing behind."""
    target = source.with_name("out")
    operations = [
        lambda: plan_quantize_checkpoint(source, CheckpointOptions()),
        lambda: quantize_checkpoint(source, target, CheckpointOptions()),
        lambda: dequantize_checkpoint(source, target, DequantizeOptions()),
        lambda: convert_checkpoint(source, target, ConvertOptions("comfy")),
    ]
    for operation in operations:
        with pytest.raises(kind, match=match):
            operation()
        assert not target.exists()


# ------------------------------------------------------------------------------------------------
# Shards and index
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [[1], [3], [1, 2, 3]])
def test_missing_shards(source, gone):
    """E2, G6: named, with their number, before any work."""
    for number in gone:
        (source / SHARD.format(number)).unlink()
    refused(source, rf"{len(gone)} of 3 shards .* missing: '{SHARD.format(gone[0])}'")


def test_tensors_that_the_index_lacks(source):
    """E2, the other way round: an engine would not load them."""
    edit_index(source, lambda content: content["weight_map"].popitem())
    refused(source, "1 tensors of the shards are not in it: 'model.norm.weight'")


def test_tensors_that_no_shard_has(source):
    edit_index(
        source,
        lambda content: content["weight_map"].update(
            {f"gone.{number}.weight": SHARD.format(2) for number in range(5)}
        ),
    )
    refused(source, "5 tensors are not in the shard that it names: .*'gone.2.weight' and 2 more")


def test_a_tensor_in_another_shard(source):
    def move(content):
        content["weight_map"]["model.norm.weight"] = SHARD.format(1)

    edit_index(source, move)
    refused(source, "not in the shard that it names: 'model.norm.weight'")


@pytest.mark.parametrize(
    "name",
    [
        "../in/model-00001-of-00003.safetensors",
        "a/../../model.safetensors",
        "/etc/passwd",
        "/model.safetensors",
        "..",
        "",
        "C:\\model.safetensors",
        "..\\model.safetensors",
    ],
)
def test_shard_names_that_leave_the_directory(source, name):
    """E20."""

    def change(content):
        content["weight_map"]["model.norm.weight"] = name

    edit_index(source, change)
    refused(source, "leaves the directory")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "damaged JSON"),
        ("[]", "no JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "'a' is no file name"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "damaged JSON"),
        ('{"weight_map": {"a": NaN}}', "damaged JSON"),
    ],
)
def test_damaged_indexes(source, text, match):
    (source / INDEX).write_text(text)
    refused(source, match)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("text", ["", "[1]", "{'a': 1}", '{"a": 1, "a": 2}'])
def test_damaged_configs(source, name, text):
    (source / name).write_text(text)
    refused(source, name)


@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_damaged_shards(source, cut):
    """D14: before any data is read, whichever shard it is."""
    path = source / SHARD.format(2)
    path.write_bytes(path.read_bytes()[:-cut])
    refused(source, SHARD.format(2))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"\x80\x02pickle of some kind", "pickled"),
    ],
)
def test_shards_that_are_something_else(source, content, match):
    """G5."""
    (source / SHARD.format(3)).write_bytes(content)
    refused(source, match)


def test_shards_that_the_index_lacks(source):
    """E2, E3: left by another download, or forgotten by what wrote the index."""
    (source / "model-00004-of-00004.safetensors").write_bytes(
        (source / SHARD.format(3)).read_bytes()
    )
    refused(source, "1 shards are not in model.safetensors.index.json: 'model-00004-of-00004")


@pytest.mark.parametrize("files", [[1], [1, 2, 3], [2, "model.safetensors"]])
def test_shards_without_an_index(source, files):
    """E2: one of several is no model, whatever lies beside it."""
    (source / INDEX).unlink()
    for number in {1, 2, 3} - set(files):
        (source / SHARD.format(number)).rename(source / "model.safetensors")
    if "model.safetensors" not in files:
        (source / "model.safetensors").unlink(missing_ok=True)
    refused(source, "holds shards .* but no")


def test_two_indexes(source):
    (source / "other.safetensors.index.json").write_text("{}")
    refused(source, "2 indexes")


@pytest.mark.parametrize("files", [[], ["pytorch_model.bin"], ["a.safetensors", "b.safetensors"]])
def test_no_weights_that_are_understood(checkpoints, tmp_path, files):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in files:
        checkpoints.write_file(folder / name, {"x.weight": checkpoints.normal((4, 32))})
    refused(folder, "no .safetensors file" if len(files) < 2 else "2 .safetensors files")


@pytest.mark.parametrize("base", ["model", "diffusion_pytorch_model", "weights"])
def test_other_base_names(checkpoints, tmp_path, base):
    """E3: names of the output follow the input's, whatever pattern its shards have."""
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=3, base=base)
    index = source / f"{base}.safetensors.index.json"
    odd = source / "extra-mtp.safetensors"
    (source / f"{base}-00003-of-00003.safetensors").rename(odd)
    index.write_text(index.read_text().replace(f"{base}-00003-of-00003.safetensors", odd.name))
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(max_shard_size=20_000))
    assert len(report.shards) > 1
    assert all(name.startswith(f"{base}-0000") for name in report.shards)
    assert (tmp_path / "out" / index.name).is_file()
    assert not (tmp_path / "out" / odd.name).exists()
    checkpoints.read(tmp_path / "out")


def test_model_safetensors_comes_before_other_forms(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    checkpoints.write_file(source / "adapter.safetensors", {"x": checkpoints.normal((3,))})
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert report.left_out == ["adapter.safetensors"]
    assert not (tmp_path / "out" / "adapter.safetensors").exists()


# ------------------------------------------------------------------------------------------------
# Links and special files
# ------------------------------------------------------------------------------------------------


def test_links_are_followed(checkpoints, source, tmp_path):
    """A link to a directory above is no endless loop; what lies outside has to be asked for."""
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for path in source.iterdir():
        (cache / path.name).symlink_to(path)
    (cache / "loop").symlink_to(cache)
    (cache / "sub").symlink_to(source.with_name("elsewhere"))
    source.with_name("elsewhere").mkdir()
    (source.with_name("elsewhere") / "notes.txt").write_text("notes")
    for name, folder in (("plain", source), ("linked", cache)):
        quantize_checkpoint(folder, tmp_path / name, CheckpointOptions(follow_links=True))
    plain, linked = (checkpoints.digest(tmp_path / name) for name in ("plain", "linked"))
    assert linked.keys() - plain.keys() == {"sub/notes.txt"}
    assert {name: linked[name] for name in plain} == plain
    assert not any(path.is_symlink() for path in (tmp_path / "linked").rglob("*"))


@pytest.mark.parametrize("kind", ["fifo", "broken"])
def test_things_that_cannot_be_copied(source, kind, tmp_path):
    path = source / "tokenizer.model"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(source / "nowhere")
    for run in (
        lambda: plan_quantize_checkpoint(source, CheckpointOptions()),
        lambda: quantize_checkpoint(source, tmp_path / "out", CheckpointOptions()),
    ):
        with pytest.raises(FileFormatError, match=r"tokenizer\.model.*link to nothing"):
            run()
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------
# Outputs
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "kind", "match"),
    [
        ("in", OptionError, "must lie outside"),
        ("in/out", OptionError, "must lie outside"),
        ("link", OptionError, "must lie outside"),
        ("in/../in", OptionError, "must lie outside"),
        (".", OptionError, "must lie outside"),
        ("full", OptionError, "not empty"),
        ("file", OptionError, "is a file"),
        ("none/out", OutputError, "no directory"),
        ("file/out", OutputError, "no directory"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_targets_that_would_destroy_something(
    checkpoints, source, tmp_path, target, kind, match, force
):
    """D3, G4: refused before any work, also with --force, which replaces only fp4kit's own."""
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = checkpoints.digest(tmp_path)
    with pytest.raises(kind, match=match):
        quantize_checkpoint(source, tmp_path / target, CheckpointOptions(), force=force)
    assert checkpoints.digest(tmp_path) == before


def test_an_empty_directory_is_a_target(source, tmp_path):
    (tmp_path / "out").mkdir()
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    with pytest.raises(OptionError, match="not empty"):
        quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())


def test_too_little_space(source, tmp_path, monkeypatch):
    """Known before work begins, with both numbers."""
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match=r"\d+ bytes are needed, 1000 are free"):
        quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------
# Single files
# ------------------------------------------------------------------------------------------------


def test_single_files(checkpoints, tmp_path):
    """Only a layout whose readers need no config.json takes one."""
    tensors = checkpoints.diffusion()
    source = checkpoints.write_file(tmp_path / "flux.safetensors", tensors, {"note": "mine"})
    for layout in ("compressed-tensors", "modelopt"):
        with pytest.raises(OptionError, match="needs a model directory"):
            quantize_checkpoint(
                source, tmp_path / "out.safetensors", CheckpointOptions(layout=layout)
            )
    comfy = CheckpointOptions(layout="comfy")
    for target, match in ((source, "input itself"), (tmp_path / "out.bin", "must end in")):
        with pytest.raises(OptionError, match=match):
            quantize_checkpoint(source, target, comfy, force=True)
    target = tmp_path / "out.safetensors"
    report = quantize_checkpoint(source, target, comfy)
    with pytest.raises(OptionError, match="exists already"):
        quantize_checkpoint(source, target, comfy)
    with pytest.raises(OptionError, match="leave --resume out"):
        quantize_checkpoint(source, target, comfy, resume=True, force=True)
    first = target.read_bytes()
    quantize_checkpoint(source, target, comfy, force=True)
    assert target.read_bytes() == first
    actions = {tensor.name: tensor.action for tensor in report.tensors}
    quantized = {name for name, action in actions.items() if action == "quantize"}
    assert quantized == {
        "double_blocks.0.img_attn.qkv.weight",
        "double_blocks.0.img_attn.proj.weight",
        "double_blocks.0.img_mlp.0.weight",
        "single_blocks.0.linear1.weight",
    }
    _, metadata = checkpoints.read_file(target)
    assert metadata["note"] == "mine"
    layers = json.loads(metadata["_quantization_metadata"])["layers"]
    assert {f"{module}.weight" for module in layers} == quantized
    back = tmp_path / "back.safetensors"
    dequantize_checkpoint(target, back, DequantizeOptions("float32"))
    decoded, left = checkpoints.read_file(back)
    assert "_quantization_metadata" not in left
    assert decoded.keys() == tensors.keys()
    for name, (_, array) in tensors.items():
        got = checkpoints.array(decoded[name])
        assert got.shape == array.shape
        scale = np.abs(array.astype(np.float32)).max()
        assert np.allclose(got.astype(np.float32), array.astype(np.float32), atol=scale / 6)


def test_not_a_checkpoint(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK")
    for path in (tmp_path / "x.npz", tmp_path / "none.safetensors", tmp_path / "none"):
        with pytest.raises(Fp4kitError):
            Checkpoint(path)
