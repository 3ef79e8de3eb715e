# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Rotations, and amaxes of rotated rows or of columns, on CUDA: instances, grids and arguments.

Nothing here knows CuPy; :mod:`fp4kit.cuda.backend` launches what these functions return.
"""

from __future__ import annotations

from functools import lru_cache

from fp4kit.backend.interface import Plan, Rotation
from fp4kit.options import GROUP

from .compile import CXX_DTYPES, instance
from .geometry import ROTATE_UNROLL, THREADS
from .launch import ITEM_SIZES, WARP, Launch, fast_division, grid_for
from .variants import rotated, sign_mask_of

#: Thread blocks that fill any device, and the most groups a thread of row_column_amax.cu takes.
AMAX_BLOCKS, AMAX_ROUNDS = 1024, 8


def _rounds(threads: int) -> int:
    """Groups a thread, of so many: few enough to fill a device, as far as there are enough."""
    return min(max(threads // (AMAX_BLOCKS * THREADS), 1), AMAX_ROUNDS)


@lru_cache(maxsize=1024)
def amax_launch(plan: Plan, dtype: str, aligned: bool) -> Launch:
    """For (x, result) amaxes of rotated rows; of columns, for (x, result, plain)."""
    launch = _column_amax_launch if plan.is_columnwise else _row_amax_launch
    return launch(plan, dtype, aligned)


def _row_amax_launch(plan: Plan, dtype: str, aligned: bool) -> Launch:
    _, elements = rotated(plan, dtype)
    groups = plan.rows * plan.cols // GROUP
    span = groups // plan.scales
    team = THREADS if span >= 4 * THREADS else WARP
    rounds = _rounds(groups)
    chunks = -(-span // (team * rounds))
    units = plan.scales * chunks
    return Launch(
        instance("row_amax_kernel", "reduce/row_column_amax.cu", CXX_DTYPES[dtype], aligned),
        grid_for(units * team),
        (
            span,
            chunks,
            *fast_division(chunks, units + THREADS // team),
            units,
            rounds,
            team,
            sign_mask_of(plan),
            int(elements == "Bf16"),
        ),
    )


def _column_amax_launch(plan: Plan, dtype: str, aligned: bool) -> Launch:
    turned, elements = rotated(plan, dtype)
    pairs = aligned and ITEM_SIZES[dtype] == 2 and plan.cols % 2 == 0
    across = 2 if pairs else 1
    width, down = plan.cols // across, -(-plan.rows // GROUP)
    each = _rounds(width * down)
    total = width * -(-down // each)
    team = 1
    if plan.scales == 1:
        team = THREADS
    elif width % WARP == 0 and plan.rows_per_scale % (WARP * across) == 0:
        team = WARP
    return Launch(
        instance(
            "column_amax_kernel", "reduce/row_column_amax.cu", CXX_DTYPES[dtype], turned, pairs
        ),
        grid_for(total),
        (
            plan.rows,
            plan.cols,
            *fast_division(width, total),
            total,
            each,
            plan.rows_per_scale,
            team,
            sign_mask_of(plan),
            int(turned and elements == "Bf16"),
        ),
    )


def rotate_launch(
    shape: tuple[int, int], dtype: str, rotation: Rotation, out: str, aligned: bool
) -> Launch:
    """For (x, out)."""
    rows, cols = shape
    scalars = (rotation.mask, int(rotation.rounding == "bf16"), int(rotation.inverse))
    types = CXX_DTYPES[dtype], CXX_DTYPES[out]
    groups = rows * cols // GROUP
    if rotation.direction == "rowwise":
        return Launch(
            instance("rotate_rows_kernel", "rht/rotate.cu", *types, aligned),
            grid_for(-(-groups // ROTATE_UNROLL[ITEM_SIZES[dtype]])),
            (groups, *scalars),
        )
    pairs = aligned and cols % 2 == 0 and min(ITEM_SIZES[dtype], ITEM_SIZES[out]) == 2
    width = cols // 2 if pairs else cols
    total = width * (rows // GROUP)
    return Launch(
        instance("rotate_columns_kernel", "rht/rotate.cu", *types, pairs),
        grid_for(total),
        (cols, *fast_division(width, total), total, *scalars),
    )
