# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what is no input, where a report may go, and surroundings of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from command_line import fail, invoke, run, succeed
from fp4kit.checkpoint.read.directory import STATE_DIR
from fp4kit.cli import quantize as commands
from fp4kit.cli.text import MAX_PIECE, one_line
from fp4kit.cpu.threads import THREADS_VARIABLE, most_threads

COMMANDS = {
    "quantize": (),
    "dequantize": ("-o", "out"),
    "convert": ("-o", "out", "--layout", "modelopt"),
    "verify": (),
    "inspect": (),
    "compare": ("x.npy",),
}


@pytest.fixture
def source(checkpoints, tmp_path):
    return checkpoints.save(tmp_path / "in", *checkpoints.llama(1), others=["tokenizer.json"])


# ------------------------------------------------------------------------------------------------
# What is no input
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Lama-3-8B", "did you mean 'Llama-3-8B'"),
        ("meta-llama/Llama-3-8B", "hf download meta-llama/Llama-3-8B"),
        ("no/such/place", "there is no directory no/such"),
        ("a.pt", "PyTorch"),
        ("a.pth", "PyTorch"),
        ("a.bin", "PyTorch"),
        ("a.ckpt", "PyTorch"),
        ("a.onnx", "ONNX"),
        ("a.json", "JSON"),
        ("a.zip", "unpack"),
        ("a.weights", "holds GGUF data"),
        ("README", "unknown kind"),
        ("dangling.npy", "link to nothing"),
    ],
)
def test_what_is_no_input(tmp_path, monkeypatch, command, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3-8B").mkdir()
    (tmp_path / "dangling.npy").symlink_to("nothing.npy")
    if "." in name and name != "dangling.npy":
        (tmp_path / name).write_bytes(b"GGUF" if name == "a.weights" else b"")
    (tmp_path / "README").write_bytes(b"hello")
    message = fail(command, name, *COMMANDS[command])
    assert message.startswith(f"Error: {name}: ")
    assert said in message


def test_convert_of_a_plain_file_says_what_to_do(checkpoints, tmp_path, monkeypatch):
    """And that works."""
    monkeypatch.chdir(tmp_path)
    checkpoints.write_file(tmp_path / "m.safetensors", checkpoints.diffusion())
    succeed("quantize", "m.safetensors", "-o", "q.safetensors")
    said = fail("convert", "q.safetensors", "-o", "c.safetensors", "--layout", "comfy")
    assert "fp4kit quantize SOURCE --layout" in said
    succeed("quantize", "m.safetensors", "-o", "c.safetensors", "--layout", "comfy")
    assert "fp4kit dequantize" in said
    succeed("dequantize", "q.safetensors", "-o", "back.safetensors")
    succeed("quantize", "back.safetensors", "-o", "d.safetensors", "--layout", "comfy")
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "q.safetensors").rename(folder / "q.safetensors")
    said = fail("dequantize", folder, "-o", "back")
    assert "give that file itself to dequantize, verify, inspect or compare" in said
    succeed("dequantize", folder / "q.safetensors", "-o", "again.safetensors")
    for command in ("verify", "inspect"):
        succeed(command, folder / "q.safetensors")
    succeed("compare", "m.safetensors", folder / "q.safetensors")


# ------------------------------------------------------------------------------------------------
# --report
# ------------------------------------------------------------------------------------------------


