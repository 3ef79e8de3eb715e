# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Kernel instances of variants that tests compile for every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from fp4kit.backend.interface import Plan, Rotation
from fp4kit.cuda import rotations as cuda_rotations
from fp4kit.cuda import search as cuda_search
from fp4kit.cuda.compile import Instance
from fp4kit.cuda.launch import quantize_launch
from fp4kit.cuda.variants import (
    Directions,
    can_be_wide,
    dequantize_launch,
    quantize_tiles_kernel,
    repeat_scales_kernel,
)
from fp4kit.formats import (
    ALL_RECIPES,
    BLOCK_FORMATS,
    DTYPES,
    MXFP4,
    NVFP4,
    SCALE_LAYOUTS,
    FormatSpec,
    Recipe,
)
from fp4kit.options import DIRECTIONS, RHT_ROUNDINGS, SEARCH_ERRORS
from fp4kit.reference.activations import ACTIVATIONS
from fp4kit.scheme import as_scheme

BLOCK_SHAPES = ("1d", "2d")


def sample_instances() -> list[Instance]:
    """Kernels of variants that tests compile for every architecture.

    Calls can combine more: options are compiled in, so that each combination is an instance of its
    own. Every option, recipe, format and element type occurs here, each with some others.
    """
    return list(
        dict.fromkeys(
            [
                *_quantize_samples(),
                *_whole_samples(),
                *_activated_samples(),
                *_flat_samples(),
                *_other_samples(),
            ]
        )
    )


def _plan(spec: FormatSpec, recipe: Recipe | None, **options: Any) -> Plan:
    """A plan of 64 x 64 elements: one second level in all, or each vector its own if per token."""
    named = {} if recipe is None else {"recipe": recipe.name}
    scheme = as_scheme(spec.name, {**named, **options}).parts[0]
    return Plan(scheme, 64, 64, 1 if scheme.second_level == "per_token" else 64)


def _laid(plan: Plan, layout: str) -> Plan:
    return replace(plan, scheme=plan.scheme.replace(scale_layout=layout))


def _options_of_te() -> Iterator[dict[str, Any]]:
    """Every option that recipe te has, with blocks and with tiles."""
    searches = [
        {"scale_search": name, "search_error": "mse"} for name in ("four_over_six", "sweep")
    ]
    for block in BLOCK_SHAPES:
        yield {"block_shape": block}
        yield {"block_shape": block, "rounding": "stochastic"}
        for search in searches:
            yield {"block_shape": block, **search}
    yield {"second_level": "per_token"}
    yield {"second_level": "per_token", "rounding": "stochastic"}
    for rounding in RHT_ROUNDINGS:
        yield {"rht": 1, "rht_rounding": rounding}


def _flat_samples() -> Iterator[Instance]:
    """Rows that are rounded stochastically, without tiles: every instance that there is."""
    for spec in (NVFP4, MXFP4):
        recipe = ALL_RECIPES["te"] if spec.has_second_level else None
        for dtype, layout in product(DTYPES, SCALE_LAYOUTS):
            # One with whole tiles of scales across, one without.
            for cols in (128, 96):
                plan = _plan(spec, recipe, rounding="stochastic", scale_layout=layout)
                plan = replace(plan, cols=cols)
                yield quantize_launch(plan, dtype, 1, True, 1).instance


def _activated_samples() -> Iterator[Instance]:
    te, specs = ALL_RECIPES["te"], list(BLOCK_FORMATS.values())
    for number, name in enumerate(ACTIVATIONS):
        for spec in (NVFP4, specs[number % len(specs)]):
            recipe = te if spec.has_second_level else None
            row, column = (
                _plan(spec, recipe, direction=direction, block_shape=BLOCK_SHAPES[number % 2])
                for direction in DIRECTIONS
            )
            dtype = ("bfloat16", "float16")[number % 2]
            for directions in (Directions(row, column), Directions(None, column)):
                yield quantize_tiles_kernel(directions, dtype, True, True, name=name)


