# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What stands beside quantized weights: AWQ's scales are folded, anything unknown is refused."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from command_line import fail, succeed
from fp4kit.checkpoint.convert import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.inspect import inspect_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify import structure_faults
from fp4kit.checkpoint.verify_values import value_faults
from fp4kit.errors import FileFormatError, OptionError

LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
DOWN = "model.layers.0.mlp.down_proj"
OUT = "model.layers.0.self_attn.o_proj"
PRE = ".pre_quant_scale"


def factors(columns, seed=0, dtype="BF16"):
    values = 1 + 7 * np.random.default_rng(seed).random(columns)
    return values.astype({"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}[dtype])


def edit(checkpoints, folder, change, metadata=None):
    """Rewrites the only weight file of a directory (or a file)."""
    path = folder if folder.is_file() else next(folder.glob("*.safetensors"))
    stored, header = checkpoints.read_file(path)
    tensors = {name: (t[0], checkpoints.array(t).copy()) for name, t in stored.items()}
    change(tensors)
    if metadata is not None:
        metadata(header)
    checkpoints.write_file(path, tensors, header)
    return folder


@pytest.fixture(scope="module")
def good(checkpoints, tmp_path_factory):
    """A source, what AWQ makes of it, and that quantized in each layout."""
    folder = tmp_path_factory.mktemp("awq")
    tensors, config = checkpoints.llama(1)
    checkpoints.save(folder / "source", tensors, config)
    smoothed = dict(tensors)
    for number, module in enumerate((DOWN, OUT)):
        weight = tensors[f"{module}.weight"][1].astype(np.float32)
        scaled = weight / factors(weight.shape[1], number).astype(np.float32)
        smoothed[f"{module}.weight"] = "BF16", scaled.astype(ml_dtypes.bfloat16)
    checkpoints.save(folder / "smoothed", smoothed, config)
    for layout in LAYOUTS:
        options = CheckpointOptions(layout=layout, activations="uncalibrated")
        quantize_checkpoint(folder / "smoothed", folder / layout, options)
    return folder


@pytest.fixture
def awq(checkpoints, good, tmp_path):
    """A quantized directory with the scales of its inputs, as AWQ exports it."""

    def make(layout, dtype="BF16", said=True):
        target = tmp_path / f"awq-{layout}"
        shutil.copytree(good / layout, target)

        def change(tensors):
            for number, module in enumerate((DOWN, OUT)):
                columns = 96 if module == DOWN else 64
                tensors[module + PRE] = dtype, factors(columns, number, dtype)

        edit(checkpoints, target, change)
        for document, key in (
            ("config", "quantization_config"),
            ("hf_quant_config", "quantization"),
        ):
            path = target / f"{document}.json"
            if layout == "modelopt" and said:
                content = json.loads(path.read_text())
                content[key]["quant_algo"] = "NVFP4_AWQ"
                path.write_text(json.dumps(content))
        return target

    return make


def decoded(checkpoints, good, layout, tmp_path):
    """The stored weights, without the scales of their inputs."""
    target = tmp_path / "plain"
    dequantize_checkpoint(good / layout, target, DequantizeOptions("float32"))
    return {name: checkpoints.array(t) for name, t in checkpoints.read(target).items()}


# ------------------------------------------------------------------------------------------------
# AWQ
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["modelopt", "comfy"])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_the_scales_are_folded(checkpoints, good, awq, tmp_path, layout, dtype):
    """F1: W * s for each column, rounded once to binary32; the parameter disappears."""
    stored = decoded(checkpoints, good, layout, tmp_path)
    source = awq(layout, dtype)
    for out in ("float32", "bfloat16"):
        dequantize_checkpoint(source, tmp_path / out, DequantizeOptions(out))
    wide, narrow = (checkpoints.read(tmp_path / out) for out in ("float32", "bfloat16"))
    assert wide.keys() == stored.keys()
    for number, module in enumerate((DOWN, OUT)):
        name = f"{module}.weight"
        s = factors(stored[name].shape[1], number, dtype).astype(np.float32)
        expected = stored[name] * s
        assert wide[name][2] == expected.tobytes()
        assert narrow[name][2] == expected.astype(ml_dtypes.bfloat16).tobytes()
    others = [name for name in stored if DOWN not in name and OUT not in name]
    assert all(wide[name][2] == stored[name].tobytes() for name in others)


@pytest.mark.parametrize("layout", ["modelopt", "comfy"])
def test_the_effective_weight_is_compared(checkpoints, good, awq, layout):
    """`verify --against` sees W; without the scales it sees something else."""
    source = awq(layout)
    assert structure_faults(source) == []
    assert value_faults(source, good / "source") == []
    # Against what the codes were made from, the scales are too many.
    assert len(value_faults(source, good / "smoothed")) == 2

    def lose(tensors):
        del tensors[DOWN + PRE]

    edit(checkpoints, source, lose)
    (fault,) = value_faults(source, good / "source")
    assert fault.startswith(f"{DOWN}.weight: its values are far from the source")


@pytest.mark.parametrize(("old", "new"), [("modelopt", "comfy"), ("comfy", "modelopt")])
def test_convert_keeps_them_for_readers_that_know_them(checkpoints, awq, tmp_path, old, new):
    source = awq(old)
    convert_checkpoint(source, tmp_path / "out", ConvertOptions(new))
    before, after = checkpoints.read(source), checkpoints.read(tmp_path / "out")
    for module in (DOWN, OUT):
        assert after[module + PRE] == before[module + PRE]
    assert structure_faults(tmp_path / "out") == []
    if new == "modelopt":
        config = checkpoints.config_of(tmp_path / "out")["quantization_config"]
        own = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
        assert config["quant_algo"] == own["quant_algo"] == "NVFP4_AWQ"
        assert own["pre_quant_scale"] is True
    for folder in (source, tmp_path / "out"):
        dequantize_checkpoint(folder, tmp_path / f"{folder.name}-d", DequantizeOptions("float32"))
    values = [checkpoints.read(tmp_path / f"{name}-d") for name in (source.name, "out")]
    assert values[0].keys() == values[1].keys()
    for name, one in values[0].items():
        # Recipes differ in the sign of zero.
        assert (checkpoints.array(one) == checkpoints.array(values[1][name])).all()


@pytest.mark.parametrize("old", ["modelopt", "comfy"])
def test_convert_refuses_readers_that_do_not(awq, tmp_path, old):
    with pytest.raises(OptionError, match=r"2 modules have scales of AWQ.*fp4kit dequantize"):
        convert_checkpoint(awq(old), tmp_path / "out", ConvertOptions("compressed-tensors"))
    assert not (tmp_path / "out").exists()


def test_weights_only_is_said_to_be_unusual(checkpoints, good, tmp_path):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions(layout="comfy"))
    edit(checkpoints, tmp_path / "q", lambda t: t.update({DOWN + PRE: ("BF16", factors(96))}))
    report = convert_checkpoint(tmp_path / "q", tmp_path / "out", ConvertOptions("modelopt"))
    assert any("AWQ" in warning and "activation scales" in warning for warning in report.warnings)


