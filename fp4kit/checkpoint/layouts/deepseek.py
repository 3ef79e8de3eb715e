# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's layout of FP8 in blocks, `quant_method` fp8: vLLM, SGLang and transformers read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4kit.checkpoint.options import DYNAMIC
from fp4kit.formats import GRID_BLOCK
from fp4kit.io.read.source import Source
from fp4kit.io.storage import QuantizedEntry, Storage

from .base import Layout, Summary

#: What its readers are called in config.json.
METHOD = "fp8"


class DeepSeek(Layout):
    """`X.weight` F8_E4M3, `X.weight_scale_inv` F32: it multiplies, despite the name."""

    name = "deepseek"
    formats = ("fp8",)
    granularities = ("block",)
    storage = Storage("deepseek", packed_suffix="", scale_suffix="_scale_inv")
    fp8_inputs = (None, DYNAMIC)  # both are the latter
    recipe = "deepseek"
    activation_suffix = ".input_scale"
    activation_shape = ()
    by_transformers = True
    read_as_views = True
    diffusion = False

    def find(
        self, source: Source, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> list[QuantizedEntry]:
        """No weight in a format with scales of blocks: FP8 is read as views."""
        return []

    def quantization_config(self, summary: Summary) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        return {
            "quant_method": METHOD,
            "fmt": "e4m3",
            # Inputs are quantized in groups of 128 as they come.
            "activation_scheme": DYNAMIC,
            "weight_block_size": [GRID_BLOCK, GRID_BLOCK],
            "modules_to_not_convert": list(summary.ignore),
        }
