# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Options that commands share, and the progress bar: where to compute, with how many threads."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from command_line import invoke, read_terminal
from fp4kit.api.backends import BackendStatus
from fp4kit.checkpoint import operations as checkpoints
from fp4kit.cli import options
from fp4kit.cli.progress import progress_bar
from fp4kit.cpu import threads as cpu_threads
from fp4kit.cpu.threads import THREADS_VARIABLE, thread_count
from fp4kit.errors import BackendUnavailableError
from fp4kit.files import devices

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    x = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    safetensors.numpy.save_file({"a": x}, path)
    return path


@pytest.fixture
def gpus(monkeypatch):
    """A machine with three GPUs, as far as the options can see."""

    class Cuda:
        def devices(self):
            return ["cuda:0", "cuda:1", "cuda:2"]

    status = [BackendStatus("cuda", True, None, {})]
    monkeypatch.setattr(devices, "backend_status", lambda: status)
    monkeypatch.setattr(devices, "get_backend", {"cuda": Cuda()}.__getitem__)


# ------------------------------------------------------------------------------------------------
# --threads
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_bounds_the_pool(model, monkeypatch, threads):
    """The command's own number wins over that of the environment."""
    monkeypatch.setenv(THREADS_VARIABLE, "7")
    asked = []
    pool = cpu_threads._pool
    monkeypatch.setattr(cpu_threads, "_pool", lambda count: asked.append(count) or pool(count))
    result = invoke("quantize", model, "--device", "cpu", "--threads", threads)
    assert result.exit_code == 0, result.output
    assert set(asked) == {threads}


def test_one_thread_needs_no_pool(model, monkeypatch):
    monkeypatch.setenv(THREADS_VARIABLE, "2")
    monkeypatch.setattr(cpu_threads, "_pool", None)
    result = invoke("quantize", model, "--device", "cpu", "--threads", "1")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("threads", ["0", "-1", "two", "1.5", ""])
def test_threads_must_be_a_positive_number(model, threads):
    before = os.environ.get(THREADS_VARIABLE)
    result = invoke("quantize", model, "--threads", threads)
    assert result.exit_code == 2
    assert "--threads" in result.stderr
    assert os.environ.get(THREADS_VARIABLE) == before


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
def test_the_variable_must_be_a_positive_number(model, monkeypatch, value):
    monkeypatch.setenv(THREADS_VARIABLE, value)
    result = invoke("quantize", model, "--device", "cpu")
    assert result.exit_code == 1
    assert f"{THREADS_VARIABLE}={value!r}" in result.stderr
    assert not model.with_name("model-nvfp4.safetensors").exists()


def test_all_cores_by_default(monkeypatch):
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    assert thread_count() == len(os.sched_getaffinity(0))


# ------------------------------------------------------------------------------------------------
# --device
# ------------------------------------------------------------------------------------------------


NO_DEVICES = [
    "cuda:",
    "cuda:-1",
    "cuda:1.5",
    "cuda:x",
    "cuda:1 ",
    "cuda:\u0661",
    "CUDA",
    "gpu",
    "0",
]


@pytest.mark.parametrize("device", [*NO_DEVICES, "cpu:0", "auto:1", ""])
@pytest.mark.parametrize("command", ["quantize", "dequantize", "verify", "compare"])
def test_what_is_no_device(model, device, command):
    arguments = {"dequantize": ["-o", "x.npz"], "compare": [model]}.get(command, [])
    result = invoke(command, model, *arguments, "--device", device)
    assert result.exit_code == 2
    assert "choose auto, cpu, cuda, or cuda:N" in result.stderr


@pytest.mark.parametrize(
    ("device", "one", "every"),
    [
        ("cpu", "cpu", ("cpu",)),
        ("auto", "cuda", ("cuda:0", "cuda:1", "cuda:2")),
        ("cuda", "cuda", ("cuda:0", "cuda:1", "cuda:2")),
        ("cuda:1", "cuda:1", ("cuda:1",)),
        ("cuda:12", "cuda:12", ("cuda:12",)),
    ],
)
def test_which_gpus(gpus, device, one, every):
    assert options.Device()(device) == device
    assert devices.resolve_device(device) == one
    assert devices.resolve_devices(device) == every