def test_compressed_tensors_has_no_such_scale(awq, tmp_path):
    source = awq("compressed-tensors")
    with pytest.raises(FileFormatError, match="pre_quant_scale: is not understood"):
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())
    assert any(DOWN + PRE in fault for fault in structure_faults(source))


def test_a_config_that_has_readers_ignore_them(awq):
    faults = structure_faults(awq("modelopt", said=False))
    assert len(faults) == 2
    assert all("quant_algo has readers ignore it" in fault for fault in faults)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (np.ones(5, np.float32), "a float for each of the 96 columns"),
        (np.full(96, np.nan, np.float32), "NaN or infinite scale"),
        (np.full(96, np.inf, np.float32), "NaN or infinite scale"),
    ],
)
def test_scales_that_do_not_fit(checkpoints, awq, tmp_path, values, match):
    source = awq("modelopt")
    edit(checkpoints, source, lambda tensors: tensors.update({DOWN + PRE: ("F32", values)}))
    with pytest.raises(FileFormatError, match=match):
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())
    assert any(match in fault for fault in structure_faults(source))


def test_scales_that_are_not_above_zero(checkpoints, awq):
    source = awq("comfy")
    values = np.where(np.arange(96) == 3, 0, 1).astype(np.float32)
    edit(checkpoints, source, lambda tensors: tensors.update({DOWN + PRE: ("F32", values)}))
    assert structure_faults(source) == [f"{DOWN}{PRE}: holds a scale that is not above 0"]


def test_inspect_knows_them(awq):
    report = inspect_checkpoint(awq("modelopt"))
    names = [tensor.name for tensor in report.tensors]
    assert DOWN + PRE not in names
    facts = {tensor.name: tensor.facts for tensor in report.tensors}
    assert facts[f"{DOWN}.weight"]["pre_quant_scale"] == DOWN + PRE
    assert "pre_quant_scale" not in facts["model.layers.0.mlp.up_proj.weight"]


