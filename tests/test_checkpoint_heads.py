# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tied output heads that no checkpoint stores but every engine builds."""

import pytest

from fp4kit.checkpoint.plan.ignored import absent_head

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize(
    ("names", "config", "head"),
    [
        (["model.embed_tokens.weight"], LLAMA, "lm_head"),
        (["model.embed_tokens.weight"], LLAMA | {"tie_word_embeddings": True}, "lm_head"),
        (["model.embed_tokens.weight"], LLAMA | {"tie_word_embeddings": False}, None),
        (["model.embed_tokens.weight", "lm_head.weight"], LLAMA, None),
        (["model.x.weight"], {"text_config": {"tie_word_embeddings": True}}, "lm_head"),
        (["x.weight"], {}, None),
        (["x.weight"], {"architectures": ["BertModel"]}, None),
        (
            ["cls.predictions.transform.dense.weight"],
            {"architectures": ["BertForMaskedLM"]},
            "cls.predictions.decoder",
        ),
        (["lm_head.dense.weight"], {"architectures": ["RobertaForMaskedLM"]}, "lm_head.decoder"),
        (
            ["vocab_transform.weight"],
            {"architectures": ["DistilBertForMaskedLM"]},
            "vocab_projector",
        ),
        (
            ["model.decoder.embed_tokens.weight"],
            {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
            "proj_out",
        ),
    ],
)
def test_the_head_that_is_built_but_not_stored(names, config, head):
    assert absent_head(names, config) == head
