# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Variants on CUDA: kernel instances, grids and arguments from plans, as pure integer arithmetic.

Nothing here knows CuPy; :mod:`fp4kit.backends.cuda` launches what these functions return.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fp4kit.formats import (
    ALL_FORMATS,
    ALL_RECIPES,
    DTYPES,
    NVFP4,
    SCALE_LAYOUTS,
    SCALE_RULES,
    FormatSpec,
    Recipe,
)
from fp4kit.scaling import second_level_range
from fp4kit.variant import AXES, BLOCKS, ERRORS, GROUP, PLAIN, RHT_ROUNDINGS, Variant

from .base import Plan
from .cuda_launch import ITEM_SIZES, Launch, grid_for, rows_are_vectors
from .cuda_module import (
    CXX_DTYPES,
    CXX_FORMATS,
    CXX_LAYOUTS,
    CXX_RECIPES,
    NAMESPACE,
    WIDE_BYTES,
    WIDE_BYTES_MOST,
    Instance,
    instance,
)

#: Extent of a tile (tiles.cuh).
TILE_ROWS, TILE_COLUMNS = 128, 64
WIDE_COLUMNS = 128
CXX_SEARCHES = {
    None: "kSearchNone",
    "four_over_six": "kSearchFourOverSix",
    "sweep": "kSearchSweep",
}
CXX_ERRORS = {
    None: "kErrorMse",
    "mse": "kErrorMse",
    "mae": "kErrorMae",
    "mse_scaled": "kErrorMseScaled",
    "mae_scaled": "kErrorMaeScaled",
}


@dataclass(frozen=True)
class Directions:
    """The plans of one launch: rows, columns, or both.

    Attributes:
        row: plan of the rowwise result, or None.
        column: plan of the columnwise result, or None.
    """

    row: Plan | None
    column: Plan | None

    @property
    def any(self) -> Plan:
        """A plan, for what both share."""
        plan = self.row or self.column
        assert plan is not None
        return plan


def variant_of(plan: Plan) -> Variant:
    """A plan's variant; a plain plan has the plain one."""
    return plan.variant or PLAIN


def rotated(plan: Plan | None, dtype: str) -> tuple[bool, str]:
    """Whether a direction is rotated, and what its elements then are."""
    if plan is None or variant_of(plan).hadamard is None:
        return False, CXX_DTYPES[dtype]
    return True, "Bf16" if variant_of(plan).rht_rounding == "bf16" else "F32"


def _cxx(template: str, *arguments: str | bool) -> str:
    """A template instance as an argument of another one."""
    words = [
        ("true" if word else "false") if isinstance(word, bool) else f"{NAMESPACE}::{word}"
        for word in arguments
    ]
    return f"{template}<{', '.join(words)}>"


def _options(variant: Variant) -> str:
    return _cxx(
        "Variant",
        variant.block == "2d",
        CXX_SEARCHES[variant.scale_search],
        CXX_ERRORS[variant.error],
        variant.rounding == "stochastic",
        variant.per_token,
    )


def cxx_recipe(plan: Plan) -> str:
    """The recipe's name in the kernels."""
    return "kRecipeNone" if plan.recipe is None else CXX_RECIPES[plan.recipe.name]


def can_be_wide(directions: Directions, dtype: str, vector: bool) -> bool:
    """Whether tiles of 128 columns are possible: two of them must fit shared memory."""
    searches = variant_of(directions.any).scale_search is not None
    return vector and ITEM_SIZES[dtype] == 2 and not searches


def one_level(directions: Directions) -> bool:
    """Whether all vectors of a direction share their second level."""
    return all(plan is None or plan.scales == 1 for plan in (directions.row, directions.column))


def wide_bytes(directions: Directions) -> int:
    """Shared memory that a block asks for, if tiles are wide."""
    plan = directions.any
    turns = variant_of(plan).block == "2d" and directions.column is not None
    turns = turns and plan.format.element.bits == 4
    has_levels = plan.has_second_level and plan.recipe is not None
    most = turns or (has_levels and not one_level(directions))
    return WIDE_BYTES_MOST if most else WIDE_BYTES


@lru_cache(maxsize=1024)
def quantize_tiles_kernel(
    directions: Directions, dtype: str, vector: bool, wide: bool = False
) -> Instance:
    """The instance for some directions of an element type, with 16-byte accesses or single ones."""
    config = tile_config(directions, dtype, vector, one_level(directions), wide)
    return instance("quantize_tiles_kernel", "quantize_tiles.cu", config)


