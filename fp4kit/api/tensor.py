# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The result of quantization: codes, scales, and everything needed to decode them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from fp4kit.arrays.frameworks import shape_of
from fp4kit.backend.interface import Plan
from fp4kit.errors import OptionError, ShapeError
from fp4kit.formats import (
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
    SECOND_LEVEL_DIRECTIONS,
    Recipe,
    get_format,
    get_recipe,
    one_of,
)
from fp4kit.variant import Variant


@lru_cache(maxsize=1024)
def _check_fields(
    format: str,
    shape: tuple[int, ...],
    recipe: str | None,
    scale_rule: str | None,
    given: tuple[str, ...],
    scale_layout: str,
    nibble_order: str,
    variant: Variant | None,
) -> str | None:
    """Checks the fields of a tensor that are no arrays and returns its recipe's name.

    Raises:
        OptionError: for unknown or contradictory fields.
        ShapeError: for an empty shape.
    """
    spec = get_format(format)
    one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    one_of("nibble_order", nibble_order, NIBBLE_ORDERS)
    if not shape:
        raise ShapeError("a quantized tensor has at least one dimension, got shape ()")
    chosen = get_recipe(recipe or "te") if spec.has_second_level else None
    if variant is not None:
        variant.check(spec, chosen, bool(given))
    if chosen is not None:
        _check_second_level(format, chosen, scale_rule, given)
        return recipe or "te"
    if recipe is not None or given:
        raise OptionError(f"{format} has neither a recipe nor a second-level scale")
    if scale_rule is not None:
        one_of("scale_rule", scale_rule, SCALE_RULES)
    return None


def _check_second_level(
    format: str, recipe: Recipe, scale_rule: str | None, given: tuple[str, ...]
) -> None:
    if scale_rule is not None:
        raise OptionError(f"{format} takes a recipe, not scale_rule={scale_rule!r}")
    if len(given) > 1:
        raise OptionError(f"more than one second-level scale given: {', '.join(given)}")
    if given and given[0] != recipe.direction:
        raise OptionError(
            f"recipe {recipe.name} keeps its second level as {recipe.direction}, got "
            f"{given[0]}; use fp4kit.convert_second_level"
        )
    if not given and not recipe.optional_second_level:
        raise OptionError(
            f"recipe {recipe.name} needs its second-level scale ({recipe.direction}); without "
            "it every value would be off by a constant factor"
        )


@lru_cache(maxsize=1024)
def _decoding_plan(
    format: str,
    recipe: str | None,
    scale_rule: str | None,
    rows: int,
    cols: int,
    scale_layout: str,
    nibble_order: str,
    has_second_level: bool,
    rows_per_scale: int,
    variant: Variant | None,
) -> Plan:
    spec = get_format(format)
    return Plan(
        format=spec,
        recipe=get_recipe(recipe or "te") if spec.has_second_level else None,
        scale_rule=scale_rule,
        rows=rows,
        cols=cols,
        scale_layout=scale_layout,
        nibble_order=nibble_order,
        has_second_level=has_second_level,
        rows_per_scale=rows_per_scale,
        variant=variant,
    ).decoding


