# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp runs checkpoints that `convert --layout gguf` has put into GGUF: `make engines`.

Its logits are compared with those of the template with the weights that fp4kit decodes from the
checkpoint itself, in float32: names, order of rows, experts and second levels all count.
"""

import numpy as np
import pytest

import fp4kit
from fp4kit.errors import OptionError

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import engine_models as models  # noqa: E402 - it imports llama_cpp
from gguf_checkpoints import EXPERT, checkpoint_of, expected  # noqa: E402
from gguf_models import EMBD, HEADS, opened, values  # noqa: E402

TOKENS = np.random.default_rng(6).integers(0, models.VOCAB, 48)
#: The architecture of each model type, and what llama.cpp has no second level for there.
MODEL_TYPES = {
    "llama": ("llama", ()),
    "mistral": ("llama", ()),
    "mixtral": ("llama", ()),
    "qwen3": ("qwen3", ()),
    "qwen3_moe": ("qwen3moe", ()),
    "qwen2": ("qwen2", ("re:.*mlp.*",)),
    "gemma2": ("gemma2", ("re:.*mlp.*",)),
    "gemma3_text": ("gemma3", ("re:.*mlp.*",)),
}


def prepare(tmp_path, model_type, form, layout, exclude):
    """A checkpoint in FP4, and the template of the same model."""
    architecture, _ = MODEL_TYPES[model_type]
    found = models.tensors(architecture, experts=models.EXPERTS if model_type in EXPERT else 0)
    stored, template = checkpoint_of(found, model_type)
    config = {
        "model_type": model_type, "num_attention_heads": HEADS, "hidden_size": EMBD,
        "num_hidden_layers": 2, "architectures": [f"{model_type}ForCausalLM"],
        "tie_word_embeddings": "output.weight" not in template, "dtype": "float32",
    }  # fmt: skip
    fp4kit.save(tmp_path / "hf", stored, config=config)
    fp4kit.quantize_checkpoint(
        tmp_path / "hf", tmp_path / "q", form, layout=layout, exclude=exclude
    )
    return tmp_path / "q", models.write(tmp_path / "t.gguf", architecture, template)


def with_decoded_weights(checkpoint, template, model_type, path):
    """The template with the weights that fp4kit decodes from the checkpoint."""
    found, decoded = {}, 0
    for name, tensor in opened(template).items():
        found[name] = np.array(values(tensor))
        if name.startswith("blk.") and found[name].ndim > 1 and "gate_inp" not in name:
            array, _ = expected(checkpoint, name, model_type)
            if array is not None:
                found[name], decoded = array, decoded + 1
    return models.write(path, MODEL_TYPES[model_type][0], found), decoded


def distance(found, expected):
    """The median over tokens of the relative distance."""
    return np.median(np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1))


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_are_those_of_the_decoded_weights(model_type, layout, tmp_path):
    _, exclude = MODEL_TYPES[model_type]
    checkpoint, template = prepare(tmp_path, model_type, "nvfp4", layout, exclude)
    target = tmp_path / "out.gguf"
    fp4kit.convert_checkpoint(checkpoint, target, "gguf", template=template)
    plain = tmp_path / "plain.gguf"
    plain, decoded = with_decoded_weights(checkpoint, template, model_type, plain)
    assert decoded == (8 if exclude else 14)
    assert sum(name.endswith(".scale") for name in opened(target)) == decoded
    expected = models.logits(plain, TOKENS)
    error = distance(models.logits(target, TOKENS), expected)
    # The 8 bits that the engine rounds activations to, and less than what quantizing changed.
    assert 0 < error < 0.02
    assert distance(models.logits(template, TOKENS), expected) > 3 * error


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "gemma3_text"])
def test_feed_forward_weights_without_a_second_level(model_type, tmp_path):
    """What llama.cpp has no second level for: two levels are refused, MXFP4 runs."""
    target = tmp_path / "out.gguf"
    checkpoint, template = prepare(tmp_path, model_type, "nvfp4", "compressed-tensors", ())
    with pytest.raises(OptionError, match=r"llama.cpp applies no .scale of ffn_gate in arch"):
        fp4kit.convert_checkpoint(checkpoint, target, "gguf", template=template)
    (tmp_path / "mx").mkdir()
    checkpoint, template = prepare(tmp_path / "mx", model_type, "mxfp4", "compressed-tensors", ())
    fp4kit.convert_checkpoint(checkpoint, target, "gguf", template=template)
    plain = tmp_path / "plain.gguf"
    plain, decoded = with_decoded_weights(checkpoint, template, model_type, plain)
    assert decoded == 14
    assert 0 < distance(models.logits(target, TOKENS), models.logits(plain, TOKENS)) < 0.02
