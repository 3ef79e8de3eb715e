# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups on CUDA: kernel instances and their arguments, for the tables of `cuda_member_tables`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.groups import GroupedPlan, filled
from fp4kit.backend.interface import Plan
from fp4kit.formats import SCALE_LAYOUTS, SCALE_RULES
from fp4kit.reference.scaling import second_level_range

from . import variants as cuda_variants
from .compile import (
    CXX_DTYPES,
    CXX_FORMATS,
    DEQUANTIZE_ACCESSES,
    NAMESPACE,
    Instance,
    function_name,
    instance,
    seed_types,
)
from .geometry import FLAT_BLOCKS, LANE
from .launch import (
    ITEM_SIZES,
    dequantize_access,
    range_bits,
    rounds_stochastically,
    seed_arguments,
)
from .member_tables import (
    MemberTable,
    Sides,
    amax_chunk,
    amax_table,
    first_plan,
    folded_table,
    lane_table,
    per_vector,
    piece_table,
    sides_of,
    strip_table,
    strips,
    tile_table,
)
from .variants import (
    TILE_COLUMNS,
    WIDE_COLUMNS,
    Directions,
    can_fold,
    cxx_recipe,
    decoded_tile,
    rotated,
    sign_mask_of,
    tile_config,
)


@dataclass(frozen=True)
class MemberLaunch:
    """A kernel over the members of a group.

    Attributes:
        instance: the kernel.
        table: its pieces of work.
        grid: thread blocks.
        scalars: what follows its arrays.
    """

    instance: Instance
    table: MemberTable
    grid: tuple[int, ...]
    scalars: tuple[int, ...]


def _directions(sides: Sides) -> Directions:
    """The directions of one member, standing for all."""
    return Directions(
        None if sides.row is None else first_plan(sides.row),
        None if sides.column is None else first_plan(sides.column),
    )


def _high_first(plan: Plan) -> int:
    return int(plan.nibble_order == "high_first")


def _rule(plan: Plan) -> int:
    return 0 if plan.scale_rule is None else SCALE_RULES.index(plan.scale_rule)


def _has_levels(plan: Plan) -> bool:
    return plan.has_second_level and plan.recipe is not None


@lru_cache(maxsize=256)
def quantize_flat_launch(
    sides: Sides, dtype: str, multiprocessors: int, name: str | None = None
) -> MemberLaunch | None:
    """For (gate, factor, second, packed, block_scale, table): the fast path of rows, or None.

    Everything must be aligned. `name`: an activation, for linear scales only. With others there is
    no factor among the parameters.
    """
    group = sides.row
    if group is None or sides.column is not None:
        return None
    plan = first_plan(group)
    members = [group.members[number] for number in filled(group)]
    whole = all(member.cols % plan.format.block_size == 0 for member in members)
    if not plan.is_plain or per_vector(group) or not whole:
        return None
    names: tuple[str | bool, ...] = (
        CXX_FORMATS[plan.format.name],
        CXX_DTYPES[dtype],
        cxx_recipe(plan),
        _has_levels(plan),
    )
    if plan.scale_layout == "linear":
        kernel, table = "rowwise", lane_table(sides)
        names = *names, function_name(name)
    elif name is not None:
        return None
    elif plan.scale_layout == "swizzled_128x4" and plan.format.block_size == LANE:
        if any(member.blocks % 4 or strips(member) >= 2**31 for member in members):
            return None
        kernel, table = "rowwise_swizzled", strip_table(sides)
    else:
        return None
    stretch, grid = table.stretches(multiprocessors * FLAT_BLOCKS[ITEM_SIZES[dtype]])
    return MemberLaunch(
        instance(f"grouped_quantize_{kernel}_kernel", f"quantize/{kernel}.cu", *names, table.kind),
        table,
        grid,
        (stretch, _high_first(plan), _rule(plan)),
    )


def quantize_grouped_kernel(
    directions: Directions,
    dtype: str,
    vector: bool,
    one_level: bool,
    wide: bool,
    kind: str,
    name: str | None = None,
) -> Instance:
    """The instance that serves everything; `one_level` unless vectors have levels of their own."""
    config = tile_config(directions, dtype, vector, one_level, wide, name)
    if can_fold(directions, wide, one_level, name):
        config = f"Tall<{NAMESPACE}::{config}>"
    seed = seed_types(rounds_stochastically(directions.any))
    return instance("grouped_quantize_tiles_kernel", "tiles/quantize_tiles.cu", config, kind, *seed)


def quantize_arguments(
    sides: Sides,
    sources: tuple[int, int],
    table: NDArray[np.void],
    tiles: int,
    row: tuple[int, int, int],
    column: tuple[int, int, int],
    seed: tuple[int, int],
) -> tuple[Any, ...]:
    """Arguments of `quantize_grouped_kernel`.

    Args:
        sides: the plans.
        sources: addresses of the buffer, and of factors.
        table: of the tiles.
        tiles: of all members.
        row: addresses of (second, packed, block_scale) of the rowwise result.
        column: the same of the columnwise one.
        seed: key and stream of the random numbers.
    """
    directions = _directions(sides)
    plan = directions.any
    return (
        *sources,
        table,
        tiles,
        *row,
        int(sides.row is not None and per_vector(sides.row)),
        *column,
        int(sides.column is not None and per_vector(sides.column)),
        _high_first(plan),
        _rule(plan),
        int(second_level_range(plan.scheme.e4m3_max)),
        sign_mask_of(directions.row),
        sign_mask_of(directions.column),
        *seed_arguments(plan, seed),
    )


