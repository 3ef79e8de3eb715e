# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The result of quantization: codes, scales, and everything needed to decode them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from .backends.base import Plan
from .errors import OptionError, ShapeError
from .formats import (
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
    Recipe,
    get_format,
    get_recipe,
    one_of,
)

SECOND_LEVEL_DIRECTIONS = ("amax", "decode", "encode")


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A block-quantized tensor of logical shape (..., K).

    The arrays live in the framework and on the device of the array that was quantized. At most
    one of the three second-level scales is set: the one in the direction the recipe keeps; they
    are not exact inverses of each other in binary32, so converting is left to
    :func:`fp4kit.convert_second_level`.

    Attributes:
        packed: uint8 codes: (..., ceil16(K)/2) for nvfp4, (..., ceil32(K)/2) for mxfp4,
            (..., ceil32(K)) for mxfp8.
        block_scale: uint8 scale bytes, raw E4M3 (nvfp4) or E8M0: (..., blocks) when linear, else
            (pad(rows), pad4(blocks)) in swizzled byte order, rows being the leading dimensions
            multiplied.
        format: `nvfp4`, `mxfp4`, `mxfp8` or `mxfp8_e5m2`.
        shape: logical shape (..., K).
        recipe: NVFP4 recipe, None for MX formats.
        scale_rule: MX scale rule, None for nvfp4.
        amax: second level as float32 amax (recipe te), (1,) or one per leading index.
        decode_scale: second level as amax/2688 (torchao, modelopt, comfy).
        encode_scale: second level as 2688/amax (nvfuser, compressed-tensors).
        scale_layout: `linear`, `swizzled_128x4` or `swizzled_8x4`.
        nibble_order: `low_first` or `high_first`.
        source_dtype: element type that was quantized.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        spec = get_format(self.format)
        one_of("scale_layout", self.scale_layout, SCALE_LAYOUTS)
        one_of("nibble_order", self.nibble_order, NIBBLE_ORDERS)
        if not self.shape:
            raise ShapeError("a quantized tensor has at least one dimension, got shape ()")
        if spec.has_second_level:
            object.__setattr__(self, "recipe", self.recipe or "te")
            self._check_second_level(get_recipe(self.recipe or "te"))
        elif self.recipe is not None or self.second_level is not None:
            raise OptionError(f"{self.format} has neither a recipe nor a second-level scale")
        elif self.scale_rule is not None:
            one_of("scale_rule", self.scale_rule, SCALE_RULES)
        plan = self.plan()
        expected = (*self.shape[:-1], plan.packed_shape[1])
        if tuple(self.packed.shape) != expected:
            raise ShapeError(
                f"packed has shape {tuple(self.packed.shape)}, but {self.format} codes of shape "
                f"{self.shape} take {expected}"
            )
        linear = self.scale_layout == "linear"
        expected = (*self.shape[:-1], plan.blocks) if linear else plan.scale_shape
        if tuple(self.block_scale.shape) != expected:
            raise ShapeError(
                f"block_scale has shape {tuple(self.block_scale.shape)}, but the "
                f"{self.scale_layout} scales of shape {self.shape} take {expected}"
            )

    def _check_second_level(self, recipe: Recipe) -> None:
        if self.scale_rule is not None:
            raise OptionError(f"{self.format} takes a recipe, not scale_rule={self.scale_rule!r}")
        given = [name for name in SECOND_LEVEL_DIRECTIONS if self._second(name) is not None]
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
        spec = get_format(self.format)
        rows = prod(self.shape[:-1])
        second = self.second_level
        count = prod(second[1].shape) if second is not None else 1
        if count == 0 or rows % count:
            raise ShapeError(f"{count} second-level scales do not divide {rows} rows")
        return Plan(
            format=spec,
            recipe=get_recipe(self.recipe or "te") if spec.has_second_level else None,
            scale_rule=self.scale_rule,
            rows=rows,
            cols=self.shape[-1],
            scale_layout=self.scale_layout,
            nibble_order=self.nibble_order,
            has_second_level=second is not None,
            rows_per_scale=max(rows // count, 1),
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
        return (
            f"QuantizedTensor({self.format}, shape={self.shape}, {rule}, "
            f"scale_layout={self.scale_layout!r}, nibble_order={self.nibble_order!r}, "
            f"{self.bits_per_element:.3g} bits per element)"
        )
