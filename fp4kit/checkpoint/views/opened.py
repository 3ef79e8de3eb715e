# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is made of, whatever it is stored as: the first step of every operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_changes

from fp4kit.checkpoint.layouts import ALL_LAYOUTS, module_of
from fp4kit.checkpoint.layouts.comfy import record_faults
from fp4kit.checkpoint.models.experts import Excluded, nothing
from fp4kit.checkpoint.models.fusion import WEIGHT
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.code_names import unread_codes
from fp4kit.checkpoint.read.config_facts import QuantFacts
from fp4kit.checkpoint.read.directory import Checkpoint, listed
from fp4kit.checkpoint.read.quantized import (
    Quantized,
    find_quantized_weights,
    read_facts,
)
from fp4kit.errors import FileFormatError
from fp4kit.formats import DTYPES as FLOATS
from fp4kit.io.read.source import SourceTensor
from fp4kit.io.storage import QuantizedEntry
from fp4kit.io.tensor_names import unknown_beside

from .base import Overlay, TensorView, ViewOptions
from .codes import Codes, EntryCodes, Fp8Codes, Mxfp4Codes
from .entries import SmoothedView
from .fp8 import Fp8View
from .logical import LogicalSource
from .mxfp4 import Mxfp4View
from .search import FoundViews, search
from .stacked import ExpertEntryView, split_entries

#: Quantizations of other tools that are decoded on the way: what they are called, and why.
DECODED_METHODS = ("fp8", "mxfp4")


@dataclass(frozen=True)
class Opened:
    """A checkpoint as logical tensors.

    Attributes:
        source: float tensors; weights in FP8 or MXFP4 and fused experts are views of it.
        quantized: its weights in a layout of ours, which are no tensors of `source`; None without.
        dropped: stored tensors that have no use once the weights are decoded, and why.
    """

    source: LogicalSource
    quantized: Quantized | None
    dropped: dict[str, str]

    @property
    def entries(self) -> dict[str, QuantizedEntry]:
        """The quantized weights by name."""
        return {} if self.quantized is None else self.quantized.entries

    @property
    def codes(self) -> dict[str, Codes]:
        """The codes of weights that are stored as MXFP4, as FP8 or in a layout, by name."""
        coded: dict[str, Codes] = {}
        for name, view in self.source.views.items():
            if isinstance(view, Mxfp4View):
                coded[name] = Mxfp4Codes(view)
            elif isinstance(view, Fp8View) and view.granularities:
                coded[name] = Fp8Codes(view, min(view.granularities))
        stored = self.entries.items()
        return coded | {name: EntryCodes(self.source.checkpoint, entry) for name, entry in stored}


def _check_method(checkpoint: Checkpoint, facts: QuantFacts | None) -> None:
    """Refuses a quantization that no view decodes."""
    if facts is not None and facts.method not in (*DECODED_METHODS, *ALL_LAYOUTS):
        raise FileFormatError(
            f"{checkpoint.path}: is quantized already by {facts.method}, which is not read here; "
            "give the original checkpoint"
        )


def find_others(
    checkpoint: Checkpoint,
    quantized: Quantized | None,
    *,
    excluded: Excluded = nothing,
    unscaled_fp8: bool = False,
) -> FoundViews:
    """What is quantized beside the weights of a layout, as views: FP8, MXFP4, marked integers."""
    parts = quantized.parts() if quantized is not None else set()
    options = ViewOptions(
        checkpoint.config,
        layers=checkpoint.layer_formats,
        fused=False,
        excluded=excluded,
        unscaled_fp8=unscaled_fp8,
    )
    return search(Overlay(checkpoint, [], parts), options)


def coded_weights(checkpoint: Checkpoint, found: FoundViews) -> list[str]:
    """The weights that views decode from codes and scales, by stored name.

    What was only cast to FP8 is none: it means what it says, whatever stands beside it.
    """
    coded = (
        view
        for view in found.views
        if len(view.consumed) > 1 and checkpoint.tensors[view.consumed[0]].dtype not in FLOATS
    )
    stored = (view.consumed[0].removesuffix("_blocks").removesuffix("_packed") for view in coded)
    return list(dict.fromkeys(stored))


def unknowns(
    checkpoint: Checkpoint,
    quantized: Quantized | None,
    found: FoundViews,
    excluded: Excluded = nothing,
) -> Iterator[str]:
    """What is stored or said about quantized weights and not understood, one line each."""
    tensors = checkpoint.tensors
    understood = {name for view in found.views for name in view.consumed} | found.dropped.keys()
    weights = coded_weights(checkpoint, found)
    if quantized is not None:
        understood |= quantized.parts()
        weights += quantized.entries
    for name, owner in unknown_beside(tensors, weights, understood).items():
        if excluded(name):
            continue
        yield (
            f"{name}: is not understood, and stands beside the quantized {owner}: it may change "
            "what that weight means"
        )
    yield from record_faults(checkpoint.layer_records, tensors)
    left = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in understood and not excluded(name)
    }
    for name in _without_scale(checkpoint, found, left):
        yield (
            f"{name}: {tensors[name].spec.dtype} as the quantized weights have, and no scale is "
            "there. Complete the checkpoint (perhaps a shard is missing)"
        )
    for name in unread_codes(left, tensors):
        yield (
            f"{name}: {tensors[name].spec.dtype} with a scale beside it is quantized in a way that "
            "is not read here"
        )


