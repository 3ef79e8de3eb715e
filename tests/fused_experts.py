# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Models with fused experts of every kind, made up for tests, and what becomes of them."""

from __future__ import annotations

import numpy as np

from checkpoints import DTYPES, NAMES, array, normal, read, read_file, write_file
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.plan.expert_restore import EXPERTS_KEY
from fp4kit.checkpoint.verify.structure import structure_faults

E, H, M = 3, 96, 64
#: Model type to how its files hold experts: (layout, names of the fused tensors, biases).
KINDS = {
    "qwen3_vl_moe": ("out_in", ("gate_up_proj", "down_proj"), False),
    "mistral4": ("out_in", ("gate_up_proj", "down_proj"), False),
    "brand_new": ("in_out", ("gate_up_proj.weight", "down_proj.weight"), False),
    "llama4_text": ("in_out", ("gate_up_proj", "down_proj"), False),
    "aria_text": ("in_out", ("fc1.weight", "fc2.weight"), False),
    "gpt_oss": ("interleaved", ("gate_up_proj", "down_proj"), True),
}


def fuse(gate, up, down, layout):
    """(gate_up, down) as a layout has them, of (E, M, H), (E, M, H) and (E, H, M)."""
    if layout == "interleaved":
        both = np.stack([gate, up], 2).reshape(len(gate), -1, gate.shape[2])
    else:
        both = np.concatenate([gate, up], 1)
    if layout == "out_in":
        return both, down
    return both.transpose(0, 2, 1), down.transpose(0, 2, 1)


def model(kind, dtype="BF16", prefix="model.layers", layers=2, seed=0):
    """(tensors, config) of attention and fused experts of a model type."""
    layout, (gate_up, down), bias = KINDS[kind]
    tensors = {}
    for layer in range(layers):
        base = f"{prefix}.{layer}"
        tensors[f"{base}.self_attn.o_proj.weight"] = normal((H, H), dtype, seed)
        weights = [
            normal(shape, dtype, seed + 7 * layer + number, 2.0**number)[1]
            for number, shape in enumerate(((E, M, H), (E, M, H), (E, H, M)))
        ]
        for name, value in zip((gate_up, down), fuse(*weights, layout), strict=True):
            tensors[f"{base}.mlp.experts.{name}"] = dtype, np.ascontiguousarray(value)
        if bias:
            for name, size in (("gate_up_proj_bias", 2 * M), ("down_proj_bias", H)):
                tensors[f"{base}.mlp.experts.{name}"] = normal((E, size), dtype, seed + size)
        tensors[f"{base}.mlp.router.weight"] = normal((E, H), dtype, seed)
    config = {
        "model_type": kind,
        "dtype": NAMES[dtype],
        "hidden_size": H,
        "intermediate_size": M,
        "num_local_experts": E,
        "num_hidden_layers": layers,
    }
    return tensors, config


def rewrite(path, metadata, drop=()):
    """Another header for a file, without the tensors in whose names some text is."""
    tensors = {
        name: (dtype, np.frombuffer(data, DTYPES[dtype]).reshape(shape))
        for name, (dtype, shape, data) in read_file(path)[0].items()
        if not any(text in name for text in drop)
    }
    write_file(path, tensors, metadata)


def quantize(source, out, **options):
    quantize_checkpoint(source, out, CheckpointOptions(**options))
    assert structure_faults(out) == []
    return out


def dequantize(source, back, dtype="BF16", **options):
    report = dequantize_checkpoint(source, back, DequantizeOptions(NAMES[dtype], **options))
    return read(back), report


def singles(out, folder, dtype="BF16", **options):
    """The same, experts left single: what the fused tensors must consist of."""
    tensors, _ = dequantize(out, folder, dtype, experts_layout="single", **options)
    return tensors


def joined(single, kind, prefix="model.layers", layer=0):
    """Fused experts of one layer, from single ones by NumPy alone."""
    layout, (gate_up, down), bias = KINDS[kind]
    base = f"{prefix}.{layer}.mlp.experts"

    def stacked(name, part):
        return np.stack([array(single[f"{base}.{e}.{name}.{part}"]) for e in range(E)])

    weights = [stacked(name, "weight") for name in ("gate_proj", "up_proj", "down_proj")]
    both, last = fuse(*weights, layout)
    found = {f"{base}.{gate_up}": both, f"{base}.{down}": last}
    if bias:
        halves = [stacked(name, "bias") for name in ("gate_proj", "up_proj")]
        found[f"{base}.gate_up_proj_bias"] = np.stack(halves, 2).reshape(E, -1)
        found[f"{base}.down_proj_bias"] = stacked("down_proj", "bias")
    return found


def assert_restored(back, single, source, kind, prefix="model.layers"):
    """Names, order, shapes and element types of the source; the values of the single experts."""
    assert {name: (dtype, a.shape) for name, (dtype, a) in source.items()} == {
        name: (dtype, shape) for name, (dtype, shape, _) in back.items()
    }
    for layer in range(2):
        for name, value in joined(single, kind, prefix, layer).items():
            assert back[name][2] == value.tobytes(), name


def without_note(out, drop=()):
    """The same checkpoint as another tool would have written it."""
    path = out / "model.safetensors"
    metadata = read_file(path)[1]
    del metadata[EXPERTS_KEY]
    rewrite(path, metadata, drop)
    return out
