# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the first run on a machine compiles, and what it says about that."""

import json
import os
import subprocess
import sys

import checkpoints
from command_line import run
from fp4kit.cpu.kernel_cache import CACHE_VARIABLE

#: Compiles what a file, a directory and arrays of all kinds need; prints what each added.
SCRIPT = """
import json, sys
import ml_dtypes
import numpy as np
from numba.core import event
import fp4kit
from fp4kit.cli.main import cli

class Compiled(event.Listener):
    def __init__(self):
        self.names = []
    def on_start(self, event):
        self.names.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        pass

def command(*words):
    cli(list(words), standalone_mode=False)

def arrays():
    for rows, cols in ((4, 64), (3, 1024)):
        x = np.ones((rows, cols), ml_dtypes.bfloat16)
        for writable in (True, False):
            x.flags.writeable = writable
            q = fp4kit.quantize(x)
            fp4kit.error_stats(x, q)
            q.packed.flags.writeable = q.block_scale.flags.writeable = writable
            fp4kit.error_stats(x, q)

source, directory, target = sys.argv[1:]
result = {}
for name, work in (
    ("file", lambda: command("quantize", source, "-o", f"{target}/a.safetensors")),
    ("directory", lambda: command("quantize", directory, "-o", f"{target}/b")),
    ("arrays", arrays),
):
    compiled = Compiled()
    with event.install_listener("numba:compile", compiled):
        work()
    result[name] = compiled.names
print(json.dumps(result))
"""

#: The largest magnitude, codes, their statistics: all that the default path of `quantize` needs.
NEEDED = ["count_nibbles", "largest_magnitude", "quantize_range", "quantized_error_range"]


def test_the_default_path_compiles_four_kernels(tmp_path):
    model = tmp_path / "model"
    checkpoints.save(model, *checkpoints.llama())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model / "model.safetensors", model, tmp_path],
        env=os.environ | {CACHE_VARIABLE: str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout.splitlines()[-1])
    # Two fifths of a second each, were it forty of them as it was once.
    helpers = [name for name in compiled["file"] if name not in NEEDED]
    assert sorted(set(compiled["file"]) & set(NEEDED)) == NEEDED
    assert len(helpers) <= 6, helpers
    assert compiled["directory"] == []
    assert compiled["arrays"] == []
    assert done.stderr.count("Compiling kernels") == 1


def test_the_first_run_says_that_it_compiles_and_the_second_does_not(tmp_path, model_file):
    cache = tmp_path / "cache"
    said = []
    for name in ("a", "b"):
        target = tmp_path / f"{name}.safetensors"
        result = run("quantize", model_file, "-o", target, **{CACHE_VARIABLE: str(cache)})
        assert result.returncode == 0
        said.append([line for line in result.stderr.decode().splitlines() if "ompil" in line])
    (folder,) = (cache / "fp4kit").iterdir()
    line = (
        "Compiling kernels for this processor (only the first time that they are needed); they "
        f"are kept in {folder}"
    )
    assert said == [[line], []]


def test_kernels_that_cannot_be_kept_are_a_warning(tmp_path, model_file):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    target = tmp_path / "out.safetensors"
    result = run("quantize", model_file, "-o", target, **{CACHE_VARIABLE: str(cache)})
    assert result.returncode == 0
    (line,) = [line for line in result.stderr.decode().splitlines() if "ompil" in line]
    assert line.startswith(
        f"Warning: compiled kernels are not kept (others can write to {cache} (chmod go-w changes "
        "that)), so every run compiles them anew; set FP4KIT_CACHE_DIR"
    )
    assert list(cache.iterdir()) == []
    assert target.exists()
