# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Taking codes over from one stored form to another, without decoding them.

Codes and block scales keep their values; the order of nibbles, the order of scales and the
direction of the second level change where the two forms differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import replace as with_changes
from functools import partial
from math import lcm

import numpy as np

from fp4kit import arrays
from fp4kit.api.backends import get_backend
from fp4kit.checkpoint.layouts import Layout
from fp4kit.checkpoint.plan.checkpoint_plan import CheckpointPlan, WorkUnit
from fp4kit.checkpoint.views.base import Bytes
from fp4kit.checkpoint.views.codes import Codes, Mxfp4Codes, swap_nibbles
from fp4kit.formats import MXFP4, get_recipe
from fp4kit.io.quantize_plan import TensorPlan
from fp4kit.io.quantize_tensors import finish_tensor, write_codes
from fp4kit.io.storage import QuantizedEntry
from fp4kit.io.stream.chunks import Tally, Write, chunk_plan, row_ranges, row_step
from fp4kit.io.stream.pipeline import Pipeline

from .lossless import block_scales, scan_group

#: From codes and scales of some rows, and the first row, to the block scales of the new form.
ScaleMap = Callable[[Bytes, Bytes], Bytes]
#: Bytes of codes that are handled together.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Transfer:
    """One weight whose codes are taken over.

    Attributes:
        codes: the old form.
        entry: the new one, with its second level.
        scale_map: what becomes of its block scales, None if they stay.
    """

    codes: Codes
    entry: QuantizedEntry
    scale_map: ScaleMap | None = None

    @property
    def logical_bytes(self) -> int:
        """Bytes of an element of the logical tensor, in which progress is counted."""
        return np.dtype(arrays.RAW_DTYPES[self.entry.dtype]).itemsize


def transfers_of(plan: CheckpointPlan, unit: WorkUnit) -> list[Transfer]:
    """The transfers of a unit: empty if its members are no codes, or must be requantized."""
    if not unit.codes:
        return []
    if not isinstance(unit.codes[0], Mxfp4Codes):
        pairs = zip(unit.codes, unit.works, strict=True)
        return [Transfer(codes, _entry(work)) for codes, work in pairs]
    assert plan.layout is not None
    return take_over(plan.layout, unit)


def take_over(layout: Layout, unit: WorkUnit) -> list[Transfer]:
    """The transfers of MXFP4 weights, empty if values would change.

    Each work of the unit learns what becomes of it.
    """
    works = unit.works
    first = works[0].entry
    assert first is not None
    if first.plan.format is MXFP4:
        for work in works:
            work.action, work.reason = "transfer", "codes and scales taken over"
        return [
            Transfer(codes, _entry(work)) for codes, work in zip(unit.codes, works, strict=True)
        ]
    exponents = scan_group(codes.view for codes in unit.codes if isinstance(codes, Mxfp4Codes))
    if exponents.misfits:
        for work in works:
            work.reason = (
                f"requantized: {exponents.misfits} of {exponents.blocks} MXFP4 blocks have "
                "exponents that E4M3 scales cannot hold beside the largest"
            )
        return []
    level = exponents.second_level
    recipe = get_recipe(layout.recipe)
    second = np.array(
        [level.decode if recipe.keeps == "decode_scale" else level.encode], np.float32
    )
    transfers = []
    for codes, work in zip(unit.codes, works, strict=True):
        entry = _entry(work)
        # Under the recipe of the layout the stored scale is the very power of two.
        scheme = entry.plan.scheme.replace(
            recipe=recipe.name, scale_search=None, search_error=None, e4m3_max=448
        )
        plan = with_changes(entry.plan, scheme=scheme)
        work.entry = with_changes(entry, plan=plan, second=second)
        work.action, work.reason = "transfer", "MXFP4 codes taken over, no value changes"
        transfers.append(Transfer(codes, work.entry, partial(block_scales, level=level)))
    return transfers


def _entry(work: TensorPlan) -> QuantizedEntry:
    assert work.entry is not None
    return work.entry


def _in_order(entry: QuantizedEntry, rows: int, packed: Bytes, scales: Bytes) -> list[Bytes]:
    """Codes and scales of some rows as the new form orders them, flat."""
    plan = chunk_plan(entry.plan, rows)
    if plan.format.codes_per_byte == 2 and plan.nibble_order == "high_first":
        packed = swap_nibbles(packed)
    if plan.scale_layout != "linear":
        swizzled = np.empty(plan.scale_shape, np.uint8)
        linear = np.ascontiguousarray(scales)
        get_backend("cpu").swizzle(linear, plan.scale_layout, swizzled)
        scales = swizzled
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (packed, scales)]


def run_transfers(transfers: Iterable[Transfer], write: Write, tally: Tally) -> None:
    """Takes every weight over: codes, block scales, second level, constants."""
    with Pipeline() as pipeline:
        for transfer in transfers:
            codes, entry = transfer.codes, transfer.entry
            step = lcm(codes.step, row_step(entry.plan))
            for first, last in row_ranges(
                codes.plan.rows, codes.plan.packed_shape[1], step, CHUNK_BYTES
            ):
                packed, scales = codes.read(first, last)
                if transfer.scale_map is not None:
                    scales = transfer.scale_map(packed, scales)
                parts = _in_order(entry, last - first, packed, scales)
                pipeline.submit(partial(write_codes, write, entry, first, *parts))
                tally.add((last - first) * codes.plan.cols * transfer.logical_bytes)
            pipeline.finish()
            finish_tensor(write, entry)
