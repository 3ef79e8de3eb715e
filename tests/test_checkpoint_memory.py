# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of whole checkpoints: 1 GB at most, however large the model and its tensors are.

The normal tests take a part of everything: of the models (rows or experts) and of the chunks.
What is then allowed is a part of what is left of 1 GB beside Python and its libraries, and the
few buffers that do not shrink. `-m slow` runs the real sizes, with a model of 8 GB, and needs 25 GB
of disk.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from math import prod

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp4kit.io.containers import DTYPES, TensorSpec
from fp4kit.io.read.source import SourceTensor
from fp4kit.io.stream.chunks import byte_ranges

LIMIT = 10**9
#: What the models and chunks of the normal tests are divided by, and the models of warming up.
SCALED, SMALL = 32, 256
#: Of the libraries 200 MB are resident; readers' pieces, copies and checks keep their size.
SCALED_LIMIT = (LIMIT - 200_000_000) // SCALED + 10_000_000

#: Runs the commands of some cases in one process, in small models first so that kernels are loaded,
#: and prints what was resident before each command and its peak.
SCRIPT = """
import ctypes, gc, json, os, shutil, sys
from fp4kit.checkpoint.views import logical
from fp4kit.checkpoint.write import transfer
from fp4kit.checkpoint.views import base as views
from fp4kit.cli.main import cli
from fp4kit.io.stream import chunks

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

cases, scale = json.loads(sys.argv[1])
constants = [(chunks, "WHOLE_BYTES"), (chunks, "CHUNK_BYTES"), (views, "CHUNK_BYTES"),
             (logical, "WIDE_BYTES"), (transfer, "CHUNK_BYTES")]
for module, name in constants:
    setattr(module, name, getattr(module, name) // scale)
if scale > 1:
    os.fsync = lambda file: None  # these files need not survive a power cut
top, peaks = os.getcwd(), []

def run(folder, commands):
    os.chdir(folder)
    for command in commands:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts afresh
        before = resident("VmRSS")
        assert not cli.main([*command, "--json"], standalone_mode=False), command
        peaks.append((before, resident("VmHWM")))
        if "X" in command:
            shutil.rmtree("X")
    os.chdir(top)

for case, commands in cases.items():
    run(case + "/small", commands)
peaks.clear()
for case, commands in cases.items():
    run(case + "/large", commands)
print(json.dumps(peaks), file=sys.stderr)
"""


# ------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------


