# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a model calls the tensors of a checkpoint.

A model of transformers is asked by transformers' own rules, which it has for every type of model: a
tensor may have another name there, or several may become one (single experts, gate and up). Any
other model has the names of its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fp4kit.arrays.frameworks import loaded
from fp4kit.errors import OptionError

#: How transformers finds names; of version 5 and on.
_RULES = "transformers.core_model_loading"


@dataclass(frozen=True)
class Merged:
    """Stored tensors that become others together: some are joined, cut, turned or reordered.

    Attributes:
        first: name of the first tensor that they become.
        parts: stored names, each with the pattern of transformers' that it matched.
        rule: transformers' converter.
        model: the model that is loaded.
    """

    first: str
    parts: tuple[tuple[str, str], ...]
    rule: Any
    model: Any

    def convert(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that the stored ones become; of meta tensors, what they would be."""
        rule = deepcopy(self.rule)
        for name, pattern in self.parts:
            # Each is read when it is its turn.
            rule.add_tensor(self.first, name, pattern, lambda name=name: read(name))
        made = rule.convert(self.first, model=self.model, config=self.model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


@dataclass(frozen=True)
class Names:
    """What stored tensors are in a model.

    Attributes:
        single: stored name to the name in the model.
        merged: what several (or parts of one) become.
    """

    single: dict[str, str]
    merged: list[Merged]


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers' own classes, or made like them."""
    transformers = loaded("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def names_of(model: nn.Module, stored: Collection[str], slots: Mapping[str, Any]) -> Names:
    """Finds what every stored tensor is called in a model.

    Args:
        model: the model.
        stored: names of the checkpoint.
        slots: the tensors of the model by name.

    Raises:
        OptionError: if transformers is too old to say so.
    """
    if not is_of_transformers(model):
        return Names({name: name for name in stored}, [])
    import transformers

    if find_spec(_RULES) is None:
        raise OptionError(
            f"transformers {transformers.__version__} does not say what its models call "
            "stored tensors; fp4kit.torch.load takes models of transformers 5 and newer"
        )
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    known = dict.fromkeys(slots, True)
    single: dict[str, str] = {}
    merged: dict[str, list[tuple[str, str]]] = {}
    # Experts have to come in the order of their numbers.
    for name in sorted(stored, key=dot_natural_key):
        found, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if found not in known and name in known:
            found, pattern = rename_source_key(name, [], [], prefix, known)
        if pattern is None or found not in known:
            single[name] = found
        else:
            merged.setdefault(found, []).append((name, pattern))
    return Names(
        single,
        [
            Merged(first, tuple(parts), by_pattern[parts[0][1]], model)
            for first, parts in merged.items()
        ],
    )


def may_be_missing(model: nn.Module) -> Callable[[str], bool]:
    """Whether a tensor of a model need not be stored."""
    return _matcher(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def may_be_left(model: nn.Module) -> Callable[[str], bool]:
    """Whether a stored tensor has no place in a model, and that is right."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if is_of_transformers(model):
        # Older files hold what models compute by now.
        buffers = [name for name, _ in model.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            patterns.add(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            patterns.add(r"(^|\.)position_ids$")
    return _matcher(patterns)


def _matcher(patterns: Collection[str]) -> Callable[[str], bool]:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def kept_in_float32(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Whether a tensor stays float32 in a model of some type, as its class wants it."""
    if not is_of_transformers(model):
        return _matcher(())
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return _matcher(())
    compiled, _, _ = build_glob_alternation(list(plan))
    return lambda name: compiled.search(name) is not None


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of tensors that are to be the same as others, beside those that are already."""
    if not is_of_transformers(model):
        return {}
    found: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    return found
