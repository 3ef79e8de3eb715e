# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models in GGUF that llama.cpp loads, and what it computes with them."""

from __future__ import annotations

import ctypes

import gguf
import llama_cpp
import numpy as np

from gguf_models import EMBD, EXPERTS, FF, HEADS, VOCAB, stored_as, weights

CONTEXT = 64
_QUIET = llama_cpp.llama_log_callback(lambda *_: None)


def _bert(seed):
    found = weights(layers=2, seed=seed, scale=0.08)
    rng = np.random.default_rng(seed + 1)
    one, zero = np.ones(EMBD, np.float32), np.zeros(EMBD, np.float32)
    made = {
        "token_embd.weight": found["token_embd.weight"],
        "position_embd.weight": rng.standard_normal((CONTEXT, EMBD)).astype("f4") * 0.1,
        "token_types.weight": rng.standard_normal((2, EMBD)).astype("f4") * 0.1,
        "token_embd_norm.weight": one,
        "token_embd_norm.bias": zero,
    }
    for layer in range(2):
        at = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            made[f"{at}{name}.weight"] = found[f"{at}{name}.weight"]
            made[f"{at}{name}.bias"] = rng.standard_normal(EMBD).astype("f4") * 0.1
        made[f"{at}ffn_up.weight"] = found[f"{at}ffn_up.weight"]
        made[f"{at}ffn_up.bias"] = rng.standard_normal(FF).astype("f4") * 0.1
        made[f"{at}ffn_down.weight"] = found[f"{at}ffn_down.weight"]
        made[f"{at}ffn_down.bias"] = rng.standard_normal(EMBD).astype("f4") * 0.1
        for norm in ("attn_output_norm", "layer_output_norm"):
            made[f"{at}{norm}.weight"], made[f"{at}{norm}.bias"] = one, zero
    return made


def tensors(architecture, seed=0, *, experts=0):
    """Weights of a tiny model of an architecture, large enough that its output is not flat."""
    if architecture == "bert":
        return _bert(seed)
    experts = EXPERTS if "moe" in architecture else experts
    found = weights(layers=2, experts=experts, seed=seed, scale=0.08)
    found["token_embd.weight"] *= 10
    if architecture.startswith("qwen3"):
        for layer in range(2):
            for name in ("attn_q_norm", "attn_k_norm"):
                found[f"blk.{layer}.{name}.weight"] = np.ones(EMBD // HEADS, np.float32)
    if architecture == "qwen2":
        rng = np.random.default_rng(seed + 1)
        for layer in range(2):
            for name in ("attn_q", "attn_k", "attn_v"):
                found[f"blk.{layer}.{name}.bias"] = rng.standard_normal(EMBD).astype("f4") * 0.1
    if architecture in ("gemma2", "gemma3"):
        for layer in range(2):
            for name in ("post_attention_norm", "post_ffw_norm"):
                found[f"blk.{layer}.{name}.weight"] = np.ones(EMBD, np.float32)
            if architecture == "gemma3":
                for name in ("attn_q_norm", "attn_k_norm"):
                    found[f"blk.{layer}.{name}.weight"] = np.ones(EMBD // HEADS, np.float32)
        found.pop("output.weight")
    return found


def write(path, architecture, found, kind=gguf.GGMLQuantizationType.F32, *, shards=1):
    """Writes a model with all that llama.cpp must know."""
    split = len(found) // shards + 1 if shards > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(2)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(EMBD // HEADS)
    writer.add_key_length(EMBD // HEADS)
    writer.add_value_length(EMBD // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if any("_exps" in name for name in found):
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(FF)
    if architecture == "bert":
        writer.add_layer_norm_eps(1e-5)
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        writer.add_token_type_count(2)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(CONTEXT)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for name, array in found.items():
        data, stored = stored_as(kind, array)
        if name == "token_embd.weight" or (array.ndim == 2 and "blk" not in name):
            data, stored = array, gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name(f"{path.stem}-00001-of-{shards:05d}.gguf") if shards > 1 else path


class Engine:
    """A model in llama.cpp. Use it as a context manager."""

    def __init__(self, path, *, embeddings=False, context=CONTEXT):
        llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._embeddings = embeddings
        settings = llama_cpp.llama_model_default_params()
        # Its kernels for AMX crash with Q8_0 of rows that are no multiple of 256.
        settings.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx = asked.n_batch = asked.n_ubatch = context
        asked.n_threads = asked.n_threads_batch = 2
        asked.embeddings = embeddings
        # A cache in 16 bits would add an error that is not that of the weights.
        asked.type_k = asked.type_v = 0
        asked.flash_attn_type = 0
        self._context = llama_cpp.llama_init_from_model(self._model, asked)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not run {path}")

    def run(self, tokens):
        """Logits of every token, or the embedding of all."""
        memory = llama_cpp.llama_get_memory(self._context)
        if memory:
            llama_cpp.llama_memory_clear(memory, True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at] = int(token), at
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            batch.logits[at] = 1
        assert llama_cpp.llama_decode(self._context, batch) == 0
        if self._embeddings:
            size = llama_cpp.llama_model_n_embd(self._model)
            found = llama_cpp.llama_get_embeddings_seq(self._context, 0)
            result = np.ctypeslib.as_array(found, (size,)).copy()
        else:
            vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
            found = llama_cpp.llama_get_logits(self._context)
            result = np.ctypeslib.as_array(found, (len(tokens), vocab)).copy()
        llama_cpp.llama_batch_free(batch)
        return result

    def __enter__(self):
        return self

    def __exit__(self, *_):
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def logits(path, tokens, **choices):
    """What llama.cpp computes with a file."""
    with Engine(path, **choices) as engine:
        return engine.run(tokens)


def log_softmax(logits):
    """Logarithms of probabilities, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def divergence(reference, found):
    """KL divergence of logits from others, in nats: the mean over tokens."""
    p, q = log_softmax(reference), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
