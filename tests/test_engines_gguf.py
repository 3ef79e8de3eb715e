# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp runs what fp4kit writes: `make engines`.

What the engine computes with a file is compared with what it computes with the same weights decoded
to float32. The two differ by the 8 bits that it rounds activations to, and that error is measured:
it has it as well with the same weights in Q8_0.
"""

import gguf
import numpy as np
import pytest

import fp4kit

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import engine_models as models  # noqa: E402 - it imports llama_cpp
from fp4kit.io import quantize_gguf  # noqa: E402
from gguf_models import opened, values  # noqa: E402

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "bert")
#: Whose feed-forward weights have block scales alone.
ONE_LEVEL = ("qwen2", "gemma2", "gemma3", "bert")
TOKENS = np.random.default_rng(5).integers(0, models.VOCAB, 48)
CHOICES = {
    "nvfp4": {"scheme": "nvfp4"},
    "sweep": {"scheme": "nvfp4", "scale_search": "sweep"},
    "four_over_six": {"scheme": "nvfp4", "scale_search": "four_over_six"},
    "mxfp4": {"scheme": "mxfp4"},
}


def run(path, architecture):
    return models.logits(path, TOKENS, embeddings=architecture == "bert")


def distances(found, expected):
    """Relative distance of each token: one whose experts changed does not hide the others."""
    found, expected = np.atleast_2d(found), np.atleast_2d(expected)
    return np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)


def made(tmp_path, architecture, choice):
    """A model, the file that fp4kit makes of it, and that file decoded again."""
    source = tmp_path / "m.gguf"
    if not source.exists():
        models.write(source, architecture, models.tensors(architecture))
    target, back = tmp_path / "q.gguf", tmp_path / "back.gguf"
    fp4kit.quantize_file(source, target, force=True, **CHOICES[choice])
    fp4kit.dequantize_file(target, back, "float32", force=True)
    return source, target, back


def in_q8_0(path, architecture, tmp_path):
    """The weights of a file in Q8_0."""
    found = {name: np.array(values(tensor)) for name, tensor in opened(path).items()}
    return models.write(tmp_path / "q8.gguf", architecture, found, gguf.GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_computes_with_the_decoded_weights(architecture, choice, tmp_path):
    source, target, back = made(tmp_path, architecture, choice)
    expected = run(back, architecture)
    own = np.median(distances(run(in_q8_0(back, architecture, tmp_path), architecture), expected))
    error = np.median(distances(run(target, architecture), expected))
    assert error < own, "more than the engine's own 8 bits"
    assert own < 0.02
    # The weights themselves changed by far more: the comparison is sharp enough to see a fault.
    assert np.median(distances(run(source, architecture), expected)) > 5 * error


@pytest.mark.parametrize("architecture", ONE_LEVEL)
def test_a_scale_where_none_is_applied_is_lost(architecture, tmp_path, monkeypatch):
    """Why the table is needed: llama.cpp loads the file, and computes without the scales."""
    monkeypatch.setattr(quantize_gguf, "why_one_level", lambda *_: "")
    _, target, back = made(tmp_path, architecture, "nvfp4")
    error = np.median(distances(run(target, architecture), run(back, architecture)))
    assert not error < 0.1, "NaN as well: the weights are thousands of times too large"


def test_a_search_makes_the_model_better(tmp_path):
    source, _, _ = made(tmp_path, "llama", "nvfp4")
    expected, errors = run(source, "llama"), {}
    for choice in CHOICES:
        made(tmp_path, "llama", choice)
        errors[choice] = np.median(distances(run(tmp_path / "q.gguf", "llama"), expected))
    assert errors["sweep"] < errors["four_over_six"] < errors["nvfp4"] < errors["mxfp4"]


def test_a_model_in_shards(tmp_path):
    whole = models.write(tmp_path / "m.gguf", "llama", models.tensors("llama"))
    first = models.write(tmp_path / "p.gguf", "llama", models.tensors("llama"), shards=3)
    for path in (whole, first):
        fp4kit.quantize_file(path)
    shards = tmp_path / "p-nvfp4-00001-of-00003.gguf"
    assert np.array_equal(run(shards, "llama"), run(tmp_path / "m-nvfp4.gguf", "llama"))


def test_embedding_and_output_in_blocks(tmp_path):
    source = models.write(tmp_path / "m.gguf", "llama", models.tensors("llama"))
    target, back = tmp_path / "q.gguf", tmp_path / "back.gguf"
    fp4kit.quantize_file(source, target, include=["output.weight", "token_embd.weight"])
    fp4kit.dequantize_file(target, back)
    error = np.median(distances(run(target, "llama"), run(back, "llama")))
    assert 0 < error < 0.02