def test_a_gpu_by_number_reaches_the_library(gpus, model, tmp_path, monkeypatch):
    """Of a file as one device, of a directory as the only one that takes shards."""
    seen = []

    def stop(*_args, **given):
        seen.append(given["devices"])
        raise BackendUnavailableError("quantize", {"cuda": "not here"})

    monkeypatch.setattr(checkpoints, "quantize_checkpoint", stop)
    for device in ("cuda:2", "cuda"):
        assert "not here" in invoke("quantize", tmp_path, "--device", device).stderr
    assert seen == [("cuda:2",), ("cuda:0", "cuda:1", "cuda:2")]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_no_gpu_is_said_and_the_cpu_is_not_taken_instead(model, monkeypatch, device):
    status = [BackendStatus("cuda", False, "no CUDA driver", {})]
    monkeypatch.setattr(devices, "backend_status", lambda: status)
    result = invoke("quantize", model, "--device", device)
    assert result.exit_code == 1
    assert f"--device {device}" in result.stderr
    assert "no CUDA driver" in result.stderr
    assert not model.with_name("model-nvfp4.safetensors").exists()


# ------------------------------------------------------------------------------------------------
# Progress
# ------------------------------------------------------------------------------------------------

BAR = """
import sys, time
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(errors="backslashreplace")  # as fp4kit's own entry point does
from fp4kit.cli.progress import progress_bar
with progress_bar("Quantizing mod\u00e8le[red]{task}\\x1b[2J") as advance:
    for step in range(1, 7):
        time.sleep(0.15)
        advance(step * 3_000_000, 60_000_000)
"""


def on_terminal(*command, **env):
    """(exit code, everything on a terminal that is the process's stderr)."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=child,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"} | env,
    )
    os.close(child)
    data = read_terminal(parent)
    return process.wait(timeout=300), data.decode()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_bar_shows_rate_and_time_left(encoding):
    code, text = on_terminal("-c", BAR, PYTHONIOENCODING=encoding)
    assert code == 0, text
    assert "\x1b[2J" not in text
    if encoding == "ascii":
        assert text.isascii()
    drawn = ESCAPES.sub("", text)
    assert "[red]{task}" in drawn
    # 42 of 60 MB are left at 20 MB/s or less.
    assert re.search(r"18\.0/60\.0 MB +\d+\.\d MB/s +0:00:0[1-9] left", drawn), drawn


RETRIES = """
from fp4kit.cli.progress import progress_bar
from fp4kit.fleet.patience import tell
with progress_bar("Quantizing") as advance:
    advance(1, 4)
    tell("The scheduler has no worker")
    tell("a.safetensors is tried again", 1)
    tell("b.safetensors: 3 requests were tried again", 3)
    advance(2, 4)
"""


def test_bar_counts_retries():
    code, text = on_terminal("-c", RETRIES)
    assert code == 0, text
    drawn = ESCAPES.sub("", text)
    assert "The scheduler has no worker" in drawn
    assert "b.safetensors: 3 requests were tried again" in drawn
    assert "Quantizing (4 retries)" in drawn


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", ["20", "200"])
def test_commands_on_odd_terminals(model, encoding, width):
    """The bar goes again, and what is said stays."""
    code, text = on_terminal(
        *("-m", "fp4kit", "quantize", str(model), "--device", "cpu"),
        PYTHONIOENCODING=encoding,
        COLUMNS=width,
    )
    assert code == 0, text
    assert ESCAPES.sub("", text).splitlines()[-1].startswith("Wrote ")
    if encoding == "ascii":
        assert text.isascii()


def test_no_terminal_no_bar(capfd):
    with progress_bar("Quantizing") as advance:
        advance(1, 2)
    assert capfd.readouterr() == ("", "")
