# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Variants on CUDA: kernel instances, grids and arguments from plans, as pure integer arithmetic.

Nothing here knows CuPy; :mod:`fp4kit.cuda.backend` launches what these functions return.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fp4kit.backend.interface import Plan
from fp4kit.formats import SCALE_LAYOUTS, SCALE_RULES
from fp4kit.reference.scaling import second_level_range
from fp4kit.scheme import Scheme

from .compile import (
    CXX_DTYPES,
    CXX_FORMATS,
    CXX_LAYOUTS,
    CXX_RECIPES,
    NAMESPACE,
    Instance,
    function_name,
    instance,
    seed_types,
)
from .geometry import THREADS, WIDE_BYTES, WIDE_BYTES_MOST
from .launch import ITEM_SIZES, Launch, fast_division, range_bits, rounds_stochastically

#: Extent of a tile (tiles/tile.cuh).
TILE_ROWS, TILE_COLUMNS = 128, 64
#: Columns of a wide one.
WIDE_COLUMNS = 128
#: Extent of a tall one (tiles/remainder_rows.cuh).
TALL_ROWS, TALL_COLUMNS = 256, 64
#: Wide tiles below one another that a thread block takes together (tiles/full_tile_scales.cuh).
STACK = 4
#: Elements from which linear scales of squares, in both directions, pay for a launch more.
REPEATED_ELEMENTS = 1 << 25
#: Bytes that a thread of scales/repeat_scales.cu copies.
PIECE = 8
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


def directions_of(plans: tuple[Plan, ...]) -> Directions:
    """Of one plan, or of the rows' and the columns'."""
    if len(plans) == 2:
        return Directions(*plans)
    (plan,) = plans
    return Directions(None, plan) if plan.is_columnwise else Directions(plan, None)


def rotated(plan: Plan | None, dtype: str) -> tuple[bool, str]:
    """Whether a direction is rotated, and what its elements then are."""
    if plan is None or plan.scheme.rht is None:
        return False, CXX_DTYPES[dtype]
    return True, "Bf16" if plan.scheme.rht_rounding == "bf16" else "F32"


def _cxx(template: str, *arguments: str | bool) -> str:
    """A template instance as an argument of another one."""
    words = [
        ("true" if word else "false") if isinstance(word, bool) else f"{NAMESPACE}::{word}"
        for word in arguments
    ]
    return f"{template}<{', '.join(words)}>"


def _options(scheme: Scheme) -> str:
    return _cxx(
        "Variant",
        scheme.block_shape == "2d",
        CXX_SEARCHES[scheme.scale_search],
        CXX_ERRORS[scheme.search_error],
        scheme.rounding == "stochastic",
        scheme.second_level == "per_token",
    )


def cxx_recipe(plan: Plan) -> str:
    """The recipe's name in the kernels."""
    return "kRecipeNone" if plan.recipe is None else CXX_RECIPES[plan.recipe.name]


def can_be_wide(directions: Directions, dtype: str, vector: bool) -> bool:
    """Whether tiles of 128 columns are possible: two of them must fit shared memory."""
    searches = directions.any.scheme.scale_search is not None
    return vector and ITEM_SIZES[dtype] == 2 and not searches


def is_whole(directions: Directions) -> bool:
    """Whether wide tiles can be whole ones, which store scales as words."""
    plans = [plan for plan in (directions.row, directions.column) if plan is not None]
    plan = directions.any
    linear = plan.scale_layout == "linear"
    if plan.scheme.block_shape == "2d":
        repeats = len(plans) == 2 and plan.rows * plan.cols >= REPEATED_ELEMENTS
        multiple, pays = TILE_ROWS, repeats or not linear
    else:
        # Scales of columns are kept over a stack (tiles/full_tile_scales.cuh).
        multiple, pays = TILE_ROWS * (STACK if linear else 1), directions.column is not None
    return (
        pays
        and plan.rows % multiple == plan.cols % WIDE_COLUMNS == 0
        and plan.format.name == "nvfp4"
        and plan.scale_layout in ("linear", "swizzled_128x4")
        and plan.nibble_order == "low_first"
        and shares_levels(directions)
        and all(_is_plain(each.scheme, len(plans) == 1) for each in plans)
    )


def repeats_scales(directions: Directions) -> bool:
    """Whether whole tiles store the scales of one vector of each sixteen (full_tile_scales.cuh)."""
    plan = directions.any
    return plan.scheme.block_shape == "2d" and plan.scale_layout == "linear"


def repeat_scales_kernel() -> Instance:
    """Copies of scales of squares."""
    return instance("repeat_scales_kernel", "scales/repeat_scales.cu")


