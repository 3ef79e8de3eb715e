# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what it writes, and what it says."""

import importlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import fp4kit
from command_line import WEIGHTS, fail, invoke, load, run, succeed, table_row
from fp4kit.cli.main import COMMANDS

# ------------------------------------------------------------------------------------------------
# What is written
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (["--recipe", "torchao", "--scale-layout", "swizzled_128x4"], None),
        (["--recipe", "modelopt", "--nibble-order", "high_first"], None),
        (
            ["--format", "MXFP4", "--scale-rule", "floor"],
            {"format": "mxfp4", "scale_rule": "floor"},
        ),
        (["--format", "mxfp8"], {"format": "mxfp8"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_trip_equals_the_library(model_file, model_tensors, tmp_path, flags, options, dtype):
    if options is None:
        options = {
            name[2:].replace("-", "_"): value
            for name, value in zip(flags[::2], flags[1::2], strict=True)
        }
    packed, back = tmp_path / "q.safetensors", tmp_path / "back.safetensors"
    succeed("quantize", model_file, "-o", packed, *flags)
    succeed("dequantize", packed, "-o", back, "--dtype", dtype)
    written, _ = load(back)
    kept, _ = load(model_file)
    assert set(written) == set(model_tensors)
    for name in model_tensors:
        if name in WEIGHTS:
            x = fp4kit.dequantize(fp4kit.quantize(model_tensors[name], **options), dtype)
            assert written[name][1:] == (x.shape, x.tobytes()), name
        else:
            assert written[name] == kept[name], name


def test_quantized_file_holds_codes_and_scales(model_file, quantized_file, model_tensors):
    written, metadata = load(quantized_file)
    q = fp4kit.quantize(model_tensors[WEIGHTS[0]])
    assert written[f"{WEIGHTS[0]}_packed"] == ("U8", (48, 32), q.packed.tobytes())
    assert written[f"{WEIGHTS[0]}_scale"][1:] == ((48, 4), q.block_scale.tobytes())
    assert metadata["format"] == "pt"
    with safetensors.safe_open(quantized_file, "np") as file:
        assert f"{WEIGHTS[1]}_packed" in file.keys()  # noqa: SIM118 not a dict


def test_include_and_exclude(model_file, tmp_path):
    path = tmp_path / "q.safetensors"
    result = succeed(
        "quantize", model_file, "-o", path, "--include", "*q_proj*", "--include", "re:.*up",
        "--exclude", "*up_proj*", "--json",
    )  # fmt: skip
    actions = {row["name"]: row["action"] for row in json.loads(result.stdout)["tensors"]}
    assert [name for name, action in actions.items() if action == "quantize"] == [WEIGHTS[0]]
    written, _ = load(path)
    assert written[WEIGHTS[1]] == load(model_file)[0][WEIGHTS[1]]


def test_npy_and_npz(tmp_path, model_tensors):
    x = model_tensors[WEIGHTS[0]].astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "y.npz", a=x, b=np.arange(3))
    for source in ("x.npy", "y.npz"):
        packed, back = tmp_path / f"{source}.safetensors", tmp_path / f"back-{source}"
        succeed("quantize", tmp_path / source, "-o", packed)
        succeed("dequantize", packed, "-o", back)
    expected = fp4kit.dequantize(fp4kit.quantize(x))
    np.testing.assert_array_equal(np.load(tmp_path / "back-x.npy"), expected)
    with np.load(tmp_path / "back-y.npz") as file:
        np.testing.assert_array_equal(file["a"], expected)
        np.testing.assert_array_equal(file["b"], np.arange(3))


def test_void_data_is_read_only_when_said_what_it_is(tmp_path, model_tensors):
    np.save(tmp_path / "x.npy", model_tensors[WEIGHTS[0]])
    target = tmp_path / "q.safetensors"
    message = fail("quantize", tmp_path / "x.npy", "-o", target)
    assert "bfloat16" in message
    assert not target.exists()
    succeed("quantize", tmp_path / "x.npy", "-o", target, "--void-dtype", "bfloat16")
    q = fp4kit.quantize(model_tensors[WEIGHTS[0]])
    assert q.packed.tobytes() in [data for _, _, data in load(target)[0].values()]


def test_default_output_lies_beside_the_input(model_file):
    result = succeed("quantize", model_file, "--format", "mxfp8")
    path = model_file.with_name("model-mxfp8.safetensors")
    assert path.exists()
    assert result.stderr.splitlines()[-1].startswith(f"Wrote {path}")


def test_bare_names_in_the_current_directory(model_file):
    result = run("quantize", model_file.name, "-o", "bare.safetensors", cwd=model_file.parent)
    assert result.returncode == 0, result.stderr
    assert load(model_file.with_name("bare.safetensors"))[0]


def test_dry_run_writes_nothing(model_file, quantized_file):
    before = sorted(model_file.parent.iterdir())
    result = succeed("quantize", model_file, "--dry-run")
    assert sorted(model_file.parent.iterdir()) == before
    assert WEIGHTS[0] in result.stdout
    assert "Wrote" not in result.output
    plan = json.loads(succeed("quantize", model_file, "--dry-run", "--json").stdout)
    done = json.loads(
        succeed("quantize", model_file, "-o", quantized_file, "--force", "--json").stdout
    )
    assert plan["dry_run"]
    for key in ("name", "action", "bytes_before", "bytes_after", "format", "shape"):
        assert [row[key] for row in plan["tensors"]] == [row[key] for row in done["tensors"]]


def test_existing_output_needs_force(model_file, quantized_file, tmp_path):
    before = quantized_file.read_bytes()
    back = tmp_path / "back.safetensors"
    back.write_bytes(b"mine")
    demo = tmp_path / "demo.safetensors"
    demo.write_bytes(b"mine")
    for args in (
        ("quantize", model_file, "-o", quantized_file, "--format", "mxfp8"),
        ("dequantize", quantized_file, "-o", back),
        ("demo", "-o", demo),
    ):
        assert "--force" in fail(*args)
    assert (quantized_file.read_bytes(), back.read_bytes(), demo.read_bytes()) == (
        before,
        b"mine",
        b"mine",
    )
    succeed("quantize", model_file, "-o", quantized_file, "--format", "mxfp8", "--force")
    assert quantized_file.read_bytes() != before


def test_output_may_not_be_the_input(model_file):
    before = model_file.read_bytes()
    fail("quantize", model_file, "-o", model_file, "--force")
    assert model_file.read_bytes() == before


def test_demo_is_something_to_work_on(tmp_path):
    demo = tmp_path / "demo.safetensors"
    result = succeed("demo", "-o", demo)
    assert str(demo) in result.stderr
    plan = json.loads(succeed("quantize", demo, "--dry-run", "--json").stdout)
    assert plan["total"]["tensors"] > 0
    assert plan["kept"]["tensors"] > 0


# ------------------------------------------------------------------------------------------------
# What is said
# ------------------------------------------------------------------------------------------------


def test_json_holds_the_numbers_of_the_table(model_file, tmp_path):
    table = succeed(
        "quantize", model_file, "-o", tmp_path / "a.safetensors", "--device", "cpu"
    ).stdout
    result = succeed(
        "quantize", model_file, "-o", tmp_path / "b.safetensors", "--device", "cpu", "--json"
    )
    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert report["target"] == str(tmp_path / "b.safetensors")
    rows = [row for row in report["tensors"] if row["action"] == "quantize"]
    assert [row["name"] for row in rows] == list(WEIGHTS)
    for row in [*rows, {"name": "total (2)", **report["total"]}]:
        cells, stats = table_row(table, row["name"]), row["stats"]
        if "shape" in row:
            assert cells[1:4] == ["x".join(map(str, row["shape"])), row["dtype"], row["format"]]
        for cell, value in zip(
            cells[-7:-5], (row["bytes_before"], row["bytes_after"]), strict=True
        ):
            number, unit = cell.split()
            scale = {"B": 1, "KiB": 1024}[unit]
            assert float(number) == pytest.approx(value / scale, abs=0.051)
        values = [
            stats["sqnr"],
            stats["relative_rms"],
            stats["max_abs_error"],
            100 * stats["saturated"],
            100 * stats["scale_underflow"],
        ]
        for cell, value in zip(cells[-5:], values, strict=True):
            assert float(cell) == pytest.approx(value, rel=5e-3, abs=5e-4)
    for row in report["tensors"]:
        if row["action"] == "keep":
            assert row["reason"]
            assert table_row(table, row["name"])[-1] == row["reason"]


def test_stats_are_those_of_the_library(model_file, quantized_file, model_tensors):
    report = json.loads(
        succeed("compare", model_file, quantized_file, "--device", "cpu", "--json").stdout
    )
    by_name = {row["name"]: row for row in report["tensors"]}
    for name in WEIGHTS:
        expected = fp4kit.error_stats(
            model_tensors[name], fp4kit.quantize(model_tensors[name])
        ).to_dict()
        got = by_name[name]["stats"]
        for key in ("sqnr", "relative_rms", "mse", "max_abs_error"):
            assert got[key] == pytest.approx(expected[key], rel=1e-9)


def test_inspect_lists_both_kinds(model_file, quantized_file):
    assert all(name in succeed("inspect", model_file).stdout for name in WEIGHTS)
    rows = json.loads(succeed("inspect", quantized_file, "--json").stdout)["tensors"]
    formats = {row["name"]: row["format"] for row in rows}
    assert formats[WEIGHTS[0]] == "nvfp4"
    assert formats["steps"] is None


def test_compare_and_its_limit(model_file, quantized_file, tmp_path):
    back = tmp_path / "back.safetensors"
    succeed("dequantize", quantized_file, "-o", back)
    for other in (quantized_file, back):
        succeed("compare", model_file, other)
        succeed("compare", model_file, other, "--min-sqnr", 10)
        result = invoke("compare", model_file, other, "--min-sqnr", 60)
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        for name in (*WEIGHTS, "total"):
            assert name in result.stderr
            assert name in result.stdout
    result = invoke("compare", model_file, quantized_file, "--min-sqnr", 60, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["below"] == [*WEIGHTS, "total"]
    result = succeed("compare", model_file, model_file, "--min-sqnr", 60)
    assert "exact" in result.stdout


def test_compare_says_what_it_cannot_measure(model_file, model_tensors, tmp_path):
    other = tmp_path / "other.safetensors"
    safetensors.numpy.save_file(model_tensors | {"steps": model_tensors["steps"] + 1}, other)
    result = succeed("compare", model_file, other)
    assert "different: steps" in result.stderr
    assert "steps" in table_row(result.stdout, "steps")
    assert succeed("compare", model_file, model_file).stderr == ""


def test_env():
    facts = json.loads(succeed("env", "--json").stdout)
    assert facts["versions"]["fp4kit"] == fp4kit.__version__
    assert facts["versions"]["numpy"] == np.__version__
    assert [backend["name"] for backend in facts["backends"]] == ["cuda", "cpu", "reference"]
    assert all(backend["available"] or backend["reason"] for backend in facts["backends"])
    text = succeed("env").stdout
    assert np.__version__ in text
    for backend in facts["backends"]:
        assert (backend["reason"] or "yes") in text


def test_bench_measures_every_operation():
    flags = ("--device", "cpu", "--sizes", "12", "--repeat", "1")
    document = json.loads(succeed("bench", *flags, "--sizes", "13,14", "--json").stdout)
    assert document["repeat"] == 1
    (result,) = document["devices"]
    assert (result["device"], result["small_calls"]) == ("cpu", [])
    timings = result["timings"]
    operations = {(timing["name"].split()[0], timing["elements"]) for timing in timings}
    for name in ("copy", "amax", "quantize", "dequantize", "matmul", "swizzle"):
        for size in (12, 13, 14):
            assert (name, 1 << size) in operations
    for name in ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"):
        assert f"quantize {name}" in {timing["name"] for timing in timings}
    for timing in timings:
        for key in ("microseconds", "gigabytes_per_second", "share_of_copy"):
            assert timing[key] > 0, timing
    text = succeed("bench", *flags, "--dtype", "float32").stdout
    assert {timing["name"] for timing in timings} <= {
        re.split(r"\s{2,}", line)[0] for line in text.splitlines()
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name):
    command = importlib.import_module(f"fp4kit.cli.{name}").command
    assert command.help.splitlines()[0] == COMMANDS[name]
    for flag in ("--help", "-h"):
        text = succeed(name, flag).stdout
        assert re.search(rf"Example:\n +fp4kit {name}", text)
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or parameter.help, parameter.name


def test_help_version_and_the_list_of_commands():
    text = succeed("--help").stdout
    assert "Example:" in text
    assert all(f"  {name} " in text and line in text for name, line in COMMANDS.items())
    assert fp4kit.__version__ in succeed("--version").stdout


def test_help_imports_nothing_heavy():
    script = """
import atexit, sys
heavy = {"numba", "cupy", "torch", "jax", "rich", "ml_dtypes"}
atexit.register(lambda: print("imported:", sorted(heavy & set(sys.modules))))
sys.argv = ["fp4kit", "--help"]
from fp4kit.cli.main import main
main()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert result.stdout.splitlines()[-1] == "imported: []"
