# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The words of a scheme's fields: what each option may be, for checks and for type checkers."""

from __future__ import annotations

from typing import Literal, TypedDict, get_args

from .errors import OptionError, ShapeError, brief

Format = Literal["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", "fp8", "fp8_e5m2"]
RecipeName = Literal[
    "te", "nvfuser", "torchao", "modelopt", "compressed-tensors", "comfy", "deepseek"
]
ScaleRule = Literal["floor", "ceil", "even", "rceil"]
Granularity = Literal["tensor", "channel", "block"]
Direction = Literal["rowwise", "columnwise"]
Directions = Literal["rowwise", "columnwise", "both"]
BlockShape = Literal["1d", "2d"]
SecondLevel = Literal["tensor", "none", "row_scaled", "per_token"]
ScaleLayout = Literal["linear", "swizzled_128x4", "swizzled_8x4", "grouped_128x4"]
NibbleOrder = Literal["low_first", "high_first"]
Rounding = Literal["nearest", "stochastic"]
ScaleSearch = Literal["four_over_six", "sweep"]
#: `_scaled` measures the error before the second-level scale, as Transformer Engine's fast path.
SearchError = Literal["mse", "mae", "mse_scaled", "mae_scaled"]
RhtRounding = Literal["bf16", "none"]
Activation = Literal["gelu", "silu", "relu", "swiglu", "dgelu", "dsilu", "drelu"]

DIRECTIONS: tuple[str, ...] = get_args(Direction)
SCALE_SEARCHES: tuple[str, ...] = get_args(ScaleSearch)
SEARCH_ERRORS: tuple[str, ...] = get_args(SearchError)
RHT_ROUNDINGS: tuple[str, ...] = get_args(RhtRounding)
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
E4M3_MAXIMA = (448, 256)
#: Elements that are rotated together, and that share one call of the random generator.
GROUP = 16
#: Transformer Engine's sign mask; bit i = 1 negates element i of a group before the rotation.
DEFAULT_SIGN_MASK = 0xD7E8

#: The words of each option that takes one of a list.
WORDS: dict[str, tuple[str, ...]] = {
    "granularity": get_args(Granularity),
    "direction": get_args(Directions),
    "block_shape": get_args(BlockShape),
    "second_level": get_args(SecondLevel),
    "scale_layout": get_args(ScaleLayout),
    "nibble_order": get_args(NibbleOrder),
    "rounding": get_args(Rounding),
    "scale_search": SCALE_SEARCHES,
    "search_error": SEARCH_ERRORS,
    "rht_direction": get_args(Directions),
    "rht_rounding": RHT_ROUNDINGS,
    "activation": ACTIVATIONS,
}


class DirectionlessFields(TypedDict, total=False):
    """The fields of a :class:`Scheme` but its direction as keywords, for type checkers."""

    format: Format
    recipe: RecipeName | None
    scale_rule: ScaleRule | None
    granularity: Granularity | None
    block_shape: BlockShape
    second_level: SecondLevel | None
    scale_layout: ScaleLayout
    nibble_order: NibbleOrder
    pad: bool
    rounding: Rounding
    scale_search: ScaleSearch | None
    search_error: SearchError | None
    e4m3_max: Literal[448, 256]
    rht: bool | int | None
    rht_direction: Directions | None
    rht_rounding: RhtRounding | None
    activation: Activation | None


class SchemeFields(DirectionlessFields, total=False):
    """The fields of a :class:`Scheme` as keyword arguments, for type checkers."""

    direction: Directions


def sign_mask(value: object) -> int:
    """The sign bits of an `rht` argument: True is the default mask, False no signs.

    Raises:
        OptionError: if it is no mask of 16 bits.
    """
    if isinstance(value, bool):
        return DEFAULT_SIGN_MASK if value else 0
    if not isinstance(value, int) or not 0 <= value <= 0xFFFF:
        raise OptionError(
            f"{brief(value)} is not a sign mask of 16 bits; pass True for "
            f"{DEFAULT_SIGN_MASK:#06x}, 0 for no signs, or a number up to 0xffff"
        )
    return value


def check_groups(length: int, direction: str, shape: tuple[int, ...]) -> None:
    """Refuses vectors that do not divide into groups of 16.

    Raises:
        ShapeError: naming the axis.
    """
    if length % GROUP:
        what = "the last axis" if direction == "rowwise" else "the number of rows"
        raise ShapeError(
            f"a rotation mixes whole groups of {GROUP}, so {what} must be a multiple of {GROUP}; "
            f"got {length} in shape {tuple(shape)}; pad the array with zeros yourself"
        )