def repeat_scales_launch(directions: Directions) -> Launch:
    """For (block_scale of either direction)."""
    scalars: list[int] = []
    for plan in (directions.row, directions.column):
        rows, cols = (0, PIECE) if plan is None else plan.scale_shape
        scalars += [rows // directions.any.format.block_size * cols // PIECE, cols]
    grid = (-(-(scalars[0] + scalars[2]) // THREADS),)
    return Launch(repeat_scales_kernel(), grid, tuple(scalars))


def can_fold(directions: Directions, wide: bool, one_level: bool, name: str | None) -> bool:
    """Whether tiles can be tall, and folded where there are few rows (tiles/remainder_rows.cuh)."""
    plan = directions.column
    return (
        plan is not None
        and directions.row is None
        and plan.format.element.bits == 4
        and plan.scheme.block_shape == "1d"
        and wide
        and one_level
        and name is None
    )


def _is_plain(scheme: Scheme, alone: bool) -> bool:
    """Whether only direction and block shape are not plain, or the rounding too if `alone`.

    Rotations are no faster for it, and both directions with random numbers were not measured.
    """
    usual = {"direction", "block_shape"} | ({"rounding"} if alone else set())
    return scheme.deviations <= usual


def shares_levels(directions: Directions) -> bool:
    """Whether all vectors of a direction have the same second level."""
    return all(plan is None or plan.scales == 1 for plan in (directions.row, directions.column))


def wide_shared(directions: Directions, dtype: str, vector: bool, one_level: bool) -> int:
    """Shared memory that a block of wide tiles asks for, 0 if tiles cannot be wide.

    The rest is as for the instance.
    """
    plan = directions.any
    if not can_be_wide(directions, dtype, vector):
        return 0
    has_levels = plan.has_second_level and plan.recipe is not None
    return WIDE_BYTES_MOST if has_levels and not one_level else WIDE_BYTES


@lru_cache(maxsize=1024)
def quantize_tiles_kernel(
    directions: Directions,
    dtype: str,
    vector: bool,
    wide: bool = False,
    whole: bool = False,
    name: str | None = None,
) -> Instance:
    """The instance for some directions of an element type, with 16-byte accesses or single ones.

    `whole`: for what :func:`is_whole` tells of, with wide tiles. `name`: a function of the
    elements, with wide tiles too.
    """
    config = tile_config(directions, dtype, vector, shares_levels(directions), wide, name)
    if whole:
        config = f"Full<{NAMESPACE}::{config}>"
    seed = seed_types(rounds_stochastically(directions.any))
    return instance("quantize_tiles_kernel", "tiles/quantize_tiles.cu", config, *seed)


def tile_config(
    directions: Directions,
    dtype: str,
    vector: bool,
    one_level: bool,
    wide: bool = False,
    name: str | None = None,
) -> str:
    """The TileConfig of an instance; `one_level` if the vectors of a direction share theirs."""
    config = _tile_config(directions, dtype, vector, one_level, wide)
    return config if name is None else _cxx("Activated", config, function_name(name))


def _tile_config(
    directions: Directions, dtype: str, vector: bool, one_level: bool, wide: bool
) -> str:
    plan = directions.any
    return _cxx(
        "TileConfig",
        CXX_FORMATS[plan.format.name],
        CXX_DTYPES[dtype],
        cxx_recipe(plan),
        plan.has_second_level and plan.recipe is not None,
        one_level,
        _options(plan.scheme),
        CXX_LAYOUTS[plan.scale_layout],
        directions.row is not None,
        *rotated(directions.row, dtype),
        directions.column is not None,
        *rotated(directions.column, dtype),
        vector,
        "kWide" if wide else "kNarrow",
    )


def _side(plan: Plan | None) -> tuple[int, ...]:
    """The numbers of one direction."""
    if plan is None:
        return (0, 0, 1, 1)
    return plan.blocks, plan.scale_shape[1], plan.scales, plan.rows_per_scale


def sign_mask_of(plan: Plan | None) -> int:
    """The sign mask of a direction's rotation."""
    return 0 if plan is None else int(plan.scheme.rht or 0)


def _tiles(plan: Plan, columns: int = TILE_COLUMNS) -> tuple[tuple[int, ...], int]:
    """Grid, and tiles in a row of them."""
    across = -(-plan.cols // columns)
    return (-(-plan.rows // TILE_ROWS) * across,), across


def quantize_tiles_launch(
    directions: Directions, kernel: Instance, wide: bool, shared: int
) -> Launch:
    """For (taken, x, factor, second, packed, block_scale of either direction), and the seed.

    The grid is that of the tiles.

    Args:
        directions: the plans.
        kernel: for them.
        wide: whether tiles have 128 columns.
        shared: bytes of shared memory that a block asks for.
    """
    plan = directions.any
    grid, across = _tiles(plan, WIDE_COLUMNS if wide else TILE_COLUMNS)
    scalars = (
        plan.rows,
        plan.cols,
        across,
        *grid,
        *_side(directions.row),
        *_side(directions.column),
        int(plan.nibble_order == "high_first"),
        0 if plan.scale_rule is None else SCALE_RULES.index(plan.scale_rule),
        int(second_level_range(plan.scheme.e4m3_max)),
        sign_mask_of(directions.row),
        sign_mask_of(directions.column),
        *fast_division(across, *grid),
    )
    return Launch(kernel, grid, scalars, shared)


def decoded_tile(plan: Plan, dtype: str, many_levels: bool) -> tuple[str | bool, ...]:
    """Template arguments of columnwise.cuh; `many_levels`: a second level for each vector."""
    has_levels = plan.has_second_level and plan.recipe is not None
    return (
        CXX_FORMATS[plan.format.name],
        CXX_DTYPES[dtype],
        cxx_recipe(plan),
        has_levels,
        not (has_levels and many_levels),
    )


@lru_cache(maxsize=1024)
def dequantize_launch(plan: Plan, dtype: str) -> Launch:
    """For (packed, block_scale, second, out) of a columnwise plan."""
    grid, across = _tiles(plan)
    arguments = decoded_tile(plan, dtype, plan.scales > 1)
    return Launch(
        instance("dequantize_columnwise_kernel", "dequantize/columnwise.cu", *arguments),
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
            *range_bits(plan),
        ),
    )


def is_padded(plan: Plan) -> bool:
    """Whether the stored scales have bytes that belong to no block."""
    stored = plan.scale_shape[0] * plan.scale_shape[1]
    return stored != plan.vectors * plan.blocks
