# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The one table of format facts; CPU, CUDA and the reference all read it.

Element and scale types are described by their primary facts (exponent bits, mantissa bits, bias,
largest finite value); everything else is derived. The CUDA sources receive the numbers as
preprocessor definitions from :func:`cuda_defines`, so that no constant is written twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from .errors import OptionError, brief


@dataclass(frozen=True)
class ElementType:
    """A small binary floating-point type (sign, exponent, mantissa).

    Attributes:
        name: the field's short name, for example `e2m1`.
        bits: width of a code.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
        bias: exponent bias.
        max_code: code of the largest finite magnitude.
        nan_code: the code that NaN encodes to (`e2m1` has no NaN: the hardware gives +6).
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """float32 value of each finite magnitude code 0..max_code, ascending."""
        codes = np.arange(self.max_code + 1)
        exponent = codes >> self.mantissa_bits
        mantissa = codes & ((1 << self.mantissa_bits) - 1)
        normal = exponent > 0
        significand = mantissa / (1 << self.mantissa_bits) + normal
        values: np.ndarray = np.ldexp(significand, np.where(normal, exponent, 1) - self.bias)
        return values.astype(np.float32)

    @property
    def max(self) -> float:
        """Largest finite value."""
        return float(self.magnitudes[-1])

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value (`emax` of the MX rules)."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @cached_property
    def values(self) -> np.ndarray:
        """float32 value of every code; codes beyond max_code decode to inf (e5m2) or NaN."""
        sign_bit = 1 << (self.bits - 1)
        half = np.full(sign_bit, np.nan, np.float32)
        half[: self.max_code + 1] = self.magnitudes
        if self.name == "e5m2":
            half[self.max_code + 1] = np.inf
        return np.concatenate([half, -half])


E2M1 = ElementType("e2m1", 4, 2, 1, bias=1, max_code=0x7, nan_code=0x7)
E4M3 = ElementType("e4m3", 8, 4, 3, bias=7, max_code=0x7E, nan_code=0x7F)
E5M2 = ElementType("e5m2", 8, 5, 2, bias=15, max_code=0x7B, nan_code=0x7F)
ELEMENT_TYPES = {element.name: element for element in (E2M1, E4M3, E5M2)}

E8M0_BIAS = 127
E8M0_NAN = 0xFF
FLT_MAX = np.float32(np.finfo(np.float32).max)
#: 448 * 6: the second level maps the tensor's amax onto the largest scale times the largest code.
SECOND_LEVEL_RANGE = np.float32(E4M3.max * E2M1.max)
#: fl(1/6), bits 3E2AAAAB.
RECIPROCAL_6 = np.float32(1) / np.float32(6)
#: fl(1/2688).
RECIPROCAL_RANGE = np.float32(1) / SECOND_LEVEL_RANGE


@dataclass(frozen=True)
class ScaleType:
    """What a block scale is stored as.

    Attributes:
        name: `e4m3`, `e8m0` or `float32`.
        dtype: element type of the arrays that hold scales: raw bytes, or numbers.
        bytes: size of one.
    """

    name: str
    dtype: str
    bytes: int


SCALE_TYPES = {
    one.name: one
    for one in (
        ScaleType("e4m3", "uint8", 1),
        ScaleType("e8m0", "uint8", 1),
        ScaleType("float32", "float32", 4),
    )
}
GRANULARITIES = ("tensor", "channel", "block")
#: Rows and columns that share a scale under granularity `block`.
GRID_BLOCK = 128


@dataclass(frozen=True)
class GridRecipe:
    """How one project scales a matrix by float32 numbers: facts, no arithmetic.

    The order of operations stands in :mod:`fp4kit.reference.grid`.

    Attributes:
        name: public name.
        granularities: what its scales span, the default first.
        rounds_scale: the scale is computed in the type of the input.
        rounds_quotient: x / scale is rounded to the type of the input before it is encoded.
        zero_is_epsilon: zeros have the epsilon of the type of the input as their scale, else 1.
    """

    name: str
    granularities: tuple[str, ...]
    rounds_scale: bool = False
    rounds_quotient: bool = False
    zero_is_epsilon: bool = False


GRID_RECIPES = {
    one.name: one
    for one in (
        GridRecipe("modelopt", ("tensor",), rounds_quotient=True),
        GridRecipe(
            "compressed-tensors",
            ("channel", "tensor", "block"),
            rounds_scale=True,
            rounds_quotient=True,
            zero_is_epsilon=True,
        ),
        GridRecipe("deepseek", ("block",)),
    )
}
#: Codes in a byte, by the bits of an element: every packing that the backends know.
CODES_PER_BYTE = {4: 2, 8: 1}


@dataclass(frozen=True)
class FormatSpec:
    """A format's traits: all code asks these, never the format's name.

    Attributes:
        name: public name.
        element: element type.
        block_size: elements of a vector that share one block scale; vectors are stored as whole
            blocks. 1 where a granularity says what shares a scale.
        scale_type: name of one of `SCALE_TYPES`.
        has_second_level: whether one binary32 scale per tensor exists as well.
        default_scale_rule: MX rule used when none is named, None where a recipe decides.
        roundings: how elements may be rounded.
        can_rotate: whether groups of 16 may be rotated first.

    Raises:
        OptionError: if no packing is known for the element, or if there is no such scale type.
    """

    name: str
    element: ElementType
    block_size: int
    scale_type: str
    has_second_level: bool
    default_scale_rule: str | None
    roundings: tuple[str, ...] = ("nearest",)
    can_rotate: bool = False

    def __post_init__(self) -> None:
        one_of("scale_type", self.scale_type, SCALE_TYPES)
        if self.element.bits not in CODES_PER_BYTE:
            known = " or ".join(map(str, CODES_PER_BYTE))
            raise OptionError(
                f"{self.name}: no packing is known for {self.element.name} elements of "
                f"{self.element.bits} bits, only for {known} bits; teach the backends one and add "
                "it to fp4kit.formats.CODES_PER_BYTE"
            )
        if self.block_size % self.codes_per_byte:
            raise OptionError(
                f"{self.name}: blocks of {self.block_size} codes end within a byte; use a multiple "
                f"of {self.codes_per_byte}"
            )

    @property
    def codes_per_byte(self) -> int:
        """How many codes share a byte."""
        return CODES_PER_BYTE[self.element.bits]

    @property
    def packs_nibbles(self) -> bool:
        """Whether two codes share a byte, so that their order counts."""
        return self.codes_per_byte == 2

    @property
    def transposes_columns(self) -> bool:
        """Whether columnwise codes are those of the transpose: no byte holds codes of two rows."""
        return self.packs_nibbles

    @property
    def has_scale_grid(self) -> bool:
        """Whether scales are numbers, for a tensor, a channel or a block of rows and columns."""
        return self.scale_type == "float32"

    @property
    def scales(self) -> ScaleType:
        """What block scales are stored as."""
        return SCALE_TYPES[self.scale_type]

    def num_blocks(self, cols: int) -> int:
        """Blocks in a row of `cols` elements, the last one possibly padded."""
        return -(-cols // self.block_size)

    def packed_cols(self, cols: int) -> int:
        """Bytes that the codes of a row of `cols` elements take, whole blocks."""
        return self.num_blocks(cols) * self.block_size // self.codes_per_byte


def one_of(what: str, value: object, allowed: object) -> str:
    """Returns `value` if it is among `allowed`; the error names the option and the choices."""
    names = list(allowed)  # type: ignore[call-overload]
    if not isinstance(value, str) or value not in names:
        raise OptionError(f"{what}={brief(value)} is not known; choose one of {', '.join(names)}")
    return value


ROUNDINGS = ("nearest", "stochastic")
NVFP4 = FormatSpec("nvfp4", E2M1, 16, "e4m3", True, None, ROUNDINGS, can_rotate=True)
MXFP4 = FormatSpec("mxfp4", E2M1, 32, "e8m0", False, "even", ROUNDINGS, can_rotate=True)
MXFP8 = FormatSpec("mxfp8", E4M3, 32, "e8m0", False, "rceil")
MXFP8_E5M2 = FormatSpec("mxfp8_e5m2", E5M2, 32, "e8m0", False, "rceil")
FP8 = FormatSpec("fp8", E4M3, 1, "float32", False, None)
FP8_E5M2 = FormatSpec("fp8_e5m2", E5M2, 1, "float32", False, None)
ALL_FORMATS = {spec.name: spec for spec in (NVFP4, MXFP4, MXFP8, MXFP8_E5M2, FP8, FP8_E5M2)}
#: Those whose vectors have a scale for each block.
BLOCK_FORMATS = {name: spec for name, spec in ALL_FORMATS.items() if not spec.has_scale_grid}

SCALE_RULES = ("floor", "ceil", "even", "rceil")
SCALE_LAYOUTS = ("linear", "swizzled_128x4", "swizzled_8x4")
NIBBLE_ORDERS = ("low_first", "high_first")
#: What a second-level scale may be: the amax, amax/2688 or 2688/amax.
SecondLevelScale = Literal["amax", "decode_scale", "encode_scale"]
SECOND_LEVEL_SCALES: tuple[str, ...] = get_args(SecondLevelScale)
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Recipe:
    """How one project turns a block of numbers into an NVFP4 block: facts, no arithmetic.

    The order of operations of each recipe stands in :mod:`fp4kit.reference.scaling` (reference),
    :mod:`fp4kit.cpu.scaling` and `kernels_cu/recipes.cuh`.

    Attributes:
        name: public name.
        index: number the kernels know it by.
        keeps: its second-level scale: `amax`, `decode_scale` (amax/2688) or `encode_scale`
            (2688/amax).
        divides: elements are divided by the block's scale instead of multiplied by its inverse.
        keeps_negative_zero: -0.0 becomes code 8 (else code 0).
        decodes_negative_zero: code 8 decodes to -0.0 (else +0.0).
        optional_second_level: `second_level=False` is defined.
        rounds_factor: dequantize rounds the second-level scale and its product with the block scale
            to the output type before multiplying.
    """

    name: str
    index: int
    keeps: str
    divides: bool = False
    keeps_negative_zero: bool = True
    decodes_negative_zero: bool = True
    optional_second_level: bool = False
    rounds_factor: bool = False


TE = Recipe("te", 0, "amax")
NVFUSER = Recipe("nvfuser", 1, "encode_scale", optional_second_level=True)
TORCHAO = Recipe("torchao", 2, "decode_scale", optional_second_level=True)
MODELOPT = Recipe(
    "modelopt",
    3,
    "decode_scale",
    divides=True,
    keeps_negative_zero=False,
    decodes_negative_zero=False,
)
COMPRESSED_TENSORS = Recipe(
    "compressed-tensors", 4, "encode_scale", divides=True, keeps_negative_zero=False
)
COMFY = Recipe("comfy", 5, "decode_scale", divides=True, rounds_factor=True)
ALL_RECIPES = {
    recipe.name: recipe for recipe in (TE, NVFUSER, TORCHAO, MODELOPT, COMPRESSED_TENSORS, COMFY)
}


def flag(what: str, value: object) -> bool:
    """Returns `value` if it is True or False.

    Raises:
        OptionError: naming the option.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(f"{what}={brief(value)} is not known; choose True or False")
    return bool(value)