def tile_config(
    directions: Directions, dtype: str, vector: bool, one_level: bool, wide: bool = False
) -> str:
    """The TileConfig of an instance; `one_level` if the vectors of a direction share theirs."""
    plan = directions.any
    return _cxx(
        "TileConfig",
        CXX_FORMATS[plan.format.name],
        CXX_DTYPES[dtype],
        cxx_recipe(plan),
        plan.has_second_level and plan.recipe is not None,
        one_level,
        _options(variant_of(plan)),
        CXX_LAYOUTS[plan.scale_layout],
        directions.row is not None,
        *rotated(directions.row, dtype),
        directions.column is not None,
        *rotated(directions.column, dtype),
        vector,
        "kWide" if wide else "kNarrow",
    )


def _side(plan: Plan | None, pointers: tuple[int, int, int]) -> tuple[int, ...]:
    """Arguments of one direction: (second, packed, block_scale) and its numbers."""
    if plan is None:
        return (0, 0, 0, 0, 0, 1, 1)
    stored_cols = plan.scale_shape[1]
    return (*pointers, plan.blocks, stored_cols, plan.scales, plan.rows_per_scale)


def sign_mask_of(plan: Plan | None) -> int:
    """The sign mask of a direction's rotation."""
    return 0 if plan is None else variant_of(plan).hadamard or 0


