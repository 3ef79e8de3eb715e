# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""fp4kit.save: what is refused, and what an interrupted run leaves."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import checkpoints as c
import fp4kit
from command_line import succeed
from file_kinds import LAYOUTS
from fp4kit import Scheme
from python_files import CONFIG, NAME, Failing, Q, X, one_line, quantized

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
    "GGUF": (
        "x.gguf",
        {"a": Q},
        {},
        "architecture, sizes, tokenizer) that arrays have",
    ),
    "GGUF with a config": ("x.gguf", {"a": Q}, {"config": {}}, "give that .gguf to quantize_file"),
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