def test_single_files_of_comfy(checkpoints, tmp_path):
    """As published: odd rows that are padded, a marker that announces the scales."""
    weight = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    s = factors(96, 1).astype(np.float32)
    tensors = {f"{DOWN}.weight": ("BF16", (weight / s).astype(ml_dtypes.bfloat16))}
    source = checkpoints.write_file(tmp_path / "in.safetensors", tensors)
    quantized, out = tmp_path / "q.safetensors", tmp_path / "out.safetensors"
    succeed("quantize", source, "-o", quantized, "--layout", "comfy", "--device", "cpu")
    marker = json.dumps({"format": "nvfp4", "pre_quant_scale": True, "group_size": 16}).encode()

    def change(stored):
        stored[DOWN + PRE] = "F32", s
        stored[f"{DOWN}.comfy_quant"] = "U8", np.frombuffer(marker, np.uint8)

    edit(checkpoints, quantized, change)
    succeed("dequantize", quantized, "-o", out, "--dtype", "float32", "--device", "cpu")
    written, _ = checkpoints.read_file(out)
    assert written.keys() == {f"{DOWN}.weight"}
    values = checkpoints.array(written[f"{DOWN}.weight"])
    assert values.shape == weight.shape
    assert np.linalg.norm(values - weight) < 0.15 * np.linalg.norm(weight)
    assert structure_faults(quantized) == []


# ------------------------------------------------------------------------------------------------
# Anything else
# ------------------------------------------------------------------------------------------------

UNKNOWN = (
    "foo_scale", "svd_up", "svdquant_lora_a", "lora_a", "lora_A.default.weight", "smooth_factor",
    "weight_zero_point", "weight_g_idx", "g_idx", "rotation", "hadamard.matrix", "proj_down",
    "weight_codebook", "weight_s_rel", "weight_shape_2",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unknown", UNKNOWN)
def test_unknown_neighbours_are_refused_by_name(checkpoints, good, tmp_path, layout, unknown):
    source = tmp_path / "q"
    shutil.copytree(good / layout, source)
    name = f"{DOWN}.{unknown}"
    edit(checkpoints, source, lambda t: t.update({name: ("F32", np.ones((4, 4), np.float32))}))
    with pytest.raises(FileFormatError, match="is not understood, and stands beside") as caught:
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())
    assert f"{name}: " in str(caught.value)
    other = "modelopt" if layout != "modelopt" else "comfy"
    with pytest.raises(FileFormatError, match="is not understood, and stands beside"):
        convert_checkpoint(source, tmp_path / "out", ConvertOptions(other))
    assert not (tmp_path / "out").exists()
    assert any(fault.startswith(f"{name}: is not understood") for fault in structure_faults(source))


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_unknown_neighbours_in_a_single_shard(checkpoints, good, tmp_path, unknown):
    """A file of compressed-tensors without its config.json."""
    (path,) = (good / "compressed-tensors").glob("*.safetensors")
    shard = tmp_path / "shard.safetensors"
    shutil.copy(path, shard)
    succeed("dequantize", shard, "-o", tmp_path / "fine.safetensors", "--device", "cpu")
    name = f"{DOWN}.{unknown}"
    edit(checkpoints, shard, lambda t: t.update({name: ("F32", np.ones((4, 4), np.float32))}))
    message = fail("dequantize", shard, "-o", tmp_path / "out.safetensors", "--device", "cpu")
    assert f"{name}: is not understood" in message


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_unknown_neighbours_of_fp8_are_refused_too(checkpoints, tmp_path, unknown):
    tensors, config, _ = checkpoints.fp8_llama()
    name = f"{DOWN}.{unknown}"
    tensors[name] = "F32", np.ones((4, 4), np.float32)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    for command in ("quantize", "dequantize"):
        message = fail(command, source, "-o", tmp_path / "out", "--device", "cpu")
        assert f"{name}: is not understood" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_harmless_neighbours_pass(checkpoints, good, tmp_path, layout):
    """Biases, norms, scales of activations and of the KV cache."""
    source = tmp_path / "q"
    shutil.copytree(good / layout, source)
    one = "F32", np.ones((), np.float32)
    extra = {f"{DOWN}.bias": one, f"{DOWN}.norm.weight": one, f"{OUT}.output_scale": one}
    extra |= {
        "model.layers.0.self_attn.k_proj.k_scale": one,
        "model.layers.0.self_attn.v_scale": one,
        "model.layers.0.self_attn.q_norm.scale": one,
    }
    edit(checkpoints, source, lambda tensors: tensors.update(extra))
    assert structure_faults(source) == []
    dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())


