# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's JSON says about its quantization, whichever tool wrote it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fp4kit.errors import FileFormatError

from .fusion import groups
from .layouts import comfy, compressed_tensors, modelopt

#: ModelOpt's names of algorithms to block formats; others are named in the error.
MODELOPT_FORMATS = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}
COMPRESSED_FORMATS = {text: name for name, text in compressed_tensors.FORMATS.items()}
COMPRESSED_FORMATS |= {"mxfp8-quantized": "mxfp8"}
MIXED = "mixed-precision"


@dataclass(frozen=True)
class QuantFacts:
    """What the JSON files say.

    Attributes:
        method: `quant_method`, or `comfy`.
        formats: block formats of the weights; empty if the method has none of ours.
        ignore: patterns of modules that are not quantized.
        activations: whether activations are quantized.
        kv_cache: how the KV cache is quantized, "" if it is not.
        faults: what engines would stumble over.
    """

    method: str
    formats: frozenset[str] = frozenset()
    ignore: tuple[str, ...] = ()
    activations: bool = False
    kv_cache: str = ""
    faults: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """The layout's name; that of the method."""
        return self.method


def _strings(value: object, what: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FileFormatError(f"{what} is not a list of names")
    return tuple(value)


def _compressed_groups(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = config.get("config_groups")
    if not isinstance(found, dict) or not found:
        raise FileFormatError("config.json: quantization_config has no config_groups")
    for name, group in found.items():
        if not isinstance(group, dict):
            raise FileFormatError(f"config.json: config_groups.{name} is no object")
        yield group


def _compressed_tensors(config: dict[str, Any]) -> QuantFacts:
    formats, activations, faults = set(), False, []
    for group in _compressed_groups(config):
        text = group.get("format") or config.get("format")
        if text not in COMPRESSED_FORMATS:
            raise FileFormatError(
                f"config.json: compressed-tensors format {text!r} is not read here; known are "
                f"{', '.join(sorted(COMPRESSED_FORMATS))}"
            )
        formats.add(COMPRESSED_FORMATS[text])
        activations |= group.get("input_activations") is not None
    if config.get("quantization_status") != "compressed":
        faults.append(
            "quantization_status is not 'compressed': transformers would leave the weights random"
        )
    scheme = config.get("kv_cache_scheme")
    return QuantFacts(
        compressed_tensors.METHOD,
        frozenset(formats),
        _strings(config.get("ignore"), "config.json: quantization_config.ignore"),
        activations,
        "" if scheme is None else str(scheme),
        tuple(faults),
    )


def _modelopt(config: dict[str, Any] | None, hf_quant: dict[str, Any] | None) -> QuantFacts:
    own = (hf_quant or {}).get("quantization") or {}
    if not isinstance(own, dict):
        raise FileFormatError("hf_quant_config.json: quantization is no object")
    given = config or {}
    algorithm = own.get("quant_algo") or given.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in MODELOPT_FORMATS:
        raise FileFormatError(
            f"hf_quant_config.json: ModelOpt algorithm {algorithm!r} is not read here; known are "
            f"{', '.join(MODELOPT_FORMATS)}"
        )
    faults = []
    if config is not None and hf_quant is not None:
        if given.get("quant_algo") != own.get("quant_algo"):
            faults.append(
                f"quant_algo is {given.get('quant_algo')!r}, in hf_quant_config.json "
                f"{own.get('quant_algo')!r}"
            )
        if set(given.get("ignore") or ()) != set(own.get("exclude_modules") or ()):
            faults.append("ignore and exclude_modules of hf_quant_config.json differ")
    if config is None:
        faults.append("has no quantization_config (only hf_quant_config.json has)")
    ignore = own.get("exclude_modules") if hf_quant is not None else given.get("ignore")
    return QuantFacts(
        modelopt.METHOD,
        frozenset((MODELOPT_FORMATS[algorithm.upper()],)),
        _strings(ignore, "hf_quant_config.json: exclude_modules"),
        algorithm.upper() == modelopt.WITH_ACTIVATIONS,
        str(own.get("kv_cache_quant_algo") or ""),
        tuple(faults),
    )


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
        return _modelopt(given, hf_quant)
    if method == compressed_tensors.METHOD:
        assert given is not None
        if _is_fp8(given):
            return QuantFacts("fp8")
        return _compressed_tensors(given)
    if given is not None:
        return QuantFacts(str(method or "an unnamed method"))
    layers = comfy.recorded_layers(headers, "header")
    if layers:
        other = sorted(set(layers.values()) - {"nvfp4"})
        if other:
            raise FileFormatError(
                f"header metadata: ComfyUI layer format {other[0]!r} is not read here; known is "
                "nvfp4"
            )
        return QuantFacts(comfy.METHOD, frozenset(("nvfp4",)))
    return None


def _is_fp8(config: dict[str, Any]) -> bool:
    """Whether compressed-tensors holds FP8 weights, which are decoded as views."""
    kinds = set()
    for group in _compressed_groups(config):
        weights = group.get("weights")
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        kind = weights.get("type") if isinstance(weights, dict) else None
        size = weights.get("group_size") if isinstance(weights, dict) else None
        kinds.add(bits == 8 and kind == "float" and size != 32)
    return kinds == {True}


# ------------------------------------------------------------------------------------------------
# Ignore lists
# ------------------------------------------------------------------------------------------------


def matches_ignore(module: str, patterns: Iterable[str], layout: str) -> bool:
    """Whether an engine would leave a module alone.

    Args:
        module: full name of a linear module.
        patterns: compressed-tensors: names, `re:` and a regular expression that matches from the
            start, or the class name `Linear`; ModelOpt: names of modules or of something that
            holds them, and globs.
        layout: whose rules apply.
    """
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], module):
                return True
        elif layout == modelopt.METHOD:
            if fnmatch.fnmatchcase(module, pattern) or module.startswith(f"{pattern}."):
                return True
        elif pattern in (module, "Linear"):
            return True
    return False


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
    listed = tuple(patterns)
    for module in quantized:
        if matches_ignore(module, listed, layout):
            yield f"{module} is quantized, but in the ignore list"
    ignored = []
    for module in kept:
        if matches_ignore(module, listed, layout):
            ignored.append(module)
        else:
            yield f"{module} is not quantized, but not in the ignore list"
    both = groups([f"{name}.weight" for name in (*quantized, *ignored)])
    left = {f"{name}.weight" for name in ignored}
    for members in both.values():
        if 0 < len(left.intersection(members)) < len(members):
            yield f"of the fused weights {', '.join(members)} only some are quantized"
