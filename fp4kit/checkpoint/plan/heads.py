# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Output heads that a checkpoint does not store, as they share the weight of the embedding.

An engine builds them all the same, so that they must stand in the ignore list. The names here are
for model types that the table of :mod:`fp4kit.checkpoint.models.architectures` does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .rules import setting

#: What a tied head is called, by a module that is stored before it.
BY_NEIGHBOUR = {
    "cls.predictions.transform": "cls.predictions.decoder",
    "lm_head.dense": "lm_head.decoder",
    "predictions.dense": "predictions.decoder",
    "vocab_transform": "vocab_projector",
}
#: The same by model type, where nothing is stored before it.
BY_TYPE = dict.fromkeys(("whisper", "moonshine", "moonshine_streaming"), "proj_out")
USUAL = "lm_head"
#: Ends of names of architectures that have such a head; most tie it unless config.json says no.
ARCHITECTURES = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "LMHeadModel")


def may_be_tied(config: dict[str, Any]) -> bool:
    """Whether a head may share the weight of the embedding: not if all that is said is no."""
    said = list(_tied(config))
    return not said or any(said)


def _tied(config: dict[str, Any]) -> Iterator[bool]:
    """What a config.json says about tying, for the whole and for its parts."""
    if config.get("tie_word_embeddings") is not None:
        yield bool(config["tie_word_embeddings"])
    for value in config.values():
        if isinstance(value, dict):
            yield from _tied(value)


def absent_head(names: Iterable[str], config: dict[str, Any]) -> str | None:
    """The output head that an engine ties to the embedding, None if there is none or it is stored.

    Args:
        names: every tensor of the checkpoint.
        config: content of config.json.
    """
    tied = setting(config, "tie_word_embeddings")
    said = config.get("architectures")
    architectures = said if isinstance(said, list) else []
    built = any(str(name).endswith(ARCHITECTURES) for name in architectures)
    if tied is False or not (tied or built):
        return None
    stored = list(names)
    head = BY_TYPE.get(str(config.get("model_type")), USUAL)
    for neighbour, name in BY_NEIGHBOUR.items():
        if any(tensor.startswith(f"{neighbour}.") for tensor in stored):
            head = name
    found = any(tensor.removesuffix(".weight").endswith(head) for tensor in stored)
    return None if found else head