@pytest.mark.parametrize("unknown", ["lora_a", "smooth_factor", "pre_quant_scale"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_weights_with_such_neighbours_are_kept(checkpoints, tmp_path, unknown, layout):
    """No quantized layer of an engine has a place for them; the rest is quantized."""
    tensors, config = checkpoints.llama(1)
    name = f"{OUT}.{unknown}"
    tensors[name] = "F32", np.ones(64, np.float32)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(layout=layout))
    reasons = {tensor.name: tensor.reason for tensor in report.tensors}
    assert reasons[f"{OUT}.weight"] == f"{name} beside it is not understood"
    written = checkpoints.read(tmp_path / "out")
    for kept in (name, f"{OUT}.weight"):
        assert written[kept] == checkpoints.stored(tensors)[kept]
    assert structure_faults(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("facts", "fine"),
    [
        ({"format": "nvfp4", "full_precision_matrix_mult": True}, True),
        ({"format": "nvfp4", "convrot": False, "params": {}}, True),
        ({"format": "nvfp4", "group_size": 16}, True),
        ({"format": "nvfp4", "convrot": True}, False),
        ({"format": "nvfp4", "convrot_groupsize": 256}, False),
        ({"format": "nvfp4", "params": {"convrot": True}}, False),
        ({"format": "nvfp4", "group_size": 32}, False),
        ({"format": "nvfp4", "pre_quant_scale": True}, False),
        ({"format": "nvfp4", "lora_rank": 32}, False),
        ({"format": "nvfp4", "act_unsigned": True}, False),
        ({"format": "svdquant_w4a4"}, False),
        ({"format": "mxfp8"}, False),
        ({"format": 5}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("place", ["marker", "header"])
def test_keys_of_markers(checkpoints, good, tmp_path, facts, fine, place):
    """Understood and harmless, or refused by name; wherever they are said."""
    source = tmp_path / "q"
    shutil.copytree(good / "comfy", source)
    data = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    key = "_quantization_metadata"

    def change(tensors):
        if place == "marker":
            tensors[f"{DOWN}.comfy_quant"] = "U8", data
        else:
            del tensors[f"{DOWN}.comfy_quant"]

    def metadata(header):
        record = json.loads(header[key])
        record["layers"][DOWN] = facts if place == "header" else {"format": facts.get("format")}
        header[key] = json.dumps(record)

    edit(checkpoints, source, change, metadata)
    if fine:
        assert structure_faults(source) == []
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())
        return
    assert structure_faults(source) != []
    for command in ("dequantize", "convert"):
        layout = ("--layout", "modelopt") if command == "convert" else ("--device", "cpu")
        message = fail(command, source, "-o", tmp_path / "out", *layout)
        assert DOWN in message or "damaged" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", [b"", b"{", b"5", b"null", b"[1]", b"\xff\xfe", b"x" * 100_000])
def test_markers_that_are_no_json(checkpoints, good, tmp_path, data):
    source = tmp_path / "q"
    shutil.copytree(good / "comfy", source)
    marker = np.frombuffer(data, np.uint8)
    edit(checkpoints, source, lambda t: t.update({f"{DOWN}.comfy_quant": ("U8", marker)}))
    message = fail("dequantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert f"{DOWN}.comfy_quant" in message
    assert len(message) < 600
    assert structure_faults(source) != []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"rotation": True}, "rotation"),
        ({"weights": {"symmetric": False}}, "zero points"),
        ({"weights": {"actorder": "group"}}, "permutes columns"),
        ({"weights": {"rotate": {"size": 16}}}, "rotate"),
    ],
)
def test_config_keys_of_compressed_tensors(checkpoints, good, tmp_path, change, match):
    source = tmp_path / "q"
    shutil.copytree(good / "compressed-tensors", source)
    config = checkpoints.config_of(source)
    weights = change.pop("weights", {})
    config["quantization_config"] |= change
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= weights
    change["weights"] = weights
    checkpoints.write_json(source / "config.json", config)
    message = fail("dequantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert match in message
    assert any(match in fault for fault in structure_faults(source))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rotate": {"rotation_fp32": True}}, "rotate"),
        ({"lora_rank": 32}, "lora_rank"),
        ({"has_zero_point": True}, "zero points"),
        ({"quant_algo": "NVFP4_SVD"}, "NVFP4_SVD"),
        ({"svdquant": True}, "svdquant"),
    ],
)
@pytest.mark.parametrize("document", ["config", "hf_quant_config"])
def test_config_keys_of_modelopt(checkpoints, good, tmp_path, change, match, document):
    source = tmp_path / "q"
    shutil.copytree(good / "modelopt", source)
    path = source / f"{document}.json"
    content = json.loads(path.read_text())
    content["quantization_config" if document == "config" else "quantization"] |= change
    checkpoints.write_json(path, content)
    faults = structure_faults(source)
    assert any(match in fault for fault in faults)
    if document == "hf_quant_config" or "quant_algo" not in change:
        assert match in fail("dequantize", source, "-o", tmp_path / "out", "--device", "cpu")
