# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of GGUF models: 700 MB at most, however large the model and its tensors are.

The normal test takes a part of the tensors and of the chunks, and allows a part of what is left of
700 MB beside Python and its libraries. `-m slow` runs the real sizes: up to 6 GB of zeros.
"""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

LIMIT = 700_000_000
#: What tensors and chunks of the normal test are divided by.
SCALED = 16
#: Of the libraries 200 MB are resident; the readers' pieces keep their size.
SCALED_LIMIT = (LIMIT - 200_000_000) // SCALED + 20_000_000
KINDS = {"F32": Kind.F32, "BF16": Kind.BF16, "Q8_0": Kind.Q8_0}

#: Runs commands in one process, with a small model first so that kernels are loaded, and prints
#: what was resident before each command and its peak.
SCRIPT = """
import ctypes, gc, json, sys
from fp4kit.cli.main import cli
from fp4kit.checkpoint.write import gguf
from fp4kit.io.stream import chunks

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

scale, peaks = int(sys.argv[1]), []
for module, name in [(chunks, "WHOLE_BYTES"), (chunks, "CHUNK_BYTES"), (gguf, "CHUNK_BYTES")]:
    setattr(module, name, getattr(module, name) // scale)
for model in ("small.gguf", "large.gguf"):
    for command in (
        ["quantize", model, "-o", "q.gguf", "--include", "output.weight"],
        ["quantize", model, "-o", "m.gguf", "--format", "mxfp4", "--scale-rule", "rceil"],
        ["dequantize", "q.gguf", "-o", "back.gguf"],
        ["verify", "q.gguf", "--against", model],
        ["compare", model, "q.gguf"],
    ):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts afresh
        before = resident("VmRSS")
        force = ["--force"] if "-o" in command else []
        assert not cli.main([*command, *force, "--json"], standalone_mode=False), command
        if model.startswith("large"):
            peaks.append((" ".join(command), before, resident("VmHWM")))
print(json.dumps(peaks), file=sys.stderr)
"""


def sparse_model(path, kind, scale):
    """A model of zeros: a stack of experts of 2 GB and an output of 1 GB as BF16, and others."""
    shapes = {
        "output.weight": (131072 // scale, 4096),
        "blk.0.ffn_up_exps.weight": (16, 16384 // scale, 4096),
        "blk.0.attn_q.weight": (4096 // min(scale, 8), 4096),
        "blk.0.attn_norm.weight": (4096,),
    }
    writer, end = gguf.GGUFWriter(path, "qwen3moe"), 0
    for name, (*lead, cols) in shapes.items():
        stored = kind if lead else Kind.F32
        elements, nbytes = gguf.GGML_QUANT_SIZES[stored]
        stored_shape = (*lead, cols // elements * nbytes)
        size = prod(stored_shape)
        writer.add_tensor_info(name, stored_shape, np.dtype(np.uint8), size, raw_dtype=stored)
        end += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        file.truncate(start + end)


def peaks(folder, kind, scale):
    """(command, bytes resident before it, peak) of every command."""
    sparse_model(folder / "small.gguf", kind, 256)
    sparse_model(folder / "large.gguf", kind, scale)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(scale)],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    for path in folder.glob("*.gguf"):
        path.unlink()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_down(kind, tmp_path):
    for command, before, peak in peaks(tmp_path, KINDS[kind], SCALED):
        print(f"{command}: {before / 1e6:.0f} + {(peak - before) / 1e6:.0f} MB")
        assert peak - before <= SCALED_LIMIT, command


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_700_megabytes(kind, tmp_path):
    for command, _, peak in peaks(tmp_path, KINDS[kind], 1):
        print(f"{command}: {peak / 1e6:.0f} MB")
        assert peak <= LIMIT, command
