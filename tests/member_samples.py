# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of groups that tests compile: a few of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any

from fp4kit.backend.groups import GroupedPlan
from fp4kit.backend.interface import Plan
from fp4kit.cuda.compile import DEQUANTIZE_ACCESSES, Instance
from fp4kit.cuda.member_tables import FEW_WORDS, Sides
from fp4kit.cuda.members import (
    amax_kernel,
    column_sums_kernel,
    dequantize_columns_kernel,
    dequantize_rows_kernel,
    quantize_flat_launch,
    quantize_grouped_kernel,
    vector_amax_kernel,
)
from fp4kit.cuda.variants import Directions, can_be_wide
from fp4kit.formats import (
    ALL_RECIPES,
    BLOCK_FORMATS,
    DTYPES,
    MXFP4,
    MXFP8,
    NVFP4,
    FormatSpec,
    Recipe,
)
from fp4kit.options import DIRECTIONS, RHT_ROUNDINGS
from fp4kit.reference.activations import ACTIVATIONS
from fp4kit.scheme import as_scheme

#: What kernels take as a table (common/members.cuh).
KINDS = ("ManyMembers", *(f"FewMembers<{words}>" for words in FEW_WORDS))


def sample_instances() -> list[Instance]:
    """Kernels of groups that tests compile for every architecture.

    What a tile is quantized to is compiled in as it is for single tensors, whose instances are
    those of `variant_samples.sample_instances`: here are a few of each kind.
    """
    return list(dict.fromkeys([*_quantize_samples(), *_other_samples()]))


def _plan(spec: FormatSpec, recipe: Recipe | None, **options: Any) -> Plan:
    named = {} if recipe is None else {"recipe": recipe.name}
    return Plan(as_scheme(spec.name, {**named, **options}).parts[0], 64, 64)


def _group(spec: FormatSpec, recipe: Recipe | None, layout: str, members: int) -> Sides:
    plan = replace(_plan(spec, recipe, scale_layout=layout), rows_per_scale=64)
    return Sides(GroupedPlan((plan,) * members, tuple(range(0, members * 4096, 4096))), None)


def _recipes(spec: FormatSpec) -> list[Recipe | None]:
    return list(ALL_RECIPES.values()) if spec.has_second_level else [None]


def _quantize_samples() -> Iterator[Instance]:
    te, kinds = ALL_RECIPES["te"], cycle(KINDS)
    for number, dtype in enumerate(DTYPES):
        for spec in BLOCK_FORMATS.values():
            for recipe in _recipes(spec):
                for layout, members in product(("linear", "swizzled_128x4"), (1, FEW_WORDS[-1])):
                    group = _group(spec, recipe, layout, members)
                    flat = quantize_flat_launch(group, dtype, multiprocessors=1)
                    if flat is not None:
                        yield flat.instance
            recipe = te if spec.has_second_level else None
            for name in ACTIVATIONS[number :: len(DTYPES)] if spec in (NVFP4, MXFP8) else ():
                group = _group(spec, recipe, "linear", 1)
                flat = quantize_flat_launch(group, dtype, 1, name)
                assert flat is not None
                yield flat.instance
            row, column = (_plan(spec, recipe, direction=direction) for direction in DIRECTIONS)
            for directions in (
                Directions(row, None),
                Directions(None, column),
                Directions(row, column),
            ):
                vector, one_level = number != 1, number != 2
                kind = next(kinds)
                yield quantize_grouped_kernel(directions, dtype, vector, one_level, False, kind)
    for name, kind in zip(ACTIVATIONS, cycle(KINDS), strict=False):
        row, column = (_plan(NVFP4, te, direction=direction) for direction in DIRECTIONS)
        directions = Directions(row, column)
        yield quantize_grouped_kernel(directions, "bfloat16", True, True, True, kind, name)
    # Tiles that are folded.
    columns = {"direction": "columnwise"}
    for plan in (
        _plan(NVFP4, te, **columns),
        _plan(NVFP4, te, rounding="stochastic", **columns),
        _plan(NVFP4, te, rht=1, rht_rounding="bf16", **columns),
        _plan(MXFP4, None, **columns),
    ):
        directions = Directions(None, plan)
        yield quantize_grouped_kernel(directions, "bfloat16", True, True, True, next(kinds))
    for options in (
        {"block_shape": "2d"},
        {"second_level": "per_token"},
        {"rounding": "stochastic"},
        {"scale_search": "four_over_six", "search_error": "mse"},
        {"rht": 1, "rht_rounding": "bf16"},
    ):
        row, column = (_plan(NVFP4, te, direction=direction, **options) for direction in DIRECTIONS)
        directions = Directions(row, column)
        for wide in {False, can_be_wide(directions, "bfloat16", True)}:
            yield quantize_grouped_kernel(directions, "bfloat16", True, True, wide, next(kinds))


def _other_samples() -> Iterator[Instance]:
    te, kinds = ALL_RECIPES["te"], cycle(KINDS)
    for dtype in DTYPES:
        for spec in BLOCK_FORMATS.values():
            plan = _plan(spec, te if spec.has_second_level else None)
            yield dequantize_columns_kernel(plan, dtype, spec.has_second_level, next(kinds))
            for access in DEQUANTIZE_ACCESSES:
                if plan.has_second_level or access != "rows":
                    yield dequantize_rows_kernel(plan, dtype, access, next(kinds))
        for kind in KINDS:
            yield amax_kernel(dtype, kind)
            yield from (column_sums_kernel(None, dtype, vector, kind) for vector in (True, False))
        for name in ACTIVATIONS:
            yield column_sums_kernel(name, dtype, True, next(kinds))
        for direction in DIRECTIONS:
            for vector in (True, False):
                plain = _plan(NVFP4, te, direction=direction)
                yield vector_amax_kernel(plain, dtype, vector, next(kinds))
                for rounding in RHT_ROUNDINGS:
                    plan = _plan(NVFP4, te, direction=direction, rht=1, rht_rounding=rounding)
                    yield vector_amax_kernel(plan, dtype, vector, next(kinds))
    for recipe in ALL_RECIPES.values():
        yield dequantize_rows_kernel(_plan(NVFP4, recipe), "bfloat16", "flat", next(kinds))
        yield dequantize_columns_kernel(_plan(NVFP4, recipe), "bfloat16", False, next(kinds))
