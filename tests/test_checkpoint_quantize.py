# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What `quantize_checkpoint` writes: names, types, shapes and bytes of every tensor and file."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest

import fp4kit
from fp4kit.checkpoint.models.fusion import fusion_group
from fp4kit.checkpoint.operations import plan_quantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from fp4kit.errors import FileFormatError, NonFiniteError, OptionError
from fp4kit.io.write.safetensors import SafetensorsWriter
from fp4kit.reference import codecs

#: (layout, format, recipe or scale rule) of everything that can be written.
KINDS = [
    ("compressed-tensors", "nvfp4", "te"),
    ("compressed-tensors", "nvfp4", "compressed-tensors"),
    ("compressed-tensors", "mxfp4", "even"),
    ("compressed-tensors", "mxfp4", "floor"),
    ("modelopt", "nvfp4", "modelopt"),
    ("modelopt", "nvfp4", "torchao"),
    ("comfy", "nvfp4", "comfy"),
    ("comfy", "nvfp4", "te"),
]
SECOND = {"compressed-tensors": "_global_scale", "modelopt": "_scale_2", "comfy": "_scale_2"}
#: What a default rule leaves alone in the made-up models.
KEPT = ("lm_head", "embed_tokens", "mlp.gate.", "shared_expert_gate", "norm", "bias")


def options_of(layout, format="nvfp4", rule="te", **more):
    chosen = {"recipe": rule} if format == "nvfp4" else {"scale_rule": rule}
    return CheckpointOptions(format=format, layout=layout, **chosen, **more)


def run(source, target, layout="compressed-tensors", format="nvfp4", rule="te", **more):
    return quantize_checkpoint(source, target, options_of(layout, format, rule, **more))


def expected_parts(checkpoints, tensors, layout, format, rule):
    """{name: (dtype, shape, bytes)} of everything, from fp4kit.quantize alone."""
    weights = {
        name: array
        for name, (_, array) in tensors.items()
        if array.ndim == 2 and not any(part in name for part in KEPT)
    }
    shared = {}
    for name, array in weights.items():
        key = fusion_group(name) or name
        shared[key] = max(shared.get(key, 0.0), checkpoints.amax(array))
    result = {
        name: (dtype, array.shape, array.tobytes())
        for name, (dtype, array) in tensors.items()
        if name not in weights
    }
    given = {"recipe": rule} if format == "nvfp4" else {"scale_rule": rule}
    if layout == "comfy":
        given |= {"scale_layout": "swizzled_128x4", "nibble_order": "high_first"}
    for name, array in weights.items():
        q = checkpoints.quantized(array, shared[fusion_group(name) or name], format, **given)
        packed, scale = np.asarray(q.packed), np.asarray(q.block_scale)
        if layout == "comfy":
            packed = np.pad(packed, ((0, -len(packed) % 16), (0, 0)))
            marker = b'{"format": "nvfp4"}'
            result[f"{name.removesuffix('.weight')}.comfy_quant"] = "U8", (len(marker),), marker
        codes = f"{name}_packed" if layout == "compressed-tensors" else name
        result[codes] = "U8", packed.shape, packed.tobytes()
        kind = "F8_E4M3" if format == "nvfp4" else "U8"
        result[f"{name}_scale"] = kind, scale.shape, scale.tobytes()
        if format == "nvfp4":
            direction = "encode_scale" if layout == "compressed-tensors" else "decode_scale"
            value = fp4kit.convert_second_level(q, direction)
            shape = (1,) if layout == "compressed-tensors" else ()
            result[f"{name}{SECOND[layout]}"] = "F32", shape, value.tobytes()
    return result


def assert_same(written, expected):
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name][:2] == tensor[:2], name
        assert written[name][2] == tensor[2], name


