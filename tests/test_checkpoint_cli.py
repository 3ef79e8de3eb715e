# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line on model directories: the same bytes as the API, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from command_line import invoke, succeed
from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import (
    CheckpointOptions,
    ConvertOptions,
    DequantizeOptions,
    parse_size,
)
from fp4kit.errors import OptionError


def fail(*args, code=1):
    """G3: no success line, no traceback, one line that says why."""
    result = invoke(*args)
    assert result.exit_code == code, result.output
    assert "Wrote" not in result.output
    assert "Traceback" not in result.output
    if code == 1:
        assert result.stderr.count("Error: ") == 1
    return result.stderr


@pytest.fixture
def source(checkpoints, tmp_path):
    tensors, config = checkpoints.moe(2)
    others = list(checkpoints.OTHER_FILES)
    return checkpoints.save(tmp_path / "in", tensors, config, shards=2, others=others)


# ------------------------------------------------------------------------------------------------
# The same as the API
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (["--weights-only"], {}),
        (["--format", "mxfp4"], {"format": "mxfp4"}),
        (
            ["--format", "mxfp4", "--scale-rule", "rceil"],
            {"format": "mxfp4", "scale_rule": "rceil"},
        ),
        (
            ["--layout", "modelopt", "--recipe", "modelopt"],
            {"layout": "modelopt", "recipe": "modelopt"},
        ),
        (["--layout", "comfy"], {"layout": "comfy"}),
        (["--activations", "uncalibrated"], {"activations": "uncalibrated"}),
        (
            ["--include", "lm_head", "--exclude", "*up_proj*", "--exclude", "re:.*o_proj"],
            {"include": ("lm_head",), "exclude": ("*up_proj*", "re:.*o_proj")},
        ),
        (["--max-shard-size", "1MB", "--threads", "1"], {"max_shard_size": 10**6}),
    ],
)
def test_quantize(checkpoints, source, tmp_path, monkeypatch, flags, options):
    monkeypatch.delenv("FP4KIT_NUM_THREADS", raising=False)
    report_file = tmp_path / "report.json"
    result = succeed("quantize", source, "-o", tmp_path / "cli", *flags, "--report", report_file)
    report = quantize_checkpoint(source, tmp_path / "api", CheckpointOptions(**options))
    assert checkpoints.digest(tmp_path / "cli") == checkpoints.digest(tmp_path / "api")
    said = result.output.replace("\n", "")
    assert f"Wrote {tmp_path / 'cli'}: " in said
    for warning in report.warnings:
        assert warning in said
    content = json.loads(report_file.read_text())
    assert [t["name"] for t in content["tensors"]] == [t.name for t in report.tensors]
    assert content["groups"] == report.groups
    assert content["ignore"] == report.ignore
    assert content["versions"] == report.versions
    assert all(t["stats"] for t in content["tensors"] if t["action"] == "quantize")
    assert content["total"]["bytes_after"] + content["kept"]["bytes"] == sum(report.shards.values())
    assert "no fault found" in succeed("verify", tmp_path / "cli", "--against", source).output


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_dequantize(checkpoints, source, tmp_path, dtype):
    """What models are stored in is the default here."""
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions())
    flags = [] if dtype is None else ["--dtype", dtype]
    succeed("dequantize", tmp_path / "q", "-o", tmp_path / "cli", *flags)
    options = DequantizeOptions(dtype or "bfloat16")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "api", options)
    assert checkpoints.digest(tmp_path / "cli") == checkpoints.digest(tmp_path / "api")
    assert checkpoints.config_of(tmp_path / "cli")["dtype"] == (dtype or "bfloat16")
    kinds = {t[0] for n, t in checkpoints.read(tmp_path / "cli").items() if "up_proj" in n}
    assert kinds == {{"float32": "F32", "float16": "F16"}.get(dtype, "BF16")}