def digest_of(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    "place",
    ["in/model.safetensors", "in/config.json", "in/new.json", "in", "in/", "link.json", "hard.json",
     "amax.json", "out", "out/report.json", "none/report.json", "folder", "fifo", "dangling.json"],
)  # fmt: skip
def test_reports_destroy_nothing(source, tmp_path, place, dry):
    """Even with --force; noticed before any work."""
    (tmp_path / "link.json").symlink_to(source / "config.json")
    (tmp_path / "hard.json").hardlink_to(source / "config.json")
    (tmp_path / "dangling.json").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "amax.json").write_text(json.dumps({"x": 1.0}))
    before = digest_of(tmp_path)
    flags = ("--force", "--report", tmp_path / place)
    if place == "amax.json":
        flags += ("--activations", tmp_path / "amax.json")
    said = fail("quantize", source, "-o", tmp_path / "out", *flags, *dry)
    assert str(tmp_path / place) in said
    assert digest_of(tmp_path) == before


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_reports_of_files_destroy_nothing(model_file, tmp_path, dry):
    target = tmp_path / "q.safetensors"
    linked = tmp_path / "linked.json"
    linked.symlink_to(model_file)
    before = digest_of(tmp_path)
    for place in (model_file, linked, target):
        fail("quantize", model_file, "-o", target, "--report", place, "--force", *dry)
    assert digest_of(tmp_path) == before


def test_an_older_report_needs_force(model_file, tmp_path):
    target, report = tmp_path / "q.safetensors", tmp_path / "report.json"
    report.write_text("mine")
    flags = ("quantize", model_file, "-o", target, "--report", report)
    assert "--force" in fail(*flags)
    for more in ((), ("--force",)):
        assert "dry run replaces nothing" in fail(*flags, "--dry-run", *more)
    assert report.read_text() == "mine"
    assert not target.exists()
    succeed(*flags, "--force")
    assert json.loads(report.read_text())["target"] == str(target)
    fresh = tmp_path / "fresh.json"
    succeed("quantize", model_file, "--dry-run", "--report", fresh)
    assert json.loads(fresh.read_text())["dry_run"]


@pytest.mark.parametrize("flags", ["", "--force"])
@pytest.mark.parametrize("report", ["/dev/stdout", "/dev/stderr", "$3"])
def test_a_report_does_not_replace_what_is_printed(model_file, tmp_path, report, flags):
    """The table would be lost with the file that a rename takes the place of."""
    target, printed = tmp_path / "q.safetensors", tmp_path / "printed.txt"
    command = f"$FP4KIT quantize $1 -o $2 --report {report} {flags} >> $3 2>> $3"
    done = shell(command, model_file, target, printed)
    assert done.returncode == 1
    assert "is the file that the command prints to; use --json" in printed.read_text()
    assert not target.exists()


def test_a_report_is_written_though_nobody_reads_on(model_file, source, tmp_path):
    for number, given in enumerate((model_file, source)):
        target, report = tmp_path / f"q{number}.safetensors", tmp_path / f"{number}.json"
        script = '{ $FP4KIT quantize "$1" -o "$2" --report "$3"; } | true'
        done = shell(script, given, target, report)
        assert "Traceback" not in done.stderr
        assert target.exists()
        assert json.loads(report.read_text())["target"] == str(target)


def test_devices_are_written_in_place(model_file, tmp_path):
    target = tmp_path / "q.safetensors"
    succeed("quantize", model_file, "-o", target, "--report", "/dev/null")
    assert not os.path.isfile("/dev/null")  # noqa: PTH113
    done = run("quantize", model_file, "-o", target, "--force", "--report", "/dev/stdout", "--json")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.decode().split("\n}\n{\n")
    assert json.loads(first + "\n}") == json.loads("{\n" + second)


# ------------------------------------------------------------------------------------------------
# Surroundings
# ------------------------------------------------------------------------------------------------


def shell(script, *args, **env):
    """A script of the shell in which $FP4KIT is the command, and its arguments are $1, $2, ..."""
    return subprocess.run(
        ["/bin/sh", "-c", script, "sh", *map(str, args)],
        env=os.environ | {"FP4KIT": f"{sys.executable} -m fp4kit"} | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(model_file, tmp_path, closed):
    target = tmp_path / "q.safetensors"
    done = shell(f"$FP4KIT quantize $1 -o $2 --device cpu {closed}", model_file, target)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    succeed("verify", target, "--against", model_file)
    done = shell(f"$FP4KIT inspect $1 {closed}", target)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["inspect $1", "--help", "--version", "inspect --help"])
