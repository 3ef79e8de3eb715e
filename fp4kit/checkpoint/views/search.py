# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every view of a checkpoint's stored tensors, whatever they are stored as.

Decoders come first; experts are then found among the decoded tensors too, so that FP8 weights of
fused experts are both decoded and separated.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from fp4kit.checkpoint.layouts.comfy import LAYERS_KEY, is_marker, layer_formats, layer_records
from fp4kit.checkpoint.models.experts import Excluded, nothing
from fp4kit.checkpoint.read.code_names import is_marker as is_fp8_marker
from fp4kit.checkpoint.read.code_names import unread_codes
from fp4kit.checkpoint.read.directory import listed
from fp4kit.errors import FileFormatError
from fp4kit.io.metadata import METADATA_KEY, entries_by_names
from fp4kit.io.read.source import Source

from . import experts, fp8, mxfp4
from .base import Overlay, TensorView, ViewOptions, where

#: Last parts of the names of activation scales of an older quantization.
ACTIVATION_SCALES = (
    "input_scale", "output_scale", "q_scale", "k_scale", "v_scale", "scale_input",
    "activation_scale", "qscale_act",
)  # fmt: skip
#: Last parts of the names of weight scales, and of what they belong to.
WEIGHT_SCALES = {
    "weight_scale_inv": ("weight",),
    "weight_scale": ("weight", "weight_packed"),
    "proj_scale_inv": ("proj",),
    "proj_scales": ("proj_blocks",),
    "scale_weight": ("weight",),
    "qscale_weight": ("weight",),
}


@dataclass(frozen=True)
class FoundViews:
    """What stands for the stored tensors.

    Attributes:
        views: the logical tensors that are computed.
        dropped: stored tensors that belong to an older quantization and are not needed to decode
            it, each with the reason.
    """

    views: list[TensorView]
    dropped: dict[str, str]


def unneeded(source: Source, config: dict[str, Any], views: list[TensorView]) -> dict[str, str]:
    """Scales that nothing needs, with the reason."""
    consumed = {name for view in views for name in view.consumed}
    # Without any quantization a tensor of such a name is the model's own.
    quantized = bool(consumed) or "quantization_config" in config
    dropped: dict[str, str] = {}
    for name, tensor in source.tensors.items():
        if name in consumed:
            continue
        last = name.rpartition(".")[2]
        if quantized and last in ACTIVATION_SCALES and prod(tensor.spec.shape) == 1:
            dropped[name] = "activation scale of an older quantization"
        if is_fp8_marker(name):
            dropped[name] = "only says that the file was FP8"
        if is_marker(tensor):
            dropped[name] = "says how a layer was quantized"
        if tensor.spec.dtype == "F8_E8M0" and last == "scale":
            owner = f"{name.removesuffix('scale')}weight"
            if owner not in source.tensors:
                dropped[name] = f"scale of {owner!r}, which is not there"
        for suffix, owners in WEIGHT_SCALES.items():
            base = name.removesuffix(suffix)
            if base != name and not any(base + owner in source.tensors for owner in owners):
                dropped[name] = f"scale of {base + owners[0]!r}, which is not there"
    return dropped


def search(source: Source, options: ViewOptions) -> FoundViews:
    """Finds every view of a checkpoint's stored tensors, from headers and config.json alone.

    NVFP4 codes are not decoded here: their layouts are read by `fp4kit dequantize`.
    """
    decoded = fp8.find_views(source, options) + mxfp4.find_views(source, options)
    overlay = Overlay(source, decoded)
    single = experts.find_views(overlay, options) if options.fused else []
    split = {name for view in single for name in view.consumed}
    for view in single:
        inner = overlay.views.get(view.consumed[0])
        if inner is not None:
            # What is consumed is what is stored.
            view.consumed = inner.consumed
    views = [view for view in decoded if view.tensor.name not in split] + single
    logical = Overlay(source, views)
    if len(logical.views) != len(views):
        names = [view.tensor.name for view in views]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileFormatError(f"{where(source, twice)} is stored in two ways; remove one of them")
    return FoundViews(views, unneeded(source, options.config, views))


def decoded_file(
    source: Source, *, excluded: Excluded = nothing, unscaled_fp8: bool = False
) -> Source:
    """The tensors of a file as floats, where they are codes of a dialect that is read here.

    Args:
        source: an open file.
        excluded: whether a tensor is left alone: one that cannot be decoded stays as it is then.
        unscaled_fp8: FP8 without a scale was only cast.

    Returns:
        The source itself if nothing is to be decoded, or if it holds block formats, which are no
        source of a quantization.

    Raises:
        FileFormatError: if weights are quantized in a way that is not read here, or lack a part.
    """
    if METADATA_KEY in source.metadata or entries_by_names(source):
        return source
    layers = layer_formats(layer_records(source, [source.metadata], source.path))
    options = ViewOptions(layers=layers, excluded=excluded, unscaled_fp8=unscaled_fp8)
    views = fp8.find_views(source, options)
    views += mxfp4.byte_views(source)
    result = Overlay(source, views, unneeded(source, {}, views))
    left = {name: tensor for name, tensor in result.tensors.items() if not excluded(name)}
    unread = unread_codes(left, source.tensors)
    if unread:
        raise FileFormatError(
            f"{source.path}: {len(unread)} tensors are quantized in a way that is not read here: "
            f"{listed(unread)}; give the original file"
        )
    if not views:
        return source
    result.metadata = {key: text for key, text in source.metadata.items() if key != LAYERS_KEY}
    return result
