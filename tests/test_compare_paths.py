# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`compare` and `verify` of files, directories, and pairs of both."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fp4kit
from command_line import fail, invoke, succeed


def report(*args):
    return json.loads(succeed("compare", *args, "--json").stdout)


@pytest.fixture
def model(checkpoints, tmp_path):
    """A directory of two shards, and the same tensors in one file."""
    tensors, config = checkpoints.llama(2)
    tensors["model.steps"] = "I64", np.arange(6).reshape(2, 3)
    folder = checkpoints.save(tmp_path / "in", tensors, config, shards=2)
    file = checkpoints.write_file(tmp_path / "in.safetensors", tensors)
    return folder, file


@pytest.fixture
def fused(checkpoints, tmp_path):
    """The same with experts in 3-D tensors, whose orientation the model type tells."""
    tensors, config = checkpoints.fused_moe()
    folder = checkpoints.save(tmp_path / "in", tensors, config)
    file = checkpoints.write_file(tmp_path / "in.safetensors", tensors)
    return folder, file


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
@pytest.mark.parametrize("original", [0, 1])
def test_a_quantized_directory(checkpoints, model, tmp_path, layout, original):
    """Against the directory that it was made from, or a file of the same tensors."""
    out = tmp_path / "out"
    done = json.loads(succeed("quantize", model[0], "-o", out, "--layout", layout, "--json").stdout)
    result = report(model[original], out)
    assert result["total"]["stats"]["sqnr"] == pytest.approx(done["total"]["stats"]["sqnr"])
    assert result["total"]["tensors"] == done["total"]["tensors"]
    if layout != "comfy":  # whose markers are counted as the weights' own only when written
        assert result["total"]["bytes_after"] == done["total"]["bytes_after"]
    wanted = {row["name"]: row["stats"] for row in done["tensors"] if row["stats"]}
    for row in result["tensors"]:
        if row["name"] in wanted:
            assert row["stats"]["sqnr"] == pytest.approx(wanted[row["name"]]["sqnr"])
            assert row["format"] == "nvfp4"
        else:
            assert row["exact"] if row["stats"] else row["reason"] == "equal"
    assert {row["name"] for row in result["tensors"]} == {row["name"] for row in done["tensors"]}
    succeed("verify", out, "--against", model[original])


@pytest.mark.parametrize("original", [0, 1])
def test_a_quantized_file(checkpoints, model, tmp_path, original):
    """What `quantize FILE` wrote, beside a directory and beside its own source."""
    target = tmp_path / "q.safetensors"
    done = json.loads(succeed("quantize", model[1], "-o", target, "--json").stdout)
    result = report(model[original], target)
    assert result["total"]["stats"]["sqnr"] == pytest.approx(done["total"]["stats"]["sqnr"])
    x = checkpoints.array(checkpoints.read(model[0])["lm_head.weight"])
    row = next(row for row in result["tensors"] if row["name"] == "lm_head.weight")
    assert row["stats"]["sqnr"] == pytest.approx(fp4kit.error_stats(x, fp4kit.quantize(x)).sqnr)
    succeed("verify", target)
    succeed("verify", target, "--against", model[original])
    assert json.loads(succeed("verify", target, "--json").stdout)["faults"] == []


@pytest.mark.parametrize("what", ["directory", "file"])
@pytest.mark.parametrize("original", [0, 1])
def test_dequantized(model, tmp_path, what, original):
    source = model[0] if what == "directory" else model[1]
    suffix = "" if what == "directory" else ".safetensors"
    quantized, back = tmp_path / f"q{suffix}", tmp_path / f"back{suffix}"
    succeed("quantize", source, "-o", quantized)
    succeed("dequantize", quantized, "-o", back, "--dtype", "float32")
    one, other = report(model[original], quantized), report(model[original], back)
    assert other["total"]["stats"]["sqnr"] == pytest.approx(one["total"]["stats"]["sqnr"])
    assert other["total"]["tensors"] == one["total"]["tensors"]


@pytest.mark.parametrize("original", [0, 1])
@pytest.mark.parametrize("excluded", [False, True])
def test_fused_experts(fused, tmp_path, original, excluded):
    """Taken one by one where one of the two has them so, else as they are."""
    flags = ["--exclude", "*experts*"] if excluded else []
    succeed("quantize", fused[0], "-o", tmp_path / "q", *flags)
    result = report(fused[original], tmp_path / "q")
    names = {row["name"] for row in result["tensors"] if "experts" in row["name"]}
    single = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert (single in names) != excluded
    assert result["total"]["stats"]["sqnr"] > 15
    succeed("verify", tmp_path / "q", "--against", fused[original])
    target = tmp_path / "q.safetensors"
    succeed("quantize", fused[1], "-o", target)
    result = report(fused[original], target)
    assert "model.layers.0.mlp.experts.down_proj" in {row["name"] for row in result["tensors"]}
    succeed("verify", target, "--against", fused[original])