@pytest.mark.parametrize("layout", ["modelopt", "comfy"])
def test_convert(checkpoints, source, tmp_path, layout):
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions())
    planned = succeed(
        "convert", tmp_path / "q", "-o", tmp_path / "cli", "--layout", layout, "--dry-run"
    )
    assert "nothing was written" in planned.output
    assert not (tmp_path / "cli").exists()
    succeed("convert", tmp_path / "q", "-o", tmp_path / "cli", "--layout", layout)
    convert_checkpoint(tmp_path / "q", tmp_path / "api", ConvertOptions(layout))
    assert checkpoints.digest(tmp_path / "cli") == checkpoints.digest(tmp_path / "api")


def test_default_targets(checkpoints, source, tmp_path):
    succeed("quantize", source)
    assert (tmp_path / "in-nvfp4" / "config.json").is_file()
    succeed("quantize", f"{source}/", "--format", "mxfp4")
    assert (tmp_path / "in-mxfp4" / "config.json").is_file()
    single = checkpoints.write_file(tmp_path / "flux.safetensors", checkpoints.diffusion())
    succeed("quantize", single, "--layout", "comfy")
    assert (tmp_path / "flux-nvfp4.safetensors").is_file()
    succeed("verify", tmp_path / "flux-nvfp4.safetensors", "--against", single)
    succeed("dequantize", tmp_path / "flux-nvfp4.safetensors", "-o", tmp_path / "back.safetensors")
    stored, _ = checkpoints.read_file(tmp_path / "back.safetensors")
    assert {dtype for dtype, *_ in stored.values()} == {"BF16"}


def test_without_a_layout_a_file_stays_a_plain_file(checkpoints, tmp_path):
    """A single file is fp4kit's own unless it is asked to be ComfyUI's."""
    single = checkpoints.write_file(tmp_path / "m.safetensors", checkpoints.diffusion())
    succeed("quantize", single, "-o", tmp_path / "q.safetensors")
    assert "fp4kit" in checkpoints.read_file(tmp_path / "q.safetensors")[1]


# ------------------------------------------------------------------------------------------------
# The plan
# ------------------------------------------------------------------------------------------------


def test_dry_run(checkpoints, source, tmp_path):
    """Every tensor, what happens, why, bytes; the total; the disk that is needed."""
    flags = ["quantize", source, "-o", tmp_path / "out", "--layout", "modelopt"]
    result = succeed(*flags, "--dry-run")
    assert "Dry run: nothing was written" in result.output
    assert not (tmp_path / "out").exists()
    plan = json.loads(succeed(*flags, "--dry-run", "--json").stdout)
    done = json.loads(succeed(*flags, "--json").stdout)
    assert not (plan.keys() ^ done.keys()) - {"dry_run"}
    for before, after in zip(plan["tensors"], done["tensors"], strict=True):
        for key in ("name", "shape", "dtype", "action", "reason", "format", "bytes_before"):
            assert before[key] == after[key]
        assert before["bytes_after"] == after["bytes_after"]
        assert before["reason"] or before["action"] == "quantize"
    for key in ("shards", "groups", "ignore", "dropped", "copied", "left_out", "disk_needed"):
        assert plan[key] == done[key]
    assert plan["kept"] == done["kept"]
    names = [tensor["name"] for tensor in plan["tensors"]]
    assert all(name.rpartition(".")[0][-30:] in result.output for name in names[:3])


def test_what_was_left_out_is_said(checkpoints, source, tmp_path):
    (source / "pytorch_model.bin").write_bytes(b"x")
    tensors, config, _ = checkpoints.fp8_llama()
    tensors["model.layers.0.mlp.up_proj.input_scale"] = checkpoints.normal((), "F32")
    fp8 = checkpoints.save(tmp_path / "fp8", tensors, config)
    said = succeed("quantize", source, "-o", tmp_path / "a").output
    assert "Not copied: pytorch_model.bin" in said
    said = succeed("quantize", fp8, "-o", tmp_path / "b").output
    assert "Dropped: 'model.layers.0.mlp.up_proj.input_scale'" in said