# ------------------------------------------------------------------------------------------------
# Tensors
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "format", "rule"), KINDS)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_every_tensor_to_the_byte(checkpoints, tmp_path, layout, format, rule, dtype, model):
    """Fusion groups lie across shards in every order; each expert is a group of its own."""
    tensors, config = getattr(checkpoints, model)(dtype=dtype)
    numbers = np.random.default_rng(1).integers(0, 3, len(tensors))
    assign = {name: int(number) for name, number in zip(tensors, numbers, strict=True)}
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=3, assign=assign)
    report = run(source, tmp_path / "out", layout, format, rule, max_shard_size=20_000)
    assert len(report.shards) > 2
    expected = expected_parts(checkpoints, tensors, layout, format, rule)
    assert_same(checkpoints.read(tmp_path / "out"), expected)
    assert structure_faults(tmp_path / "out") == []
    assert value_faults(tmp_path / "out", source) == []


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_rows_that_fill_no_tile(checkpoints, tmp_path, layout):
    """O of no multiple of 16 and of 128, I/16 of no multiple of 4; ComfyUI pads them."""
    tensors = {
        f"model.layers.{number}.mlp.down_proj.weight": checkpoints.normal((rows, cols), seed=number)
        for number, (rows, cols) in enumerate([(1, 16), (15, 48), (17, 80), (129, 32), (130, 208)])
    }
    source = checkpoints.save(tmp_path / "in", tensors, {})
    run(source, tmp_path / "out", layout)
    expected = expected_parts(checkpoints, tensors, layout, "nvfp4", "te")
    assert_same(checkpoints.read(tmp_path / "out"), expected)
    assert value_faults(tmp_path / "out", source) == []


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", ["gate_proj", "k_proj"])
def test_a_member_that_does_not_fit_keeps_its_whole_group(checkpoints, tmp_path, format, name):
    block = 16 if format == "nvfp4" else 32
    tensors, config = checkpoints.llama(1)
    parent = "mlp" if name == "gate_proj" else "self_attn"
    odd = f"model.layers.0.{parent}.{name}.weight"
    tensors[odd] = checkpoints.normal((96, 64 + block // 2))
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = run(source, tmp_path / "out", format=format, rule="te" if block == 16 else "even")
    group = {n for n in tensors if fusion_group(n) == fusion_group(odd) and n.endswith("weight")}
    assert len(group) > 1
    kept = {t.name: t.reason for t in report.tensors if t.action == "keep"}
    assert group <= kept.keys()
    assert f"is not a multiple of {block}" in kept[odd]
    assert all(odd in kept[member] for member in group - {odd})
    assert group <= {f"{module}.weight" for module in report.ignore}
    written = checkpoints.read(tmp_path / "out")
    assert all(written[member] == checkpoints.stored(tensors)[member] for member in group)


@pytest.mark.parametrize(
    "special",
    [
        {"a.weight": ("BF16", (0, 32)), "b.weight": ("BF16", (4, 0))},
        {"scalar": ("F32", ()), "one": ("BF16", (1,)), "empty": ("F32", (0,))},
        {"rope.inv_freq": ("F32", (32,)), "conv.weight": ("BF16", (8, 8, 3, 3))},
        {
            "ids": ("I64", (4, 32)),
            "mask.weight": ("BOOL", (4, 32)),
            "wide.weight": ("F64", (4, 32)),
        },
        {"not_a_weight": ("BF16", (32, 32)), "model.mtp.fc.weight": ("BF16", (32, 32))},
    ],
)
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_everything_else_is_carried_through(checkpoints, tmp_path, special, layout):
    """E11, D19: every tensor of the input is in the output in some form."""
    tensors, config = checkpoints.llama(1)
    for number, (name, (dtype, shape)) in enumerate(special.items()):
        tensors[name] = checkpoints.normal(shape, dtype, number)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2)
    report = run(source, tmp_path / "out", layout)
    written = checkpoints.read(tmp_path / "out")
    for name in special:
        assert written[name] == checkpoints.stored(tensors)[name]
    assert {t.name for t in report.tensors} == tensors.keys()
    stacked = [name for name, (dtype, shape) in special.items() if len(shape) > 2]
    assert all(any(name in warning for warning in report.warnings) for name in stacked)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_dead_weights_have_a_finite_second_level(checkpoints, tmp_path, layout, value):
    """A2: all zeros decode to zeros, and no scale is infinite, in a group and alone."""
    tensors, config = checkpoints.moe(2)
    for name in tensors:
        if "experts.0." in name or name.endswith("o_proj.weight"):
            tensors[name][1][:] = value
    source = checkpoints.save(tmp_path / "in", tensors, config)
    run(source, tmp_path / "out", layout)
    assert structure_faults(tmp_path / "out") == []
    written = checkpoints.read(tmp_path / "out")
    seconds = [n for n in written if n.endswith(SECOND[layout])]
    dead = [n for n in seconds if "experts.0." in n or "o_proj" in n]
    assert len(dead) == 4
    assert all(checkpoints.array(written[name]) == 1.0 for name in dead)
    for name in dead:
        packed = name.removesuffix(SECOND[layout])
        packed += "_packed" if layout == "compressed-tensors" else ""
        scale = name.removesuffix(SECOND[layout]) + "_scale"
        codes = checkpoints.array(written[packed])
        scales = checkpoints.array(written[scale])
        values = codecs.decode(scales, fp4kit.formats.E4M3)
        assert not ((codes & 0x77).any() and values.any())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_weight_that_is_not_finite(checkpoints, tmp_path, bad, shards):
    """A26: named with its place, nothing that looks finished is left; kept tensors may hold it."""
    tensors, config = checkpoints.llama(1)
    tensors["model.norm.weight"][1][3] = bad
    source = checkpoints.save(tmp_path / "good", tensors, config, shards=shards)
    run(source, tmp_path / "fine", max_shard_size=15_000)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][1][5, 7] = bad
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=shards)
    before = checkpoints.digest(source)
    with pytest.raises(NonFiniteError, match=rf"{name}.*\(5, 7\)"):
        run(source, tmp_path / "out", max_shard_size=15_000)
    assert checkpoints.digest(source) == before
    assert not (tmp_path / "out" / "config.json").exists()
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert "unfinished" in structure_faults(tmp_path / "out")[0]
    with pytest.raises(OptionError, match="unfinished"):
        run(source, tmp_path / "out")


