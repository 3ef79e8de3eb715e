# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Small model directories made up for tests, and an independent reader of what became of them."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.io.containers import TensorSpec
from fp4kit.io.write.safetensors import SafetensorsWriter

#: NumPy's types of safetensors' element types; those of the second kind are raw bytes.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
    "F64": np.dtype(np.float64),
}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
OTHER_FILES = {
    "tokenizer.json": b'{"model": {}}',
    "generation_config.json": b'{"do_sample": true}',
    "chat_template.jinja": b"{{ messages }}",
    "preprocessor_config.json": b"{}",
    "LICENSE": b"free",
    "onnx/notes/readme.md": b"# deep",
}


# ------------------------------------------------------------------------------------------------
# Writing
# ------------------------------------------------------------------------------------------------


def normal(shape, dtype="BF16", seed=0, scale=1.0):
    """(dtype, array) of normal values."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return dtype, values.astype(DTYPES[dtype])


def write_file(path, tensors, metadata=None):
    """One safetensors file of {name: (dtype, array)}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    specs = [TensorSpec(name, dtype, array.shape) for name, (dtype, array) in tensors.items()]
    with SafetensorsWriter(path, specs, metadata or {}) as writer:
        for name, (_, array) in tensors.items():
            writer.write(name, 0, np.frombuffer(array.tobytes(), np.uint8))
        writer.finish()
    return path


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2))


def save(
    folder, tensors, config=None, *, shards=1, metadata=None, others=(), assign=None, base="model"
):
    """A model directory.

    Args:
        folder: directory to create.
        tensors: {name: (dtype, array)}.
        config: content of config.json, None for no such file.
        shards: number of weight files; more than one come with an index.
        metadata: header metadata of each.
        others: names of OTHER_FILES to add.
        assign: name of a tensor to the number of its shard; by default cut into even runs.
        base: first part of the names of weight files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    per = -(-len(names) // shards)
    place = assign or {name: number // per for number, name in enumerate(names)}
    metadata = {"format": "pt"} if metadata is None else metadata
    weight_map = {}
    for number in range(shards):
        file = f"{base}.safetensors"
        if shards > 1:
            file = f"{base}-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names if place[name] == number}
        weight_map |= dict.fromkeys(part, file)
        write_file(folder / file, part, metadata)
    if shards > 1:
        total = sum(array.nbytes for _, array in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{base}.safetensors.index.json", index)
    if config is not None:
        write_json(folder / "config.json", config)
    for name in others:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(OTHER_FILES[name])
    return folder


# ------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------


def _fill(shapes, dtype, seed):
    """Weights of very different sizes, as those of a real model are."""
    rng = np.random.default_rng(seed)
    return {
        name: normal(shape, dtype, int(rng.integers(1 << 30)), float(2.0 ** rng.integers(-8, 3)))
        for name, shape in shapes.items()
    }


def attention(prefix, hidden):
    return {
        f"{prefix}.self_attn.k_proj.weight": (hidden // 2, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}.self_attn.q_norm.weight": (hidden // 2,),
        f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
        f"{prefix}.self_attn.q_proj.bias": (hidden,),
        f"{prefix}.self_attn.v_proj.weight": (hidden // 2, hidden),
    }


def mlp(prefix, hidden, intermediate):
    return {
        f"{prefix}.down_proj.weight": (hidden, intermediate),
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
    }


def llama(layers=2, hidden=64, intermediate=96, dtype="BF16", seed=0, head=True):
    """(tensors, config) of a dense model."""
    shapes = {"lm_head.weight": (80, hidden)} if head else {}
    shapes["model.embed_tokens.weight"] = (80, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= attention(prefix, hidden) | mlp(f"{prefix}.mlp", hidden, intermediate)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": NAMES[dtype],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "tie_word_embeddings": not head,
        "vocab_size": 80,
    }
    return _fill(shapes, dtype, seed), config


def moe(experts=3, hidden=64, intermediate=32, dtype="BF16", seed=0):
    """(tensors, config) of a model with experts, routers and a shared expert, one layer."""
    prefix = "model.layers.0"
    shapes = {"lm_head.weight": (80, hidden), "model.embed_tokens.weight": (80, hidden)}
    shapes |= attention(prefix, hidden)
    for expert in range(experts):
        shapes |= mlp(f"{prefix}.mlp.experts.{expert}", hidden, intermediate)
    shapes |= mlp(f"{prefix}.mlp.shared_expert", hidden, 2 * intermediate)
    shapes[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
    shapes[f"{prefix}.mlp.shared_expert_gate.weight"] = (1, hidden)
    config = {
        "model_type": "qwen2_moe",
        "dtype": NAMES[dtype],
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    return _fill(shapes, dtype, seed), config


def fused_moe(model_type="qwen3_5_moe", experts=3, hidden=64, intermediate=32, dtype="BF16"):
    """(tensors, config) with experts in 3-D tensors [E, 2I, H], [E, H, I]; no routers fused."""
    prefix = "model.layers.0"
    shapes = attention(prefix, hidden)
    shapes[f"{prefix}.mlp.experts.gate_up_proj"] = (experts, 2 * intermediate, hidden)
    shapes[f"{prefix}.mlp.experts.down_proj"] = (experts, hidden, intermediate)
    shapes[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
    config = {
        "model_type": model_type,
        "dtype": NAMES[dtype],
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_hidden_layers": 1,
    }
    return _fill(shapes, dtype, 5), config


def diffusion(dtype="BF16", out=64):
    """Tensors of a single-file diffusion model, with layers that ComfyUI's files keep whole."""
    shapes = {
        "double_blocks.0.img_attn.qkv.weight": (3 * out, 64),
        "double_blocks.0.img_attn.qkv.bias": (3 * out,),
        "double_blocks.0.img_attn.proj.weight": (out, 64),
        "double_blocks.0.img_mod.lin.weight": (out, 64),
        "double_blocks.0.img_mlp.0.weight": (out + 4, 64),
        "final_layer.linear.weight": (16, 64),
        "img_in.weight": (out, 64),
        "single_blocks.0.linear1.weight": (out, 48),
        "single_blocks.0.norm.query_norm.scale": (64,),
    }
    return _fill(shapes, dtype, 3)


