# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Activation scales of W4A4 checkpoints: from a user's calibration, or the published constant."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fp4kit.checkpoint.models.fusion import fusion_group
from fp4kit.checkpoint.options import UNCALIBRATED, CheckpointOptions
from fp4kit.checkpoint.read.directory import listed, read_json
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.formats import SECOND_LEVEL_RANGE

#: The amax whose scale is 1.0 in both directions.
UNCALIBRATED_AMAX = float(SECOND_LEVEL_RANGE)


def _amax(module: str, value: object, path: object) -> float:
    number = value.get("input_amax") if isinstance(value, dict) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise FileFormatError(f"{path}: activation amax of {module!r} is no number")
    if not math.isfinite(number) or number < 0:
        raise FileFormatError(
            f"{path}: activation amax of {module!r} is {number}; it must be finite and not negative"
        )
    return float(number)


def activation_amaxes(options: CheckpointOptions, modules: Iterable[str]) -> dict[str, float]:
    """The activation amax of each module, modules that an engine fuses sharing the largest.

    Args:
        options: weights only, `uncalibrated`, or a JSON file `{module: amax}` (or
            `{module: {"input_amax": amax}}`).
        modules: the modules whose weights are quantized.

    Returns:
        Module to amax; empty for weights only.
    """
    wanted = list(modules)
    if options.activations is None:
        return {}
    if options.activations == UNCALIBRATED:
        return dict.fromkeys(wanted, UNCALIBRATED_AMAX)
    (path,) = options.files
    given = {name: _amax(name, value, path) for name, value in read_json(path).items()}
    missing = [module for module in wanted if module not in given]
    if missing:
        raise OptionError(
            f"{path}: has no activation amax for {len(missing)} of {len(wanted)} modules: "
            f"{listed(missing)}; add them, or exclude these modules"
        )
    shared: dict[str, float] = {}
    for module in wanted:
        key = fusion_group(f"{module}.weight") or module
        shared[key] = max(shared.get(key, 0.0), given[module])
    return {module: shared[fusion_group(f"{module}.weight") or module] for module in wanted}
