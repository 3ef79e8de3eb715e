# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files from Python: what is refused, what is left behind, and what the functions report."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import checkpoints as c
import fp4kit
from command_line import succeed
from file_kinds import KINDS, LAYOUTS
from fp4kit import Scheme
from fp4kit.checkpoint.write.state import State
from fp4kit.io.write.files import AtomicFile, OutputError
from fuzzing import as_text, damage_bytes, damage_values, fuzz

NAME = "model.layers.0.mlp.down_proj.weight"
X = np.random.default_rng(0).standard_normal((32, 64), np.float32)
Q = fp4kit.quantize(X)
CONFIG = {"model_type": "llama", "dtype": "bfloat16"}


def one_line(error):
    assert isinstance(error.value, fp4kit.Fp4kitError)
    assert "\n" not in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------------------------------------
# Opening
# ------------------------------------------------------------------------------------------------


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
        ("x.gguf", fp4kit.OptionError, "GGUF"),
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


# ------------------------------------------------------------------------------------------------
# Saving
# ------------------------------------------------------------------------------------------------


def quantized(**options):
    return fp4kit.quantize(X, **options)


REFUSED = {
    "a list": ("x.safetensors", {"x": [1, 2]}, {}, "list"),
    "objects": ("x.safetensors", {"x": np.array([{}], object)}, {}, "object"),
    "long floats": ("x.safetensors", {"x": np.zeros(2, np.longdouble)}, {}, "cast it first"),
    "no mapping": ("x.safetensors", [X], {}, "give a dict"),
    "a name that is none": ("x.safetensors", {1: X}, {}, "names are strings"),
    "a clash": ("x.safetensors", {"w": Q, "w_scale": X}, {}, "'w_scale'"),
    "columns": ("x.safetensors", {"w": quantized(direction="columnwise")}, {}, "along the columns"),
    "rows": (
        "x.safetensors",
        {"w": quantized(second_level="row_scaled")},
        {},
        "several second-level",
    ),
    "none": (
        "x.safetensors",
        {"w": quantized(recipe="torchao", second_level="none")},
        {},
        "no second-level scale",
    ),
    "rotated": ("x.safetensors", {"w": quantized(rht=True)}, {}, "rotated"),
    "tiles": (
        "x.safetensors",
        {"w": quantized(block_shape="2d")},
        {},
        "do not record all of nvfp4 (recipe='te'",
    ),
    "quantized .npy": ("x.npy", {"w": Q}, {}, "arrays only"),
    "two in .npy": ("x.npy", {"a": X, "b": X}, {}, "2 tensors"),
    "metadata of .npz": ("x.npz", {"a": X}, {"metadata": {"a": "b"}}, "no place for metadata"),
    "layout of .npz": ("x.npz", {"a": X}, {"layout": "comfy"}, "no place for layout"),
    "a bad name in .npz": ("x.npz", {"../a": X}, {}, "write .safetensors"),
    "metadata that are no strings": ("x.safetensors", {"a": X}, {"metadata": {"a": 1}}, "strings"),
    "another tool's file": ("x.pt", {"a": X}, {}, "another tool"),
    "config of a file": ("x.safetensors", {"a": X}, {"config": {}}, "for directories"),
    "an unknown layout": ("x", {NAME: Q}, {"layout": "gguf", "config": {}}, "compressed-tensors"),
    "modelopt in a file": ("x.safetensors", {NAME: Q}, {"layout": "modelopt"}, "model directory"),
    "no config": ("x", {NAME: Q}, {}, "need a config.json"),
    "a config that is not there": ("x", {NAME: Q}, {"config": "none.json"}, "no such file"),
    "a config of another kind": ("x", {NAME: Q}, {"config": 7}, "to_dict"),
    "a size": ("x", {"a": X}, {"max_shard_size": "many"}, "no size"),
    "three axes": (
        "x",
        {NAME: fp4kit.quantize(X.reshape(2, 16, 64))},
        {"config": CONFIG},
        "2-D weights",
    ),
    "padding": (
        "x",
        {NAME: fp4kit.quantize(X[:, :60], pad=True)},
        {"config": CONFIG},
        "no padded rows",
    ),
    "no weight": ("x", {"w": Q}, {"config": CONFIG}, "end in .weight"),
    "mxfp8": ("x", {NAME: quantized(format="mxfp8")}, {"config": CONFIG}, "this is mxfp8"),
    "two formats": (
        "x",
        {NAME: Q, "lm_head.weight": quantized(format="mxfp4")},
        {"config": CONFIG},
        "names one format",
    ),
    "fused": (
        "x",
        {
            NAME.replace("down", "gate"): Q,
            NAME.replace("down", "up"): fp4kit.quantize(2 * X),
        },
        {"config": CONFIG},
        "one second-level scale",
    ),
    "what changes a weight": (
        "x",
        {NAME: Q, f"{NAME}_zero_point": X},
        {"config": CONFIG},
        "may change what it means",
    ),
    "another layout's activations": (
        "x",
        {NAME: Q, NAME.replace("weight", "input_scale"): np.ones(1, np.float32)},
        {"config": CONFIG},
        "activation scale of layout modelopt",
    ),
    "channels for DeepSeek": (
        "x",
        {NAME: quantized(format="fp8", granularity="channel")},
        {"config": CONFIG, "layout": "deepseek"},
        "granularity block, not channel",
    ),
    "FP8 without activations for ModelOpt": (
        "x",
        {NAME: quantized(format="fp8", granularity="tensor")},
        {"config": CONFIG, "layout": "modelopt"},
        "a scale of each module's input",
    ),
    "FP8 scales that are infinite": (
        "x",
        {
            NAME: fp4kit.QuantizedTensor(
                quantized(format="fp8", granularity="channel").packed,
                np.full((32, 1), np.inf, np.float32),
                Scheme("fp8", granularity="channel"),
                (32, 64),
            )
        },
        {"config": CONFIG},
        "32 of 32 block scales are NaN",
    ),
    "scales that are NaN": (
        "x",
        {
            NAME: fp4kit.QuantizedTensor(
                Q.packed, np.full_like(Q.block_scale, 0x7F), "nvfp4", Q.shape, amax=Q.amax
            )
        },
        {"config": CONFIG},
        "are NaN",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(tmp_path, case):
    name, tensors, options, said = REFUSED[case]
    with pytest.raises(fp4kit.Fp4kitError) as error:
        fp4kit.save(tmp_path / name, tensors, **options)
    assert said in one_line(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors", "x"])
def test_existing_targets(tmp_path, name):
    path = tmp_path / name
    fp4kit.save(path, {"x": X})
    with pytest.raises(fp4kit.OptionError) as error:
        fp4kit.save(path, {"x": X + 1})
    assert "force" in one_line(error)
    assert (fp4kit.open(path)["x"] == X).all()
    fp4kit.save(path, {"x": X + 1}, force=True)
    assert (fp4kit.open(path)["x"] == X + 1).all()


def test_what_fp4kit_did_not_write_stays(tmp_path):
    tensors, config = c.llama(1)
    folder = c.save(tmp_path / "model", tensors, config)
    before = c.digest(folder)
    with pytest.raises(fp4kit.OptionError) as error:
        fp4kit.save(folder, {"x": X}, force=True)
    assert "did not write" in one_line(error)
    assert c.digest(folder) == before


@pytest.mark.parametrize("name", ["x.safetensors", "x"])
def test_nothing_is_saved_over_what_it_is_read_from(tmp_path, name):
    path = tmp_path / name
    fp4kit.save(path, {"x": X})
    with fp4kit.open(path) as file, pytest.raises(fp4kit.OptionError) as error:
        fp4kit.save(path, file, force=True)
    assert "input" in one_line(error)
    assert (fp4kit.open(path)["x"] == X).all()


class Failing(Mapping):
    """A mapping that fails when a value is fetched for the second time."""

    def __init__(self, values, name, error=KeyboardInterrupt):
        self._values, self._name, self._error, self._asked = values, name, error, 0

    def __getitem__(self, name):
        self._asked += name == self._name
        if self._asked > 1:
            raise self._error
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors", "x"])
def test_an_interrupted_save_leaves_nothing(tmp_path, name):
    values = {"a": np.zeros((700, 1024), np.float32), "b": np.ones((700, 1024), np.float32)}
    with pytest.raises(KeyboardInterrupt):
        fp4kit.save(tmp_path / name, Failing(values, "b"), **SHARDS.get(name, {}))
    assert list(tmp_path.iterdir()) == []


SHARDS = {"x": {"max_shard_size": "3MB"}}
KILLED = """
import os, signal, sys
import numpy as np
import fp4kit
from fp4kit.io.write.files import AtomicFile, OutputError
write, written = AtomicFile.write_at, []
def kill(self, offset, data):
    write(self, offset, data)
    written.append(data)
    if len(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
AtomicFile.write_at = kill
a = np.zeros((700, 1024), np.float32)
fp4kit.save(sys.argv[1], {"a": a, "b": a + 1}, max_shard_size="3MB")
"""


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors", "x"])
def test_killed_in_the_middle(tmp_path, name):
    """No half file has the name of the result; the next run removes what is left."""
    script = KILLED.replace('"a": a, ', "") if name == "x.npy" else KILLED
    if name == "x.npz":  # which is written as a stream
        script = script.replace("len(written) == 2", "False").replace(
            "fp4kit.save(", "os.fsync = lambda fd: os.kill(os.getpid(), 9)\nfp4kit.save("
        )
    path = tmp_path / name
    done = subprocess.run([sys.executable, "-c", script, path], check=False, timeout=60)
    assert done.returncode == -9
    if name == "x":
        with pytest.raises(fp4kit.FileFormatError, match="unfinished"):
            fp4kit.open(path)
    else:
        assert not path.exists()
    fp4kit.save(path, {"x": X}, force=True)
    assert list(tmp_path.rglob("*fp4kit-tmp")) == []
    assert (next(iter(fp4kit.open(path).values())) == X).all()


# What stands in the place of a new result, and what is saved over it.
OLD = {"a": X, NAME: Q}
LARGE = np.tile(X, (100, 1))
NEW = {"a": LARGE + 1, "b": LARGE + 2, "c": LARGE + 3}
NEW_SHARDS = {"max_shard_size": "1MB"}


def older(path):
    """A good result, in a directory with files of somebody else's; its bytes."""
    fp4kit.save(path, OLD, **({} if path.suffix else {"config": CONFIG}))
    if not path.is_dir():
        return {"": path.read_bytes()}
    (path / "sub").mkdir()
    (path / "sub" / "model.safetensors").write_text("mine")
    (path / "notes.txt").write_text("mine")
    return c.digest(path)


def content(path):
    return c.digest(path) if path.is_dir() else {"": path.read_bytes()}


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["x.safetensors", "x"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, FileNotFoundError, "write_at", "commit"])
def test_a_failed_save_with_force_leaves_the_old_result(tmp_path, monkeypatch, name, fault):
    path = tmp_path / name
    before = older(path)
    more = {} if path.suffix else NEW_SHARDS
    given, error = NEW, OutputError
    if isinstance(fault, str):
        real, calls = getattr(AtomicFile, fault), []
        after = 0 if path.suffix and fault == "commit" else 2

        def fail(*args):
            calls.append(args)
            (full if len(calls) > after else real)(*args)

        monkeypatch.setattr(AtomicFile, fault, fail)
    else:
        given, error = Failing(NEW, "c", fault), (fault, OutputError)
    with pytest.raises(error):
        fp4kit.save(path, given, force=True, **more)
    assert content(path) == before
    assert len(list(tmp_path.rglob("*"))) == len(before) + (0 if path.suffix else 2)
    with fp4kit.open(path) as file:
        assert (file["a"] == X).all()
        assert (file[NAME].packed == Q.packed).all()
    monkeypatch.undo()
    fp4kit.save(path, NEW, force=True, **more)
    assert (fp4kit.open(path)["c"] == LARGE + 3).all()
    if path.is_dir():
        assert dict(before.items() & content(path).items()).keys() == {
            "notes.txt",
            "sub/model.safetensors",
        }
        assert not list(path.glob(".fp4kit*"))


def test_what_appears_while_a_result_is_saved_over_an_old_one(tmp_path):
    path = tmp_path / "x"
    before = older(path)

    class Meddling(Failing):
        def __getitem__(self, name):
            if self._asked:
                (path / "model-00002-of-00003.safetensors").write_text("theirs")
            self._asked += name == self._name
            return self._values[name]

    with pytest.raises(OutputError, match="did not write"):
        fp4kit.save(path, Meddling(NEW, "c"), force=True, **NEW_SHARDS)
    assert (path / "model-00002-of-00003.safetensors").read_text() == "theirs"
    assert {name: content(path).get(name) for name in before} == before


@pytest.mark.parametrize("step", ["replace", "rmdir", "finish"])
def test_interrupted_as_the_new_result_takes_its_place(tmp_path, monkeypatch, step):
    """Nothing can fail any more, so that it is completed."""
    path = tmp_path / "x"
    others = {name: bits for name, bits in older(path).items() if not name.startswith(("m", "c"))}
    owner = State if step == "finish" else Path
    real, calls = getattr(owner, step), []

    def interrupt(*args):
        done = real(*args)
        if (path / ".fp4kit-incomplete").exists() or step == "finish":
            calls.append(args)
            if len(calls) == 1:
                raise KeyboardInterrupt
        return done

    monkeypatch.setattr(owner, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fp4kit.save(path, NEW, force=True, **NEW_SHARDS)
    assert calls
    monkeypatch.undo()
    fp4kit.save(tmp_path / "whole", NEW, **NEW_SHARDS)
    assert c.digest(path) == c.digest(tmp_path / "whole") | others


# Every step that changes a directory, one after the other, is the last one of a process.
KILLED_AT = """
import os, shutil, signal, sys
import numpy as np
import fp4kit
x = np.tile(np.random.default_rng(0).standard_normal((32, 64), np.float32), (100, 1))
new = {"a": x + 1, "b": x + 2, "c": x + 3}
fp4kit.save(sys.argv[3], new, max_shard_size="1MB")
os.fsync = lambda fd: None
for number in range(1000):
    shutil.copytree(sys.argv[1], f"{sys.argv[2]}/{number}")
    child = os.fork()
    if not child:
        steps = []
        def dying(real):
            def step(*args, **options):
                steps.append(args)
                if len(steps) > number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)
            return step
        for name in ("replace", "rename", "link", "unlink", "mkdir", "rmdir", "pwrite"):
            setattr(os, name, dying(getattr(os, name)))
        fp4kit.save(f"{sys.argv[2]}/{number}", new, force=True, max_shard_size="1MB")
        os._exit(0)
    if not os.waitpid(child, 0)[1]:
        break
"""


def test_killed_at_any_step_of_a_save_with_force(tmp_path):
    """The old result or the new one is whole, or the next save completes the new one."""
    before, whole = older(tmp_path / "old"), tmp_path / "whole"
    work = tmp_path / "work"
    work.mkdir()
    script = [sys.executable, "-c", KILLED_AT, tmp_path / "old", work, whole]
    subprocess.run(script, check=True, timeout=60)
    others = {name: before[name] for name in ("notes.txt", "sub/model.safetensors")}
    after = c.digest(whole) | others
    seen = {"old": 0, "new": 0, "marked": 0}
    for path in sorted(work.iterdir(), key=lambda path: int(path.name)):
        for newborn in path.rglob("*.fp4kit-tmp"):  # would stay for some seconds
            os.utime(newborn, (0, 0))
        marked = (path / ".fp4kit-incomplete").is_dir()
        found = {name: digest for name, digest in c.digest(path).items() if name[0] != "."}
        state = "marked" if marked else "old" if found == before else "new"
        seen[state] += 1
        if marked:
            with pytest.raises(fp4kit.FileFormatError, match="unfinished"):
                fp4kit.open(path)
        else:
            assert found == (before if state == "old" else after)
            assert (fp4kit.open(path)["a"] == (X if state == "old" else LARGE + 1)).all()
        with pytest.raises(KeyboardInterrupt):
            fp4kit.save(path, Failing({"z": X}, "z"), force=True)
        assert c.digest(path) == (before if state == "old" else after)
        fp4kit.save(path, {"z": X}, force=True)
        assert c.digest(path).keys() == {"model.safetensors", *others}
    assert seen["old"] > 20
    assert seen["marked"] > 5
    assert seen["new"] == 1


def test_permissions_are_those_of_the_source(tmp_path):
    source = tmp_path / "x.safetensors"
    fp4kit.save(source, {"x": X})
    source.chmod(0o600)
    with fp4kit.open(source) as file:
        fp4kit.save(tmp_path / "y.safetensors", file)
        fp4kit.save(tmp_path / "y", file)
    for name in ("y.safetensors", "y/model.safetensors"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_a_layout(tmp_path, layout):
    """An index, config.json with the quantization, and what verify and dequantize make of it."""
    rng = np.random.default_rng(0)
    weights = {
        f"model.layers.{layer}.mlp.down_proj.weight": rng.standard_normal((1024, 1536), np.float32)
        for layer in range(4)
    }
    tensors = {name: fp4kit.quantize(x) for name, x in weights.items()}
    tensors["model.norm.weight"] = np.ones(64, ml_dtypes.bfloat16)
    folder = tmp_path / "model"
    report = fp4kit.save(
        folder,
        tensors,
        layout=layout,
        config=CONFIG,
        metadata={"note": "mine"},
        max_shard_size="2MB",
    )
    assert len(report.shards) > 1
    assert json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert fp4kit.verify(folder, against=_plain(tmp_path, weights, tensors)).ok
    with fp4kit.open(folder) as file:
        assert file.metadata["note"] == "mine"
        assert ("quantization_config" in file.config) == (layout != "comfy")
        for name in weights:
            values, again = bits(tensors[name]), bits(file[name])
            # Another order of operations: at most one unit in the last place apart.
            assert np.abs(values - again).max() <= 1
    succeed("dequantize", folder, "-o", tmp_path / "back", "--device", "cpu")


def bits(q):
    """Decoded bfloat16 as integers; ModelOpt has no -0."""
    return (fp4kit.dequantize(q, "bfloat16") + ml_dtypes.bfloat16(0)).view(np.uint16).astype(int)


def _plain(tmp_path, weights, tensors):
    fp4kit.save(tmp_path / "plain", tensors | weights, config=CONFIG)
    return tmp_path / "plain"


# ------------------------------------------------------------------------------------------------
# Operations
# ------------------------------------------------------------------------------------------------


def told(seen):
    return lambda done, total: seen.append((done, total))


def test_reports_are_the_numbers_of_the_command_line(tmp_path):
    tensors, config = c.llama(1)
    source = c.save(tmp_path / "model", tensors, config)
    file = c.write_file(tmp_path / "in.safetensors", tensors)
    for function, place, out in (
        (fp4kit.quantize_file, file, "q.safetensors"),
        (fp4kit.quantize_checkpoint, source, "q"),
    ):
        seen = []
        report = function(place, tmp_path / out, device="cpu", progress=told(seen))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 0
        said = json.loads(
            succeed(
                "quantize", place, "-o", tmp_path / f"c{out}", "--device", "cpu", "--json"
            ).stdout
        )
        assert [t["name"] for t in said["tensors"]] == [t.name for t in report.tensors]
        for ours, theirs in zip(report.tensors, said["tensors"], strict=True):
            assert (ours.stats and ours.stats.to_dict()) == theirs["stats"]
        if out == "q":
            assert c.digest(tmp_path / "q") == c.digest(tmp_path / "cq")
        else:
            assert (tmp_path / out).read_bytes() == (tmp_path / f"c{out}").read_bytes()
        plan = function(place, tmp_path / "none", dry_run=True)
        assert plan.target is None
        assert [t.action for t in plan.tensors] == [t.action for t in report.tensors]
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("whole", [False, True])
def test_a_scheme_is_the_same_as_its_fields(tmp_path, whole):
    tensors, config = c.llama(1)
    source = c.save(tmp_path / "model", tensors, config)
    function = fp4kit.quantize_checkpoint if whole else fp4kit.quantize_file
    fields = {"scale_search": "sweep", "e4m3_max": 256} | (
        {} if whole else {"scale_layout": "swizzled_8x4", "nibble_order": "high_first"}
    )
    results = []
    for name, call in (("a", (Scheme(**fields), {})), ("b", ("nvfp4", fields))):
        target = tmp_path / (name if whole else f"{name}.safetensors")
        place = source if whole else source / "model.safetensors"
        function(place, target, call[0], device="cpu", **call[1])
        results.append(c.read(target) if whole else target.read_bytes())
    assert results[0] == results[1]


def test_default_targets(tmp_path, monkeypatch):
    tensors, config = c.llama(1)
    source = c.save(tmp_path / "model", tensors, config)
    c.write_file(tmp_path / "in.safetensors", tensors)
    monkeypatch.chdir(tmp_path)
    assert fp4kit.quantize_file("in.safetensors", None, "mxfp8").target == "in-mxfp8.safetensors"
    monkeypatch.chdir(source)
    assert fp4kit.quantize_checkpoint(".").target == str(tmp_path / "model-nvfp4")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: fp4kit.quantize_file(p / "m"), "use quantize_checkpoint"),
        (lambda p: fp4kit.dequantize_file(p / "m", p / "x.npz"), "use dequantize_checkpoint"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", includ=["*"]), "'includ' is no option"),
        (lambda p: fp4kit.quantize_checkpoint(p / "m", p / "n", pad=True), "'pad' is no option"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", None, Scheme(rht=True)), "rht=True is not"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", None, Scheme(direction="both")), "direction"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", None, Scheme(), pad=True), "beside a Scheme"),
        (lambda p: fp4kit.quantize_checkpoint(p / "m", None, Scheme(pad=True)), "pad=True is not"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", device="gpu"), "choose auto, cpu"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", p / "x.npz"), "must end in .safetensors"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", exclude=["*"]), "no tensor is quantized"),
        (lambda p: fp4kit.convert_checkpoint(p / "m", p / "n", "comfy"), "holds no"),
        (lambda p: fp4kit.verify(p / "nothing"), "no such file"),
        (lambda p: fp4kit.verify(p / "m", p / "nothing"), "no such file"),
    ],
)
def test_operations_that_are_refused(tmp_path, call, said):
    np.save(tmp_path / "x.npy", X)
    fp4kit.save(tmp_path / "m", {NAME: X}, config=CONFIG)
    with pytest.raises(fp4kit.Fp4kitError) as error:
        call(tmp_path)
    assert said in one_line(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "x.npy"]


def test_verify_names_faults(tmp_path):
    fp4kit.save(tmp_path / "m", {NAME: Q}, config=CONFIG)
    assert fp4kit.verify(tmp_path / "m") == fp4kit.VerifyReport(str(tmp_path / "m"), [], [])
    fp4kit.save(tmp_path / "other", {NAME: X + 9}, config=CONFIG)
    report = fp4kit.verify(tmp_path / "m", tmp_path / "other")
    assert not report.ok
    (fault,) = report.faults
    assert NAME in fault


def test_resume_and_force_are_those_of_the_command_line(tmp_path):
    fp4kit.save(tmp_path / "m", {NAME: X}, config=CONFIG)
    out = tmp_path / "q"
    with pytest.raises(fp4kit.FileFormatError, match="no unfinished conversion"):
        fp4kit.quantize_checkpoint(tmp_path / "m", out, resume=True)
    fp4kit.quantize_checkpoint(tmp_path / "m", out)
    with pytest.raises(fp4kit.OptionError, match="not empty"):
        fp4kit.quantize_checkpoint(tmp_path / "m", out)
    fp4kit.quantize_checkpoint(tmp_path / "m", out, layout="modelopt", force=True)
    assert fp4kit.open(out).layout == "modelopt"