@lru_cache(maxsize=1024)
def _stored_shapes(plan: Plan, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and block scales of a tensor of a logical shape."""
    if plan.is_columnwise:
        return plan.packed_shape, plan.scale_shape
    lead = shape[:-1]
    linear = plan.scale_layout == "linear"
    scales = (*lead, plan.blocks) if linear else plan.scale_shape
    return (*lead, plan.packed_shape[1]), scales


class _Kept:
    """Room for what `buffers` finds out about a tensor's arrays, outside its fields."""

    __slots__ = ("_decoding", "_target")


@dataclass(frozen=True, eq=False)
class QuantizedTensor(_Kept):
    """A block-quantized tensor of logical shape (..., K).

    The arrays live in the framework and on the device of the array that was quantized. At most
    one of the three second-level scales is set: the one in the direction the recipe keeps; they
    are not exact inverses of each other in binary32, so converting is left to
    :func:`fp4kit.convert_second_level`.

    Attributes:
        packed: uint8 codes: (..., ceil16(K)/2) for nvfp4, (..., ceil32(K)/2) for mxfp4,
            (..., ceil32(K)) for mxfp8. Columnwise, M being the leading dimensions multiplied:
            (K, ceil16(M)/2), (K, ceil32(M)/2) and, not transposed, (ceil32(M), K).
        block_scale: uint8 scale bytes, raw E4M3 (nvfp4) or E8M0: (..., blocks) when linear, else
            (pad(rows), pad4(blocks)) in swizzled byte order, rows being the leading dimensions
            multiplied. Columnwise: (K, blocks), and (blocks, K) for linear mxfp8, whose swizzled
            scales are those of the transpose.
        format: `nvfp4`, `mxfp4`, `mxfp8` or `mxfp8_e5m2`.
        shape: logical shape (..., K).
        recipe: NVFP4 recipe, None for MX formats.
        scale_rule: MX scale rule, None for nvfp4.
        amax: second level as float32 amax (recipe te), (1,), one per leading index, or one per
            column of a columnwise tensor.
        decode_scale: second level as amax/2688 (torchao, modelopt, comfy).
        encode_scale: second level as 2688/amax (nvfuser, compressed-tensors).
        scale_layout: `linear`, `swizzled_128x4` or `swizzled_8x4`.
        nibble_order: `low_first` or `high_first`.
        source_dtype: element type that was quantized.
        variant: how the quantization differs from the plain rowwise one, None if it does not.
    """

    packed: Any
    block_scale: Any
    format: str
    shape: tuple[int, ...]
    recipe: str | None = None
    scale_rule: str | None = None
    amax: Any = None
    decode_scale: Any = None
    encode_scale: Any = None
    scale_layout: str = "linear"
    nibble_order: str = "low_first"
    source_dtype: str = field(default="float32")
    variant: Variant | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if self.variant is not None and self.variant.is_plain:
            object.__setattr__(self, "variant", None)
        given = tuple(name for name in SECOND_LEVEL_DIRECTIONS if self._second(name) is not None)
        fields = (
            self.format,
            self.shape,
            self.recipe,
            self.scale_rule,
            given,
            self.scale_layout,
            self.nibble_order,
            self.variant,
        )
        try:
            recipe = _check_fields(*fields)
        except TypeError:  # a field that cannot be hashed gets the message of its own check
            recipe = _check_fields.__wrapped__(*fields)
        object.__setattr__(self, "recipe", recipe)
        packed, scales = (shape_of(getattr(self, name), name) for name in ("packed", "block_scale"))
        for name in given:
            shape_of(self._second(name), "the second-level scale")
        packed_shape, scale_shape = _stored_shapes(self.plan(), self.shape)
        if packed != packed_shape:
            raise ShapeError(
                f"packed has shape {packed}, but {self.format} codes of shape "
                f"{self.shape} take {packed_shape}"
            )
        if scales != scale_shape:
            raise ShapeError(
                f"block_scale has shape {scales}, but the {self.scale_layout} scales of shape "
                f"{self.shape} take {scale_shape}"
            )

    def __getstate__(self) -> dict[str, Any]:
        # The fields: what is kept beside them is not for copies.
        return dict(vars(self))

    def _second(self, direction: str) -> Any:
        return self.amax if direction == "amax" else getattr(self, f"{direction}_scale")

    @property
    def second_level(self) -> tuple[str, Any] | None:
        """(direction, float32 array) of the second-level scale, or None."""
        for direction in SECOND_LEVEL_DIRECTIONS:
            value = self._second(direction)
            if value is not None:
                return direction, value
        return None

    def plan(self) -> Plan:
        """The plan that decodes this tensor."""
        rows = prod(self.shape[:-1])
        second = self.second_level
        count = prod(second[1].shape) if second is not None else 1
        columnwise = self.variant is not None and self.variant.axis == "column"
        vectors = self.shape[-1] if columnwise else rows
        if count == 0 or vectors % count:
            what = "columns" if columnwise else "rows"
            raise ShapeError(f"{count} second-level scales do not divide {vectors} {what}")
        return _decoding_plan(
            self.format,
            self.recipe,
            self.scale_rule,
            rows,
            self.shape[-1],
            self.scale_layout,
            self.nibble_order,
            second is not None,
            max(vectors // count, 1),
            self.variant,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and second-level scale together."""
        second = self.second_level
        extra = 4 * prod(second[1].shape) if second is not None else 0
        return int(prod(self.packed.shape) + prod(self.block_scale.shape) + extra)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per logical element, 0.0 for an empty tensor."""
        elements = prod(self.shape)
        return 8 * self.nbytes / elements if elements else 0.0

    def __repr__(self) -> str:
        rule = f"recipe={self.recipe!r}" if self.recipe else f"scale_rule={self.scale_rule!r}"
        variant = f"{self.variant.describe()}, " if self.variant is not None else ""
        return (
            f"QuantizedTensor({self.format}, shape={self.shape}, {rule}, {variant}"
            f"scale_layout={self.scale_layout!r}, nibble_order={self.nibble_order!r}, "
            f"{self.bits_per_element:.3g} bits per element)"
        )
