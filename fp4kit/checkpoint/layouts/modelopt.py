# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of NVIDIA's ModelOpt: read by TensorRT-LLM, vLLM and SGLang."""

from __future__ import annotations

from typing import Any

from fp4kit.io.storage import Storage

from .base import FormatGroup, Layout, Summary

METHOD = "modelopt"
#: Engines choose their reader by the producer's name; the version is that of the form we write.
PRODUCER = {"name": METHOD, "version": "0.47.0"}
WEIGHTS_ONLY = "W4A16_NVFP4"
WITH_ACTIVATIONS = "NVFP4"
#: AWQ: readers multiply the input of each module by its `pre_quant_scale`.
PRE_SCALED = "NVFP4_AWQ"
#: Every module has an algorithm of its own.
MIXED = "MIXED_PRECISION"
#: Algorithms whose readers need an activation scale of each module.
ACTIVATED = (WITH_ACTIVATIONS, PRE_SCALED)
GROUP_SIZE = 16
FP8 = "FP8"


def _algorithm(summary: Summary, group: FormatGroup | None = None) -> str:
    """The algorithm of a whole checkpoint, or of a group of its weights."""
    if summary.mixed and group is None:
        return MIXED
    granularity = summary.granularity if group is None else group.granularity
    if granularity is not None:
        return FP8
    if summary.pre_scaled:
        return PRE_SCALED
    return WEIGHTS_ONLY if summary.activations is None else WITH_ACTIVATIONS


def _group_size(granularity: str | None) -> dict[str, int]:
    """What is said of the size of blocks, nothing for FP8."""
    return {} if granularity else {"group_size": GROUP_SIZE}


def _layers(summary: Summary) -> dict[str, Any]:
    """What is said of every module where they differ."""
    layers = {
        module: {"quant_algo": _algorithm(summary, group), **_group_size(group.granularity)}
        for group in summary.mixed
        for module in group.modules
    }
    return {"quantized_layers": dict(sorted(layers.items()))} if layers else {}


def _group(summary: Summary, group: FormatGroup) -> dict[str, Any]:
    """One of config_groups."""
    bits = 4 if group.granularity is None else 8
    arguments = {"dynamic": False, "num_bits": bits, "type": "float"}
    arguments |= _group_size(group.granularity)
    said: dict[str, Any] = {}
    if summary.activations is not None:
        said["input_activations"] = dict(arguments)
    targets = sorted(group.modules) or list(group.targets)
    return said | {"weights": dict(arguments), **_awq(summary), "targets": targets}


def _excluded(summary: Summary) -> list[str]:
    """Modules that are not quantized; ModelOpt names embeddings as well."""
    return sorted({*summary.ignore, *summary.embeddings})


def _awq(summary: Summary) -> dict[str, bool]:
    """What ModelOpt adds for AWQ."""
    return {"has_zero_point": False, "pre_quant_scale": True} if summary.pre_scaled else {}


class ModelOpt(Layout):
    """`X.weight` U8, `X.weight_scale`, `X.weight_scale_2` (decode direction)."""

    name = METHOD
    formats = ("nvfp4", "fp8")
    granularities = ("tensor",)
    fp8_inputs = True
    storage = Storage(
        METHOD,
        packed_suffix="",
        second_suffix="_scale_2",
        second_shape=(),
        keeps="decode_scale",
    )
    recipe = METHOD
    activation_suffix = ".input_scale"
    activation_shape = ()
    pre_scale_suffix = ".pre_quant_scale"
    matches_inside = True  # vLLM does
    in_hf_quant_config = True
    mixes = True

    def tail_pattern(self, tail: str) -> str:
        """A glob: ModelOpt has no regular expressions."""
        return f"*{tail}"

    def quantization_config(self, summary: Summary) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        groups = summary.mixed or (
            FormatGroup(summary.format, summary.granularity, (), ("Linear",)),
        )
        return {
            "config_groups": {
                f"group_{number}": _group(summary, group) for number, group in enumerate(groups)
            },
            "ignore": _excluded(summary),
            "quant_algo": _algorithm(summary),
            **_layers(summary),
            "producer": dict(PRODUCER),
            "quant_method": METHOD,
        }

    def hf_quant_config(self, summary: Summary) -> dict[str, Any]:
        """The content of hf_quant_config.json."""
        return {
            "producer": dict(PRODUCER),
            "quantization": {
                "quant_algo": _algorithm(summary),
                "kv_cache_quant_algo": None,
                **({} if summary.mixed else _group_size(summary.granularity)),
                **_layers(summary),
                **_awq(summary),
                "exclude_modules": _excluded(summary),
            },
        }