def llama(scale):
    """8 GB bfloat16: a kept tensor of 2 GB, one linear layer of 1 GB, fusion groups of 1 GB."""
    shapes = {"model.embed_tokens.weight": ("BF16", (131072 // scale, 8192))}
    sizes = {
        "self_attn.q_proj": 8192,
        "self_attn.k_proj": 1024,
        "self_attn.v_proj": 1024,
        "self_attn.o_proj": 8192,
        "mlp.gate_proj": 28672,
        "mlp.up_proj": 28672,
        "mlp.down_proj": 28672,
    }
    for layer in range(3):
        for name, rows in sizes.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = ("BF16", (rows // scale, 8192))
    shapes["model.layers.3.mlp.down_proj.weight"] = ("BF16", (65536 // scale, 8192))
    return shapes, {"model_type": "llama", "tie_word_embeddings": True}


def fused(scale):
    """4 GB bfloat16 in two tensors: experts stored [E, in, out], which are transposed."""
    side = round(scale**0.5)
    hidden, double, inner = (size // side // 64 * 64 for size in (5120, 16384, 8192))
    prefix = "language_model.model.layers.0.feed_forward.experts"
    shapes = {
        f"{prefix}.gate_up_proj": ("BF16", (16, hidden, double)),
        f"{prefix}.down_proj": ("BF16", (16, inner, hidden)),
    }
    return shapes, {"model_type": "llama4"}


def gpt_oss(scale):
    """2.1 GB of MXFP4 in fused experts: 7 GB as bfloat16."""
    shapes = {}
    experts = max(32 // scale, 1)
    for layer in range(1 if scale == SMALL else 4):
        for role, out in (("gate_up_proj", 5760), ("down_proj", 2880)):
            name = f"model.layers.{layer}.mlp.experts.{role}"
            shapes[f"{name}_blocks"] = ("U8", (experts, out, 90, 16))
            shapes[f"{name}_scales"] = ("U8", (experts, out, 90))
            shapes[f"{name}_bias"] = ("BF16", (experts, out))
    return shapes, {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}


def wide_gpt_oss(scale):
    """The same, but NVFP4 cannot hold its exponents: everything is decoded and quantized anew."""
    shapes, config = gpt_oss(scale)
    wide = {
        name: ("F8_E8M0", shape) if name.endswith("_scales") else (dtype, shape)
        for name, (dtype, shape) in shapes.items()
    }
    return wide, config


def fp8(scale):
    """2.1 GB of FP8 in blocks with their scales: 8 GB as the float32 that are quantized."""
    shapes = {}
    for layer in range(1 if scale == SMALL else 4):
        for role in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.{role}.weight"
            rows = 24576 // scale
            shapes[name] = ("F8_E4M3", (rows, 7168))
            shapes[f"{name}_scale_inv"] = ("F32", (-(-rows // 128), 56))
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return shapes, {"model_type": "deepseek_v3", "quantization_config": config}


def pattern(name, dtype):
    """16 MB that are repeated over a tensor."""
    rng = np.random.default_rng(0)
    if dtype == "F8_E8M0":
        return rng.integers(90, 140, 1 << 24, np.uint8)
    if name.endswith("_scales"):
        return rng.integers(118, 126, 1 << 24, np.uint8)
    if dtype == "BF16":
        return (rng.standard_normal(1 << 23, np.float32).view(np.uint32) >> 16).astype("<u2")
    if dtype == "F32":
        return rng.random(1 << 22, np.float32)
    return rng.integers(0, 0x7F, 1 << 24, np.uint8)


def write_model(folder, shapes, config, limit):
    """Writes a model in shards of at most `limit` bytes."""
    bins, filled = [{}], 0
    for name, (dtype, shape) in shapes.items():
        size = prod(shape) * DTYPES[dtype].bits // 8
        if bins[-1] and filled + size > limit:
            bins.append({})
            filled = 0
        bins[-1][name] = dtype, shape, size
        filled += size
    folder.mkdir()
    weight_map, patterns = {}, {}
    for number, members in enumerate(bins, 1):
        file = f"model-{number:05d}-of-{len(bins):05d}.safetensors"
        header, at = {}, 0
        for name, (dtype, shape, size) in members.items():
            offsets = [at, at + size]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            at += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name, (dtype, _, size) in members.items():
                key = dtype, name.endswith("_scales")
                data = patterns.setdefault(key, memoryview(pattern(name, dtype)).cast("B"))
                for begin in range(0, size, len(data)):
                    out.write(data[: size - begin])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


# ------------------------------------------------------------------------------------------------
# Commands
# ------------------------------------------------------------------------------------------------

CPU = ["--device", "cpu"]
QUANTIZE = [
    ["quantize", "IN", "-o", "Q", *CPU],
    ["verify", "Q", "--against", "IN", *CPU],
]
CASES = {
    "llama": (
        llama,
        [
            *QUANTIZE,
            ["dequantize", "Q", "-o", "X", "--dtype", "bfloat16", *CPU],
            ["convert", "Q", "-o", "X", "--layout", "comfy"],
            ["quantize", "IN", "-o", "X", "--format", "mxfp4", *CPU],
        ],
    ),
    "fused": (
        fused,
        [*QUANTIZE, ["dequantize", "Q", "-o", "X", "--dtype", "bfloat16", *CPU]],
    ),
    "gpt_oss": (
        gpt_oss,
        [
            *QUANTIZE,
            ["quantize", "IN", "-o", "X", "--format", "mxfp4", *CPU],
            ["dequantize", "IN", "-o", "X", "--dtype", "bfloat16", *CPU],
            ["dequantize", "Q", "-o", "X", "--dtype", "bfloat16", *CPU],
        ],
    ),
    "wide": (wide_gpt_oss, [["quantize", "IN", "-o", "X", *CPU]]),
    "fp8": (
        fp8,
        [
            *QUANTIZE,
            ["dequantize", "IN", "-o", "X", "--dtype", "bfloat16", *CPU],
            ["quantize", "IN", "-o", "X", "--exclude", "*", "--allow-nothing", *CPU],
        ],
    ),
}


def peaks(folder, names, scale):
    """(command, bytes resident before it, peak) of every command of some cases."""
    for name in names:
        for kind, size in (("small", SMALL), ("large", scale)):
            (folder / name / kind).mkdir(parents=True)
            write_model(folder / name / kind / "IN", *CASES[name][0](size), (2 << 30) // scale)
    cases = {name: CASES[name][1] for name in names}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([cases, scale])],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    commands = [f"{name}: {' '.join(command)}" for name in names for command in cases[name]]
    return [(command, *pair) for command, pair in zip(commands, found, strict=True)]


@pytest.fixture
def folder(tmp_path):
    """A directory that is gone afterwards, as pytest keeps its own for a while."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_scaled_down(folder):
    found = peaks(folder, list(CASES), SCALED)
    for command, before, peak in found:
        print(f"{command}: {before / 1e6:.0f} + {(peak - before) / 1e6:.0f} MB")
    over = [command for command, before, peak in found if peak - before > SCALED_LIMIT]
    assert not over


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_gigabyte(folder, case):
    for command, _, peak in peaks(folder, [case], 1):
        print(f"{command}: {peak / 1e6:.0f} MB")
        assert peak <= LIMIT, command


@settings(deadline=None)
@example(dtype="BF16", shape=[1, 100_000], limit=3000)
@given(
    dtype=st.sampled_from(["BF16", "F32", "I64", "U8", "F4"]),
    shape=st.lists(st.integers(0, 100), min_size=1, max_size=3),
    limit=st.sampled_from([1 << 10, 3000, 1 << 16]),
)
def test_copies_have_no_piece_above_the_limit(dtype, shape, limit):
    """However long the rows are: a copy may be cut anywhere between elements."""
    shape = (*shape[:-1], shape[-1] * 2)
    spec = TensorSpec("x", dtype, shape)
    spans = list(byte_ranges(SourceTensor(spec, "", spec.nbytes), limit))
    assert [first for first, _ in spans] == [0, *(last for _, last in spans[:-1])]
    assert spans[-1][1] == spec.nbytes
    assert max(last - first for first, last in spans) <= limit
    assert all(first * 8 % DTYPES[dtype].bits == 0 for first, _ in spans)
