# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF models written by the gguf package, and its view of what came out."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

EMBD, FF, HEADS, VOCAB, EXPERTS = 128, 192, 4, 64, 4


def weights(architecture="llama", *, layers=2, experts=0, seed=0, scale=0.02):
    """float32 weights of a tiny model by their names in files, as its architecture has them."""
    rng = np.random.default_rng(seed)

    def matrix(*shape):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    found = {"token_embd.weight": matrix(VOCAB, EMBD), "output_norm.weight": np.ones(EMBD, "f4")}
    for layer in range(layers):
        at = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            found[f"{at}{name}.weight"] = matrix(EMBD, EMBD)
        found[f"{at}attn_norm.weight"] = np.ones(EMBD, "f4")
        found[f"{at}ffn_norm.weight"] = np.ones(EMBD, "f4")
        lead, suffix = ((experts,), "_exps") if experts else ((), "")
        if experts:
            found[f"{at}ffn_gate_inp.weight"] = matrix(experts, EMBD)
        for name in ("ffn_gate", "ffn_up"):
            found[f"{at}{name}{suffix}.weight"] = matrix(*lead, FF, EMBD)
        found[f"{at}ffn_down{suffix}.weight"] = matrix(*lead, EMBD, FF)
    found["output.weight"] = matrix(VOCAB, EMBD)
    return found


def stored_as(kind, array):
    """The bytes of a float32 array in an element type of ggml."""
    if array.ndim < 2 or array.shape[-1] % 32:
        return array, Kind.F32
    return gguf.quantize(array, kind), kind


def write_model(path, found, architecture="llama", *, kind=Kind.BF16, kinds=(), shards=1, more=()):
    """Writes a model with metadata of every type; `kinds` are those of single tensors."""
    split = len(found) // shards + 1 if shards > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(64)
    writer.add_embedding_length(EMBD)
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}é" for n in range(VOCAB)])
    writer.add_array("tokenizer.ggml.scores", [float(n) for n in range(VOCAB)])
    writer.add_bool("some.flag", True)
    for key, value, value_type in more:
        writer.add_key_value(key, value, value_type)
    for name, array in found.items():
        data, stored = stored_as(dict(kinds).get(name, kind), array)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if shards == 1:
        return path
    return path.with_name(f"{path.stem}-00001-of-{shards:05d}.gguf")


def write_blocks(path, name, blocks, kind, more=()):
    """A file with one tensor of rows of blocks, and plain ones."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, blocks, raw_dtype=kind)
    for other, array in dict(more).items():
        writer.add_tensor(other, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path):
    """The tensors of a file by name as the gguf package reads them."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def fields(path):
    """The metadata of a file by key, as the gguf package reads it."""
    reader = gguf.GGUFReader(path)
    return {
        key: (field.types, field.contents())
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }


def values(tensor):
    """float32 values of a tensor, decoded by the gguf package, in its shape."""
    shape = tuple(int(size) for size in tensor.shape[::-1])
    return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)


def every_block(layout):
    """A row of one block for each scale byte, with every code under every scale of it."""
    rng, size = np.random.default_rng(0), layout.format.block_size
    blocks = np.empty((256, layout.type.nbytes), np.uint8)
    for row in range(256):
        for place in range(layout.scales):
            blocks[row, place] = (row + place) % 256
            codes = np.concatenate([rng.permutation(16) for _ in range(size // 16)])
            first = layout.scales + place * layout.half
            blocks[row, first : first + layout.half] = (
                codes[: layout.half] | codes[layout.half :] << 4
            )
    return blocks


#: Names of a dense model in its checkpoint and in GGUF.
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name):
    """What a weight of a dense model is called in GGUF."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    inside, kind = name.rsplit(".", 1)
    _, _, layer, module = inside.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.{kind}"


def from_checkpoint(path, arrays, architecture):
    """A model in GGUF from the arrays of its checkpoint, of an architecture that turns no rows."""
    found = {gguf_name(name): np.asarray(array, np.float32) for name, array in arrays.items()}
    return write_model(path, found, architecture)