# ------------------------------------------------------------------------------------------------
# Files around the weights
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
@pytest.mark.parametrize("size", [10**9, 9000])
def test_files_beside_the_weights(checkpoints, tmp_path, layout, size):
    """E3, E12, E13: other files are copied, what is generated is generated, nothing is stale."""
    tensors, config = checkpoints.llama(2)
    metadata = {"format": "pt", "author": "someone", "_quantization_metadata": '{"layers": {}}'}
    files = list(checkpoints.OTHER_FILES)
    source = checkpoints.save(
        tmp_path / "in", tensors, config, shards=4, metadata=metadata, others=files
    )
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    (source / "onnx" / "model.onnx").write_bytes(b"other weights")
    (source / "consolidated.safetensors").write_bytes((source / "tokenizer.json").read_bytes())
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_bytes(b"ref")
    target = tmp_path / "out"
    report = run(source, target, layout, max_shard_size=size)
    for name in files:
        assert (target / name).read_bytes() == checkpoints.OTHER_FILES[name]
    assert sorted(report.copied) == sorted(files)
    left = ["consolidated.safetensors", "onnx/model.onnx", "pytorch_model.bin"]
    assert sorted(report.left_out) == left
    weights = set(report.shards)
    generated = {"config.json"} | ({"model.safetensors.index.json"} if len(weights) > 1 else set())
    if layout == "modelopt":
        generated.add("hf_quant_config.json")
    assert checkpoints.digest(target).keys() == {*files, *weights, *generated}
    expected = [f"model-{n + 1:05d}-of-{len(weights):05d}.safetensors" for n in range(len(weights))]
    assert list(report.shards) == (expected if len(weights) > 1 else ["model.safetensors"])
    assert report.disk_needed >= sum((target / name).stat().st_size for name in files)
    for path in target.glob("*.safetensors"):
        _, found = checkpoints.read_file(path)
        assert found["format"] == "pt"
        assert found["author"] == "someone"
        assert ("_quantization_metadata" in found) == (layout == "comfy")


@pytest.mark.parametrize("size", [10**9, 9000])
def test_index(checkpoints, tmp_path, size):
    """E13: bytes of tensors, not of files; parameters are those of the model, not codes."""
    tensors, config = checkpoints.llama(2)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = run(source, tmp_path / "out", max_shard_size=size)
    written = checkpoints.read(tmp_path / "out")  # weight_map and total_size are compared there
    assert sum(report.shards.values()) == sum(len(data) for *_, data in written.values())
    assert all(nbytes <= size or count == 1 for nbytes, count in _units_of(report, checkpoints))
    if size == 10**9:
        assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
        return
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    parameters = sum(array.size for _, array in tensors.values())
    assert index["metadata"]["total_parameters"] == parameters


