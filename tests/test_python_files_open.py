# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files that fp4kit.open refuses, and damage of any kind."""

from __future__ import annotations

import json
import os
import tracemalloc

import numpy as np
import pytest

import checkpoints as c
import fp4kit
from file_kinds import KINDS
from fuzzing import as_text, damage_bytes, damage_values, fuzz
from python_files import NAME, Q, X, one_line


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def garble(path):
    path.write_bytes(path.read_bytes()[:8] + b"}" + path.read_bytes()[9:])


def lose_scale(path):
    stored, metadata = c.read_file(path)
    kept = {name: (t[0], c.array(t)) for name, t in stored.items() if not name.endswith("_scale")}
    c.write_file(path, kept, metadata)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(cut, "bytes"), (garble, "header"), (lose_scale, "is missing"), (os.remove, "no such file")],
)
def test_damaged_files(tmp_path, damage, said):
    path = tmp_path / "q.safetensors"
    fp4kit.save(path, {NAME: Q})
    damage(path)
    with pytest.raises(fp4kit.FileFormatError) as error:
        fp4kit.open(path)
    assert said in one_line(error)
    assert str(path) in str(error.value)


def test_damaged_directories(tmp_path):
    tensors, config = c.llama(1)
    folder = c.save(tmp_path / "model", tensors, config, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(fp4kit.FileFormatError) as error:
        fp4kit.open(folder)
    assert "1 of 3 shards" in one_line(error)
    (folder / ".fp4kit").mkdir()
    with pytest.raises(fp4kit.FileFormatError):
        fp4kit.open(folder)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("x.pt", fp4kit.OptionError, "pickled"),
        ("x.gguf", fp4kit.FileFormatError, "not a GGUF file"),
        ("x.xyz", fp4kit.OptionError, "unknown kind"),
        ("x.npz", fp4kit.FileFormatError, "x.npz"),
        ("empty", fp4kit.FileFormatError, "no .safetensors file"),
    ],
)
def test_other_kinds_of_files(tmp_path, name, error, said):
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    else:
        path.write_bytes(b"not a file of tensors, whatever its name says")
    with pytest.raises(error) as caught:
        fp4kit.open(path)
    assert said in one_line(caught)


def test_what_is_quantized_in_an_unknown_way(tmp_path):
    """Refused, and readable as it is stored."""
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    codes = np.arange(32, dtype=np.int32).reshape(4, 8)
    folder = c.save(tmp_path / "gptq", {"a.qweight": ("I32", codes)}, config)
    with pytest.raises(fp4kit.FileFormatError) as error:
        fp4kit.open(folder)
    assert "gptq" in one_line(error)
    with fp4kit.open(folder, raw=True) as file:
        assert (file["a.qweight"] == codes).all()


def test_names(tmp_path):
    path = tmp_path / "x.safetensors"
    fp4kit.save(path, {NAME: X})
    with fp4kit.open(path) as file:
        with pytest.raises(KeyError) as error:
            file[NAME.replace("down", "dwon")]
        assert f"did you mean '{NAME}'?" in one_line(error)
        assert file.get("nothing") is None
        assert "nothing" not in file
        assert file == file
        assert {file: 1}[file] == 1
    with pytest.raises(fp4kit.FileFormatError) as error:
        file[NAME]
    assert "is closed" in one_line(error)
    assert repr(file).endswith("1 tensors, closed>")
    file.close()


def test_a_file_that_changes(tmp_path):
    path = tmp_path / "x.safetensors"
    fp4kit.save(path, {"x": X})
    with fp4kit.open(path) as file:
        assert (file["x"] == X).all()
        fp4kit.save(path, {"x": X + 1}, force=True)
        with pytest.raises(fp4kit.FileFormatError) as error:
            file["x"]
    assert "has changed" in one_line(error)


def test_members_that_are_no_arrays(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, x=X, words=np.array([{}], object))
    with fp4kit.open(path) as file:
        assert list(file) == ["x"]
        with pytest.raises(fp4kit.DtypeError) as error:
            file["words"]
    assert "object" in one_line(error)


def test_an_unknown_type_to_decode_to(tmp_path):
    fp4kit.save(tmp_path / "x.npy", {"x": X})
    with pytest.raises(fp4kit.OptionError) as error:
        fp4kit.open(tmp_path / "x.npy", decode="float64")
    assert "bfloat16" in one_line(error)


def test_one_tensor_at_a_time(tmp_path):
    """Opening and indexing allocate no more than what is asked for."""
    array = np.zeros((1024, 1024), np.float32)
    fp4kit.save(tmp_path / "x.safetensors", {f"x{number}": array for number in range(16)})
    tracemalloc.start()
    try:
        with fp4kit.open(tmp_path / "x.safetensors") as file:
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            for name in file:
                assert file[name].shape == array.shape
            assert tracemalloc.get_traced_memory()[1] < 1.2 * array.nbytes
            fp4kit.save(tmp_path / "copy.safetensors", file)
            assert tracemalloc.get_traced_memory()[1] < 2.2 * array.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "kind", ["safetensors of every type", "own search", "comfy file", "fp8 file"]
)
def test_damage_of_any_kind_is_one_line(tmp_path, kind):
    """Whatever a file says, it is read, or refused in one line, in bounded time and memory."""
    content = KINDS[kind](tmp_path).read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header, path, read = json.loads(content[8:size]), tmp_path / "damaged.safetensors", [0]

    def case(rng):
        text = as_text(rng, damage_values(rng, header, rng.choice([0, 1, 1, 2, 4])))
        text = damage_bytes(rng, text, rng.choice([0, 0, 0, 1, 3]))
        data = damage_bytes(rng, content[size:], rng.choice([0, 0, 1, 2]))
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        decode, raw = rng.choice([None, "float32"]), rng.random() < 0.1
        with fp4kit.open(path, decode=decode, raw=raw) as file:
            for name in file:
                assert tuple(file[name].shape) == file.info(name).shape
        read[0] += 1

    fuzz(f"open {kind}", 100, case)
    assert read[0] > 5