def test_inspect(source, tmp_path):
    succeed("quantize", source, "-o", tmp_path / "q")
    said = succeed("inspect", tmp_path / "q").output
    assert "nvfp4" in said
    content = json.loads(succeed("inspect", tmp_path / "q", "--json").stdout)
    shapes = {tensor["name"]: tensor["shape"] for tensor in content["tensors"]}
    assert shapes["model.layers.0.mlp.experts.0.up_proj.weight"] == [32, 64]


@pytest.mark.parametrize(
    ("layout", "granularity", "scales"),
    [("compressed-tensors", "channel", 32), ("deepseek", "block", 1), ("modelopt", "tensor", 1)],
)
def test_inspect_lists_fp8_weights_as_such(source, tmp_path, layout, granularity, scales):
    more = ["--activations", "uncalibrated"] if layout == "modelopt" else []
    succeed("quantize", source, "-o", tmp_path / "q", "--format", "fp8", "--layout", layout, *more)
    content = json.loads(succeed("inspect", tmp_path / "q", "--json").stdout)
    listed = {tensor["name"]: tensor for tensor in content["tensors"]}
    assert not any("weight_scale" in name for name in listed)
    weight = listed["model.layers.0.mlp.experts.0.up_proj.weight"]
    assert (weight["action"], weight["format"], weight["shape"]) == ("quantized", "fp8", [32, 64])
    assert weight["facts"]["granularity"] == granularity
    assert weight["bytes_before"] == 32 * 64 + 4 * scales
    assert {tensor["action"] for tensor in content["tensors"]} == {"quantized", "keep"}
    assert f"scale per {granularity}" in succeed("inspect", tmp_path / "q").output


def test_inspect_lists_what_nothing_reads_as_it_is_stored(checkpoints, tmp_path):
    tensors = {
        "a.weight": ("F8_E4M3", np.zeros((32, 64), np.uint8)),
        "a.weight_scale": ("F32", np.ones((32, 7), np.float32)),
        "b.weight": ("F8_E4M3", np.zeros((32, 64), np.uint8)),
    }
    folder = checkpoints.save(tmp_path / "odd", tensors, {})
    content = json.loads(succeed("inspect", folder, "--json").stdout)
    assert {tensor["name"] for tensor in content["tensors"]} == tensors.keys()
    assert {tensor["action"] for tensor in content["tensors"]} == {"keep"}


# ------------------------------------------------------------------------------------------------
# Failures
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "code", "match"),
    [
        (["--weights-only", "--activations", "uncalibrated"], 2, "exclude each other"),
        (["--scale-layout", "swizzled_128x4"], 2, "--scale-layout is for plain files"),
        (["--nibble-order", "high_first"], 2, "--nibble-order is for plain files"),
        (["--scale-search", "sweep", "--recipe", "comfy"], 2, "not recipe comfy"),
        (["--e4m3-max", "256"], 2, "--e4m3-max belongs to --scale-search"),
        (["--layout", "gguf"], 2, "gguf"),
        (["--layout", "modelopt", "--format", "mxfp4"], 1, "layout modelopt holds nvfp4"),
        (["--format", "mxfp8"], 1, "not mxfp8"),
        (["--format", "mxfp4", "--recipe", "te"], 2, "--recipe is not for mxfp4"),
        (["--max-shard-size", "5XB"], 1, "is no size"),
        (["--max-shard-size", "10KB"], 1, "too small"),
        (["--include", "*typo*"], 1, "no tensor matches include='*typo*'"),
        (["--exclude", "re:("], 1, "bad regular expression"),
        (["--activations", "none.json"], 1, "none.json"),
        (["--resume"], 1, "no unfinished conversion"),
    ],
)
def test_wrong_usage(source, tmp_path, flags, code, match):
    assert match in fail("quantize", source, "-o", tmp_path / "out", *flags, code=code)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--weights-only", "--resume", "--max-shard-size=1GB"])