def _units_of(report, checkpoints):
    """(bytes, fusion groups or lone tensors) of each file of the output."""
    from pathlib import Path

    for name, nbytes in report.shards.items():
        held, _ = checkpoints.read_file(Path(report.target) / name)
        assert sum(len(data) for *_, data in held.values()) == nbytes
        bases = {n.rsplit(".weight", 1)[0] + ".weight" if ".weight" in n else n for n in held}
        yield nbytes, len({fusion_group(base) or base for base in bases})


def test_config_keeps_everything_else(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1)
    config |= {"rope_scaling": {"factor": 2.5}, "note": "Größe", "nothing": None}
    source = checkpoints.save(tmp_path / "in", tensors, config)
    run(source, tmp_path / "out")
    written = checkpoints.config_of(tmp_path / "out")
    assert written.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert written == config
    run(source, tmp_path / "comfy", "comfy")
    assert checkpoints.config_of(tmp_path / "comfy") == config


@pytest.mark.parametrize(
    ("layout", "taken"),
    [
        ("compressed-tensors", "weight_packed"),
        ("compressed-tensors", "weight_scale"),
        ("compressed-tensors", "input_global_scale"),
        ("modelopt", "weight_scale_2"),
        ("modelopt", "input_scale"),
        ("comfy", "comfy_quant"),
    ],
)
def test_names_that_would_collide(checkpoints, tmp_path, layout, taken):
    """Two tensors under one name: refused before any work, with the way out."""
    module = "model.layers.0.mlp.down_proj"
    tensors = {
        f"{module}.weight": checkpoints.normal((32, 64)),
        f"{module}.{taken}": checkpoints.normal((3,), "F32"),
    }
    source = checkpoints.save(tmp_path / "in", tensors, {})
    with pytest.raises(FileFormatError, match=f"both be written as '{module}.{taken}'; exclude"):
        run(source, tmp_path / "out", layout, activations="uncalibrated")
    assert not (tmp_path / "out").exists()


def test_a_directory_without_config(checkpoints, tmp_path):
    tensors, _ = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, None)
    run(source, tmp_path / "out", "modelopt")
    assert list(checkpoints.config_of(tmp_path / "out")) == ["quantization_config"]
    run(source, tmp_path / "comfy", "comfy")
    assert not (tmp_path / "comfy" / "config.json").exists()


# ------------------------------------------------------------------------------------------------
# Plan and report
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_the_plan_says_what_is_done(checkpoints, tmp_path, layout, monkeypatch):
    """E18, E21: a dry run reads headers only, and its report is that of the real run."""
    tensors, config = checkpoints.moe()
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=3, others=["LICENSE"])
    options = options_of(layout, max_shard_size=9000, exclude=("*down_proj*",))
    with monkeypatch.context() as patched:
        patched.setattr("fp4kit.checkpoint.read.directory.Checkpoint.read", None)
        patched.setattr(SafetensorsWriter, "__init__", None)
        plan = plan_quantize_checkpoint(source, options)
    assert plan.target is None
    done = quantize_checkpoint(source, tmp_path / "out", options)
    for name in ("shards", "groups", "ignore", "dropped", "copied", "left_out", "disk_needed"):
        assert getattr(plan, name) == getattr(done, name), name
    for before, after in zip(plan.tensors, done.tensors, strict=True):
        for name in ("name", "shape", "action", "reason", "format", "bytes_before", "bytes_after"):
            assert getattr(before, name) == getattr(after, name)
    assert sum(t.bytes_after for t in done.tensors) == sum(done.shards.values())
    assert sum(prod(t.shape) for t in done.tensors) == sum(a.size for _, a in tensors.values())
    assert all(t.stats.sqnr > 15 for t in done.tensors if t.action == "quantize")


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "gguf"},
        {"format": "mxfp8"},
        {"layout": "modelopt", "format": "mxfp4"},
        {"layout": "comfy", "format": "mxfp4"},
        {"recipe": "unknown"},
        {"recipe": "te", "scale_rule": "even"},
        {"include": ("re:(",)},
        {"include": ("*nothing*",)},
        {"exclude": ("*nothing*",)},
        {"experts_layout": "sideways"},
        {"activations": "calibrated.json"},
    ],
)
def test_wrong_options_are_refused_before_any_work(checkpoints, tmp_path, options):
    """E21."""
    tensors, config = checkpoints.fused_moe()
    source = checkpoints.save(tmp_path / "in", tensors, config)
    with pytest.raises((OptionError, FileFormatError)):
        quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(**options))
    assert not (tmp_path / "out").exists()
