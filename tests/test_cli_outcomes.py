# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what exit code 0 means, and what is said where nothing or little was done."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import fp4kit
from command_line import WEIGHTS, fail, invoke, load, succeed
from fp4kit.io.report import grouped
from fp4kit.io.tensor_names import Patterns


def save(path, **arrays):
    safetensors.numpy.save_file(arrays, path)
    return path


def plan(*args):
    return json.loads(succeed("quantize", *args, "--dry-run", "--json").stdout)


@pytest.fixture
def llama(checkpoints, tmp_path):
    return checkpoints.save(tmp_path / "in", *checkpoints.llama(2))


# ------------------------------------------------------------------------------------------------
# Nothing quantized
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dry", [(), ("--dry-run",), ("--json",)])
@pytest.mark.parametrize(
    ("arrays", "flags", "reasons"),
    [
        ({"a": np.ones((4, 32))}, (), ["float64 is not quantized (1 tensor)", "--cast float32"]),
        ({"a": np.ones((4, 100), np.float32)}, (), ["last axis is not a multiple", "--pad"]),
        ({"a": np.ones(32, np.float32), "b": np.ones(64, np.float32)}, (), ["1-D (2 tensors)"]),
        ({"a": np.ones((4, 32), np.int8)}, (), ["int8 is not quantized (1 tensor)"]),
        ({"a": np.ones((4, 32), np.float32)}, ("--exclude", "*"), ["excluded by * (1 tensor)"]),
    ],
)
def test_nothing_to_quantize_is_a_failure(tmp_path, arrays, flags, reasons, dry):
    for source in (save(tmp_path / "x.safetensors", **arrays), tmp_path / "x.npz"):
        np.savez(tmp_path / "x.npz", **arrays)
        before = sorted(tmp_path.iterdir())
        said = fail("quantize", source, *flags, *dry)
        assert "no tensor is quantized" in said
        assert all(reason in said for reason in (*reasons, "--allow-nothing"))
        assert sorted(tmp_path.iterdir()) == before
    result = succeed("quantize", source, *flags, *dry, "--allow-nothing")
    assert "no tensor is quantized" in result.output
    assert (tmp_path / "x-nvfp4.safetensors").exists() == ("--dry-run" not in dry)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_nothing_to_quantize_in_a_directory(checkpoints, llama, tmp_path, layout, dry):
    out = tmp_path / "out"
    flags = ("-o", out, "--layout", layout, "--exclude", "*weight*")
    said = fail("quantize", llama, *flags, *dry)
    assert "excluded by *weight* (" in said
    assert not out.exists()
    succeed("quantize", llama, *flags, *dry, "--allow-nothing")
    if not dry:
        assert checkpoints.read(out) == checkpoints.read(llama)
        # No reader is told of a quantization that is not there.
        assert checkpoints.config_of(out) == checkpoints.config_of(llama)
        assert not (out / "hf_quant_config.json").exists()
        succeed("quantize", llama, "-o", out, "--layout", layout, "--force")
        assert ("quantization_config" in checkpoints.config_of(out)) == (layout != "comfy")


def test_reasons_are_grouped_and_counted():
    many = ["1-D", *(f"last axis {n} is not a multiple of 16" for n in (3, 5)), "1-D"]
    assert grouped(many) == "1-D (2 tensors), last axis is not a multiple of 16 (2 tensors)"
    assert grouped(f"r{n}" for n in range(20)).endswith("12 for other reasons")


# ------------------------------------------------------------------------------------------------
# Patterns
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--include", "--exclude"])
@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("q_proj", "'*q_proj*'"),
        ("Q_PROJ", "'*q_proj*'"),
        ("re:q_proj", "'*q_proj*'"),
        ("*q_porj*", "'*q_proj*'"),
        ("zzz", "must match the whole name"),
    ],
)
def test_a_pattern_that_matches_nothing(model_file, llama, tmp_path, option, pattern, meant):
    for source in (model_file, llama):
        said = fail("quantize", source, "-o", tmp_path / "q.safetensors", option, pattern)
        assert f"no tensor matches {option[2:]}='{pattern}'" in said
        assert meant in said
    assert not (tmp_path / "q.safetensors").exists()


