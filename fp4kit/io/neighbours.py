# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors beside quantized weights that are not understood: named, and never passed over.

A tensor beside a quantized weight may change what that weight means, as zero points, column orders,
low-rank corrections, rotations and smoothing factors do; only what is known not to is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

WEIGHT = ".weight"
#: Tensors beside a weight that leave it what it is.
HARMLESS = frozenset((
    "weight", "bias", "input_scale", "input_global_scale", "output_scale", "activation_scale",
    "scale_input", "qscale_act", "q_scale", "k_scale", "v_scale", "kv_scale", "comfy_quant",
    "e_score_correction_bias",
))  # fmt: skip


def _owner(name: str, modules: Collection[str], whole: Collection[str]) -> tuple[str, str] | None:
    """The quantized module or weight that a tensor stands beside, and what is added to its name."""
    at = name.find(".")
    while at > 0:
        if name[:at] in modules:
            return name[:at], name[at + 1 :]
        at = name.find(".", at + 1)
    for match in re.finditer(r"[._]", name) if whole else ():
        if name[: match.start()] in whole:
            return name[: match.start()], name[match.end() :]
    return None


def _is_harmless(added: str) -> bool:
    return added in HARMLESS or "norm" in added.partition(".")[0]


def unknown_beside(
    names: Iterable[str], weights: Iterable[str], understood: Collection[str]
) -> dict[str, str]:
    """Tensors beside weights that are not understood.

    Args:
        names: every tensor.
        weights: quantized weights, by logical name.
        understood: tensors that are read.

    Returns:
        The tensor to the module (or the weight, if it is none of a module) that it stands beside.
    """
    listed = list(weights)
    modules = {name.removesuffix(WEIGHT) for name in listed if name.endswith(WEIGHT)}
    whole = {name for name in listed if not name.endswith(WEIGHT)}
    found = {}
    for name in names:
        if name in understood:
            continue
        owner = _owner(name, modules, whole)
        if owner is not None and not _is_harmless(owner[1]):
            found[name] = owner[0]
    return found
