# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""From a call's options and shape to a plan: every check that needs no array.

The results are remembered, so that a call like an earlier one costs two lookups: its options
(`quantize_options`), then these with the arrays' shapes, type and device (`quantize_call`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fp4kit.backend.interface import Backend, Plan
from fp4kit.errors import OptionError, ShapeError
from fp4kit.formats import (
    NIBBLE_ORDERS,
    SCALE_LAYOUTS,
    SCALE_RULES,
    FormatSpec,
    Recipe,
    get_format,
    get_recipe,
    one_of,
)
from fp4kit.variant import Variant, check_groups

from .backends import engine_for

NONFINITE_POLICIES = ("raise", "propagate")
#: The arguments of a second-level scale, by its direction.
SCALE_ARGUMENTS = {"amax": "amax", "decode": "decode_scale", "encode": "encode_scale"}


@dataclass(frozen=True, eq=False)
class Options:
    """The options of a quantize or quantize_dequantize call, equal ones being one object.

    Those that depend on the shape are checked with it, by `quantize_call`.

    Attributes:
        operation: `quantize` or `quantize_dequantize`.
        format: block format.
        recipe: NVFP4 order of operations, None for MX formats.
        scale_rule: MX rule, None for NVFP4.
        second_level: whether the caller wants a second-level scale if the format has one.
        scale_layout: as passed.
        nibble_order: as passed.
        pad: as passed.
        refuses_nonfinite: whether the data must be scanned for NaN and infinity.
        given: direction of the second-level scale that was passed, or None.
        variant: deviations from plain rowwise quantization, None if there are none.
    """

    operation: str
    format: FormatSpec
    recipe: Recipe | None
    scale_rule: str | None
    second_level: bool
    scale_layout: str
    nibble_order: str
    pad: bool
    refuses_nonfinite: bool
    given: str | None
    variant: Variant | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about a call but the arrays.

    Attributes:
        options: the caller's options.
        plan: what the backend is to do.
        engine: the backend that does it.
        packed_shape: shape of the codes as the caller sees them.
        scale_shape: the same of the block scales.
        is_empty: whether there is nothing to do.
    """

    options: Options
    plan: Plan
    engine: Backend
    packed_shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    is_empty: bool


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
    variant: Variant | None = None,
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
    rows, cols = prod(shape[:-1]), shape[-1]
    columnwise = variant is not None and variant.axis == "column"
    if variant is not None:
        variant.check(spec, chosen, second_level)
        if variant.hadamard is not None:
            check_groups(rows if columnwise else cols, variant.axis, shape)
    tiled = variant is not None and variant.block == "2d"
    if cols % spec.block_size and not pad and (tiled or not columnwise):
        raise ShapeError(
            f"{spec.name} needs the last axis to be a multiple of {spec.block_size}, got shape "
            f"{tuple(shape)}; pass pad=True or reshape"
        )
    if rows % spec.block_size and not pad and (tiled or columnwise):
        raise ShapeError(
            f"{spec.name} in {'2-D tiles' if tiled else 'columns'} needs the number of rows to be "
            f"a multiple of {spec.block_size}, got {rows} in shape {tuple(shape)}; pass pad=True"
        )
    vectors = cols if columnwise else rows
    if scales == 0 or vectors % scales:
        raise ShapeError(
            f"{scales} second-level scales do not divide the {vectors} "
            f"{'columns' if columnwise else 'rows'} of shape {tuple(shape)}"
        )
    if tiled and scales > 1 and (columnwise or rows // scales % spec.block_size):
        raise ShapeError(
            f"{scales} second-level scales would cut 2-D tiles of {spec.block_size} rows of shape "
            f"{tuple(shape)}; pass one scale"
        )
    return Plan(
        format=spec,
        recipe=chosen,
        scale_rule=rule,
        rows=rows,
        cols=cols,
        scale_layout=scale_layout,
        nibble_order=nibble_order,
        has_second_level=chosen is not None and second_level,
        rows_per_scale=max(vectors // scales, 1),
        variant=variant,
    )


def _given_direction(recipe: Recipe, passed: list[str]) -> str:
    """The direction of the one second-level scale that was passed.

    Raises:
        OptionError: if several were passed, or one in a direction the recipe cannot take.
    """
    if len(passed) > 1:
        names = ", ".join(SCALE_ARGUMENTS[direction] for direction in passed)
        raise OptionError(f"pass one of {names}, not all")
    direction = passed[0]
    if direction not in ("amax", recipe.direction):
        allowed = " or ".join(dict.fromkeys(("amax", SCALE_ARGUMENTS[recipe.direction])))
        raise OptionError(
            f"recipe {recipe.name} takes {allowed}, not {SCALE_ARGUMENTS[direction]}; directions "
            "are not exact inverses, so convert on purpose: fp4kit.convert_second_level"
        )
    return direction


def _check_options(
    operation: str,
    format: str,
    recipe: str | None,
    scale_rule: str | None,
    second_level: bool,
    scale_layout: str,
    nibble_order: str,
    pad: bool,
    nonfinite: str,
    amax: bool,
    decode: bool,
    encode: bool,
    variant: Variant | None = None,
) -> Options:
    one_of("nonfinite", nonfinite, NONFINITE_POLICIES)
    spec = get_format(format)
    chosen, rule = resolve_rules(spec, recipe, scale_rule)
    flags = {"amax": amax, "decode": decode, "encode": encode}
    passed = [direction for direction, flag in flags.items() if flag]
    if passed and (chosen is None or not second_level):
        raise OptionError(
            f"a second-level scale was passed, but {spec.name}"
            f"{'' if chosen is None else ' with second_level=False'} has none"
        )
    return Options(
        operation=operation,
        format=spec,
        recipe=chosen,
        scale_rule=rule,
        second_level=second_level,
        scale_layout=scale_layout,
        nibble_order=nibble_order,
        pad=pad,
        refuses_nonfinite=nonfinite == "raise",
        given=_given_direction(chosen, passed) if chosen is not None and passed else None,
        variant=variant,
    )


_known_options = lru_cache(maxsize=1024)(_check_options)


def quantize_options(
    operation: str,
    format: str,
    recipe: str | None,
    scale_rule: str | None,
    second_level: bool,
    scale_layout: str,
    nibble_order: str,
    pad: bool,
    nonfinite: str,
    amax: bool,
    decode: bool,
    encode: bool,
    variant: Variant | None = None,
) -> Options:
    """Checks the options of a call; `amax`, `decode` and `encode` say which scales were passed.

    Raises:
        OptionError: for unknown or contradictory options.
    """
    # Positional: keywords would double the cost of a lookup.
    options = (operation, format, recipe, scale_rule, second_level, scale_layout)
    more = (nibble_order, pad, nonfinite, amax, decode, encode)
    try:
        return _known_options(*options, *more, variant)
    except TypeError:  # an option that cannot be hashed gets the message of its own check
        return _check_options(*options, *more, variant)


@lru_cache(maxsize=1024)
def quantize_call(
    options: Options,
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    scales: int,
    backend: str | None,
) -> Call:
    """Checks options against a shape and chooses the backend.

    Raises:
        OptionError: for unknown or contradictory options.
        ShapeError: for shapes that the format cannot take.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.
    """
    recipe = options.recipe.name if options.recipe is not None else None
    plan = plan_quantize(
        shape,
        options.format.name,
        recipe=recipe,
        scale_rule=options.scale_rule,
        second_level=options.second_level,
        scale_layout=options.scale_layout,
        nibble_order=options.nibble_order,
        pad=options.pad,
        scales=scales,
        variant=options.variant,
    )
    name, variant = plan.format.name, options.variant
    engine = engine_for(options.operation, device, dtype, name, recipe, backend, variant)
    lead = shape[:-1]
    linear = plan.scale_layout == "linear" and not plan.is_columnwise
    return Call(
        options=options,
        plan=plan,
        engine=engine,
        packed_shape=plan.packed_shape if plan.is_columnwise else (*lead, plan.packed_shape[1]),
        scale_shape=(*lead, plan.blocks) if linear else plan.scale_shape,
        is_empty=plan.rows == 0 or plan.cols == 0,
    )
