# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of NVIDIA's ModelOpt: read by TensorRT-LLM, vLLM and SGLang."""

from __future__ import annotations

from typing import Any

from fp4kit.io.storage import Storage

from .base import STATIC, Layout, Summary

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


def _algorithm(summary: Summary) -> str:
    if summary.granularity is not None:
        return FP8
    if summary.pre_scaled:
        return PRE_SCALED
    return WEIGHTS_ONLY if summary.activations is None else WITH_ACTIVATIONS


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
    fp8_inputs = (STATIC,)
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

    def tail_pattern(self, tail: str) -> str:
        """A glob: ModelOpt has no regular expressions."""
        return f"*{tail}"

    def quantization_config(self, summary: Summary) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        arguments: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
        if summary.granularity is None:
            arguments |= {"num_bits": 4, "group_size": GROUP_SIZE}
        group: dict[str, Any] = {}
        if summary.activations is not None:
            group["input_activations"] = dict(arguments)
        group |= {"weights": dict(arguments), **_awq(summary), "targets": ["Linear"]}
        return {
            "config_groups": {"group_0": group},
            "ignore": _excluded(summary),
            "quant_algo": _algorithm(summary),
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
                **({} if summary.granularity else {"group_size": GROUP_SIZE}),
                **_awq(summary),
                "exclude_modules": _excluded(summary),
            },
        }
