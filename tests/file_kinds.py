# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""One file or checkpoint of every kind that fp4kit reads, made up for tests."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

import checkpoints as c
import fp4kit
import test_checkpoint_gpt_oss as gpt_oss
from awq_checkpoints import DOWN, PRE, edit, factors
from fp4kit.io.containers import TensorSpec
from fp4kit.io.write.npy import NpyWriter
from test_checkpoint_mistral import native
from test_checkpoint_packed_bytes import deepseek_v4
from test_checkpoint_pipelines import pipeline

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
#: An array of every element type of safetensors whose elements are whole bytes.
ARRAYS = {
    dtype: np.arange(24, dtype=np.uint8).reshape(2, 12).view(dtype)
    for dtype in (
        *("uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
        *(ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz),
    )
} | {
    "bool": np.array([True, False]),
    "float64": np.linspace(0, 1, 6).reshape(3, 2),
    "int64": np.arange(3),
    "uint64": np.arange(3, dtype=np.uint64),
    "complex64": np.array([1 + 2j], np.complex64),
    "scalar": np.float32(3),
    "empty": np.zeros((0, 4), np.float32),
}
ARRAYS = {str(getattr(name, "__name__", name)): array for name, array in ARRAYS.items()}


def _floats():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((32, 64), np.float32).astype(ml_dtypes.bfloat16),
        "b.weight": rng.standard_normal((2, 16, 32), np.float32),
        "norm": np.ones(64, np.float32),
        "steps": np.arange(4),
    }


def own(**options):
    """A file that fp4kit quantized."""

    def make(folder):
        source = folder / "source.npz"
        np.savez(source, **{name: x for name, x in _floats().items() if x.dtype != "bfloat16"})
        target = folder / "own.safetensors"
        fp4kit.quantize_file(source, target, device="cpu", **options)
        return target

    return make


def npy(dtype):
    """An .npy; bfloat16 is recorded beside it."""

    def make(folder):
        array = np.random.default_rng(0).standard_normal((4, 32)).astype(dtype)
        path = folder / "w.npy"
        spec = TensorSpec("w", "BF16" if dtype is ml_dtypes.bfloat16 else "F32", array.shape)
        with NpyWriter(path, [spec]) as writer:
            writer.write("w", 0, array.view(np.uint8).reshape(-1))
            writer.finish()
        return path

    return make


def npz(folder):
    np.savez(folder / "w.npz", **{name: x for name, x in _floats().items() if name != "a.weight"})
    return folder / "w.npz"


def plain_file(folder):
    fp4kit.save(folder / "plain.safetensors", ARRAYS, metadata={"note": "mine"})
    return folder / "plain.safetensors"


def directory(shards=1):
    def make(folder):
        tensors, config = c.llama(1)
        return c.save(folder / "plain", tensors, config, shards=shards, others=["tokenizer.json"])

    return make


def layout(name, format="nvfp4", shards=1, **options):
    """A directory that fp4kit quantized in a layout."""

    def make(folder):
        tensors, config = c.llama(1)
        source = c.save(folder / "source", tensors, config, shards=shards)
        target = folder / "quantized"
        fp4kit.quantize_checkpoint(source, target, format, layout=name, device="cpu", **options)
        if shards > 1:  # of the size that a shard has at least there is nothing here
            stored = {key: (t[0], c.array(t)) for key, t in c.read(target).items()}
            config = c.config_of(target)
            (target / "model.safetensors").unlink()
            c.save(target, stored, config, shards=shards)
        return target

    return make


def comfy_file(folder):
    source = c.write_file(folder / "model.safetensors", c.diffusion(out=72))
    target = folder / "comfy.safetensors"
    fp4kit.quantize_checkpoint(source, target, layout="comfy", device="cpu")
    return target


def smoothed(name):
    """As AWQ exports it, with the scales of inputs beside a weight."""

    def make(folder):
        path = layout(name, activations="uncalibrated")(folder)

        def change(tensors):
            tensors[DOWN + PRE] = "BF16", factors(96)

        return edit(c, path, change)

    return make


def fp8(folder):
    tensors, config, _ = c.fp8_llama()
    return c.save(folder / "fp8", tensors, config)


def fp8_file(folder):
    tensors, _, _ = c.fp8_llama()
    return c.write_file(folder / "fp8.safetensors", tensors)


def deepseek(folder):
    tensors, config, _ = deepseek_v4(c)
    return c.save(folder / "v4", tensors, config)


def gpt_oss_directory(folder):
    gpt_oss.model(folder / "oss", mxfp4=True)
    return folder / "oss"


def fused_experts(folder):
    tensors, config = c.fused_moe()
    return c.save(folder / "moe", tensors, config)


def mistral(folder):
    native(c, folder / "in")
    fp4kit.quantize_checkpoint(folder / "in", folder / "native", device="cpu")
    return folder / "native"


def diffusers(folder):
    pipeline(c, folder / "in")
    fp4kit.quantize_checkpoint(folder / "in", folder / "pipe", layout="comfy", device="cpu")
    return folder / "pipe"


#: Kind to what makes one in a folder.
KINDS = {
    "npy": npy(np.float32),
    "npy bfloat16": npy(ml_dtypes.bfloat16),
    "npz": npz,
    "safetensors of every type": plain_file,
    **{f"own {f}": own(scheme=f) for f in ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2")},
    **{
        f"own fp8 {granularity}": own(scheme="fp8", granularity=granularity)
        for granularity in ("tensor", "channel", "block")
    },
    "own swizzled": own(scale_layout="swizzled_128x4", nibble_order="high_first"),
    "own 8x4": own(scheme="mxfp8", scale_layout="swizzled_8x4"),
    "own torchao": own(recipe="torchao"),
    "own search": own(scale_search="four_over_six", e4m3_max=256),
    "directory": directory(),
    "shards": directory(3),
    "fused experts": fused_experts,
    **{f"{name} nvfp4": layout(name) for name in LAYOUTS},
    **{f"{name} W4A4": layout(name, activations="uncalibrated") for name in LAYOUTS},
    "compressed-tensors mxfp4": layout("compressed-tensors", "mxfp4"),
    "compressed-tensors shards": layout("compressed-tensors", shards=3),
    "compressed-tensors search": layout("compressed-tensors", scale_search="sweep", e4m3_max=256),
    "compressed-tensors fp8": layout("compressed-tensors", "fp8"),
    "modelopt fp8": layout("modelopt", "fp8", activations="uncalibrated"),
    "deepseek fp8": layout("deepseek", "fp8"),
    "comfy file": comfy_file,
    "awq modelopt": smoothed("modelopt"),
    "awq comfy": smoothed("comfy"),
    "fp8": fp8,
    "fp8 file": fp8_file,
    "deepseek v4": deepseek,
    "gpt-oss": gpt_oss_directory,
    "mistral": mistral,
    "pipeline": diffusers,
    **{
        f"golden {path.name}": (lambda folder, path=path: path)
        for path in sorted(GOLDEN.iterdir())
        if path.is_dir()
    },
}
