# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""From a call's options and shape to a plan: every check that needs no array."""

from __future__ import annotations

from math import prod

from .backends.base import Plan
from .errors import OptionError, ShapeError
from .formats import (
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
    FormatSpec,
    Recipe,
    get_format,
    get_recipe,
    one_of,
)


def resolve_rules(
    spec: FormatSpec, recipe: str | None, scale_rule: str | None
) -> tuple[Recipe | None, str | None]:
    """(recipe, None) for nvfp4, (None, scale rule) for MX formats.

    Raises:
        OptionError: if an option belongs to the other kind of format.
    """
    if spec.has_second_level:
        if scale_rule is not None:
            raise OptionError(
                f"{spec.name} takes a recipe, not scale_rule={scale_rule!r}; scale rules are for "
                "mxfp4 and mxfp8"
            )
        return get_recipe(recipe or "te"), None
    if recipe not in (None, "te"):
        raise OptionError(
            f"recipe={recipe!r} is for nvfp4; {spec.name} takes scale_rule: "
            f"{', '.join(SCALE_RULES)}"
        )
    return None, one_of("scale_rule", scale_rule or spec.default_scale_rule, SCALE_RULES)


def plan_quantize(
    shape: tuple[int, ...],
    format: str,
    *,
    recipe: str | None = None,
    scale_rule: str | None = None,
    second_level: bool = True,
    scale_layout: str = "linear",
    nibble_order: str = "low_first",
    pad: bool = False,
    scales: int = 1,
) -> Plan:
    """Checks every option of a quantize call against a shape and returns the plan.

    Raises:
        OptionError: for unknown or contradictory options.
        ShapeError: for shapes that the format cannot take.
    """
    spec = get_format(format)
    chosen, rule = resolve_rules(spec, recipe, scale_rule)
    one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    one_of("nibble_order", nibble_order, NIBBLE_ORDERS)
    if not shape:
        raise ShapeError(f"{spec.name} quantizes the last axis, but the array is 0-dimensional")
    if chosen is not None and not second_level and not chosen.optional_second_level:
        raise OptionError(
            f"recipe {chosen.name} is not defined without its second-level scale; use nvfuser or "
            "torchao for second_level=False"
        )
    if shape[-1] % spec.block_size and not pad:
        raise ShapeError(
            f"{spec.name} needs the last axis to be a multiple of {spec.block_size}, got shape "
            f"{tuple(shape)}; pass pad=True or reshape"
        )
    rows = prod(shape[:-1])
    if scales == 0 or rows % scales:
        raise ShapeError(
            f"{scales} second-level scales do not divide the {rows} rows of shape {tuple(shape)}"
        )
    return Plan(
        format=spec,
        recipe=chosen,
        scale_rule=rule,
        rows=rows,
        cols=shape[-1],
        scale_layout=scale_layout,
        nibble_order=nibble_order,
        has_second_level=chosen is not None and second_level,
        rows_per_scale=max(rows // scales, 1),
    )