def fp8_blocks(rows, cols, seed=0, block=128):
    """(weight, scale_inv, decoded float32) of a DeepSeek-style FP8 weight."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, (rows, cols), np.uint8) | rng.integers(0, 2, 1, np.uint8) * 128
    codes = np.where((codes & 0x7F) == 0x7F, 0, codes).astype(np.uint8)
    grid = (-(-rows // block), -(-cols // block))
    scale = (2.0 ** rng.integers(-10, -3, grid) * rng.uniform(1, 2, grid)).astype(np.float32)
    spread = scale.repeat(block, 0)[:rows].repeat(block, 1)[:, :cols]
    decoded = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * spread
    return ("F8_E4M3", codes), ("F32", scale), decoded


def fp8_llama(layers=1, hidden=128, intermediate=160):
    """(tensors, config, {name: decoded}) of a dense model whose linear weights are FP8 blocks."""
    tensors, config = llama(layers, hidden, intermediate)
    decoded = {}
    for number, name in enumerate(list(tensors)):
        array = tensors[name][1]
        if array.ndim == 2 and "_proj" in name:
            weight, scale, decoded[name] = fp8_blocks(*array.shape, seed=number)
            tensors[name], tensors[f"{name}_scale_inv"] = weight, scale
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return tensors, config | {"quantization_config": quantization}, decoded


# ------------------------------------------------------------------------------------------------
# Reading and expecting
# ------------------------------------------------------------------------------------------------


def read_file(path):
    """({name: (dtype, shape, bytes)}, metadata), independent of fp4kit; without a hole."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    spans = sorted(tuple(facts["data_offsets"]) for facts in header.values())
    ends = [0, *(last for _, last in spans)]
    assert [first for first, _ in spans] == ends[:-1]
    assert ends[-1] == len(data) - 8 - length
    tensors = {}
    for name, facts in header.items():
        first, last = facts["data_offsets"]
        body = data[8 + length + first : 8 + length + last]
        tensors[name] = facts["dtype"], tuple(facts["shape"]), body
    return tensors, metadata


def read(folder):
    """Every tensor of a model directory, as its index or its only file has them."""
    indexes = list(folder.glob("*.index.json"))
    if not indexes:
        (path,) = folder.glob("*.safetensors")
        return read_file(path)[0]
    (index,) = indexes
    content = json.loads(index.read_text())
    tensors, places = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        part = read_file(path)[0]
        assert not tensors.keys() & part.keys()
        tensors |= part
        places |= dict.fromkeys(part, path.name)
    assert content["weight_map"] == places
    assert content["metadata"]["total_size"] == sum(len(data) for *_, data in tensors.values())
    return tensors


def stored(tensors):
    """{name: (dtype, array)} as `read` gives it."""
    return {name: (dtype, a.shape, a.tobytes()) for name, (dtype, a) in tensors.items()}


def array(tensor):
    """A tensor that `read` gave, as an array."""
    dtype, shape, data = tensor
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def digest(folder):
    """Every file of a directory with its SHA-256."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def amax(*arrays):
    """The largest magnitude of them all."""
    return max(float(np.abs(a.astype(np.float32)).max(initial=0)) for a in arrays)


def quantized(x, shared, format="nvfp4", **options):
    """fp4kit.quantize of an array whose fusion group has the amax `shared`."""
    if format == "nvfp4":
        options = {"recipe": "te", "amax": shared, **options}
    return fp4kit.quantize(x, format, **options)
