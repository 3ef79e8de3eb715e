# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Codes that nothing decodes: integers with a scale beside them, whatever made them.

Carrying them along would hand on numbers that mean something else. They are named instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from fp4kit.checkpoint.read.fp8_names import scale_names
from fp4kit.io.read.source import SourceTensor

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
