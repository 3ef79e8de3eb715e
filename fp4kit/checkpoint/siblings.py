# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What stands beside quantized weights and is not understood: named, and never passed over.

Two kinds. Integers with a scale beside them are codes of a quantization, whatever made them: if no
view decodes them, carrying them along would hand on numbers that mean something else. And a tensor
beside a quantized weight may change what that weight means, as zero points, column orders, low-rank
corrections, rotations and smoothing factors do; only what is known not to is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from fp4kit.io.source import SourceTensor

from .fp8_views import WEIGHT, scale_names

#: Element types in which codes are stored.
CODE_DTYPES = frozenset(("I8", "U8", "I16", "U16", "I32", "U32", "F4", "F6_E2M3", "F6_E3M2"))
#: Last parts of the names of codes.
_CODES = re.compile(r".*(weight|kernel|codes|qdata|_q|_packed|_proj|_data)", re.IGNORECASE)
#: Those that need nothing beside them to be known.
_NAMED_CODES = frozenset(("qweight", "W_q"))
#: What stands in the place of a name of codes: scales and zero points of all dialects.
_BESIDE = (
    "scale", "scales", "weight_scale", "weight_scales", "weight_scale_inv", "scale_weight",
    "wscales", "qscales", "SCB", "qzeros", "zeros", "zero", "weight_zero_point", "weight_zeros",
    "absmax", "codebook", "codebooks", "weight_codebook", "weight_s_rel", "lut",
)  # fmt: skip
#: What is added to a name of codes.
_ADDED = ("_scales", ".scale", ".scales", "._scale", ".absmax", ".quant_map", ".SCB")
#: Ends of names of codes that their scales lack.
_CODE_SUFFIXES = ("_packed", "_blocks", "_qdata", "._data", "_q")
#: Tensors beside a weight that leave it what it is.
HARMLESS = frozenset((
    "weight", "bias", "input_scale", "input_global_scale", "output_scale", "activation_scale",
    "scale_input", "qscale_act", "q_scale", "k_scale", "v_scale", "kv_scale", "comfy_quant",
    "e_score_correction_bias",
))  # fmt: skip


def _scales_of(name: str) -> Iterator[str]:
    """Names of tensors that would make integers codes."""
    yield from scale_names(name)
    for suffix in _ADDED:
        yield name + suffix
    for suffix in _CODE_SUFFIXES:
        base = name.removesuffix(suffix)
        if base != name:
            yield from (f"{base}_scale", f"{base}_scales", f"{base}.scale", f"{base}._scale")
    parent, _, last = name.rpartition(".")
    if _CODES.fullmatch(last):
        for other in _BESIDE:
            yield f"{parent}.{other}" if parent else other


def unread_codes(tensors: Mapping[str, SourceTensor], names: Collection[str]) -> list[str]:
    """Integers with scales beside them, of which some view would have made floats if it could.

    Args:
        tensors: those that no view consumes.
        names: every stored tensor.
    """
    found = []
    for name, tensor in tensors.items():
        if tensor.spec.dtype not in CODE_DTYPES or 0 in tensor.spec.shape:
            continue
        last = name.rpartition(".")[2]
        beside = any(scale in names for scale in _scales_of(name) if scale != name)
        if last in _NAMED_CODES or (beside and len(tensor.spec.shape) > 1):
            found.append(name)
    return found


def _owner(name: str, modules: Collection[str], whole: Collection[str]) -> tuple[str, str] | None:
    """The quantized module or weight that a tensor stands beside, and what is added to its name."""
    at = name.find(".")
    while at > 0:
        if name[:at] in modules:
            return name[:at], name[at + 1 :]
        at = name.find(".", at + 1)
    for match in re.finditer(r"[._]", name):
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