def test_a_full_device_is_one_line(model_file, words):
    done = shell(f"$FP4KIT {words} > /dev/full", model_file)
    assert done.returncode == 1
    assert done.stderr == "Error: No space left on device\n"


@pytest.mark.parametrize("limit", [200_000, 400_000, 600_000])
def test_little_memory_is_one_line(model_file, limit):
    """Where the compiler and the threads could not even say so."""
    done = shell(f"ulimit -v {limit}; $FP4KIT quantize $1 --device cpu", model_file)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "memory" in done.stderr


def test_memory_that_runs_out_is_one_line(model_file, monkeypatch):
    def give_up(*args):
        raise MemoryError("Unable to allocate 1. EiB")

    monkeypatch.setattr("fp4kit.io.quantize.quantize_file", give_up)
    assert "out of memory: Unable to allocate 1. EiB" in fail("quantize", model_file)


@pytest.mark.parametrize("number", [most_threads() + 1, 10**6, 10**30])
def test_too_many_threads(model_file, monkeypatch, number):
    assert str(most_threads()) in fail("quantize", model_file, "--threads", number, code=2)
    monkeypatch.setenv(THREADS_VARIABLE, str(number))
    assert f"at most {most_threads()}" in fail("quantize", model_file, "--device", "cpu")
    assert not model_file.with_name("model-nvfp4.safetensors").exists()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit(143)])
@pytest.mark.parametrize("started", [".", "transformer", None])
def test_a_stopped_run_names_resume(source, tmp_path, monkeypatch, stop, started):
    out = tmp_path / "out"

    def interrupted(*_args, **_given):
        if started is not None:
            (out / started / STATE_DIR).mkdir(parents=True)
        raise stop

    monkeypatch.setattr(commands, "quantize_checkpoint", interrupted)
    result = invoke("quantize", source, "-o", out)
    assert result.exit_code in (130, 143)
    assert ("--resume" in result.stderr) == (started is not None)
    assert (f"Stopped: {out} is unfinished" in result.stderr) == (started is not None)
    assert "\\n" not in result.stderr


def test_long_pieces_of_a_message_are_cut():
    name, dims = "n" * 10**6, str(list(range(10**5)))
    text = one_line(f"a/b.npz: tensor '{name}' of fp4kit's has shape {dims}, not 'x' but {name}")
    assert len(text) < 4 * MAX_PIECE
    for part in (
        "a/b.npz: tensor 'nnn",
        "nnn' of fp4kit's has shape [0, 1",
        "99999], not 'x' but ",
    ):
        assert part in text
    assert one_line("it's 'a' and 'b'") == "it's 'a' and 'b'"


@pytest.mark.parametrize("args", [("inspect",), ("quantize",), ("verify",), ("compare", "self")])
def test_long_names_in_errors_of_commands(tmp_path, args):
    path = tmp_path / "x.safetensors"
    long = "layer" * 100_000
    tensors = {f"{long}_packed": np.ones((2, 8), np.uint8), f"{long}_scale": np.ones(7, np.int8)}
    safetensors.numpy.save_file(tensors, path)
    command, *other = args
    result = invoke(command, path, *([path] if other else []))
    assert len(result.stderr) < 2000
    if command != "inspect":
        assert result.exit_code == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "dequantize",
            "float32 for a file of fp4kit's own or a .gguf, bfloat16 for a model directory",
        ),
        ("convert", "their order in the files may be another"),
        ("quantize", "Exits with 1 and writes nothing if no tensor would be quantized"),
        ("quantize", "in a directory only what fp4kit wrote"),
    ],
)
def test_help_is_true(command, words):
    assert words in " ".join(succeed(command, "--help").stdout.split())


def test_a_dry_run_does_not_ask_for_what_was_given(source, tmp_path):
    out = tmp_path / "out"
    succeed("quantize", source, "-o", out)
    for flags in ((), ("--force",)):
        said = succeed("quantize", source, "-o", out, "--dry-run", *flags).stderr
        assert "(exists: replaced only with --force)" in said
        assert "1 other file," in said or "other files," in said