def test_what_is_meant_matches():
    names = ["model.layers.0.self_attn.q_proj.weight"]
    for pattern in ("q_proj", "self_atn", "*.Q_Proj"):
        with pytest.raises(fp4kit.OptionError) as caught:
            Patterns([pattern], "include").check_used(names)
        meant = str(caught.value).rpartition("did you mean '")[2].partition("'")[0]
        assert Patterns([meant], "include").match(names[0]), meant


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("*embed_tokens*", "embedding"), ("*norm*", "1-D"), ("*q_proj.bias", "1-D")],
)
def test_include_of_what_is_never_quantized(llama, tmp_path, pattern, reason):
    said = succeed("quantize", llama, "-o", tmp_path / "out", "--include", pattern).stderr
    assert f"--include '{pattern}' has no effect" in said
    assert "never quantized" in said
    assert reason in said
    said = succeed("quantize", llama, "-o", tmp_path / "head", "--include", "lm_head").stderr
    assert "no effect" not in said


def test_include_of_what_a_file_never_quantizes(model_file):
    said = fail("quantize", model_file, "--include", "*norm*")
    assert "--include '*norm*' has no effect" in said
    said = succeed(
        "quantize", model_file, "--include", "*norm*", "--include", "*q_proj*", "--dry-run"
    ).stderr
    assert "--include '*norm*' has no effect" in said


# ------------------------------------------------------------------------------------------------
# --cast and --pad
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_cast_equals_casting_first(tmp_path, suffix):
    """Byte for byte, and compare takes the float64 file as its original."""
    x = np.random.default_rng(1).standard_normal((48, 64))
    files = {}
    for name, array in (("wide", x), ("narrow", x.astype(np.float32))):
        files[name] = tmp_path / name / f"x{suffix}"
        files[name].parent.mkdir()
        if suffix == ".npy":
            np.save(files[name], array)
        elif suffix == ".npz":
            np.savez(files[name], x=array, bias=array[0])
        else:
            save(files[name], x=array, bias=array[0].copy())
        flags = ["--cast", "float32"] if name == "wide" else []
        succeed("quantize", files[name], "-o", tmp_path / f"{name}.safetensors", *flags)
    assert load(tmp_path / "wide.safetensors") == load(tmp_path / "narrow.safetensors")
    report = json.loads(
        succeed("compare", files["wide"], tmp_path / "wide.safetensors", "--json").stdout
    )
    expected = fp4kit.error_stats(x.astype(np.float32), fp4kit.quantize(x.astype(np.float32)))
    assert report["total"]["stats"]["sqnr"] == pytest.approx(expected.sqnr, rel=1e-12)
    succeed("verify", tmp_path / "wide.safetensors", "--against", files["wide"])


def test_cast_of_a_checkpoint(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1, dtype="F32")
    wide = {name: ("F64", a.astype(np.float64)) for name, (_, a) in tensors.items()}
    source = checkpoints.save(tmp_path / "wide", wide, config | {"dtype": "float64"})
    narrow = checkpoints.save(tmp_path / "narrow", tensors, config)
    assert "--cast float32" in fail("quantize", source, "-o", tmp_path / "a")
    succeed("quantize", source, "-o", tmp_path / "a", "--cast", "float32")
    succeed("quantize", narrow, "-o", tmp_path / "b")
    assert checkpoints.read(tmp_path / "a") == checkpoints.read(tmp_path / "b")
    assert checkpoints.config_of(tmp_path / "a")["dtype"] == "float32"
    succeed("verify", tmp_path / "a", "--against", source)


def test_cast_loses_nothing_in_silence(tmp_path):
    for shape in ((2, 32), (32,)):
        x = np.ones(shape)
        x.reshape(-1)[5] = 1e39
        source = save(tmp_path / "x.safetensors", x=x, y=np.ones((2, 32), np.float32))
        said = fail("quantize", source, "--cast", "float32", "-o", tmp_path / "q.safetensors")
        assert "'x'" in said
        assert "1e+39" in said
        assert not (tmp_path / "q.safetensors").exists()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("shape", [(3, 100), (2, 5, 20), (1, 1)])
def test_pad(tmp_path, format, layout, shape):
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    source = save(tmp_path / "x.safetensors", x=x)
    target, back = tmp_path / "q.safetensors", tmp_path / "back.npy"
    flags = ("--format", format, "--scale-layout", layout)
    fail("quantize", source, "-o", target, *flags)
    result = succeed("quantize", source, "-o", target, *flags, "--pad", "--json")
    q = fp4kit.quantize(x, format, pad=True, scale_layout=layout)
    assert load(target)[0]["x" if format.startswith("mxfp8") else "x_packed"][2] == (
        q.packed.tobytes()
    )
    succeed("dequantize", target, "-o", back)
    np.testing.assert_array_equal(np.load(back), fp4kit.dequantize(q))
    compared = json.loads(succeed("compare", source, target, "--json").stdout)
    assert compared["total"]["stats"]["sqnr"] == pytest.approx(
        json.loads(result.stdout)["total"]["stats"]["sqnr"]
    )
    listed = json.loads(succeed("inspect", target, "--json").stdout)["tensors"]
    assert [row["shape"] for row in listed] == [list(shape)]
    succeed("verify", target, "--against", source)


