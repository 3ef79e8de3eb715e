# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of very many tensors: memory and time for each, and limits that are met early."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from fp4kit.checkpoint.layouts import expressions
from fp4kit.checkpoint.layouts.ignore_list import IgnoreList
from fp4kit.checkpoint.operations import plan_quantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.plan import checkpoint_plan as plan
from fp4kit.checkpoint.plan.quantize import plan_quantize
from fp4kit.checkpoint.read import directory
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import FileFormatError

#: Bytes that planning may take for a tensor: 400,000 of them fit the gigabyte that is promised.
BYTES_PER_TENSOR = 2500


def many(folder, count, shards=2, shape=(16, 16)):
    """A model of `count` experts, whose data is a hole in the file."""
    folder.mkdir()
    size, weight_map = 2 * shape[0] * shape[1], {}
    names = [
        f"model.layers.{n // 768}.mlp.experts.{n // 3 % 256}.{part}.weight"
        for n, part in zip(
            range(count), ("gate_proj", "up_proj", "down_proj") * count, strict=False
        )
    ]
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        held = names[number::shards]
        weight_map |= dict.fromkeys(held, file)
        header = {
            name: {
                "dtype": "BF16",
                "shape": list(shape),
                "data_offsets": [at * size, (at + 1) * size],
            }
            for at, name in enumerate(held)
        }
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + len(held) * size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "x", "dtype": "bfloat16"}')
    return folder


def test_memory_of_a_plan(tmp_path):
    source = many(tmp_path / "in", 6000)
    tracemalloc.start()
    try:
        with Checkpoint(source) as checkpoint:
            planned = plan_quantize(checkpoint, CheckpointOptions())
            assert len(planned.works) == 6000
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak / 6000 < BYTES_PER_TENSOR


def test_shards_are_cut_by_their_headers(tmp_path, monkeypatch):
    """Tiny tensors: a shard of 5 GB of them would have a header that no reader takes."""
    source = many(tmp_path / "in", 60)
    monkeypatch.setattr(plan, "HEADER_BYTES", 9000)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert len(report.shards) == 4
    assert structure_faults(tmp_path / "out") == []


def test_a_single_file_of_too_many_tensors(checkpoints, tmp_path, monkeypatch):
    """Said before any work: a file that is one cannot be cut."""
    monkeypatch.setattr(plan, "FILE_TENSORS", 10)
    source = checkpoints.write_file(tmp_path / "in.safetensors", checkpoints.diffusion())
    with pytest.raises(FileFormatError, match=r"one file of \d+ tensors; at most 10 are written"):
        plan_quantize_checkpoint(source, CheckpointOptions(layout="comfy"))


def test_a_checkpoint_of_too_many_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "MAX_TENSORS", 50)
    source = many(tmp_path / "in", 60)
    with pytest.raises(FileFormatError, match="holds more than 50 tensors"):
        Checkpoint(source)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.*\.)?lm_head$",
        r"(?:.*\.)?cls\.predictions\.decoder$",
        r".*\.gate$",
        r"model\.layers\.\d+\.mlp\.gate",
    ],
)
def test_usual_patterns_are_fast(pattern, monkeypatch):
    """Each is matched with every module: the engine for hostile ones takes 100 times as long."""
    monkeypatch.setattr(expressions, "_matches", None)
    ignored = IgnoreList([f"re:{pattern}"], "compressed-tensors")
    for module in ("lm_head", "model.cls.predictions.decoder", "model.layers.3.mlp.gate"):
        ignored.matches(module)
    assert ignored.faults == []
