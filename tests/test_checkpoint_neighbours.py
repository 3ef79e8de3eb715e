# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What stands beside quantized weights and is not understood is refused by name."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from awq_checkpoints import DOWN, LAYOUTS, OUT, edit
from command_line import fail, succeed
from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import FileFormatError

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
        ({"transform_config": {"config_groups": {"R1": {"type": "rht"}}}}, "transform_config"),
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
