# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Taking codes over from one stored form to another, without decoding them.

Codes and block scales keep their values; the order of nibbles, the order of scales and the
direction of the second level change where the two forms differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from fp4kit.checkpoint.views.codes import Codes, Fp8Codes, Mxfp4Codes, Scales, swap_nibbles
from fp4kit.checkpoint.views.stacked import StackedCodes
from fp4kit.errors import OptionError
from fp4kit.formats import E4M3, MXFP4, NVFP4, get_recipe
from fp4kit.io.quantize_plan import TensorPlan
from fp4kit.io.quantize_tensors import finish_tensor, write_codes
from fp4kit.io.storage import QuantizedEntry
from fp4kit.io.stream.chunks import Tally, Write, chunk_plan, row_ranges, row_step
from fp4kit.io.stream.pipeline import Pipeline

from .lossless import Exponents, Nvfp4Recoder, Recoder, scan_group
from .lossless_fp8 import Fp8Recoder

#: What becomes of codes, in reports.
TAKEN_OVER = "codes and scales taken over"
SAME_VALUES = "MXFP4 codes taken over, no value changes"
#: Bytes of codes that are handled together, and of those that are recoded.
CHUNK_BYTES, RECODED_BYTES = 32 << 20, 4 << 20


@dataclass(frozen=True)
class Transfer:
    """One weight whose codes are taken over.

    Attributes:
        codes: the old form.
        work: what is said about it; its entry is the new form, with its second level.
        recode: what becomes of codes and scales, None if they stay.
    """

    codes: Codes
    work: TensorPlan
    recode: Recoder | None = None

    @property
    def entry(self) -> QuantizedEntry:
        """The new form."""
        return _entry(self.work)

    @property
    def logical_bytes(self) -> int:
        """Bytes of an element of the logical tensor, in which progress is counted."""
        return np.dtype(arrays.RAW_DTYPES[self.entry.dtype]).itemsize

    def chunks(self) -> Iterator[tuple[int, int, Bytes, Scales]]:
        """(first row, row after the last, codes, scales) of the new form."""
        step = lcm(self.codes.step, row_step(self.entry.plan))
        plan, limit = self.codes.plan, CHUNK_BYTES if self.recode is None else RECODED_BYTES
        for first, last in row_ranges(plan.rows, plan.packed_shape[1], step, limit):
            packed, scales = self.codes.read(first, last)
            if self.recode is not None:
                packed, scales = self.recode(packed, scales)
            yield first, last, packed, scales

    def end(self) -> None:
        """Says what has become of the values, once all chunks are made."""
        if self.recode is not None and self.recode.rounded:
            self.work.rounded = self.recode.rounded
            elements = self.codes.plan.rows * self.codes.plan.cols
            self.work.reason = (
                f"{self.work.rounded} of {elements} MXFP4 values are rounded: they are too small "
                "beside the largest under the same scale"
            )


def transfers_of(plan: CheckpointPlan, unit: WorkUnit) -> list[Transfer]:
    """The transfers of a unit: empty if its members are no codes, or must be requantized."""
    if not unit.codes:
        return []
    if isinstance(unit.codes[0], Mxfp4Codes):
        assert plan.layout is not None
        return take_over(plan.layout, unit)
    pairs = list(zip(unit.codes, unit.works, strict=True))
    if isinstance(unit.codes[0], StackedCodes):
        if _entry(unit.works[0]).plan.format is not MXFP4:
            return []
        for work in unit.works:
            work.action, work.reason = "transfer", TAKEN_OVER
    if isinstance(unit.codes[0], Fp8Codes):
        return _bytes_taken_over(unit)
    return [Transfer(codes, work) for codes, work in pairs]


def _bytes_taken_over(unit: WorkUnit) -> list[Transfer]:
    """The transfers of FP8 weights, empty if the new form has other elements or scales."""
    found = []
    for codes, work in zip(unit.codes, unit.works, strict=True):
        fitting = codes.under(_entry(work).plan) if isinstance(codes, Fp8Codes) else None
        if fitting is None:
            return []
        found.append(Transfer(fitting, work))
    for work in unit.works:
        work.action, work.reason = "transfer", TAKEN_OVER
    return found


def take_over(layout: Layout, unit: WorkUnit) -> list[Transfer]:
    """The transfers of MXFP4 weights, empty if values would change.

    Each work of the unit learns what becomes of it.
    """
    works = unit.works
    new = _entry(works[0]).plan
    if new.format is MXFP4:
        for work in works:
            work.action, work.reason = "transfer", TAKEN_OVER
        return [Transfer(codes, work) for codes, work in zip(unit.codes, works, strict=True)]
    views = [codes.view for codes in unit.codes if isinstance(codes, Mxfp4Codes)]
    if new.grid is not None and new.format.element is E4M3:
        return _as_fp8(unit, scan_group(views) if new.has_one_scale else None)
    if new.format is not NVFP4 or not new.has_second_level:
        return []
    exponents = scan_group(views)
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
        work.action, work.reason = "transfer", SAME_VALUES
        transfers.append(Transfer(codes, work, Nvfp4Recoder(level)))
    return transfers


def _as_fp8(unit: WorkUnit, exponents: Exponents | None) -> list[Transfer]:
    """The transfers of MXFP4 weights to FP8; `exponents` are those of all under one scale."""
    transfers = []
    for codes, work in zip(unit.codes, unit.works, strict=True):
        work.action, work.reason = "transfer", SAME_VALUES
        transfers.append(Transfer(codes, work, Fp8Recoder(_entry(work).plan, exponents)))
    return transfers


def check_lossless(plan: CheckpointPlan) -> None:
    """Refuses a plan under which a value would change; reads the codes where only they tell.

    Raises:
        OptionError: naming the first weight that would not keep its values, and why.
    """
    for unit in (unit for shard in plan.shards for unit in shard.units):
        transfers = transfers_of(plan, unit)
        if not transfers and any(work.entry is not None for work in unit.works):
            work = unit.works[0]
            plain = f"it is quantized from plain numbers {work.reason}".rstrip()
            _refuse(plan, work, work.reason if unit.codes else plain)
        for transfer in transfers:
            if isinstance(transfer.recode, Fp8Recoder):
                for _ in transfer.chunks():
                    pass
                transfer.end()
            if transfer.work.rounded:
                _refuse(plan, transfer.work, transfer.work.reason)


def _refuse(plan: CheckpointPlan, work: TensorPlan, why: str) -> None:
    raise OptionError(
        f"{plan.source.path}: {work.tensor.name!r} would not keep all of its values "
        f"({why or 'its scales are others'}); exclude it, choose another format or granularity, or "
        "leave --lossless out"
    )


def _entry(work: TensorPlan) -> QuantizedEntry:
    assert work.entry is not None
    return work.entry


def _in_order(entry: QuantizedEntry, rows: int, packed: Bytes, scales: Scales) -> list[Bytes]:
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
            for first, last, packed, scales in transfer.chunks():
                parts = _in_order(entry, last - first, packed, scales)
                pipeline.submit(partial(write_codes, write, entry, first, *parts))
                tally.add((last - first) * codes.plan.cols * transfer.logical_bytes)
            pipeline.finish()
            finish_tensor(write, entry)
            transfer.end()