def _without_scale(
    checkpoint: Checkpoint, found: FoundViews, left: Mapping[str, SourceTensor]
) -> Iterator[str]:
    """Weights of the bytes that others are decoded from, whose own scale is lost."""
    coded = (view.consumed[0] for view in found.views if len(view.consumed) > 1)
    codes = {checkpoint.tensors[name].spec.dtype for name in coded if name.endswith(WEIGHT)}
    for name, tensor in left.items():
        integer = tensor.spec.dtype in ("I8", "U8") and tensor.spec.dtype in codes
        if integer and name.endswith(WEIGHT) and len(tensor.spec.shape) > 1:
            yield name


def _refuse_unknowns(
    checkpoint: Checkpoint,
    quantized: Quantized | None,
    found: FoundViews,
    excluded: Excluded = nothing,
) -> None:
    lines = list(unknowns(checkpoint, quantized, found, excluded))
    if lines:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise FileFormatError(f"{checkpoint.path}: {lines[0]}{more}; give the original checkpoint")


def open_quantized(
    checkpoint: Checkpoint,
    *,
    fold: bool = True,
    unscaled_fp8: bool = False,
    plain: bool = False,
    excluded: Excluded = nothing,
) -> Opened:
    """A checkpoint that is quantized in any known way.

    Args:
        checkpoint: what is stored.
        fold: weights that AWQ smoothed are views of their effective values; else they are weights
            of their layout like others, and the scales of their inputs tensors.
        unscaled_fp8: FP8 without a scale was only cast.
        plain: it need not be quantized at all.
        excluded: whether a tensor is left alone, understood or not.

    Raises:
        FileFormatError: if nothing is quantized, or in a way that is not known.
    """
    _check_method(checkpoint, read_facts(checkpoint))
    quantized = find_quantized_weights(checkpoint)
    parts = quantized.parts() if quantized is not None else set()
    found = find_others(checkpoint, quantized, excluded=excluded, unscaled_fp8=unscaled_fp8)
    if quantized is not None or found.views:
        _refuse_unknowns(checkpoint, quantized, found, excluded)
    if not found.views and not (quantized is not None and quantized.entries):
        if unread_codes(checkpoint.tensors, checkpoint.tensors):
            _refuse_unknowns(checkpoint, quantized, found, excluded)
        if not plain:
            raise FileFormatError(f"{checkpoint.path}: holds no quantized weight")
    dropped = dict(found.dropped)
    views = list(found.views)
    experts: list[ExpertEntryView] = []
    if quantized is not None:
        experts = list(split_entries(checkpoint, quantized.layout, quantized.entries))
        stacked = {view.entry.name for view in experts}
        kept = {name: each for name, each in quantized.entries.items() if name not in stacked}
        quantized = with_changes(quantized, entries=kept)
        views += experts
        owned = {name for view in experts for name in view.consumed}
        owned |= {spec.name for entry in quantized.entries.values() for spec in entry.parts}
        owned |= {tensor.name for tensor in quantized.pre_scales.values()}
        dropped |= {
            name: f"belongs to layout {quantized.layout.name}"
            for name in parts
            if name not in owned
        }
        if fold:
            views += _folded(checkpoint, quantized)
            quantized = quantized.without_pre_scales()
        else:
            parts -= {tensor.name for tensor in quantized.pre_scales.values()}
    source = LogicalSource(checkpoint, views, dropped.keys() | parts)
    return Opened(source, quantized, dropped)


def _folded(checkpoint: Checkpoint, quantized: Quantized) -> list[TensorView]:
    """The weights that AWQ smoothed, as they take effect."""
    return [
        SmoothedView(checkpoint, entry, quantized.pre_scales[module_of(name)])
        for name, entry in quantized.entries.items()
        if module_of(name) in quantized.pre_scales
    ]


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    """Refuses weights that are quantized to what is wanted, or in a way that loses more."""
    quantized = find_quantized_weights(checkpoint)
    if quantized is None or not quantized.entries:
        return
    names = list(quantized.entries)
    formats = {entry.plan.format.name for entry in quantized.entries.values()}
    if formats == {"mxfp4"} and quantized.layout.storage.packed_suffix == "_packed":
        return  # decoded, or taken over, by views
    raise FileFormatError(
        f"{checkpoint.path}: is quantized already ({len(names)} weights as "
        f"{' and '.join(sorted(formats))} in layout {quantized.layout.name}: {listed(names)}); "
        "nothing is quantized twice. Use `fp4kit convert` for another layout, or `fp4kit "
        "dequantize` first"
    )


def open_logical(
    checkpoint: Checkpoint, options: CheckpointOptions, excluded: Excluded = nothing
) -> Opened:
    """A checkpoint that is to be quantized.

    Args:
        checkpoint: the stored tensors.
        options: how it is to be quantized.
        excluded: whether a tensor is left alone; fused experts that are stay fused.

    Raises:
        FileFormatError: if it is quantized already in a way that is not a source.
        OptionError: if it cannot be told how experts are fused.
    """
    _check_method(checkpoint, read_facts(checkpoint))
    _refuse_quantized(checkpoint)
    view_options = ViewOptions(
        checkpoint.config,
        options.experts_layout,
        checkpoint.layer_formats,
        excluded=excluded,
        unscaled_fp8=options.unscaled_fp8,
    )
    found = search(checkpoint, view_options)
    _refuse_unknowns(checkpoint, None, found, excluded)
    return Opened(LogicalSource(checkpoint, found.views, set(found.dropped)), None, found.dropped)
