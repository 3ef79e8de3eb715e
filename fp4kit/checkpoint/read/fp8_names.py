# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Names and element types of FP8 weights and of their scales, in every dialect."""

from __future__ import annotations

from fp4kit.formats import DTYPES as FLOAT_NAMES
from fp4kit.formats import ELEMENT_TYPES
from fp4kit.io.containers import DTYPE_CODES
from fp4kit.io.read.source import Source

ELEMENTS = {"F8_E4M3": ELEMENT_TYPES["e4m3"], "F8_E5M2": ELEMENT_TYPES["e5m2"]}
#: Element types with other biases, which no table here covers.
FOREIGN = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
FLOATS = tuple(DTYPE_CODES[name] for name in FLOAT_NAMES)
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
FLOAT_SCALES = ("F32", "BF16", "F16")
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
