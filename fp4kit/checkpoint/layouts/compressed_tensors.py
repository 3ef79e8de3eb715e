# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of compressed-tensors: read by vLLM, SGLang and transformers."""

from __future__ import annotations

import re
from typing import Any

from fp4kit.formats import GRID_BLOCK
from fp4kit.io.storage import Storage

from .base import FormatGroup, Layout, Summary

METHOD = "compressed-tensors"
#: Block format to the reader's name of it, and back.
FORMATS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "fp8": "float-quantized",
}
#: Its name of several formats together.
MIXED = "mixed-precision"
#: Version of the reader whose schema is written.
VERSION = "0.20.0"


def _fp8_arguments(granularity: str | None) -> dict[str, Any]:
    """The quantization arguments of weights in FP8."""
    block = {"block_structure": [GRID_BLOCK, GRID_BLOCK]} if granularity == "block" else {}
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": granularity,
        "symmetric": True,
        "dynamic": False,
        **block,
    }


def _arguments(format: str, dynamic: bool | str) -> dict[str, Any]:
    """The quantization arguments of weights or activations."""
    two_level = format == "nvfp4"
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if two_level else "group",
        "group_size": 16 if two_level else 32,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.float8_e4m3fn" if two_level else "torch.uint8",
    }


def _group(group: FormatGroup, activated: bool) -> dict[str, Any]:
    """One of config_groups."""
    activations, weights = None, _arguments(group.format, False)
    if group.granularity is not None:
        weights = _fp8_arguments(group.granularity)
    elif activated:
        # The second level of an input is stored, its block scales are made on the fly.
        activations = _arguments(group.format, "local" if group.format == "nvfp4" else True)
    return {
        "targets": list(group.targets),
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": FORMATS[group.format],
    }


class CompressedTensors(Layout):
    """`X.weight_packed`, `X.weight_scale`, `X.weight_global_scale` (encode direction)."""

    name = METHOD
    formats = tuple(FORMATS)
    granularities = ("channel", "tensor", "block")
    storage = Storage(METHOD)
    recipe = METHOD
    activation_suffix = ".input_global_scale"
    activation_shape = (1,)
    by_transformers = True
    decoded_dtype = "bfloat16"
    in_params = True
    diffusion = False
    mixes = True

    def tail_pattern(self, tail: str) -> str:
        """A regular expression, anchored at both ends."""
        return rf"re:(?:.*\.)?{re.escape(tail)}$".replace(r"\*", r"\d+")

    def quantization_config(self, summary: Summary) -> dict[str, Any]:
        """The `quantization_config` of config.json; the reader refuses unknown keys."""
        groups = summary.mixed or (
            FormatGroup(summary.format, summary.granularity, (), ("Linear",)),
        )
        return {
            "quant_method": METHOD,
            "format": MIXED if summary.mixed else FORMATS[summary.format],
            # Without it transformers leaves the weights as it initialized them.
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{number}": _group(group, summary.activations is not None)
                for number, group in enumerate(groups)
            },
            "ignore": list(summary.ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "version": VERSION,
        }
