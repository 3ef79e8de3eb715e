# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what it writes, what it says where, and how it fails."""

import fcntl
import importlib
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from click.testing import CliRunner

import fp4kit
from fp4kit.backends import BackendStatus
from fp4kit.cli.main import COMMANDS, cli

WEIGHTS = ("layers.0.q_proj.weight", "layers.0.up_proj.weight")


def invoke(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def succeed(*args):
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result


def fail(*args, code=1):
    """A failed run: nothing on stdout, one line on stderr (usage errors add how to get help)."""
    result = invoke(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert "Wrote" not in result.output
    assert result.stdout == ""
    if code == 1:
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
    return result.stderr


def run(*args, cwd=None, **env):
    """`fp4kit` in a process of its own, with no terminal anywhere."""
    return subprocess.run(
        [sys.executable, "-m", "fp4kit", *map(str, args)],
        cwd=cwd,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
        check=False,
    )


def run_script(script, *args):
    """The entry point, after `script` has replaced something."""
    code = f"import sys, fp4kit.io.convert as convert\n{script}\n"
    code += f"sys.argv = {['fp4kit', *map(str, args)]!r}\nfrom fp4kit.cli.main import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


def load(path):
    """Every tensor of a safetensors file as (dtype name, shape, bytes), and the metadata."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = raw[8 + length :]
    tensors = {
        name: (entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
    return tensors, metadata


def table_row(text, name):
    """Cells of the row of a table that starts with `name`."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return re.split(r"\s{2,}", line.strip())


@pytest.fixture
def tensors():
    rng = np.random.default_rng(7)
    return {
        WEIGHTS[0]: rng.standard_t(5, (48, 64)).astype(ml_dtypes.bfloat16),
        WEIGHTS[1]: rng.standard_t(5, (32, 128)).astype(ml_dtypes.bfloat16),
        "layers.0.norm.weight": np.ones(64, np.float32),
        "layers.0.odd.weight": rng.normal(size=(4, 20)).astype(np.float32),
        "steps": np.arange(8, dtype=np.int64).reshape(2, 4),
    }


@pytest.fixture
def model(tmp_path, tensors):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    return path


@pytest.fixture
def quantized(model, tmp_path):
    path = tmp_path / "q.safetensors"
    succeed("quantize", model, "-o", path, "--device", "cpu")
    return path


# What is written


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
def test_round_trip_equals_the_library(model, tensors, tmp_path, flags, options, dtype):
    if options is None:
        options = {
            name[2:].replace("-", "_"): value
            for name, value in zip(flags[::2], flags[1::2], strict=True)
        }
    packed, back = tmp_path / "q.safetensors", tmp_path / "back.safetensors"
    succeed("quantize", model, "-o", packed, *flags)
    succeed("dequantize", packed, "-o", back, "--dtype", dtype)
    written, _ = load(back)
    kept, _ = load(model)
    assert set(written) == set(tensors)
    for name in tensors:
        if name in WEIGHTS:
            x = fp4kit.dequantize(fp4kit.quantize(tensors[name], **options), dtype)
            assert written[name][1:] == (x.shape, x.tobytes()), name
        else:
            assert written[name] == kept[name], name


def test_quantized_file_holds_codes_and_scales(model, quantized, tensors):
    written, metadata = load(quantized)
    q = fp4kit.quantize(tensors[WEIGHTS[0]])
    assert written[f"{WEIGHTS[0]}_packed"] == ("U8", (48, 32), q.packed.tobytes())
    assert written[f"{WEIGHTS[0]}_scale"][1:] == ((48, 4), q.block_scale.tobytes())
    assert metadata["format"] == "pt"
    with safetensors.safe_open(quantized, "np") as file:
        assert f"{WEIGHTS[1]}_packed" in file.keys()  # noqa: SIM118 not a dict


def test_include_and_exclude(model, tmp_path):
    path = tmp_path / "q.safetensors"
    result = succeed(
        "quantize", model, "-o", path, "--include", "*q_proj*", "--include", "re:.*up", "--exclude",
        "*up_proj*", "--json",
    )  # fmt: skip
    actions = {row["name"]: row["action"] for row in json.loads(result.stdout)["tensors"]}
    assert [name for name, action in actions.items() if action == "quantize"] == [WEIGHTS[0]]
    written, _ = load(path)
    assert written[WEIGHTS[1]] == load(model)[0][WEIGHTS[1]]


def test_npy_and_npz(tmp_path, tensors):
    x = tensors[WEIGHTS[0]].astype(np.float32)
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


def test_void_data_is_read_only_when_said_what_it_is(tmp_path, tensors):
    np.save(tmp_path / "x.npy", tensors[WEIGHTS[0]])
    target = tmp_path / "q.safetensors"
    message = fail("quantize", tmp_path / "x.npy", "-o", target)
    assert "bfloat16" in message
    assert not target.exists()
    succeed("quantize", tmp_path / "x.npy", "-o", target, "--void-dtype", "bfloat16")
    q = fp4kit.quantize(tensors[WEIGHTS[0]])
    assert q.packed.tobytes() in [data for _, _, data in load(target)[0].values()]


def test_default_output_lies_beside_the_input(model):
    result = succeed("quantize", model, "--format", "mxfp8")
    path = model.with_name("model-mxfp8.safetensors")
    assert path.exists()
    assert result.stderr.splitlines()[-1].startswith(f"Wrote {path}")


def test_bare_names_in_the_current_directory(model):
    result = run("quantize", model.name, "-o", "bare.safetensors", cwd=model.parent)
    assert result.returncode == 0, result.stderr
    assert load(model.with_name("bare.safetensors"))[0]


def test_dry_run_writes_nothing(model, quantized):
    before = sorted(model.parent.iterdir())
    result = succeed("quantize", model, "--dry-run")
    assert sorted(model.parent.iterdir()) == before
    assert WEIGHTS[0] in result.stdout
    assert "Wrote" not in result.output
    plan = json.loads(succeed("quantize", model, "--dry-run", "--json").stdout)
    done = json.loads(succeed("quantize", model, "-o", quantized, "--force", "--json").stdout)
    assert plan["dry_run"]
    for key in ("name", "action", "bytes_before", "bytes_after", "format", "shape"):
        assert [row[key] for row in plan["tensors"]] == [row[key] for row in done["tensors"]]


def test_existing_output_needs_force(model, quantized, tmp_path):
    before = quantized.read_bytes()
    back = tmp_path / "back.safetensors"
    back.write_bytes(b"mine")
    demo = tmp_path / "demo.safetensors"
    demo.write_bytes(b"mine")
    for args in (
        ("quantize", model, "-o", quantized, "--format", "mxfp8"),
        ("dequantize", quantized, "-o", back),
        ("demo", "-o", demo),
    ):
        assert "--force" in fail(*args)
    assert (quantized.read_bytes(), back.read_bytes(), demo.read_bytes()) == (
        before,
        b"mine",
        b"mine",
    )
    succeed("quantize", model, "-o", quantized, "--format", "mxfp8", "--force")
    assert quantized.read_bytes() != before


def test_output_may_not_be_the_input(model):
    before = model.read_bytes()
    fail("quantize", model, "-o", model, "--force")
    assert model.read_bytes() == before


def test_demo_is_something_to_work_on(tmp_path):
    demo = tmp_path / "demo.safetensors"
    result = succeed("demo", "-o", demo)
    assert str(demo) in result.stderr
    plan = json.loads(succeed("quantize", demo, "--dry-run", "--json").stdout)
    assert plan["total"]["tensors"] > 0
    assert plan["kept"]["tensors"] > 0


# What is said


def test_json_holds_the_numbers_of_the_table(model, tmp_path):
    table = succeed("quantize", model, "-o", tmp_path / "a.safetensors", "--device", "cpu").stdout
    result = succeed(
        "quantize", model, "-o", tmp_path / "b.safetensors", "--device", "cpu", "--json"
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


def test_stats_are_those_of_the_library(model, quantized, tensors):
    report = json.loads(succeed("compare", model, quantized, "--device", "cpu", "--json").stdout)
    by_name = {row["name"]: row for row in report["tensors"]}
    for name in WEIGHTS:
        expected = fp4kit.error_stats(tensors[name], fp4kit.quantize(tensors[name])).to_dict()
        got = by_name[name]["stats"]
        for key in ("sqnr", "relative_rms", "mse", "max_abs_error"):
            assert got[key] == pytest.approx(expected[key], rel=1e-9)


def test_inspect_lists_both_kinds(model, quantized):
    assert all(name in succeed("inspect", model).stdout for name in WEIGHTS)
    rows = json.loads(succeed("inspect", quantized, "--json").stdout)["tensors"]
    formats = {row["name"]: row["format"] for row in rows}
    assert formats[WEIGHTS[0]] == "nvfp4"
    assert formats["steps"] is None


def test_compare_and_its_limit(model, quantized, tmp_path):
    back = tmp_path / "back.safetensors"
    succeed("dequantize", quantized, "-o", back)
    for other in (quantized, back):
        succeed("compare", model, other)
        succeed("compare", model, other, "--min-sqnr", 10)
        result = invoke("compare", model, other, "--min-sqnr", 60)
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        for name in (*WEIGHTS, "total"):
            assert name in result.stderr
            assert name in result.stdout
    result = invoke("compare", model, quantized, "--min-sqnr", 60, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["below"] == [*WEIGHTS, "total"]
    result = succeed("compare", model, model, "--min-sqnr", 60)
    assert "exact" in result.stdout


def test_compare_says_what_it_cannot_measure(model, tensors, tmp_path):
    other = tmp_path / "other.safetensors"
    safetensors.numpy.save_file(tensors | {"steps": tensors["steps"] + 1}, other)
    result = succeed("compare", model, other)
    assert "different: steps" in result.stderr
    assert "steps" in table_row(result.stdout, "steps")
    assert succeed("compare", model, model).stderr == ""


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
    for name in ("copy", "amax", "quantize", "dequantize", "quantize_dequantize", "swizzle"):
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


# How it fails


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["quantize"],
        ["quantize", "x.safetensors", "--format", "int3"],
        ["quantize", "x.safetensors", "--scale-rule", "ceil"],
        ["quantize", "x.safetensors", "--format", "mxfp4", "--recipe", "comfy"],
        ["quantize", "x.safetensors", "--void-dtype", "float16"],
        ["dequantize", "x.safetensors"],
        ["dequantize", "x.safetensors", "-o", "y.npy", "--dtype", "float64"],
        ["compare", "x.safetensors"],
        ["bench", "--sizes", "24,x"],
        ["bench", "--sizes", "99"],
        ["compare", "x.safetensors", "y.safetensors", "--min-sqnr", "many"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(args):
    message = fail(*args, code=2)
    assert "Usage:" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}q\x00.",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 4) + b"{{{{",
    ],
    ids=["empty", "pickle", "huge header", "no JSON"],
)
def test_malformed_input_is_one_line_and_no_output(tmp_path, content):
    source = tmp_path / "bad.safetensors"
    source.write_bytes(content)
    for args in (
        ("quantize", source),
        ("quantize", source, "--dry-run"),
        ("dequantize", source, "-o", tmp_path / "out.npz"),
        ("inspect", source),
        ("compare", source, source),
    ):
        assert "bad.safetensors" in fail(*args)
    assert list(tmp_path.iterdir()) == [source]


def test_missing_files_and_directories(model, tmp_path):
    assert "none.safetensors" in fail("quantize", tmp_path / "none.safetensors")
    assert "none" in fail("quantize", model, "-o", tmp_path / "none" / "q.safetensors")
    fail("quantize", model, "-o", model / "q.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no .safetensors file" in fail("quantize", empty)
    assert "no .safetensors file" in fail("inspect", empty)
    assert {*tmp_path.iterdir()} == {model, empty}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only directories")
def test_read_only_directory_is_refused(model, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    assert "locked" in fail("quantize", model, "-o", locked / "q.safetensors")


def test_device_cuda_without_a_gpu(model, monkeypatch):
    status = [BackendStatus("cuda", False, "no CUDA driver", {})]
    monkeypatch.setattr("fp4kit.cli.options.backend_status", lambda: status)
    for args in (
        ("quantize", model),
        ("dequantize", model, "-o", model.with_name("x.npz")),
        ("compare", model, model),
    ):
        assert "no CUDA driver" in fail(*args, "--device", "cuda")
    succeed("quantize", model, "--device", "auto", "-o", model.with_name("auto.safetensors"))


def test_unquantizable_files_are_no_silent_success(tmp_path):
    path = tmp_path / "ints.safetensors"
    safetensors.numpy.save_file({"a": np.arange(4)}, path)
    assert "no tensor is quantized" in succeed("quantize", path).stderr


def test_bugs_keep_their_traceback(model, monkeypatch):
    monkeypatch.setattr("fp4kit.cli.inspect.inspect_file", lambda path: 1 / 0)
    assert isinstance(invoke("inspect", model).exception, ZeroDivisionError)
    script = "convert.inspect_file = lambda path: 1 / 0"
    result = run_script(script, "inspect", model)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr


def test_interrupt_exits_130_without_a_traceback(model, tmp_path):
    script = "def stop(*args): raise KeyboardInterrupt\nconvert.quantize_file = stop"
    result = run_script(script, "quantize", model, "--device", "cpu")
    assert (result.returncode, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr


def test_termination_runs_the_clean_up(model):
    script = """
import os, signal, time
def stop(*args):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("cleaned up")
convert.quantize_file = stop
"""
    result = run_script(script, "quantize", model, "--device", "cpu")
    assert (result.returncode, result.stdout) == (143, "cleaned up\n")
    assert result.stderr == ""


def test_a_reader_that_leaves_is_no_fault(model):
    process = subprocess.Popen(
        [sys.executable, "-m", "fp4kit", "inspect", str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(timeout=300)


# Where it runs


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"TERM": "dumb", "COLUMNS": "20"},
    ],
    ids=["ascii", "C locale", "dumb"],
)
def test_odd_consoles(tmp_path, tensors, env):
    source = tmp_path / "mod\u00e8le.npz"
    np.savez(source, **{"gewicht\u00df\u6a21": tensors[WEIGHTS[0]].astype(np.float32)})
    target = tmp_path / "q.safetensors"
    for args in (
        ("--help",),
        ("env",),
        ("quantize", source, "-o", target),
        ("inspect", target),
        ("compare", source, target),
    ):
        result = run(*args, **env)
        assert result.returncode == 0, result.stderr
        assert b"\x1b" not in result.stdout + result.stderr
        if "TERM" not in env:
            assert (result.stdout + result.stderr).isascii()
    assert load(target)[0]


def test_home_that_cannot_be_written(quantized, tmp_path):
    # Below a device nobody, not even root, can make a directory.
    nowhere = "/dev/null/home"
    env = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "CUPY_CACHE_DIR": nowhere}
    result = run("dequantize", quantized, "-o", tmp_path / "back.safetensors", **env)
    assert result.returncode == 0, result.stderr
    assert set(WEIGHTS) <= set(load(tmp_path / "back.safetensors")[0])


def test_hostile_names_reach_the_terminal_escaped(tmp_path):
    source = tmp_path / "x.safetensors"
    name = "\x1b]0;owned\x07[red]{task}\nrow"
    safetensors.numpy.save_file({name: np.ones((2, 16), np.float32)}, source)
    result = succeed("quantize", source)
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    assert "[red]{task}\\nrow" in result.stdout
    assert json.loads(succeed("inspect", source, "--json").stdout)["tensors"][0]["name"] == name


def test_no_terminal_no_folding_and_no_progress(tmp_path):
    source = tmp_path / "x.safetensors"
    name = "layer." * 60 + "weight"
    safetensors.numpy.save_file({name: np.ones((2, 16), np.float32)}, source)
    result = run("quantize", source)
    assert name.encode() in result.stdout
    assert result.stderr.startswith(b"Wrote ")
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize("width", [60, 100])
def test_narrow_terminal(model, width):
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fp4kit", "quantize", str(model)],
        stdin=child,
        stdout=child,
        stderr=subprocess.PIPE,
        env=env | {"TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(child)
    text = b""
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(parent)
    talk = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=300) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()
    assert all(len(line) <= width for line in lines), lines
    assert "SQNR" in lines[0]
    assert "too narrow for" in talk
    assert Path(model.with_name("model-nvfp4.safetensors")).exists()
