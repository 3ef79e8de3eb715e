# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Planning how a quantized checkpoint becomes plain numbers again."""

from __future__ import annotations

from fp4kit.checkpoint.layouts import Summary
from fp4kit.checkpoint.models.experts import FusedTensor
from fp4kit.checkpoint.options import DequantizeOptions
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.views.base import TensorView
from fp4kit.checkpoint.views.entries import EntryView
from fp4kit.checkpoint.views.experts import join
from fp4kit.checkpoint.views.logical import LogicalSource
from fp4kit.checkpoint.views.opened import Opened, open_quantized
from fp4kit.errors import FileFormatError
from fp4kit.formats import DTYPES, one_of
from fp4kit.io.containers import DTYPE_CODES, TensorSpec
from fp4kit.io.quantize_plan import TensorPlan
from fp4kit.io.read.source import SourceTensor

from .checkpoint_plan import CheckpointPlan, WorkUnit, in_stored_order, pack
from .expert_restore import WAY_OUT, find_fused
from .model_dtype import stating


def _dtype_of(opened: Opened, fused: FusedTensor, dtype: str) -> str:
    """Element type of a fused tensor: that of parts which were kept, if there are any."""
    source = opened.source
    kept = {
        source.tensors[part.name].dtype
        for part in fused.parts()
        if part.name in source.tensors and not source.is_decoded(part.name)
    }
    if len(kept) > 1 or not kept <= set(DTYPES):
        raise FileFormatError(
            f"{source.path}: the experts of {fused.name!r} are {' and '.join(sorted(kept))}, which "
            f"cannot be one tensor; {WAY_OUT}"
        )
    return kept.pop() if kept else dtype


def _join_experts(opened: Opened, fused: list[FusedTensor], dtype: str) -> LogicalSource:
    """A checkpoint with some of its experts put together."""
    source, entries = opened.source, opened.entries
    dtypes = {each.name: _dtype_of(opened, each, dtype) for each in fused}
    decoded: list[TensorView] = [
        EntryView(source.checkpoint, entries[part.name], dtypes[each.name])
        for each in fused
        for part in each.parts()
        if part.name in entries
    ]
    single = source.with_views(decoded)
    joined: list[TensorView] = []
    parts: set[str] = set()
    for each in fused:
        names = [part.name for part in each.parts()]
        for name in names:
            if source.is_decoded(name) and single.tensors[name].dtype != dtypes[each.name]:
                single.cast(name, dtypes[each.name])
        view = join(single, each, dtypes[each.name])
        # What is consumed is what is stored.
        view.consumed = tuple(stored for name in names for stored in single.stored_names(name))
        joined.append(view)
        parts.update(names)
    return source.with_views(joined, parts)


def plan_dequantize(checkpoint: Checkpoint, options: DequantizeOptions) -> CheckpointPlan:
    """Decides about every tensor of a quantized checkpoint.

    Weights in FP8 are decoded as well; tensors that are not quantized stay as they are. Experts
    are put together where the model has them fused.

    Raises:
        OptionError: for an unknown element type.
        FileFormatError: if nothing is quantized, or in a way that is not known, or experts that
            belong together are incomplete.
    """
    one_of("dtype", options.dtype, DTYPES)
    opened = open_quantized(checkpoint, unscaled_fp8=options.unscaled_fp8)
    shapes = {name: tensor.spec.shape for name, tensor in opened.source.tensors.items()}
    shapes |= {name: entry.shape for name, entry in opened.entries.items()}
    fused, warnings = find_fused(checkpoint, shapes, options.experts_layout)
    source = _join_experts(opened, fused, options.dtype)
    joined = {each.name for each in fused}
    parts = {part.name for each in fused for part in each.parts()}
    units: dict[str, WorkUnit] = {}
    for name, tensor in list(source.tensors.items()):
        plain, reason = tensor, tensor.note or "not quantized"
        action = "dequantize" if name in joined and source.is_decoded(name) else "keep"
        if source.is_decoded(name) and name not in joined and options.dtype != tensor.dtype:
            plain = source.cast(name, options.dtype)
        units[name] = WorkUnit([TensorPlan(plain, action, reason)])
    for name, entry in opened.entries.items():
        if name in parts:
            continue
        spec = TensorSpec(name, DTYPE_CODES[options.dtype], entry.shape)
        plain = SourceTensor(spec, options.dtype, entry.stored)
        units[name] = WorkUnit([TensorPlan(plain, "dequantize", origin=entry)])
    return CheckpointPlan(
        source=source,
        options=options,
        layout=None,
        shards=pack(in_stored_order(source, units), checkpoint, options.max_shard_size),
        summary=Summary("", ()),
        dropped=opened.dropped,
        config=stating(checkpoint.config, options.dtype),
        warnings=warnings,
    )
