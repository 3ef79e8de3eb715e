# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Signals at any moment end a command, without a traceback and without a result."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from command_line import run_script

#: Seconds after the start: in Python's own start, in imports, at work.
DELAYS = (0.03, 0.06, 0.1, 0.2, 0.35, 0.6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_while_a_command_starts(model_file, tmp_path, number):
    """None is lost: the command never completes as if nothing had been."""
    for delay in DELAYS:
        target = tmp_path / f"out-{delay}.safetensors"
        # Unbuffered work that lasts longer than any delay.
        script = (
            "import sys, time\nfrom fp4kit.cli import interrupts\ninterrupts.prepare()\n"
            "print('ready', flush=True)\n"
            "import fp4kit.io.quantize_tensors as stream\nreal = stream.quantize_tensors\n"
            "from fp4kit.cli.entry import main\n"
            f"sys.argv = ['fp4kit', 'quantize', {str(model_file)!r}, '-o', {str(target)!r}]\n"
            "import fp4kit.io.quantize as work\n"
            "def slow(*args):\n    time.sleep(3)\n    return real(*args)\n"
            "work.quantize_tensors = slow\nmain()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Where tests run in the background, SIGINT is ignored, and so it would be here.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode in (-number, 128 + number), err
        assert "Traceback" not in err
        assert out == ""
        assert not target.exists()
        assert list(tmp_path.glob(".*")) == []


def test_a_swallowed_signal_still_ends_the_command(model_file, tmp_path):
    """What a handler raises inside a callback of the collector is printed and forgotten."""
    script = """
import fp4kit.io.quantize as work, os, signal, weakref
real = work.quantize_tensors
class Thing: pass
def swallowed(*args):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del thing
    return real(*args)
work.quantize_tensors = swallowed
"""
    target = tmp_path / "out.safetensors"
    result = run_script(script, "quantize", model_file, "-o", target, "--device", "cpu")
    assert result.returncode == 143
    assert not target.exists()