def _tiles(plan: Plan, columns: int = TILE_COLUMNS) -> tuple[tuple[int, ...], int]:
    """Grid, and tiles in a row of them."""
    across = -(-plan.cols // columns)
    return (-(-plan.rows // TILE_ROWS) * across,), across


def can_vector(plan: Plan, dtype: str) -> bool:
    """Whether rows of the input are whole 16-byte pieces."""
    return rows_are_vectors(plan.cols, dtype)


def quantize_arguments(
    directions: Directions,
    x: int,
    row: tuple[int, int, int],
    column: tuple[int, int, int],
    seed: tuple[int, int],
    wide: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tiles and arguments of `quantize_tiles_kernel`; fewer blocks stride over the tiles.

    Args:
        directions: the plans.
        x: address of the input.
        row: addresses of (second, packed, block_scale) of the rowwise result.
        column: the same of the columnwise one.
        seed: key and stream of the random numbers.
        wide: whether tiles have 128 columns.
    """
    plan = directions.any
    variant = variant_of(plan)
    grid, across = _tiles(plan, WIDE_COLUMNS if wide else TILE_COLUMNS)
    key, stream = seed
    return grid, (
        x,
        plan.rows,
        plan.cols,
        across,
        *grid,
        *_side(directions.row, row),
        *_side(directions.column, column),
        int(plan.nibble_order == "high_first"),
        0 if plan.scale_rule is None else SCALE_RULES.index(plan.scale_rule),
        int(second_level_range(variant.e4m3_max)),
        sign_mask_of(directions.row),
        sign_mask_of(directions.column),
        # The kernel takes the bits of an unsigned number.
        key - (1 << 64) if key >= 1 << 63 else key,
        stream,
    )


@lru_cache(maxsize=1024)
def dequantize_launch(plan: Plan, dtype: str) -> Launch:
    """For (packed, block_scale, second, out)."""
    grid, across = _tiles(plan)
    kernel = instance(
        "dequantize_tiles_kernel",
        "dequantize_tiles.cu",
        CXX_FORMATS[plan.format.name],
        CXX_DTYPES[dtype],
        cxx_recipe(plan),
        plan.has_second_level and plan.recipe is not None,
        plan.is_columnwise,
    )
    return Launch(
        kernel,
        grid,
        (
            plan.rows,
            plan.cols,
            across,
            plan.blocks,
            plan.scale_shape[1],
            plan.scales,
            plan.rows_per_scale,
            SCALE_LAYOUTS.index(plan.scale_layout),
            int(plan.nibble_order == "high_first"),
            int(second_level_range(variant_of(plan).e4m3_max)),
        ),
    )


@lru_cache(maxsize=1024)
def amax_launch(plan: Plan, dtype: str) -> Launch:
    """For (x, result): amaxes of a plan's vectors."""
    # A tile is scaled as a whole, so its amaxes are those of the rows in either direction.
    columns = plan.is_columnwise and variant_of(plan).block == "1d"
    length = plan.rows if columns else plan.cols
    groups = -(-length // GROUP)
    total = groups * (plan.cols if columns else plan.rows)
    turned, elements = rotated(plan, dtype)
    return Launch(
        instance("vector_amax_kernel", "rotate.cu", CXX_DTYPES[dtype], elements, columns, turned),
        grid_for(total),
        (plan.rows, plan.cols, groups, total, plan.scales, plan.rows_per_scale, sign_mask_of(plan)),
    )


def rotate_launch(
    rows: int, cols: int, dtype: str, axis: str, mask: int, rounding: str, inverse: bool, out: str
) -> Launch:
    """For (x, out)."""
    columns = axis == "column"
    groups = (rows if columns else cols) // GROUP
    total = rows * cols // GROUP
    return Launch(
        instance("rotate_kernel", "rotate.cu", CXX_DTYPES[dtype], CXX_DTYPES[out], columns),
        grid_for(total),
        (cols, groups, total, mask, int(rounding == "bf16"), int(inverse)),
    )


def is_padded(plan: Plan) -> bool:
    """Whether the stored scales have bytes that belong to no block."""
    stored = plan.scale_shape[0] * plan.scale_shape[1]
    return stored != plan.vectors * plan.blocks


def sample_instances() -> list[Instance]:
    """Kernels of variants that tests compile for every architecture.

    Calls can combine more: options are compiled in, so that each combination is an instance of its
    own. Every option, recipe, format and element type occurs here, each with some others.
    """
    return list(dict.fromkeys([*_quantize_samples(), *_other_samples()]))


def _plan(spec: FormatSpec, recipe: Recipe | None, **options: Any) -> Plan:
    """A plan of 64 x 64 elements: one second level in all, or each vector its own if per token."""
    variant = Variant(**options)
    plan = Plan(spec, recipe, spec.default_scale_rule, 64, 64, has_second_level=recipe is not None)
    return replace(plan, variant=variant, rows_per_scale=1 if variant.per_token else 64)


def _options_of_te() -> Iterator[dict[str, Any]]:
    """Every option that recipe te has, with blocks and with tiles."""
    searches = [{"scale_search": name, "error": "mse"} for name in ("four_over_six", "sweep")]
    for block in BLOCKS:
        yield {"block": block}
        yield {"block": block, "rounding": "stochastic"}
        for search in searches:
            yield {"block": block, **search}
    yield {"per_token": True}
    yield {"per_token": True, "rounding": "stochastic"}
    for rounding in RHT_ROUNDINGS:
        yield {"hadamard": 1, "rht_rounding": rounding}


def _quantize_samples() -> Iterator[Instance]:
    te = ALL_RECIPES["te"]
    for options in _options_of_te():
        row, column = (_plan(NVFP4, te, axis=axis, **options) for axis in AXES)
        for directions in (
            Directions(row, None),
            Directions(None, column),
            Directions(row, column),
        ):
            yield quantize_tiles_kernel(directions, "bfloat16", True)
    for number, dtype in enumerate(DTYPES):
        for spec in ALL_FORMATS.values():
            recipe = te if spec.has_second_level else None
            row, column = (
                _plan(spec, recipe, axis=axis, block=BLOCKS[number % 2]) for axis in AXES
            )
            yield quantize_tiles_kernel(Directions(row, column), dtype, number == 1)
    for recipe in ALL_RECIPES.values():
        column = _plan(NVFP4, recipe, axis="column")
        yield quantize_tiles_kernel(Directions(None, column), "float16", True)
        many = replace(column, rows_per_scale=1)
        yield quantize_tiles_kernel(Directions(None, many), "float16", True)
    for error in ERRORS:
        for search in ("four_over_six", "sweep"):
            row = _plan(NVFP4, te, scale_search=search, error=error)
            yield quantize_tiles_kernel(Directions(row, None), "bfloat16", True)
    # What takes most shared memory.
    for block in BLOCKS:
        row, column = (
            _plan(NVFP4, te, axis=axis, block=block, scale_search="four_over_six", error="mse")
            for axis in AXES
        )
        yield quantize_tiles_kernel(Directions(row, column), "float32", True)
        row, column = (replace(plan, rows_per_scale=16) for plan in (row, column))
        yield quantize_tiles_kernel(Directions(row, column), "float32", True)
    for layout in SCALE_LAYOUTS:
        row, column = (
            replace(_plan(NVFP4, te, axis=axis, block="2d"), scale_layout=layout) for axis in AXES
        )
        yield quantize_tiles_kernel(Directions(row, column), "bfloat16", True)


def _other_samples() -> Iterator[Instance]:
    te = ALL_RECIPES["te"]
    for dtype in DTYPES:
        for spec in ALL_FORMATS.values():
            recipe = te if spec.has_second_level else None
            yield dequantize_launch(_plan(spec, recipe, axis="column"), dtype).instance
        for axis in AXES:
            turned = {"axis": axis, "hadamard": 1, "rht_rounding": "bf16"}
            yield amax_launch(_plan(NVFP4, te, **turned), dtype).instance
            yield amax_launch(_plan(NVFP4, te, axis=axis), dtype).instance
            yield rotate_launch(64, 64, dtype, axis, 1, "none", False, dtype).instance
    for recipe in ALL_RECIPES.values():
        yield dequantize_launch(_plan(NVFP4, recipe, axis="column"), "bfloat16").instance
