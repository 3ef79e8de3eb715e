# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The element type that config.json states, which readers compute in unless they are told one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp4kit.formats import DTYPES

from .checkpoint_plan import CheckpointPlan
from .rules import setting

#: Keys that state it; the older one is read by every version of transformers.
DTYPE_KEYS = ("dtype", "torch_dtype")
OLDER_KEY = DTYPE_KEYS[1]


def model_dtype(config: dict[str, Any]) -> str | None:
    """Element type of the model's weights by its config, None if that does not say."""
    for key in DTYPE_KEYS:
        value = setting(config, key)
        if value in DTYPES:
            return str(value)
    return None


def _restated(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config that states another type wherever it states one."""
    result = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = _restated(value, dtype)
        elif key in DTYPE_KEYS and value in DTYPES:
            value = dtype
        result[key] = value
    return result


def _keys(config: dict[str, Any]) -> Iterator[str]:
    """Keys that state a type, the outermost first."""
    yield from (key for key in DTYPE_KEYS if config.get(key) in DTYPES)
    for value in config.values():
        if isinstance(value, dict):
            yield from _keys(value)


def stating(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What of config.json changes so that readers compute in a type.

    Nested configs (`text_config`, `vision_config`) state it where they did. A config of
    transformers that states none does so from now on: else the first tensor of the weights would
    decide, which need not be one of those that are decoded.

    Returns:
        The keys of the outermost level whose values change, with the new values.
    """
    result = _restated(config, dtype)
    if "model_type" in config and not any(key in config for key in DTYPE_KEYS):
        result[next(_keys(config), OLDER_KEY)] = dtype
    return {key: value for key, value in result.items() if config.get(key) != value}


def state_decoded_dtype(plan: CheckpointPlan) -> list[str]:
    """Lets config.json state the type that readers decode weights to, so that a model can compute.

    Returns:
        A line about it if the model had another type.
    """
    checkpoint = plan.source.checkpoint
    decoded = None if plan.layout is None else plan.layout.decoded_dtype
    if decoded is None or plan.plain:
        return []
    floats = (tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype in DTYPES)
    # Without a word in config.json, transformers takes the type of the first float tensor.
    dtype = model_dtype(checkpoint.config) or next(floats, decoded)
    if dtype == decoded:
        return []
    plan.config |= stating(checkpoint.config, decoded)
    return [
        f"the model is {dtype}, but transformers decodes this layout to {decoded} only: "
        f"config.json of the output says {decoded}"
    ]