def test_pad_is_not_for_engines(llama):
    assert "--pad is for plain files" in fail("quantize", llama, "--pad", code=2)


# ------------------------------------------------------------------------------------------------
# Totals, overflow, and what JSON says
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_total_for_one_pair(tmp_path, dtype):
    """Kept and equal tensors do not count, whichever command measures; nor do exact ones."""
    rng = np.random.default_rng(3)
    kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    source = save(
        tmp_path / "x.safetensors",
        a=rng.standard_normal((32, 64)).astype(kind),
        b=rng.standard_normal((32, 64)).astype(kind),
        kept=(100 * rng.standard_normal((32, 63))).astype(kind),
        norm=(100 * np.ones(64)).astype(kind),
        ones=np.ones((16, 32), kind),
    )
    target, back = tmp_path / "q.safetensors", tmp_path / "back.safetensors"
    quantized = json.loads(succeed("quantize", source, "-o", target, "--json").stdout)
    succeed("dequantize", target, "-o", back)
    totals = [quantized["total"]] + [
        json.loads(succeed("compare", source, other, "--json").stdout)["total"]
        for other in (target, back)
    ]
    values = [total["stats"]["sqnr"] for total in totals]
    assert values == pytest.approx([values[0]] * 3, rel=1e-9)
    assert [total["tensors"] for total in totals] == [3, 3, 2]
    rows = {row["name"]: row for row in quantized["tensors"] if row["stats"]}
    assert rows["ones"]["exact"]
    assert not rows["a"]["exact"]
    assert rows["a"]["at_max_code"] == rows["a"]["stats"]["saturated"]


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_overflow_is_reported_by_name(tmp_path, json_flag):
    """Recipe te decodes finite values of 1e37 and more to infinity."""
    huge = np.full((2, 16), 1e38, np.float32)
    source = save(tmp_path / "x.safetensors", fine=np.ones((2, 16), np.float32), huge=huge)
    result = succeed("quantize", source, "-o", tmp_path / "q.safetensors", *json_flag)
    decoded = fp4kit.dequantize(fp4kit.quantize(huge))
    assert not np.isfinite(decoded).all()
    assert "Warning: finite values of 1 tensor decode to infinity" in result.stderr
    assert "huge" in result.stderr
    assert "recipe te" in result.stderr
    if json_flag:
        assert "NaN" not in result.stdout.replace("infinity or NaN", "")
        report = json.loads(result.stdout)
        flags = {row["name"]: row["overflow"] for row in report["tensors"]}
        assert flags == {"fine": False, "huge": True}
    else:
        assert "overflow" in result.stdout
        assert "inf" not in result.stdout


def test_compare_tells_nan_from_no_error(tmp_path):
    x = np.ones((2, 16), np.float32)
    damaged = x.copy()
    damaged[0, 3] = np.nan
    a = save(tmp_path / "a.safetensors", x=x, mask=np.full(4, -np.inf, np.float32))
    b = save(tmp_path / "b.safetensors", x=damaged, mask=np.full(4, -np.inf, np.float32))
    same = json.loads(succeed("compare", a, a, "--json").stdout)["tensors"]
    assert all(row["exact"] and not row["overflow"] for row in same)
    result = succeed("compare", a, b, "--json")
    rows = {row["name"]: row for row in json.loads(result.stdout)["tensors"]}
    x = rows["x"]
    assert (x["exact"], x["overflow"], x["stats"]["sqnr"]) == (False, True, None)
    assert rows["mask"]["exact"]
    assert "no SQNR exists: x" in result.stderr
    assert invoke("compare", a, b, "--min-sqnr", 1).exit_code == 1


def test_kept_tensors_that_an_option_would_take(model_file, tmp_path):
    said = succeed("quantize", model_file, "-o", tmp_path / "q.safetensors").stderr
    assert "--pad" in said
    assert len(plan(model_file, "--pad")["warnings"]) == 0
    names = {row["name"] for row in plan(model_file, "--pad")["tensors"] if row["format"]}
    assert names == {*WEIGHTS, "layers.0.odd.weight"}
