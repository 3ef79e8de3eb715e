# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Names and element types of codes and of their scales, in every dialect.

Codes that nothing decodes are integers with a scale beside them, whatever made them. Carrying them
along would hand on numbers that mean something else; they are named instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from fp4kit.formats import ELEMENT_TYPES
from fp4kit.io.read.source import Source, SourceTensor

# FP8 weights.
ELEMENTS = {"F8_E4M3": ELEMENT_TYPES["e4m3"], "F8_E5M2": ELEMENT_TYPES["e5m2"]}
#: Element types with other biases, which no table here covers.
FOREIGN = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
#: Element types of plain weights, and of scales that are no exponents.
FLOATS = ("F32", "BF16", "F16")
#: What the name of a scale adds to the weight's, or puts in the place of `weight`.
SCALE_SUFFIXES = ("_scale_inv", "_scale")
SCALE_PLACES = (".scale", ".scale_weight", ".qscale_weight")
WEIGHT = ".weight"
#: ComfyUI's formats of single layers that are decoded here, and how their codes are stored.
COMFY_FORMATS = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8_tensorwise": "I8",
}
EXPONENT_SCALES = ("U8", "F8_E8M0")


def is_marker(name: str) -> bool:
    """Whether a tensor says that ComfyUI's older files are FP8; what it holds means nothing."""
    return name.rpartition(".")[2] == "scaled_fp8"


def is_block_scale(source: Source, name: str) -> bool:
    """Whether an F8 tensor is the block scale of 4-bit codes and not a weight."""
    base = name.removesuffix("_scale")
    if base == name:
        return False
    owners = (source.tensors.get(owner) for owner in (base, f"{base}_packed"))
    return any(owner is not None and owner.spec.dtype in ("U8", "I8") for owner in owners)


def scale_names(name: str) -> list[str]:
    """Every name that the scale of a weight may have."""
    module = name.removesuffix(WEIGHT)
    places = [module + place for place in SCALE_PLACES] if module != name else []
    return [name + suffix for suffix in SCALE_SUFFIXES] + places


# Codes that nothing decodes.
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
    """Integers with scales beside them, of which some view would have made floats if it could."""
    found = []
    for name, tensor in tensors.items():
        if tensor.spec.dtype not in CODE_DTYPES or 0 in tensor.spec.shape:
            continue
        last = name.rpartition(".")[2]
        beside = any(scale in names for scale in _scales_of(name) if scale != name)
        if last in _NAMED_CODES or (beside and len(tensor.spec.shape) > 1):
            found.append(name)
    return found
