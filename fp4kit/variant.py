# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How a quantization differs from the plain rowwise one: the choices, and which of them combine.

No arithmetic stands here. The formulas are in :mod:`fp4kit.reference.scale_search`
(four_over_six, sweep), :mod:`fp4kit.reference.rotation` (Hadamard),
:mod:`fp4kit.reference.philox` (stochastic rounding) and :mod:`fp4kit.reference.scaling`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import OptionError, ShapeError
from .formats import FormatSpec, Recipe, one_of

AXES = ("row", "column")
BLOCKS = ("1d", "2d")
#: What `amax` may be besides a value: whose largest magnitude makes a second-level scale.
AMAX_WORDS = ("row_scaled", "per_token")
SCALE_SEARCHES = ("four_over_six", "sweep")
#: `_scaled` measures the error before the second-level scale, as Transformer Engine's fast path.
ERRORS = ("mse", "mae", "mse_scaled", "mae_scaled")
E4M3_MAXIMA = (448, 256)
ROUNDINGS = ("nearest", "stochastic")
RHT_ROUNDINGS = ("bf16", "none")
#: Elements that are rotated together, and that share one call of the random generator.
GROUP = 16
#: Transformer Engine's sign mask; bit i = 1 negates element i of a group before the rotation.
DEFAULT_SIGN_MASK = 0xD7E8


def sign_mask(value: object) -> int:
    """The sign bits of a `hadamard` argument: True is the default mask, False no signs.

    Raises:
        OptionError: if it is no mask of 16 bits.
    """
    if isinstance(value, bool):
        return DEFAULT_SIGN_MASK if value else 0
    if not isinstance(value, int) or not 0 <= value <= 0xFFFF:
        raise OptionError(
            f"{value!r} is not a sign mask of 16 bits; pass True for {DEFAULT_SIGN_MASK:#06x}, 0 "
            "for no signs, or a number up to 0xffff"
        )
    return value


def check_groups(length: int, axis: str, shape: tuple[int, ...]) -> None:
    """Refuses vectors that do not divide into groups of 16.

    Raises:
        ShapeError: naming the axis.
    """
    if length % GROUP:
        what = "the last axis" if axis == "row" else "the number of rows"
        raise ShapeError(
            f"a rotation mixes whole groups of {GROUP}, so {what} must be a multiple of {GROUP}; "
            f"got {length} in shape {tuple(shape)}; pad the array with zeros yourself"
        )


@dataclass(frozen=True)
class Variant:
    """Deviations from plain rowwise quantization with blocks along one axis.

    Attributes:
        axis: `row` (blocks along the last axis) or `column` (along the rows, all leading
            dimensions flattened). Columnwise nvfp4 and mxfp4 are those of the transpose: codes
            (K, M/2). Columnwise mxfp8 keeps the order of the data: codes (M, K).
        block: `1d`, or `2d` for square tiles of block_size x block_size with one scale each,
            repeated for each row (or column) of the tile.
        per_token: the element factor is S/q, or 0 where q is 0, and an amax counts as at least
            1e-12 (Transformer Engine pull request 3045).
        scale_search: `four_over_six`, `sweep` or None.
        error: what a search makes small, None without a search.
        e4m3_max: the scale that the largest block gets: the second level maps the amax onto
            6 * e4m3_max.
        rounding: `nearest` or `stochastic`.
        hadamard: 16-bit sign mask of the rotation that was applied, or None.
        rht_rounding: `bf16` rounds the rotated values to bfloat16, `none` leaves them float32;
            None without a rotation.
    """

    axis: str = "row"
    block: str = "1d"
    per_token: bool = False
    scale_search: str | None = None
    error: str | None = None
    e4m3_max: int = 448
    rounding: str = "nearest"
    hadamard: int | None = None
    rht_rounding: str | None = None

    def __post_init__(self) -> None:
        one_of("axis", self.axis, AXES)
        one_of("block", self.block, BLOCKS)
        one_of("rounding", self.rounding, ROUNDINGS)
        if self.scale_search is not None:
            one_of("scale_search", self.scale_search, SCALE_SEARCHES)
            one_of("error", self.error, ERRORS)
        elif self.error is not None or self.e4m3_max != 448:
            raise OptionError("error and e4m3_max belong to a scale_search; name one")
        if self.e4m3_max not in E4M3_MAXIMA:
            raise OptionError(f"e4m3_max={self.e4m3_max!r} is not known; choose 448 or 256")
        if self.hadamard is None:
            if self.rht_rounding is not None:
                raise OptionError("rht_rounding belongs to hadamard; pass hadamard=True or a mask")
            return
        one_of("rht_rounding", self.rht_rounding, RHT_ROUNDINGS)
        sign_mask(self.hadamard)

    def describe(self) -> str:
        """What differs from plain quantization, in words."""
        words = (f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
        plain = {f"{name}={getattr(PLAIN, name)!r}" for name in self.__dataclass_fields__}
        return ", ".join(word for word in words if word not in plain)

    @property
    def is_plain(self) -> bool:
        """Whether this is plain rowwise quantization after all."""
        return self == PLAIN

    @property
    def decodes_plainly(self) -> bool:
        """Whether decoding needs to know nothing of the variant."""
        return self.axis == "row" and self.e4m3_max == 448

    def check(self, spec: FormatSpec, recipe: Recipe | None, has_second_level: bool) -> None:
        """Refuses what a format or recipe does not combine with.

        Raises:
            OptionError: with the reason.
        """
        name = spec.name if recipe is None else f"{spec.name} with recipe {recipe.name}"
        if self.scale_search is not None:
            if recipe is None or recipe.name != "te" or not has_second_level:
                raise OptionError(
                    f"scale_search={self.scale_search!r} compares errors under recipe te of nvfp4, "
                    f"not {name}; use recipe='te' (its codes can be stored for any engine)"
                )
            for what, clash in (
                ("rounding='stochastic'", self.rounding == "stochastic"),
                ("amax='per_token'", self.per_token),
            ):
                if clash:
                    raise OptionError(
                        f"scale_search compares the errors of rounding to nearest under recipe te; "
                        f"it cannot be combined with {what}"
                    )
        if self.per_token:
            if recipe is None or recipe.name != "te":
                raise OptionError(f"amax='per_token' is a formula of recipe te, not of {name}")
            if self.block == "2d":
                raise OptionError("a 2-D tile has one scale, amax='per_token' one per row: no both")
        if self.rounding == "stochastic":
            if spec.element.bits != 4:
                raise OptionError(f"rounding='stochastic' is for E2M1 elements, not {name}")
            if recipe is not None and recipe.name != "te":
                raise OptionError(f"rounding='stochastic' is defined for recipe te, not {name}")
        if self.hadamard is not None:
            if spec.element.bits != 4:
                raise OptionError(f"hadamard rotates before E2M1 quantization, not for {name}")
            if recipe is not None and recipe.name != "te":
                raise OptionError(f"hadamard is defined for recipe te, not {name}")
            if self.block == "2d":
                raise OptionError(
                    "hadamard mixes 16 elements of one direction, a 2-D tile must serve both"
                )


PLAIN = Variant()


def search_variant(scale_search: str | None, error: str | None, e4m3_max: int) -> Variant | None:
    """The variant of rowwise quantization with a search alone, None without one.

    Raises:
        OptionError: for unknown or contradictory choices.
    """
    error = error or ("mse" if scale_search is not None else None)
    variant = Variant(scale_search=scale_search, error=error, e4m3_max=e4m3_max)
    return None if variant.is_plain else variant
