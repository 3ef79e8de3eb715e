# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which fields of a scheme go together, and the reason where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import OptionError, brief
from .formats import ALL_RECIPES, GRID_RECIPES, SCALE_RULES, flag, get_recipe, one_of
from .options import E4M3_MAXIMA, sign_mask

if TYPE_CHECKING:
    from .scheme import Scheme


def check_fields(scheme: Scheme) -> None:
    """Refuses fields that contradict each other or the format.

    Raises:
        OptionError: with the reason.
    """
    if scheme.recipe is not None:
        recipes = GRID_RECIPES if scheme.spec.has_scale_grid else ALL_RECIPES
        one_of("recipe", scheme.recipe, recipes)
    if scheme.scale_rule is not None:
        one_of("scale_rule", scheme.scale_rule, SCALE_RULES)
    flag("pad", scheme.pad)
    if scheme.spec.has_scale_grid:
        _check_grid(scheme)
    elif scheme.granularity is not None:
        raise OptionError(
            f"granularity={scheme.granularity!r} is for fp8; {scheme.format} has a scale for each "
            f"block of {scheme.spec.block_size}"
        )
    _check_scales(scheme)
    _check_search(scheme)
    _check_second_level(scheme)
    if scheme.rounding not in scheme.spec.roundings:
        raise OptionError(f"rounding={scheme.rounding!r} is for E2M1 elements, not {_name(scheme)}")
    if scheme.rounding == "stochastic":
        _check_te(scheme, "rounding='stochastic' is defined for")
    _check_rotation(scheme)


def _name(scheme: Scheme) -> str:
    """The format and, where it has one, the recipe, for messages."""
    if not scheme.spec.has_second_level:
        return scheme.format
    return f"{scheme.format} with recipe {scheme.recipe or 'te'}"


def _check_scales(scheme: Scheme) -> None:
    """Recipe, scale rule and second level each belong to some formats."""
    if scheme.spec.has_second_level:
        if scheme.scale_rule is not None:
            raise OptionError(
                f"{scheme.format} takes a recipe, not scale_rule={scheme.scale_rule!r}; scale "
                "rules are for mxfp4 and mxfp8"
            )
        recipe = get_recipe(scheme.recipe or "te")
        if scheme.second_level == "none" and not recipe.optional_second_level:
            raise OptionError(
                f"recipe {recipe.name} is not defined without its second-level scale; use "
                "nvfuser or torchao for second_level='none'"
            )
        return
    if scheme.recipe is not None and not scheme.spec.has_scale_grid:
        raise OptionError(
            f"recipe={scheme.recipe!r} is for nvfp4; {scheme.format} takes scale_rule: "
            f"{', '.join(SCALE_RULES)}"
        )
    if scheme.second_level not in (None, "none"):
        raise OptionError(
            f"second_level={scheme.second_level!r} is for nvfp4; {scheme.format} has none"
        )


def _check_grid(scheme: Scheme) -> None:
    """What formats with float32 scales do not have."""
    if scheme.granularity is not None and scheme.recipe is not None:
        known = GRID_RECIPES[scheme.recipe].granularities
        if scheme.granularity not in known:
            raise OptionError(
                f"recipe {scheme.recipe} has granularity {' or '.join(known)}, not "
                f"{scheme.granularity!r}"
            )
    for name, only in (("scale_rule", None), ("scale_layout", "linear"), ("block_shape", "1d")):
        if getattr(scheme, name) != only:
            raise OptionError(
                f"{name}={getattr(scheme, name)!r} is for scales of blocks along vectors; "
                f"{scheme.format} takes a granularity"
            )
    if scheme.direction != "rowwise" and scheme.grid_granularity != "channel":
        raise OptionError(
            f"granularity={scheme.grid_granularity!r} has no direction: one result serves both; "
            f"leave direction={scheme.direction!r} out, or use granularity='channel'"
        )


def _check_search(scheme: Scheme) -> None:
    if not isinstance(scheme.e4m3_max, int) or scheme.e4m3_max not in E4M3_MAXIMA:
        raise OptionError(f"e4m3_max={brief(scheme.e4m3_max)} is not known; choose 448 or 256")
    if scheme.scale_search is None:
        if scheme.search_error is not None or scheme.e4m3_max != 448:
            raise OptionError("search_error and e4m3_max belong to a scale_search; name one")
        return
    if not scheme.spec.has_second_level or scheme.recipe not in (None, "te"):
        raise OptionError(
            f"scale_search={scheme.scale_search!r} compares errors under recipe te of nvfp4, not "
            f"{_name(scheme)}; use recipe='te' (its codes can be stored for any engine)"
        )
    for name, clash in (("rounding", "stochastic"), ("second_level", "per_token")):
        if getattr(scheme, name) == clash:
            raise OptionError(
                "scale_search compares the errors of rounding to nearest under recipe te; it "
                f"cannot be combined with {name}={clash!r}"
            )


def _check_second_level(scheme: Scheme) -> None:
    if scheme.second_level not in ("row_scaled", "per_token"):
        return
    if scheme.second_level == "per_token" and scheme.recipe not in (None, "te"):
        raise OptionError(
            f"second_level='per_token' is a formula of recipe te, not of {_name(scheme)}"
        )
    if scheme.block_shape == "2d":
        raise OptionError(
            f"a 2-D tile has one scale, second_level={scheme.second_level!r} one per row: no both"
        )


def _check_te(scheme: Scheme, what: str) -> None:
    if scheme.recipe not in (None, "te"):
        raise OptionError(f"{what} recipe te, not {_name(scheme)}")


def _check_rotation(scheme: Scheme) -> None:
    if scheme.rht is None or scheme.rht is False:
        for name in ("rht_direction", "rht_rounding"):
            if getattr(scheme, name) is not None:
                raise OptionError(f"{name} belongs to rht; pass rht=True or a mask")
        return
    sign_mask(scheme.rht)
    if not scheme.spec.can_rotate:
        raise OptionError(f"rht rotates before E2M1 quantization, not {_name(scheme)}")
    _check_te(scheme, "rht is defined for")
    if scheme.block_shape == "2d":
        raise OptionError("rht mixes 16 elements of one direction, a 2-D tile must serve both")
    if scheme.rht_direction is not None and scheme.direction not in ("both", scheme.rht_direction):
        raise OptionError(
            f"rht_direction={scheme.rht_direction!r} is not quantized under "
            f"direction={scheme.direction!r}"
        )