@lru_cache(maxsize=256)
def quantize_launch(
    sides: Sides, dtype: str, vector: bool, wide: bool, name: str | None = None
) -> tuple[Instance, MemberTable]:
    """The kernel and table that `quantize_arguments` are for."""
    directions, one_level = _directions(sides), _share_levels(sides)
    if can_fold(directions, wide, one_level, name):
        table = folded_table(sides)
    else:
        table = tile_table(sides, WIDE_COLUMNS if wide else TILE_COLUMNS)
    kernel = quantize_grouped_kernel(directions, dtype, vector, one_level, wide, table.kind, name)
    return kernel, table


def wide_shared(sides: Sides, dtype: str, vector: bool) -> int:
    """Shared memory that a block of wide tiles asks for, 0 if tiles cannot be wide."""
    return cuda_variants.wide_shared(_directions(sides), dtype, vector, _share_levels(sides))


def _share_levels(sides: Sides) -> bool:
    return not any(group is not None and per_vector(group) for group in sides)


@lru_cache(maxsize=256)
def dequantize_launch(group: GroupedPlan, dtype: str, vector: bool) -> MemberLaunch:
    """For (packed, block_scale, second, out, table); `vector` as `takes_vectors`, and aligned."""
    sides = sides_of((group,))
    plan = first_plan(group)
    if plan.is_columnwise:
        table = tile_table(sides)
        kernel = dequantize_columns_kernel(plan, dtype, per_vector(group), table.kind)
    else:
        access = _dequantize_access(group, dtype, vector)
        table = piece_table(sides, dtype, access)
        kernel = dequantize_rows_kernel(plan, dtype, access, table.kind)
    return MemberLaunch(
        kernel,
        table,
        table.grid,
        (
            int(per_vector(group)),
            SCALE_LAYOUTS.index(plan.scale_layout),
            _high_first(plan),
            *range_bits(plan),
        ),
    )


def _dequantize_access(group: GroupedPlan, dtype: str, vector: bool) -> str:
    """The first of `DEQUANTIZE_ACCESSES` that fits all members: the last one that one needs."""
    scales = 2 if per_vector(group) else 1
    members = (group.members[number] for number in filled(group))
    needed = {dequantize_access(m, dtype, scales, vector) for m in members}
    return max(needed, key=list(DEQUANTIZE_ACCESSES).index)


def dequantize_rows_kernel(plan: Plan, dtype: str, access: str, kind: str) -> Instance:
    """Every member decoded, rowwise."""
    return instance(
        "grouped_dequantize_rowwise_kernel",
        "dequantize/rowwise.cu",
        CXX_FORMATS[plan.format.name],
        CXX_DTYPES[dtype],
        cxx_recipe(plan),
        _has_levels(plan),
        DEQUANTIZE_ACCESSES[access],
        kind,
    )


def dequantize_columns_kernel(plan: Plan, dtype: str, many_levels: bool, kind: str) -> Instance:
    """Every member decoded, columnwise."""
    arguments = decoded_tile(plan, dtype, many_levels)
    return instance(
        "grouped_dequantize_columnwise_kernel", "dequantize/columnwise.cu", *arguments, kind
    )


@lru_cache(maxsize=256)
def amax_launch(group: GroupedPlan, dtype: str, vector: bool) -> MemberLaunch:
    """For (x, table, result): one amax a member, or one a vector, perhaps after the rotation."""
    sides = sides_of((group,))
    plan = first_plan(group)
    if not per_vector(group) and plan.scheme.rht is None:
        table = amax_table(sides, dtype)
        kernel = amax_kernel(dtype, table.kind)
        scalars = int(plan.is_columnwise), amax_chunk(dtype)
    else:
        table = tile_table(sides)
        kernel = vector_amax_kernel(plan, dtype, vector, table.kind)
        scalars = int(per_vector(group)), sign_mask_of(plan)
    return MemberLaunch(kernel, table, table.grid, scalars)


def amax_kernel(dtype: str, kind: str) -> Instance:
    """One amax a member."""
    return instance("grouped_amax_kernel", "reduce/amax.cu", CXX_DTYPES[dtype], kind)


def vector_amax_kernel(plan: Plan, dtype: str, vector: bool, kind: str) -> Instance:
    """One amax a vector, perhaps after the rotation."""
    turned, elements = rotated(plan, dtype)
    return instance(
        "grouped_row_column_amax_kernel",
        "reduce/row_column_amax.cu",
        CXX_DTYPES[dtype],
        elements,
        plan.is_columnwise,
        turned,
        vector,
        kind,
    )


def column_sums_kernel(name: str | None, dtype: str, vector: bool, kind: str) -> Instance:
    """Two levels of the sums of an element type, of its activation's results if one is named."""
    names = CXX_DTYPES[dtype], function_name(name), vector, kind
    return instance("grouped_column_sums_kernel", "reduce/column_sums.cu", *names)