def get_format(name: str) -> FormatSpec:
    """Looks a format up by name (case is ignored).

    Raises:
        OptionError: if the name is unknown; the message lists the known ones.
    """
    lowered = name.lower() if isinstance(name, str) else name
    return ALL_FORMATS[one_of("format", lowered, ALL_FORMATS)]


def get_recipe(name: str) -> Recipe:
    """Looks an NVFP4 recipe up by name.

    Raises:
        OptionError: if the name is unknown; the message lists the known ones.
    """
    return ALL_RECIPES[one_of("recipe", name, ALL_RECIPES)]


def cuda_defines() -> list[str]:
    """The table as `-D` options for NVRTC and host compilers: the only way constants reach CUDA."""
    facts: dict[str, object] = {
        "FP4KIT_E8M0_BIAS": E8M0_BIAS,
        "FP4KIT_E8M0_NAN": E8M0_NAN,
        "FP4KIT_GRID_BLOCK": GRID_BLOCK,
        "FP4KIT_SECOND_LEVEL_RANGE": f"{float(SECOND_LEVEL_RANGE):.1f}f",
    }
    for element in ELEMENT_TYPES.values():
        prefix = f"FP4KIT_{element.name.upper()}"
        facts[f"{prefix}_MAX"] = f"{element.max:.1f}f"
        facts[f"{prefix}_MAX_CODE"] = element.max_code
        facts[f"{prefix}_NAN_CODE"] = element.nan_code
        facts[f"{prefix}_MANTISSA_BITS"] = element.mantissa_bits
        facts[f"{prefix}_BIAS"] = element.bias
        facts[f"{prefix}_MAX_EXPONENT"] = element.max_exponent
    for spec in BLOCK_FORMATS.values():
        facts[f"FP4KIT_{spec.name.upper()}_BLOCK_SIZE"] = spec.block_size
    for recipe in ALL_RECIPES.values():
        prefix = f"FP4KIT_RECIPE_{recipe.name.upper().replace('-', '_')}"
        facts[prefix] = recipe.index
    for number, rule in enumerate(SCALE_RULES):
        facts[f"FP4KIT_RULE_{rule.upper()}"] = number
    for number, layout in enumerate(SCALE_LAYOUTS):
        facts[f"FP4KIT_LAYOUT_{layout.upper()}"] = number
    return [f"-D{name}={value}" for name, value in facts.items()]