def test_options_that_a_plain_file_has_not(checkpoints, tmp_path, flag):
    single = checkpoints.write_file(tmp_path / "m.safetensors", checkpoints.diffusion())
    assert "is for model directories" in fail("quantize", single, flag, code=2)


def test_failures_have_no_success_line(checkpoints, source, tmp_path):
    """G3, G6: exit 1, the reason in one line, nothing that looks finished."""
    tensors, config = checkpoints.moe(2)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"][1][0, 3] = np.inf
    bad = checkpoints.save(tmp_path / "bad", tensors, config)
    said = fail("quantize", bad, "-o", tmp_path / "out")
    assert "experts.1.up_proj.weight' holds 0 NaN and 1 infinite values" in said
    verified = invoke("verify", tmp_path / "out")
    assert verified.exit_code == 1
    assert "unfinished" in verified.stdout
    assert "unfinished" in fail("dequantize", tmp_path / "out", "-o", tmp_path / "d")
    (source / "model-00002-of-00002.safetensors").unlink()
    said = fail("quantize", source, "-o", tmp_path / "other")
    assert "1 of 2 shards" in said
    assert "must lie outside" in fail("quantize", bad, "-o", bad)
    assert "must lie outside" in fail("quantize", bad, "-o", bad / "q")


def test_experts_whose_orientation_is_overridden(checkpoints, tmp_path):
    """`verify` takes the word that `quantize` took."""
    tensors, config = checkpoints.fused_moe("llama4_text", intermediate=48)  # but stored [out, in]
    source = checkpoints.save(tmp_path / "in", tensors, config)
    assert "--experts-layout out_in" in fail("quantize", source, "-o", tmp_path / "q")
    succeed("quantize", source, "-o", tmp_path / "q", "--experts-layout", "out_in")
    against = ["verify", tmp_path / "q", "--against", source]
    assert "--experts-layout" in invoke(*against).stdout
    succeed(*against, "--experts-layout", "out_in")


def test_verify_lists_every_fault(checkpoints, source, tmp_path):
    succeed("quantize", source, "-o", tmp_path / "q")
    (path,) = (tmp_path / "q").glob("*.safetensors")
    stored, metadata = checkpoints.read_file(path)
    arrays = {n: (t[0], checkpoints.array(t).copy()) for n, t in stored.items()}
    for expert in range(2):
        arrays[f"model.layers.0.mlp.experts.{expert}.up_proj.weight_scale"][1][0, 0] = 0x7F
    checkpoints.write_file(path, arrays, metadata)
    result = invoke("verify", tmp_path / "q")
    assert result.exit_code == 1
    assert "2 faults found" in result.stderr
    assert result.stdout.count("block scales are NaN") == 2
    result = invoke("verify", tmp_path / "q", "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["faults"]) == 2


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("1MB", 10**6),
        ("1.5 GB", 1_500_000_000),
        ("512MiB", 1 << 29),
        ("2000000", 2_000_000),
        ("1tb", 10**12),
        ("3gib", 3 << 30),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "1 G B", "1e9", "5 apples", "0", "999999", "1KB"]
)
def test_wrong_sizes(text):
    with pytest.raises(OptionError, match="max_shard_size"):
        parse_size(text)


def test_a_console_of_ascii(checkpoints, tmp_path):
    """G2: no glyph crashes the command after the work (click writes UTF-8 to such a console)."""
    tensors, config = checkpoints.llama(1)
    tensors = {name.replace("model.", "mödel."): tensor for name, tensor in tensors.items()}
    source = checkpoints.save(tmp_path / "ïn", tensors, config)
    done = subprocess.run(
        [sys.executable, "-m", "fp4kit", "quantize", str(source), "-o", str(tmp_path / "öut")],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "60"},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Wrote " in done.stdout + done.stderr
    checkpoints.read(tmp_path / "öut")
