# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights whose codes can be taken over: as MXFP4, or as NVFP4 if no value changes."""

from __future__ import annotations

from dataclasses import replace as with_changes
from functools import partial

import numpy as np

from fp4kit.checkpoint.layouts import Layout
from fp4kit.checkpoint.plan.checkpoint_plan import CheckpointPlan, Unit
from fp4kit.checkpoint.views.codes import Mxfp4Codes
from fp4kit.checkpoint.views.mxfp4 import Mxfp4View
from fp4kit.formats import MXFP4, get_recipe
from fp4kit.io.metadata import QuantizedEntry
from fp4kit.io.quantize_plan import TensorPlan

from .lossless import Exponents, PowerOfTwo, block_scales, scan_group
from .transfer import Transfer


def transfers_of(plan: CheckpointPlan, unit: Unit) -> list[Transfer]:
    """The transfers of a unit: empty if its members are no codes, or must be requantized."""
    if not unit.codes:
        return []
    if not isinstance(unit.codes[0], Mxfp4Codes):
        pairs = zip(unit.codes, unit.works, strict=True)
        return [Transfer(codes, _entry(work)) for codes, work in pairs]
    assert plan.layout is not None
    return take_over(plan.layout, unit)


def take_over(layout: Layout, unit: Unit) -> list[Transfer]:
    """The transfers of MXFP4 weights, empty if values would change.

    Each work of the unit learns what becomes of it.

    Args:
        layout: how the result is stored.
        unit: the members of a fusion group, or one weight.
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
    exponents = scan_group(_views(unit))
    if exponents.misfits:
        for work in works:
            work.reason = _refused(exponents)
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
        transfers.append(Transfer(codes, work.entry, partial(_scales, level)))
    return transfers


def _entry(work: TensorPlan) -> QuantizedEntry:
    assert work.entry is not None
    return work.entry


def _views(unit: Unit) -> list[Mxfp4View]:
    return [codes.view for codes in unit.codes if isinstance(codes, Mxfp4Codes)]


def _scales(level: PowerOfTwo, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return block_scales(packed, scales, level)


def _refused(exponents: Exponents) -> str:
    return (
        f"requantized: {exponents.misfits} of {exponents.blocks} MXFP4 blocks have exponents that "
        "E4M3 scales cannot hold beside the largest"
    )
