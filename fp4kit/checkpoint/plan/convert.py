# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Planning how a quantized checkpoint changes its layout, codes and block scales staying verbatim.

The second level changes its direction, by one division in binary32. A division and another do not
always give the first number back; where they do not, the header of the result keeps the old bits,
so that converting back gives the same file.
"""

from __future__ import annotations

import json
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.checkpoint.layouts import Layout, Summary, get_layout, module_of
from fp4kit.checkpoint.options import ConvertOptions
from fp4kit.checkpoint.plan.expert_restore import EXPERTS_KEY, describe, recorded
from fp4kit.checkpoint.read.directory import Checkpoint, listed
from fp4kit.checkpoint.read.quantized import Quantized, is_usable, scale_bits
from fp4kit.checkpoint.views.base import TensorView
from fp4kit.checkpoint.views.entries import EntryView
from fp4kit.checkpoint.views.logical import LogicalSource
from fp4kit.checkpoint.views.opened import Opened, open_quantized
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.containers import DTYPE_CODES, TensorSpec
from fp4kit.io.quantize_plan import TensorPlan, refuse_collisions
from fp4kit.io.read.json_text import parse_metadata
from fp4kit.io.read.source import SourceTensor
from fp4kit.io.storage import Constant, QuantizedEntry
from fp4kit.reference.scaling import convert_second_level, quiet
from fp4kit.scheme import as_scheme

from .checkpoint_plan import CheckpointPlan, WorkUnit, check_source, in_stored_order, pack
from .convert_fp8 import fp8_codes, plan_convert_fp8
from .ignored import ignored_modules, unknown_type_warnings
from .model_dtype import state_decoded_dtype
from .quantize import embedding_modules
from .schemes import format_groups

#: Header metadata: bits of second-level scales before a conversion that does not invert itself.
SECOND_LEVEL_KEY = "fp4kit_second_level"

Scale = NDArray[np.float32]
#: The second level of NVFP4 that is stored without one; its own inverse.
ONE = np.ones(1, np.float32)
#: Why codes are not taken over.
REQUANTIZED = "requantized: the layout keeps no second level"
OPPOSITE = {"encode_scale": "decode_scale", "decode_scale": "encode_scale"}


def _patterns(content: Any) -> dict[str, int]:
    """Names to the bits of their second levels."""
    if not all(type(bits) is int and 0 <= bits < 2**32 for bits in content.values()):
        raise ValueError("not all of its values are 32-bit patterns")
    return dict(content)


class SecondLevelChange:
    """Second levels from one layout's direction to another's, and back to the same bits."""

    def __init__(self, checkpoint: Checkpoint, old: Layout, new: Layout) -> None:
        self._old, self._new = old.storage.keeps, new.storage.keeps
        before = parse_metadata(checkpoint.metadata, SECOND_LEVEL_KEY, checkpoint.path, _patterns)
        self._before = before or {}
        #: Bits that the header of the result has to keep.
        self.kept: dict[str, int] = {}

    def changed(self, key: str, value: Scale) -> Scale:
        """A scale in the new direction.

        Args:
            key: name of the weight or module that it belongs to.
            value: float32 (1,) in the old direction.
        """
        with quiet():
            before = self._recorded(key, value)
            if self._old == self._new:
                if before is not None:
                    self.kept[key] = scale_bits(before)
                return value
            if before is not None:
                return before
            result = convert_second_level(value, self._old, self._new)
            if scale_bits(convert_second_level(result, self._new, self._old)) != scale_bits(value):
                self.kept[key] = scale_bits(value)
        return result

    def _recorded(self, key: str, value: Scale) -> Scale | None:
        """The scale that this one was made from, if the header knows it and it still fits."""
        if key not in self._before:
            return None
        before = np.array([self._before[key]], np.uint32).view(np.float32)
        back = convert_second_level(before, OPPOSITE[self._old], self._old)
        return before if scale_bits(back) == scale_bits(value) else None


def _converted(
    layout: Layout, entry: QuantizedEntry, quantized: Quantized, change: SecondLevelChange
) -> QuantizedEntry:
    """A weight in the new layout, under the recipe that its readers decode by."""
    recipe = layout.recipe if entry.plan.format.has_second_level else None
    fields = {"recipe": recipe, "scale_rule": entry.plan.scale_rule}
    scheme = as_scheme(entry.plan.format.name, fields)
    made = layout.entry(entry.name, entry.shape, entry.dtype, scheme)
    if not made.plan.has_second_level:
        return made
    second = ONE if entry.second is None else entry.second
    made = with_changes(made, second=change.changed(entry.name, second))
    module = module_of(entry.name)
    value = quantized.activations.get(module)
    if value is None or layout.activation_suffix is None:
        return made
    # Its own name differs between layouts.
    scale = change.changed(module, value).astype("<f4").tobytes()
    spec = TensorSpec(f"{module}{layout.activation_suffix}", "F32", layout.activation_shape)
    return with_changes(made, constants=(*made.constants, Constant(spec, scale)))


def _is_requantized(layout: Layout, entry: QuantizedEntry) -> bool:
    """Whether a weight has a second level that a layout keeps no place for."""
    return (
        entry.second is not None
        and layout.storage.second_suffix is None
        and scale_bits(entry.second) != scale_bits(ONE)
    )


def _requantized(opened: Opened, layout: Layout) -> tuple[LogicalSource, dict[str, TensorPlan]]:
    """The weights that are decoded and quantized again, and a source that decodes them."""
    source = opened.source
    entries = [entry for entry in opened.entries.values() if _is_requantized(layout, entry)]
    views: list[TensorView] = [EntryView(source.checkpoint, each, "float32") for each in entries]
    source = source.with_views(views)
    works = {}
    for entry in entries:
        made = layout.entry(entry.name, entry.shape, "float32", as_scheme(entry.format, {}))
        works[entry.name] = TensorPlan(
            source.tensors[entry.name], "quantize", REQUANTIZED, entry=made
        )
    return source, works


def _requantized_warning(layout: Layout, works: dict[str, TensorPlan]) -> list[str]:
    if not works:
        return []
    return [
        f"{len(works)} weights are quantized again, as layout {layout.name} stores nvfp4 without "
        "its second level: values change. Quantize the original checkpoint instead if you have it"
    ]


def _check(checkpoint: Checkpoint, quantized: Quantized | None, layout: Layout) -> Quantized:
    if quantized is None or not quantized.entries:
        raise FileFormatError(
            f"{checkpoint.path}: holds no weight in a layout that can be converted; use `fp4kit "
            "quantize` for gpt-oss and plain checkpoints"
        )
    if quantized.layout is layout:
        raise OptionError(f"{checkpoint.path}: is in layout {layout.name} already")
    formats = {entry.plan.format.name for entry in quantized.entries.values()}
    foreign = formats - set(layout.formats)
    if foreign:
        raise OptionError(
            f"{checkpoint.path}: holds {' and '.join(sorted(foreign))}; layout {layout.name} takes "
            f"{' or '.join(layout.formats)} only"
        )
    if len(formats) > 1 and not layout.mixes:
        raise OptionError(
            f"{checkpoint.path}: holds {' and '.join(sorted(formats))}; layout {layout.name} has "
            "no form for several formats"
        )
    check_source(checkpoint, layout)
    layout.check_names(quantized.entries, checkpoint.config)
    if layout.stacks(quantized.entries, checkpoint.config):
        raise OptionError(
            f"{checkpoint.path}: readers of layout {layout.name} want its experts stacked; use "
            f"`fp4kit quantize --layout {layout.name}`, which takes MXFP4 codes over"
        )
    unfit = {name: layout.reason_to_keep(name) for name in quantized.entries}
    for name, reason in unfit.items():
        if reason:
            raise OptionError(
                f"{checkpoint.path}: {name!r} cannot be quantized in layout {layout.name} "
                f"({reason}); use `fp4kit dequantize`, then `fp4kit quantize`"
            )
    if quantized.pre_scales and layout.pre_scale_suffix is None:
        raise OptionError(
            f"{checkpoint.path}: {len(quantized.pre_scales)} modules have scales of AWQ for their "
            f"inputs ({listed([tensor.name for tensor in quantized.pre_scales.values()])}), which "
            f"readers of layout {layout.name} do not apply; choose another --layout, or `fp4kit "
            "dequantize`, which folds them into the weights"
        )
    return quantized


def _refuse_others(opened: Opened, layout: Layout) -> None:
    """Refuses weights that are quantized in another way: layouts are written with one format."""
    source = opened.source
    others = [name for name in source.tensors if source.is_decoded(name)]
    if others:
        raise OptionError(
            f"{source.path}: holds weights in FP8 or another form beside the layout's "
            f"({len(others)}: {listed(others)}); layout {layout.name} is written with "
            f"{' or '.join(layout.formats)} only. Use `fp4kit dequantize`, then `fp4kit quantize`"
        )


def _check_activations(path: Path, quantized: Quantized) -> None:
    """Refuses activation scales of which some are missing or no scales."""
    suffix = quantized.layout.activation_suffix
    bad = [
        f"{module}{suffix}"
        for module, value in quantized.activations.items()
        if not is_usable(value)
    ]
    if bad:
        raise FileFormatError(
            f"{path}: {len(bad)} activation scales are not finite and above 0: {listed(bad)}; "
            "repair the checkpoint"
        )
    wanted = [
        module_of(name) for name, entry in quantized.entries.items() if entry.second is not None
    ]
    missing = [f"{name}{suffix}" for name in wanted if name not in quantized.activations]
    said = quantized.facts is not None and quantized.facts.activations
    if missing and (said or len(missing) < len(wanted)):
        raise FileFormatError(
            f"{path}: {len(missing)} of {len(wanted)} activation scales are missing: "
            f"{listed(missing)}; the checkpoint is incomplete"
        )


def _activations(quantized: Quantized) -> str | None:
    """What the JSON files say about activations."""
    if not quantized.activations:
        return None
    ones = all(float(value[0]) == 1.0 for value in quantized.activations.values())
    return "uncalibrated" if ones else "calibrated"


def _dropped(opened: Opened, works: dict[str, TensorPlan]) -> dict[str, str]:
    """Stored tensors that appear nowhere, with the reason; not what has another name now."""
    assert opened.quantized is not None
    suffix = opened.quantized.layout.activation_suffix
    converted = {
        f"{module_of(name)}{suffix}"
        for name, work in works.items()
        if work.entry is not None and work.entry.constants
    }
    return {name: why for name, why in opened.dropped.items() if name not in converted}


def plan_convert(checkpoint: Checkpoint, options: ConvertOptions) -> CheckpointPlan:
    """Decides about every tensor of a quantized checkpoint.

    Raises:
        OptionError: for an unknown layout, the one that it has, or one that lacks its format.
        FileFormatError: if nothing is quantized, or in a way that is not known.
    """
    layout = get_layout(options.layout)
    opened = open_quantized(checkpoint, fold=False)
    if not opened.entries and fp8_codes(opened):
        plan = plan_convert_fp8(checkpoint, options, opened, layout)
    else:
        plan = _plan_blocks(checkpoint, options, opened, layout)
    if EXPERTS_KEY in checkpoint.metadata:
        plan.header[EXPERTS_KEY] = describe(recorded(checkpoint))
    facts = None if opened.quantized is None else opened.quantized.facts
    if facts is not None and facts.kv_cache:
        plan.warnings.append(
            f"the source quantizes the KV cache ({facts.kv_cache}); the result does not say so"
        )
    plan.warnings += state_decoded_dtype(plan)
    plan.warnings += unknown_type_warnings(checkpoint, layout)
    return plan


def _plan_blocks(
    checkpoint: Checkpoint, options: ConvertOptions, opened: Opened, layout: Layout
) -> CheckpointPlan:
    """Decides about every tensor of a checkpoint in a format with scales of blocks."""
    quantized = _check(checkpoint, opened.quantized, layout)
    _refuse_others(opened, layout)
    _check_activations(checkpoint.path, quantized)
    source, again = _requantized(opened, layout)
    change = SecondLevelChange(checkpoint, quantized.layout, layout)
    codes = opened.codes
    units: dict[str, WorkUnit] = {}
    works: dict[str, TensorPlan] = {}
    for name, tensor in opened.source.tensors.items():
        works[name] = TensorPlan(tensor, "keep", tensor.note or "not quantized")
        units[name] = WorkUnit([works[name]])
    for name, entry in quantized.entries.items():
        if name in again:
            works[name] = again[name]
            units[name] = WorkUnit([works[name]])
            continue
        made = _converted(layout, entry, quantized, change)
        logical = SourceTensor(
            TensorSpec(name, DTYPE_CODES[entry.dtype], entry.shape), entry.dtype, entry.stored
        )
        works[name] = TensorPlan(logical, "transfer", entry=made, origin=entry)
        units[name] = WorkUnit([works[name]], codes=[codes[name]])
    refuse_collisions(checkpoint.path, works.values())
    formats = [entry.plan.format.name for entry in quantized.entries.values()]
    plan = CheckpointPlan(
        source=source,
        options=options,
        layout=layout,
        shards=pack(in_stored_order(source, units), checkpoint, options.max_shard_size),
        summary=Summary(
            formats[0],
            ignored_modules(works, checkpoint, layout),
            _activations(quantized),
            embedding_modules(works),
            bool(quantized.pre_scales),
            mixed=format_groups(works, checkpoint, layout),
        ),
        dropped=_dropped(opened, works),
    )
    if change.kept:
        plan.header[SECOND_LEVEL_KEY] = json.dumps(change.kept, separators=(",", ":"))
    if quantized.pre_scales and not quantized.activations and not layout.single_file:
        plan.warnings.append(
            "the weights have scales of AWQ for their inputs, but no activation scales: readers of "
            f"layout {layout.name} know AWQ with both only"
        )
    plan.warnings += _requantized_warning(layout, again)
    return plan
