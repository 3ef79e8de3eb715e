# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's JSON says about its quantization, whichever tool wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fp4kit.checkpoint.layouts import comfy, compressed_tensors, modelopt
from fp4kit.checkpoint.layouts.ignore_list import IgnoreList
from fp4kit.checkpoint.models.fusion import groups
from fp4kit.errors import FileFormatError

from .config_facts import QuantFacts, comfy_facts, compressed_facts, modelopt_facts


def detect(
    config: dict[str, Any], hf_quant: dict[str, Any] | None, headers: Iterable[dict[str, str]]
) -> QuantFacts | None:
    """What the JSON files and headers of a checkpoint say about its quantization.

    Args:
        config: content of config.json, empty without one.
        hf_quant: content of hf_quant_config.json, or None.
        headers: header metadata of the weight files.

    Returns:
        The facts, None if it does not say that it is quantized. Methods that are not read here
        come with their name and nothing else.

    Raises:
        FileFormatError: if a method that is read here is used in a way that is not.
    """
    given = config.get("quantization_config")
    if given is None and isinstance(config.get("text_config"), dict):
        given = config["text_config"].get("quantization_config")
    if given is None:
        given = config.get("compression_config")
    if given is not None and not isinstance(given, dict):
        raise FileFormatError("config.json: quantization_config is no object")
    method = given.get("quant_method") if given is not None else None
    if method == modelopt.METHOD or (given is None and hf_quant is not None):
        return modelopt_facts(given, hf_quant)
    if method == compressed_tensors.METHOD:
        assert given is not None
        return compressed_facts(given)
    if given is not None:
        return QuantFacts(str(method or "an unnamed method")[:80])
    layers = comfy.recorded_layers(headers, "header")
    if layers:
        return comfy_facts(layers)
    return None


# ------------------------------------------------------------------------------------------------
# Ignore lists
# ------------------------------------------------------------------------------------------------


def matches_ignore(module: str, patterns: Iterable[str], layout: str) -> bool:
    """Whether an engine would leave a module alone.

    Args:
        module: full name of a linear module.
        patterns: names and patterns of the list.
        layout: whose rules apply.
    """
    return IgnoreList(patterns, layout).matches(module)


def check_ignore(
    quantized: Iterable[str], kept: Iterable[str], patterns: Iterable[str], layout: str
) -> Iterator[str]:
    """What is wrong with an ignore list: engines build quantized layers for all it does not name.

    Args:
        quantized: modules whose weights are quantized.
        kept: modules of linear weights that are not.
        patterns: the list.
        layout: whose rules apply.
    """
    listed = IgnoreList(patterns, layout)
    for module in quantized:
        if listed.matches(module):
            yield f"{module} is quantized, but in the ignore list"
    ignored = []
    for module in kept:
        if listed.matches(module):
            ignored.append(module)
        else:
            yield f"{module} is not quantized, but not in the ignore list"
    yield from listed.faults
    both = groups([f"{name}.weight" for name in (*quantized, *ignored)])
    left = {f"{name}.weight" for name in ignored}
    for members in both.values():
        if 0 < len(left.intersection(members)) < len(members):
            yield f"of the fused weights {', '.join(members)} only some are quantized"