def test_the_original_comes_first(model, tmp_path):
    succeed("quantize", model[0], "-o", tmp_path / "q")
    succeed("quantize", model[1], "-o", tmp_path / "q.safetensors")
    for quantized in (tmp_path / "q", tmp_path / "q.safetensors"):
        for source in model:
            assert "swap them?" in fail("compare", quantized, source)


@pytest.mark.parametrize("against", [0, 1])
def test_verify_finds_what_is_wrong_with_a_file(checkpoints, model, tmp_path, against):
    target = tmp_path / "q.safetensors"
    succeed("quantize", model[1], "-o", target)
    stored, metadata = checkpoints.read_file(target)
    name = "model.layers.1.mlp.up_proj.weight"
    intact = {n: (t[0], checkpoints.array(t).copy()) for n, t in stored.items()}

    def verify(change, *flags):
        arrays = {n: (dtype, a.copy()) for n, (dtype, a) in intact.items()}
        change(arrays)
        checkpoints.write_file(target, arrays, metadata)
        result = invoke("verify", target, *flags)
        assert result.exit_code == 1
        assert "no fault" not in result.output
        return result.stdout

    def nan(arrays):
        arrays[f"{name}_scale"][1][0, 0] = 0x7F

    def other_codes(arrays):
        arrays[f"{name}_packed"][1][:] = arrays[f"{name}_packed"][1][::-1].copy()

    def kept(arrays):
        arrays["model.norm.weight"][1][3] += 1

    def steps(arrays):
        arrays["model.steps"][1][0, 0] = 7

    flags = ("--against", model[against])
    assert f"{name}_scale: 1 of " in verify(nan)
    assert f"{name}: its values are far from the source" in verify(other_codes, *flags)
    assert "model.norm.weight: is not quantized, but its values differ" in verify(kept, *flags)
    assert "model.steps: is not quantized, but 1 of 6 elements differ" in verify(steps, *flags)
    assert "is missing" in verify(lambda arrays: arrays.pop("model.norm.weight"), *flags)
    assert "its part" in verify(lambda arrays: arrays.pop(f"{name}_scale"))


def test_verify_of_what_is_not_quantized(model):
    for source in model:
        result = invoke("verify", source)
        assert result.exit_code == 1
        assert "holds no quantized" in result.stdout


def test_numpy_files(tmp_path):
    x = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x)
    for source in (tmp_path / "x.npy", tmp_path / "x.npz"):
        succeed("quantize", source, "-o", tmp_path / "q.safetensors", "--force")
        succeed("verify", tmp_path / "q.safetensors", "--against", source)
        result = report(source, tmp_path / "q.safetensors")
        assert result["total"]["stats"]["sqnr"] == pytest.approx(
            fp4kit.error_stats(x, fp4kit.quantize(x)).sqnr
        )


def test_equal_tensors_are_no_worst_ones(model, tmp_path):
    succeed("quantize", model[0], "-o", tmp_path / "q")
    text = succeed("compare", model[0], tmp_path / "q").stdout
    assert "exact" not in text
    row = next(line for line in text.splitlines() if line.endswith("  equal"))
    assert row.split()[-4:-3] == ["10"], row
    assert text.rstrip().splitlines()[-1].startswith("total (14)")
    same = succeed("compare", model[0], model[1]).stdout
    assert "All measured tensors are equal." in same
    assert same.rstrip().splitlines()[-1].startswith("total (0)")
    assert "exact" in same


def test_pipelines(checkpoints, tmp_path):
    """Part by part; what is not quantized is equal."""
    source, out = tmp_path / "pipe", tmp_path / "out"
    weights = {
        "transformer_blocks.0.attn.to_q.weight": checkpoints.normal((64, 64)),
        "transformer_blocks.0.norm.weight": checkpoints.normal((64,)),
    }
    config = {"_class_name": "FluxTransformer2DModel"}
    base = "diffusion_pytorch_model"
    checkpoints.save(source / "transformer", weights, config, base=base)
    checkpoints.save(source / "text_encoder", *checkpoints.llama(1))
    index = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder": ["transformers", "LlamaForCausalLM"],
    }
    checkpoints.write_json(source / "model_index.json", index)
    succeed("quantize", source, "-o", out, "--layout", "comfy")
    result = report(source, out)
    assert result["total"]["tensors"] == 1
    rows = {row["name"]: row for row in result["tensors"]}
    x = weights["transformer_blocks.0.attn.to_q.weight"][1]
    coded = rows["transformer/transformer_blocks.0.attn.to_q.weight"]
    assert coded["stats"]["sqnr"] == pytest.approx(fp4kit.error_stats(x, fp4kit.quantize(x)).sqnr)
    assert rows["text_encoder/lm_head.weight"]["exact"]
    listed = json.loads(succeed("inspect", out, "--json").stdout)
    assert set(rows) <= {row["name"] for row in listed["tensors"]}
    assert list(listed["options"]["components"]) == ["text_encoder", "transformer"]
    succeed("verify", out, "--against", source)