def _whole_samples() -> Iterator[Instance]:
    """Whole tiles, whose scales are stored as words."""
    te, modelopt = ALL_RECIPES["te"], ALL_RECIPES["modelopt"]
    types = ("bfloat16", "float16")
    whole = partial(quantize_tiles_kernel, vector=True, wide=True, whole=True)
    for block, layout, dtype in product(BLOCK_SHAPES, ("linear", "swizzled_128x4"), types):
        row, column = (
            _laid(_plan(NVFP4, te, direction=direction, block_shape=block), layout)
            for direction in DIRECTIONS
        )
        yield whole(Directions(row, column), dtype)
        if block == "2d" and layout != "linear":
            yield whole(Directions(row, None), dtype)
            yield whole(Directions(None, column), dtype)
    for recipe, layout, rounding in (
        (modelopt, "linear", "nearest"),
        (modelopt, "swizzled_128x4", "nearest"),
        (te, "linear", "stochastic"),
        (te, "swizzled_128x4", "stochastic"),
    ):
        column = _plan(NVFP4, recipe, direction="columnwise", rounding=rounding)
        yield whole(Directions(None, _laid(column, layout)), "bfloat16")
    yield repeat_scales_kernel()


def _quantize_samples() -> Iterator[Instance]:
    te = ALL_RECIPES["te"]
    for options in _options_of_te():
        row, column = (_plan(NVFP4, te, direction=direction, **options) for direction in DIRECTIONS)
        for directions in (
            Directions(row, None),
            Directions(None, column),
            Directions(row, column),
        ):
            yield quantize_tiles_kernel(directions, "bfloat16", True)
            if can_be_wide(directions, "bfloat16", True):
                yield quantize_tiles_kernel(directions, "bfloat16", True, wide=True)
    for number, dtype in enumerate(DTYPES):
        for spec in BLOCK_FORMATS.values():
            recipe = te if spec.has_second_level else None
            row, column = (
                _plan(spec, recipe, direction=direction, block_shape=BLOCK_SHAPES[number % 2])
                for direction in DIRECTIONS
            )
            yield quantize_tiles_kernel(Directions(row, column), dtype, number == 1)
    for recipe in ALL_RECIPES.values():
        column = _plan(NVFP4, recipe, direction="columnwise")
        yield quantize_tiles_kernel(Directions(None, column), "float16", True)
        many = replace(column, rows_per_scale=1)
        for wide in (False, True):
            yield quantize_tiles_kernel(Directions(None, many), "float16", True, wide)
    for error in SEARCH_ERRORS:
        for search in ("four_over_six", "sweep"):
            row = _plan(NVFP4, te, scale_search=search, search_error=error)
            yield quantize_tiles_kernel(Directions(row, None), "bfloat16", True)
            for dtype in DTYPES:
                yield cuda_search.quantize_searched_kernel(row, dtype)
            for layout in SCALE_LAYOUTS:
                laid = _laid(row, layout)
                yield cuda_search.quantize_searched_kernel(laid, "bfloat16")
    # What takes most shared memory.
    for block, search in product(BLOCK_SHAPES, ("four_over_six", "sweep")):
        row, column = (
            _plan(
                NVFP4,
                te,
                direction=direction,
                block_shape=block,
                scale_search=search,
                search_error="mse",
            )
            for direction in DIRECTIONS
        )
        yield quantize_tiles_kernel(Directions(row, column), "float32", True)
        row, column = (replace(plan, rows_per_scale=16) for plan in (row, column))
        yield quantize_tiles_kernel(Directions(row, column), "float32", True)
    for layout in SCALE_LAYOUTS:
        row, column = (
            _laid(_plan(NVFP4, te, direction=direction, block_shape="2d"), layout)
            for direction in DIRECTIONS
        )
        yield quantize_tiles_kernel(Directions(row, column), "bfloat16", True)


def _other_samples() -> Iterator[Instance]:
    te = ALL_RECIPES["te"]
    for dtype in DTYPES:
        for spec in BLOCK_FORMATS.values():
            recipe = te if spec.has_second_level else None
            yield dequantize_launch(_plan(spec, recipe, direction="columnwise"), dtype).instance
        for direction, aligned in product(DIRECTIONS, (True, False)):
            turned = _plan(NVFP4, te, direction=direction, rht=1, rht_rounding="bf16")
            yield cuda_rotations.amax_launch(turned, dtype, aligned).instance
            for out in DTYPES:
                rotation = Rotation(direction, 1, "none", False)
                yield cuda_rotations.rotate_launch((64, 64), dtype, rotation, out, aligned).instance
        for aligned in (True, False):
            yield cuda_rotations.amax_launch(
                _plan(NVFP4, te, direction="columnwise"), dtype, aligned
            ).instance
    for recipe in ALL_RECIPES.values():
        column = _plan(NVFP4, recipe, direction="columnwise")
        yield dequantize_launch(column, "bfloat16").instance
        for dtype in ("bfloat16", "float32"):
            yield dequantize_launch(replace(column, rows_per_scale=1), dtype).instance
